"""Requests of `benchmarks.scale` and `benchmarks.coordinator` over streams, to a coordinator over fakes."""

import asyncio

import pytest
import typer

from benchmarks import scale
from benchmarks.streams import Door, stream_messages
from paceline.measure.load.load import LoadLog
from paceline.observe.metrics import new_registry
from paceline.types import GenerationRequest, Text, TokenIds
from tests.coordinators import fake_server
from tests.fakes.dispatches import EXPECTED, LENGTH, PROMPTS
from tests.fakes.model_services import FakeDrafter, FakeVerifier

REQUESTS = [GenerationRequest(TokenIds(prompt), LENGTH, omit_text=True) for prompt in PROMPTS]


async def test_no_more_calls_of_a_stream_run_at_once_than_are_asked_for_and_all_end() -> None:
    outputs: dict[int, list[int]] = {number: [] for number in range(len(REQUESTS))}
    begun, ended, most = set[int](), set[int](), 0
    async with fake_server(FakeDrafter(0.9), FakeVerifier(), new_registry("coordinator"), batch_size=8) as server:
        async for message in stream_messages(server.address, REQUESTS, at_once=2):
            for update in message.updates:
                begun.add(update.call_id)
                most = max(most, len(begun - ended))
                outputs[update.call_id] += [one for run in update.response.runs for one in run.token_ids]
                if update.HasField("ended"):
                    ended.add(update.call_id)
    assert [outputs[number] for number in range(len(REQUESTS))] == EXPECTED
    assert most == 2


async def test_the_log_of_streams_has_all_tokens_of_requests_that_several_connections_share() -> None:
    log = LoadLog()
    async with fake_server(FakeDrafter(0.9), FakeVerifier(), new_registry("coordinator"), batch_size=8) as server:
        await scale._by_streams(server.address, 3, 2, REQUESTS, log)
    assert sorted(one.output_count for one in log.records) == sorted(map(len, EXPECTED))


async def test_a_call_of_a_stream_that_fails_ends_the_benchmark_with_its_words() -> None:
    refused = GenerationRequest(Text("no tokenizer"), LENGTH)
    async with fake_server(FakeDrafter(0.9), FakeVerifier(), new_registry("coordinator")) as server:
        with pytest.raises(AssertionError, match="tokenizer"):
            async with asyncio.timeout(30):
                async for _ in stream_messages(server.address, [refused]):
                    pass


def test_several_processes_are_refused_where_all_calls_share_a_connection() -> None:
    with pytest.raises(typer.BadParameter, match="--processes 2 needs --door stream"):
        scale.scale(processes=2, door=Door.TEXT)
