"""Real services that send their spans to a receiver: the trace of a request, however it ended."""

import asyncio
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from paceline.client import NO_RETRIES, Client
from paceline.errors import CallTimedOut
from paceline.observe.report.analysis import requests_of
from paceline.observe.report.receiver import Receiver, running_receiver
from paceline.observe.spans.setup import tracing
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, UserMessage
from tests.clusters import cluster
from tests.services import Service, running_trio
from tests.spans import Spans
from tests.trees import Tree, tree_of

pytestmark = pytest.mark.slow

Result = TypeVar("Result")
SERVERS = {("draft.propose", "paceline-draft"), ("target.verify", "paceline-target")}
PROMPT = "Nina saves $25 a week for 8 weeks. How much is that?"


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    async with running_receiver("127.0.0.1", 0) as receiver:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield receiver


MODEL_FLAGS = ("--threads", "1", "--log-level", "warning")


def asked(max_new_tokens: int) -> GenerationRequest:
    return GenerationRequest(UserMessage(PROMPT), max_new_tokens=max_new_tokens, ignore_end_tokens=True)


class Traced:
    """Calls, each in its own trace, and the receiver's spans of it."""

    def __init__(self, client: Client, spans: Spans, receiver: Receiver) -> None:
        self.client, self._spans, self.receiver = client, spans, receiver

    async def __call__(self, work: Coroutine[Any, Any, Result], trace_ids: list[str]) -> Result:
        with self._spans.tracer.start_as_current_span("caller") as span:
            trace_ids.append(f"{span.get_span_context().trace_id:032x}")
            return await work

    async def tree(self, trace_id: str, accept: Callable[[Tree], bool], killed_ns: int = 0) -> Tree:
        """Wait until the trace has all its spans; return them."""
        for _ in range(2000):
            try:
                if accept(tree := tree_of(self.receiver.spans, trace_id, killed_ns)):
                    return tree
            except AssertionError:
                pass
            await asyncio.sleep(0.05)
        return tree_of(self.receiver.spans, trace_id, killed_ns)

    def client_latency_s(self, trace_id: str) -> float:
        (span,) = [one for one in self._spans("generate", "client") if one.trace_id == trace_id]
        return span.duration_s


def ended_as(code: str) -> Callable[[Tree], bool]:
    return lambda tree: tree.request.attributes["rpc.response.status_code"] == code


async def check_answered(traced: Traced) -> None:
    """Check three requests at once: whole trees, shared rounds, and hops within the latency."""
    ids: list[str] = []
    answers = await asyncio.gather(*(traced(traced.client.complete(asked(60)), ids) for _ in range(3)))
    trees = [await traced.tree(trace_id, ended_as("OK")) for trace_id in ids]
    for trace_id, tree, answer in zip(ids, trees, answers, strict=True):
        assert not tree.request.is_error
        assert tree.request.attributes["gen_ai.usage.output_tokens"] == len(answer.tokens) == 60
        (request,) = [one for one in requests_of(traced.receiver.spans) if one.span.trace_id == trace_id]
        assert len(tree.rounds) == len(request.rounds)
        # A round may bring a request nothing: its prompt waits for an equal prompt under way.
        assert len(request.rounds) >= answer.finish.usage.round_count
        assert sum(one.drafted_count for one in request.rounds) == answer.finish.usage.drafted_count
        assert sum(one.accepted_count for one in request.rounds) == answer.finish.usage.accepted_count
        assert {one.service for one in tree.rounds + tree.calls} == {"paceline-coordinator"}
        assert {(one.name, one.service) for one in tree.served} == SERVERS
        # The rest of the latency depends on the machine: `paceline trace` shows it as `other`.
        hops_s = sum(one.total_s for one in request.rounds)
        assert 0 < hops_s <= request.latency_s <= traced.client_latency_s(trace_id)
    assert any(len(one.links) > 1 for tree in trees for one in tree.shared)
    told = str(traced.receiver.spans)
    assert not [text for text in (PROMPT, *(answer.text for answer in answers)) if text in told]


async def check_cancelled(traced: Traced) -> None:
    async def leave() -> None:
        stream = traced.client.generate(asked(2000))
        await anext(stream)
        await stream.aclose()

    ids: list[str] = []
    await traced(leave(), ids)
    tree = await traced.tree(ids[0], ended_as("CANCELLED"))
    assert not tree.request.is_error
    assert tree.rounds
    assert tree.request.attributes["gen_ai.usage.output_tokens"] > 0
    assert tree.request.attributes["gen_ai.response.finish_reasons"] == []


async def check_timed_out(traced: Traced, target: Service) -> None:
    """Pause the target after a request's first tokens, so that the deadline passes in a later round."""

    async def time_out(timeout_s: float) -> bool:
        """Return whether time ran out in a later round, after the first tokens and before the last."""
        has_tokens = False
        try:
            async for _ in traced.client.generate(asked(2000), timeout_s=timeout_s):
                has_tokens = True
                target.pause()
        except CallTimedOut:
            return has_tokens
        finally:
            target.resume()
        return False

    ids: list[str] = []
    timeout_s = 1.0
    while not await traced(time_out(timeout_s), ids):
        timeout_s *= 2
    tree = await traced.tree(ids[-1], ended_as("DEADLINE_EXCEEDED"))
    assert tree.request.is_error
    assert tree.rounds


async def check_dead_target(traced: Traced, target: Service) -> None:
    """Check that its rounds fail; a new target at its address completes the request."""
    ids: list[str] = []
    await traced(traced.client.complete(asked(5)), ids)
    before = await traced.tree(ids[0], ended_as("OK"))
    begun = asyncio.Event()

    async def answer() -> int:
        count = 0
        async for piece in traced.client.generate(asked(400)):
            count += len(piece.tokens)
            begun.set()
        return count

    answering = asyncio.ensure_future(traced(answer(), ids))
    await begun.wait()
    target.kill()  # between two rounds of the request, or within one
    killed_ns = time.time_ns()
    await target.start_again()
    assert await answering == 400
    after = await traced.tree(ids[1], ended_as("OK"), killed_ns)
    failed = [one for one in after.rounds if one.is_error]
    assert failed
    assert {one.attributes["error.type"] for one in failed} <= {"PEER_UNAVAILABLE", "CancelledError"}
    assert len(after.rounds) > len(failed)
    assert _instances(before, "draft.propose") == _instances(after, "draft.propose")
    assert _instances(after, "target.verify") - _instances(before, "target.verify")


async def check_dead_draft(traced: Traced, draft: Service) -> None:
    """Check that only the draft's calls have errors, if it is asked before it is known to be gone."""
    ids: list[str] = []
    draft.kill()
    only_draft = DraftingOptions((DraftSource.DRAFT,))  # others draft in its place
    await traced(traced.client.complete(replace(asked(5), drafting=only_draft)), ids)
    tree = await traced.tree(ids[0], ended_as("OK"))
    assert not any(one.is_error for one in (tree.request, *tree.rounds, *tree.served))
    codes = {(one.name, one.attributes["rpc.response.status_code"], one.is_error) for one in tree.calls}
    assert codes - {("draft.propose", "UNAVAILABLE", True)} == {("target.verify", "OK", False)}
    assert tree.request.attributes["paceline.drafted_count"] == 0


async def test_a_trace_is_whole_however_its_request_ended_and_whichever_service_died(receiver: Receiver) -> None:
    spans = Spans()
    with running_trio(MODEL_FLAGS, MODEL_FLAGS) as services:
        async with Client(services.coordinator.address, NO_RETRIES, spans.tracer) as client:
            traced = Traced(client, spans, receiver)
            await check_answered(traced)
            await check_cancelled(traced)
            await check_timed_out(traced, services.target)
            await check_dead_target(traced, services.target)
            await check_dead_draft(traced, services.draft)


async def test_the_command_receives_spans_until_it_is_stopped_and_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("-m", "paceline", "trace", "--listen", "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE)
    assert process.stdout
    address = (await process.stdout.readline()).decode().split()[3].rstrip(";")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
    with tracing("coordinator", None) as tracer:
        async with cluster("builtin:target", "builtin:draft", tracer=tracer) as running:
            await running.client.complete(asked(20))
    process.send_signal(signal.SIGINT)
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert "1 requests" in out.decode()
    assert " first: " in out.decode()


async def test_services_answer_and_end_though_their_collector_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        collector.listen()  # accepts connections and never reads from them
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with running_trio(MODEL_FLAGS, MODEL_FLAGS) as services:
            async with Client(services.coordinator.address, NO_RETRIES) as client:
                assert len((await client.complete(asked(20))).tokens) == 20
            assert [await one.terminate() for one in services.all] == [0, 0, 0]


def _instances(tree: Tree, name: str) -> set[str]:
    return {one.instance for one in tree.served if one.name == name}
