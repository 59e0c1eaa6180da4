"""A request's trace tells itself: its queue, its prefill and its rounds, in turn, within it, with their hops."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, SpanProcessor
from opentelemetry.trace import Link, SpanContext, TraceFlags
from structlog.testing import capture_logs

from coordinator.door.tracer import request_tracer
from coordinator.requests.generation import Generation, Request
from coordinator.requests.traced_request import MAX_ROUNDS, OwnRound, RoundNote, TracedRequest
from coordinator.rounds.round_report import RoundReport, RowReport
from coordinator.rounds.tracer import SHARED_AT_ONCE, SHARED_PER_S, RoundCap, RoundTracer
from paceline.codec.generation import request_to_pb
from paceline.errors import PeerUnavailable
from paceline.observe.records import SpanRecord
from paceline.types import DraftSource, FinishReason, GenerationRequest, HopTime, SourceUsage, TokenIds
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.wire import open_channel
from tests.clusters import cluster
from tests.conftest import PairOfCheckpoints
from tests.generations import generation_of
from tests.spans import Spans
from tests.trees import tree_of

MS = 1_000_000
PROPOSE, VERIFY = HopTime(0.001, 0.002, 0.003), HopTime(0.001, 0.0, 0.010)
SHARED = SpanContext(77, 78, False, TraceFlags(TraceFlags.SAMPLED))


def generation(request: Request, index: int = 0) -> Generation:
    one = generation_of(name=str(index), request=request, completion_index=index)
    request.generations.append(one)
    return one


class Told:
    """A traced request that began at 1000 ms and was queued at 1001 ms; all its outputs have finished."""

    def __init__(self, output_count: int = 1) -> None:
        self.spans = Spans()
        self.request = Request()
        self.generations = [generation(self.request, index) for index in range(output_count)]
        for one in self.generations:
            one.output.finish_reason = FinishReason.LENGTH
        self.span = self.spans.tracer.start_span("generate", contexts.Context(), start_time=1000 * MS)
        self.traced = TracedRequest(self.span, Link(self.span.get_span_context()), frozenset(), 1001 * MS)
        self.request.traced = self.traced

    def note(
        self,
        began_ms: int,
        index: int = 0,
        queued_ms: int = 0,
        prefill: bool = False,
        error: str = "",
        source: DraftSource = DraftSource.DRAFT,
        model: str = "",
    ) -> None:
        """Note a round of 20 ms that waited 1 ms and accepted 3 of 5 drafts."""
        hops = (HopTime(), HopTime()) if error else (PROPOSE, VERIFY)
        note = RoundNote(began_ms * MS, (began_ms + 20) * MS, 8, *hops, SHARED, error)
        gains = (0, 0) if error else (5, 3)
        drafted_by = None if error else SourceUsage(source, model, *gains)
        self.traced.note(OwnRound(note, index, prefill, queued_ms / 1e3, 0.001, *gains, drafted_by))

    async def children(self) -> list[SpanRecord]:
        """End the request, and return its children as viewers show them, by start."""
        with request_tracer(self.spans.tracer) as tracer:
            tracer.end(self.request, 0.004, 0.030)
        self.span.end(2000 * MS)
        (whole,) = self.spans("generate")
        found = [one for one in self.spans() if one.name != "generate"]
        assert {(one.trace_id, one.parent_id) for one in found} <= {(whole.trace_id, whole.span_id)}
        return sorted(found, key=lambda one: (one.start_ns, one.end_ns))


def times_ms(spans: Sequence[SpanRecord]) -> list[tuple[str, float, float]]:
    return [(one.name, one.start_ns / MS, one.end_ns / MS) for one in spans]


@pytest.mark.review
async def test_a_request_has_its_queue_its_prefill_and_its_rounds_as_children() -> None:
    """review E1"""
    told = Told()
    told.note(1005, queued_ms=3, prefill=True)
    told.note(1026)
    told.note(1047)
    children = await told.children()
    assert times_ms(children) == [
        ("queue", 1001, 1005),
        ("prefill", 1005, 1025),
        ("round", 1026, 1046),
        ("round", 1047, 1067),
    ]
    assert dict(children[2].attributes) == {
        "paceline.group_size": 8,
        "paceline.draft.wire_s": 0.001,
        "paceline.draft.queued_s": 0.002,
        "paceline.draft.executed_s": 0.003,
        "paceline.target.wire_s": 0.001,
        "paceline.target.executed_s": 0.010,
        "paceline.drafted_count": 5,
        "paceline.accepted_count": 3,
        "paceline.draft_source": "draft",
    }
    assert [(link.trace_id, link.span_id) for link in children[2].links] == [(f"{77:032x}", f"{78:016x}")]


@pytest.mark.review
async def test_time_in_the_queue_and_to_the_first_token_stand_on_the_requests_span() -> None:
    """review E4"""
    told = Told()
    await told.children()
    (whole,) = told.spans("generate")
    assert whole.attributes["paceline.queued_s"] == 0.004
    assert whole.attributes["gen_ai.response.time_to_first_chunk"] == 0.030


async def test_what_the_target_had_of_a_prompt_already_stands_on_the_requests_span_once() -> None:
    """Else nobody sees why one prefill takes a tenth of another."""
    told = Told(output_count=2)
    for one, count in zip(told.generations, (40, 32), strict=True):
        one.usage.cached_prompt_count = count
    await told.children()
    (whole,) = told.spans("generate")
    assert whole.attributes["gen_ai.usage.cache_read.input_tokens"] == 40


async def test_rounds_beyond_the_limit_are_summed_up_in_one_child() -> None:
    told = Told()
    count = MAX_ROUNDS + 40
    for number in range(count):
        told.note(1005 + 21 * number)
    *rounds, later = (await told.children())[1:]
    assert (len(rounds), later.name) == (MAX_ROUNDS, "later_rounds")
    assert times_ms([later]) == [("later_rounds", 1005 + 21 * MAX_ROUNDS, 1005 + 21 * (count - 1) + 20)]
    assert later.attributes["paceline.round_count"] == 40
    assert later.attributes["paceline.accepted_count"] == 40 * 3
    assert later.attributes["paceline.waited_s"] == pytest.approx(40 * 0.001)
    assert later.attributes["paceline.target.executed_s"] == pytest.approx(40 * 0.010)
    assert later.attributes["paceline.coordinator_s"] == pytest.approx(40 * (0.020 - 0.006 - 0.011))


async def test_a_round_names_what_drafted_and_later_rounds_add_up_by_source() -> None:
    told, suffix = Told(), DraftSource.SUFFIX
    told.note(1005, source=suffix)
    told.note(1026, model="small")
    for number in range(2, MAX_ROUNDS):
        told.note(1005 + 21 * number)
    for number in range(MAX_ROUNDS, MAX_ROUNDS + 3):
        told.note(1005 + 21 * number, source=suffix if number == MAX_ROUNDS else DraftSource.DRAFT)
    _, first, second, *_, later = await told.children()
    assert first.attributes["paceline.draft_source"] == "suffix"
    assert "paceline.draft_model" not in first.attributes
    assert [second.attributes[f"paceline.draft_{word}"] for word in ("source", "model")] == ["draft", "small"]
    sums = {name: count for name, count in later.attributes.items() if re.search(r"(draft|suffix)\.\w+_count", name)}
    assert sums == {
        "paceline.draft.drafted_count": 10,
        "paceline.draft.accepted_count": 6,
        "paceline.suffix.drafted_count": 5,
        "paceline.suffix.accepted_count": 3,
    }
    assert "paceline.draft_source" not in later.attributes


def test_a_round_is_noted_for_the_source_that_drafted_in_it() -> None:
    told = Told()
    (one,) = told.generations
    one.output.finish_reason = None
    tracer = RoundTracer(told.spans.tracer, "continuous")
    drafts = [(DraftSource.DRAFT, 2, 3), (DraftSource.SUFFIX, 0, 4), (None, 0, 0), (DraftSource.DRAFT, 1, 1)]
    for source, accepted_count, drafted_count in drafts:
        with tracer.round([one], [0.0], [5], 0) as record:
            token_ids = [5] * (accepted_count + 1)
            one.commit(token_ids, accepted_count=accepted_count, drafted_count=drafted_count, source=source)
            row = RowReport(drafted_count, accepted_count, accepted_count + 1, source)
            record(RoundReport([replace(row, generation=one), row], 0.0, PROPOSE, VERIFY, None, None))
    usages = [note.source for note in told.traced.rounds]
    assert usages == [
        *(SourceUsage(DraftSource.DRAFT, "", 3, 2), SourceUsage(DraftSource.SUFFIX, "", 4, 0)),
        *(None, SourceUsage(DraftSource.DRAFT, "", 1, 1)),
    ]
    shared = told.spans("shared_round")
    assert shared[0].attributes["paceline.draft.drafted_count"] == 6
    assert shared[1].attributes["paceline.suffix.accepted_count"] == 0
    assert not [name for name in shared[2].attributes if "suffix" in name or "draft." in name]


async def test_an_output_that_lost_its_place_has_another_queue() -> None:
    told = Told()
    told.note(1005)
    told.note(1100, queued_ms=50)
    assert times_ms(await told.children())[2:] == [("queue", 1049, 1100), ("round", 1100, 1120)]


async def test_a_round_that_failed_says_by_what() -> None:
    told = Told()
    told.note(1005, error="PEER_UNAVAILABLE")
    failed = (await told.children())[1]
    assert failed.is_error
    assert failed.attributes["error.type"] == "PEER_UNAVAILABLE"


async def test_a_request_that_no_round_took_has_a_queue_alone() -> None:
    told = Told()
    told.generations[0].output.finish_reason = None
    assert [one.name for one in await told.children()] == ["queue"]


async def test_the_last_wait_of_an_output_that_did_not_finish_is_told() -> None:
    told = Told(output_count=3)
    told.note(1005, index=0)
    told.note(1005, index=2)
    for one in told.generations[:2]:
        one.output.finish_reason = None
    children = await told.children()
    last = [one for one in children if one.end_ns > 1025 * MS]
    assert [(one.name, one.attributes["paceline.completion_index"], one.start_ns / MS) for one in last] == [
        ("queue", 1, 1001),
        ("last_wait", 0, 1025),
    ]
    assert last[0].end_ns == last[1].end_ns


async def test_a_failed_round_among_those_summed_up_is_told_as_such() -> None:
    told = Told()
    for number in range(MAX_ROUNDS + 2):
        told.note(1005 + 21 * number)
    told.note(1005 + 21 * (MAX_ROUNDS + 2), error="PEER_UNAVAILABLE")
    later = next(one for one in await told.children() if one.name == "later_rounds")
    counted = {name: value for name, value in later.attributes.items() if name.endswith("_count")}
    assert counted == {
        "paceline.round_count": 3,
        "paceline.failed_round_count": 1,
        "paceline.drafted_count": 10,
        "paceline.accepted_count": 6,
        "paceline.draft.drafted_count": 10,
        "paceline.draft.accepted_count": 6,
    }
    assert all(type(value) is int for value in counted.values())
    assert later.attributes["paceline.failed_s"] == pytest.approx(0.020)
    assert later.attributes["paceline.coordinator_s"] == pytest.approx(2 * (0.020 - 0.006 - 0.011))


async def test_a_processor_that_fails_costs_one_request_its_children_and_is_told() -> None:
    first, second = Told(), Told()
    first.request.request_id = "the-first"

    class Failing(SpanProcessor):
        def on_start(self, span: Span, parent_context: Context | None = None) -> None:
            if span.context and span.context.trace_id == first.span.get_span_context().trace_id:
                raise RuntimeError("not this one")

    first.spans.provider.add_span_processor(Failing())
    with capture_logs() as logs, request_tracer(first.spans.tracer) as tracer:
        for told in (first, second):
            told.note(1005)
            tracer.end(told.request, 0.004, 0.030)
    assert [one["request_id"] for one in logs if one["event"] == "spans were lost"] == ["the-first"]
    trace_id = f"{second.span.get_span_context().trace_id:032x}"
    assert {one.name for one in first.spans() if one.trace_id == trace_id} >= {"queue", "round"}


async def test_outputs_of_one_request_are_told_apart() -> None:
    told = Told(output_count=2)
    told.note(1005, index=0)
    told.note(1005, index=1)
    indexes = [(one.name, one.attributes["paceline.completion_index"]) for one in await told.children()]
    assert sorted(indexes) == [("queue", 0), ("queue", 1), ("round", 0), ("round", 1)]


@pytest.mark.parametrize("earlier_rounds", [0, 1])
async def test_a_request_that_ends_in_a_round_tells_so_and_not_that_it_waited(earlier_rounds: int) -> None:
    """A request that its target kept until its deadline seemed to have been in the queue all the time."""
    told = Told()
    (one,) = told.generations
    one.output.finish_reason = None
    tracer = RoundTracer(told.spans.tracer, "continuous")
    for _ in range(earlier_rounds):
        told.note(1005)
    with tracer.round([one], [0.0], [5], 0):
        *before, cut_off = await told.children()
    assert [one.name for one in before] == ["queue", *["round"] * earlier_rounds]
    assert (cut_off.name, cut_off.attributes["paceline.is_cut_off"], cut_off.is_error) == ("prefill", True, False)
    (shared,) = told.spans("shared_round")
    assert [link.span_id for link in cut_off.links] == [shared.span_id]
    assert cut_off.start_ns < cut_off.end_ns < shared.end_ns


async def test_a_round_that_has_ended_is_not_told_twice() -> None:
    told = Told()
    told.generations[0].output.finish_reason = None
    traced_round(RoundTracer(Spans().tracer, "continuous"), told.generations, REPORT)
    assert [one.name for one in await told.children()] == ["queue", "prefill", "last_wait"]


def traced_round(tracer: RoundTracer, group: list[Generation], report: RoundReport | None) -> None:
    with tracer.round(group, [0.0] * len(group), [5] * len(group), 0) as record:
        if report is None:
            raise PeerUnavailable("the prompt that no span may hold")
        record(report)


REPORT = RoundReport([], 0.0, PROPOSE, VERIFY, None, None)


@pytest.mark.review
def test_the_rate_of_shared_rounds_is_capped_and_no_request_loses_a_round_by_that() -> None:
    """review E2"""
    told, now_s = Told(), [0.0]
    tracer = RoundTracer(told.spans.tracer, "continuous", RoundCap(lambda: now_s[0]))
    group = [*told.generations, generation(Request())]
    for _ in range(1000):
        now_s[0] += 0.01
        traced_round(tracer, group, REPORT)
    made = len(told.spans("shared_round"))
    assert made == pytest.approx(SHARED_AT_ONCE + 10 * SHARED_PER_S, abs=1)
    assert len(told.traced.rounds) == MAX_ROUNDS
    assert sum(one.round.span is not None for one in told.traced.rounds) == pytest.approx(
        SHARED_AT_ONCE + 0.01 * MAX_ROUNDS * SHARED_PER_S, abs=1
    )
    for _ in range(1000):
        traced_round(tracer, [generation(Request())], REPORT)  # of no traced request: no span, and none of the cap's
    now_s[0] += 100
    assert all(RoundCap.lets_through(tracer._cap) for _ in range(SHARED_AT_ONCE))


def test_a_round_that_fails_is_noted_without_its_message() -> None:
    told = Told()
    with pytest.raises(PeerUnavailable):
        traced_round(RoundTracer(told.spans.tracer, "continuous"), told.generations, None)
    (shared,) = told.spans("shared_round")
    assert (shared.is_error, shared.attributes["error.type"], shared.events) == (True, "PEER_UNAVAILABLE", ())
    assert [one.round.error for one in told.traced.rounds] == ["PEER_UNAVAILABLE"]


async def answered(pair: PairOfCheckpoints, asked: GenerationRequest) -> tuple[Spans, str]:
    """Answer a request at a traced cluster; return the spans and the request id that its first message names."""
    spans = Spans()
    async with (
        cluster(pair.target, pair.draft, tracer=spans.tracer) as served,
        open_channel(served.coordinator_address) as channel,
    ):
        messages = [one async for one in GenerationServiceStub(channel).GenerateText(request_to_pb(asked))]
        await spans.one("generate", "server")
    return spans, messages[0].accepted.request_id


@pytest.mark.review
async def test_a_real_request_reads_from_top_to_bottom(pairs: dict[str, PairOfCheckpoints]) -> None:
    """review E1: the rows of a viewer, which shows one trace with its spans by start."""
    asked = GenerationRequest(TokenIds(tuple(range(3, 60))), 24, ignore_end_tokens=True, seed=2**63 + 5)
    spans, request_id = await answered(pairs["Llama"], asked)
    (whole,) = spans("generate", "server")
    tree = tree_of(spans(), whole.trace_id)
    names = [one.name for one in tree.children]
    assert names == ["queue", "prefill", *["round"] * (len(names) - 2)]
    assert len(names) > 3
    accepted_count = sum(one.attributes.get("paceline.accepted_count", 0) for one in tree.rounds)
    assert accepted_count == whole.attributes["paceline.accepted_count"] > 0
    assert accepted_count + len(tree.rounds) >= 24
    for one in tree.rounds:
        calls_s = sum(value for name, value in one.attributes.items() if name.endswith("_s"))
        assert 0 < calls_s < one.duration_s
    assert len(tree.shared) == len(tree.rounds)
    first, finish = whole.events
    assert (first.name, finish.name) == ("first_token", "finish")
    assert tree.rounds[0].end_ns <= first.time_ns <= finish.time_ns <= whole.end_ns
    assert finish.attributes == {"paceline.finish_reason": "length"}
    assert whole.attributes["paceline.request_id"] == whole.attributes["gen_ai.response.id"] == request_id
    assert whole.attributes["gen_ai.response.model"] == str(pairs["Llama"].target)
    assert whole.attributes["paceline.seed"] == str(2**63 + 5)
    assert "gen_ai.request.seed" not in whole.attributes
    assert 0 < whole.attributes["gen_ai.response.time_to_first_chunk"] < whole.duration_s


@pytest.mark.review
async def test_log_span_and_first_message_name_a_request_alike(pairs: dict[str, PairOfCheckpoints]) -> None:
    """review E1"""
    with capture_logs() as logs:
        spans, request_id = await answered(pairs["Llama"], GenerationRequest(TokenIds((5, 6, 7)), 4, seed=7))
    (line,) = [one for one in logs if one["event"] == "request ended"]
    (span,) = spans("generate", "server")
    assert line["request_id"] == request_id == span.attributes["paceline.request_id"]
    assert span.attributes["gen_ai.request.seed"] == 7


async def test_a_request_that_is_refused_has_its_name_in_its_span_too(pairs: dict[str, PairOfCheckpoints]) -> None:
    spans, pair = Spans(), pairs["Llama"]
    with capture_logs() as logs:
        async with cluster(pair.target, pair.draft, tracer=spans.tracer) as served:
            with pytest.raises(Exception, match="prompt"):
                await served.client.complete(GenerationRequest(TokenIds(())))
            span = await spans.one("generate", "server")
    (line,) = [one for one in logs if one["event"] == "request ended"]
    assert span.attributes["paceline.request_id"] == line["request_id"]
