"""Counting of a service's calls: once each, by method and by outcome."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from paceline.wire import Exchange
from tests.fakes.counted_calls import counted_calls, drain, release
from tests.scrapes import by_label


async def test_requests_on_streams_are_counted_as_calls_and_the_streams_are_not() -> None:
    registry = CollectorRegistry()
    async with counted_calls(registry) as (servicer, channel):
        exchange = Exchange(TargetServiceStub(channel).VerifyTokens)

        async def send(order: str) -> None:
            await exchange.ask(target_pb.VerifyTokensRequest(rows=[target_pb.VerifyTokensRow(sequence_id=order)]), 60)

        for order in ("answer", "answer", "refuse", "answer", "break", "answer"):
            with suppress(grpc.aio.AioRpcError):
                await send(order)
        hanging = asyncio.ensure_future(send("hang"))
        await servicer.hung.wait()
        hanging.cancel()
        while sum((counts := by_label(registry, "rpc_calls_total", "code")).values()) < 7:
            await asyncio.sleep(0.01)
        await send("answer")
    # By now the last stream has been cut off while idle.
    counts = by_label(registry, "rpc_calls_total", "code")
    assert counts == {"OK": 5, "INVALID_ARGUMENT": 1, "INTERNAL": 1, "CANCELLED": 1}
    assert set(by_label(registry, "rpc_calls_total", "method")) == {"VerifyTokens"}


async def test_what_is_sent_unasked_on_a_stream_answers_no_request() -> None:
    """It counted as an answered call, and the call that was cancelled after it did not count."""
    registry = CollectorRegistry()
    async with counted_calls(registry) as (servicer, channel):
        told = asyncio.Queue[object]()
        exchange = Exchange(DraftServiceStub(channel).ProposeTokens, told.put_nowait)

        async def send(order: str) -> None:
            await exchange.ask(draft_pb.ProposeTokensRequest(rows=[draft_pb.ProposeTokensRow(sequence_id=order)]), 60)
            await told.get()

        await send("answer")
        hanging = asyncio.ensure_future(send("hang"))
        await servicer.hung.wait()
        hanging.cancel()
        while sum((counts := by_label(registry, "rpc_calls_total", "code")).values()) < 2:
            await asyncio.sleep(0.01)
        await send("answer")
    # By now the last stream has been cut off while idle.
    counts = by_label(registry, "rpc_calls_total", "code")
    assert counts == {"OK": 2, "CANCELLED": 1}


@pytest.mark.parametrize(("send", "method"), [(release, "ReleaseTargetSequences"), (drain, "GenerateText")])
async def test_calls_are_counted_by_method_and_status(send: Callable[..., Awaitable[None]], method: str) -> None:
    registry = CollectorRegistry()
    async with counted_calls(registry) as (servicer, channel):
        await send(channel, "answer")
        for order in ("refuse", "break"):
            with pytest.raises(grpc.aio.AioRpcError):
                await send(channel, order)
        with pytest.raises(grpc.aio.AioRpcError):
            await send(channel, "hang", 2)
        # On a busy machine the server may begin this call only now; its event must not count for the next call.
        await servicer.hung.wait()
        servicer.hung.clear()
        hanging = asyncio.ensure_future(send(channel, "hang"))
        await servicer.hung.wait()
        hanging.cancel()
        # The server notices it later.
        while sum((counts := by_label(registry, "rpc_calls_total", "code")).values()) < 5:
            await asyncio.sleep(0.01)
    assert counts == {"OK": 1, "INVALID_ARGUMENT": 1, "INTERNAL": 1, "DEADLINE_EXCEEDED": 1, "CANCELLED": 1}
    assert set(by_label(registry, "rpc_calls_total", "method")) == {method}


async def test_a_method_that_is_called_has_series_of_failures_before_there_are_any() -> None:
    """A rate misses the step from nothing to one: the panel of failed calls did not show a first burst of them."""
    registry = CollectorRegistry()
    async with counted_calls(registry) as (_, channel):
        await release(channel, "answer")
        codes = {
            sample.labels["code"]: sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "paceline_rpc_calls_total" and sample.labels["method"] == "ReleaseTargetSequences"
        }
    failures = {code: count for code, count in codes.items() if code != "OK"}
    assert {"INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED"} <= failures.keys() and not any(failures.values())
