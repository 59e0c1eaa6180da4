"""Load runs on fake time: arrivals, the start of latency, and the outcomes of requests."""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CallTimedOut, Overloaded, PacelineError
from paceline.measure.load.arrivals import poisson_arrivals
from paceline.measure.load.files import write_json, write_plot
from paceline.measure.load.load import Generate, LoadLog, Outcome, SentRequest, run_load
from paceline.measure.load.summary import Objectives, percentile, summarize
from paceline.types import FinishReason, GenerationFinish, GenerationRequest, OutputPiece, OutputToken, Text, Usage
from tests.fakes.fake_time import FakeTime

USAGE = Usage(1, 4, drafted_count=5, accepted_count=2, round_count=2, queued_s=0.25)


def request(number: int) -> GenerationRequest:
    return GenerationRequest(Text(str(number)))


def piece(token_count: int, *, last: bool = False) -> OutputPiece:
    finish = GenerationFinish(FinishReason.LENGTH, USAGE) if last else None
    return OutputPiece(tuple(OutputToken(5, "x", False) for _ in range(token_count)), finish)


def server(time: FakeTime, first_s: float, rest_s: float, errors: dict[str, PacelineError] | None = None) -> Generate:
    """Answer each prompt with a token after `first_s` and three more `rest_s` later, or with its error."""

    async def generate(asked: GenerationRequest) -> AsyncIterator[OutputPiece]:
        await time.sleep(first_s)
        assert isinstance(asked.prompt, Text)
        if error := (errors or {}).get(asked.prompt.value):
            raise error
        yield piece(1)
        await time.sleep(rest_s)
        yield piece(3, last=True)

    return generate


def at(times: Sequence[float]) -> list[tuple[float, GenerationRequest]]:
    return [(at_s, request(number)) for number, at_s in enumerate(times)]


async def run(
    times: Sequence[float], first_s: float, rest_s: float, errors: dict[str, PacelineError] | None = None
) -> LoadLog:
    time = FakeTime()
    log = LoadLog(time.clock)
    await time.run(run_load(at(times), server(time, first_s, rest_s, errors), log, time.sleep))
    return log


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = list(islice(poisson_arrivals(4.0, seed=1), 20_000))
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    # Mean and standard deviation of 20,000 exponential gaps leave 3 % of 1 / rate once in 20,000 seeds.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert min(gaps) >= 0


def test_arrivals_are_the_seeds_and_end_at_the_first_limit() -> None:
    times = list(poisson_arrivals(2.0, seed=3, count=50))
    assert times == list(poisson_arrivals(2.0, seed=3, count=50))
    assert times != list(poisson_arrivals(2.0, seed=4, count=50))
    within = list(poisson_arrivals(2.0, seed=3, duration_s=5.0))
    assert within == [at_s for at_s in times if at_s < 5]
    assert list(poisson_arrivals(2.0, seed=3, duration_s=5.0, count=3)) == times[:3]


async def test_a_stalled_server_does_not_delay_arrivals() -> None:
    log = await run([1.0, 2.0, 3.0], first_s=100.0, rest_s=1.0)
    assert [record.sent_s for record in log.records] == [1, 2, 3]
    assert [record.first_token_s for record in log.records] == [100, 100, 100]
    assert [record.latency_s for record in log.records] == [101, 101, 101]
    assert [record.per_token_s for record in log.records] == [pytest.approx(1 / 3)] * 3


async def test_latency_counts_from_the_planned_arrival_even_when_the_sender_was_late() -> None:
    time = FakeTime()
    log = LoadLog(time.clock)

    async def oversleep(delay_s: float) -> None:
        await time.sleep(delay_s + 0.5)

    await time.run(run_load(at([1.0]), server(time, 2.0, 1.0), log, oversleep))
    (record,) = log.records
    assert (record.planned_s, record.sent_s) == (1, 1.5)
    assert (record.first_token_s, record.latency_s) == (2.5, 3.5)
    assert summarize(log.records, Objectives()).late_s == 0.5


async def test_rejected_and_failed_requests_are_counted_by_reason_and_have_no_part_in_latencies() -> None:
    errors: dict[str, PacelineError] = {"0": Overloaded("full"), "1": CallTimedOut("late"), "2": Overloaded("full too")}
    log = await run([1.0, 2.0, 3.0, 4.0], 1.0, 3.0, errors)
    summary = summarize(log.records, Objectives(first_token_s=1.0))
    assert summary.counts == {"completed": 1, "rejected": 2, "failed": 1, "unfinished": 0}
    assert summary.errors == {"OVERLOADED": 2, "CALL_TIMED_OUT": 1}
    assert summary.messages == {"OVERLOADED": "full", "CALL_TIMED_OUT": "late"}
    assert summary.latency_s is not None
    assert (summary.latency_s.p50, summary.latency_s.p99) == (4, 4)
    assert summary.queued_s is not None
    assert summary.queued_s.p99 == 0.25
    assert summary.elapsed_s == 8
    assert (summary.requests_per_s, summary.tokens_per_s) == (1 / 8, 4 / 8)
    assert (summary.good_count, summary.good_per_s) == (1, 1 / 8)


async def test_a_stream_without_a_finish_is_a_failure() -> None:
    async def generate(_: GenerationRequest) -> AsyncIterator[OutputPiece]:
        yield piece(2)

    time = FakeTime()
    log = LoadLog(time.clock)
    await time.run(run_load(at([1.0]), generate, log, time.sleep))
    assert log.records[0].outcome is Outcome.FAILED


async def test_an_interrupted_run_keeps_what_it_measured() -> None:
    time = FakeTime()
    log = LoadLog(time.clock)

    async def interrupted() -> None:
        task = asyncio.create_task(run_load(at([1.0, 2.0, 50.0]), server(time, 2.0, 2.5), log, time.sleep))
        await time.sleep(6.0)
        assert (log.sent_count, log.in_flight_count) == (2, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await time.run(interrupted())
    assert [record.outcome for record in log.records] == [Outcome.COMPLETED, Outcome.UNFINISHED]
    assert [record.output_count for record in log.records] == [4, 1]
    summary = summarize(log.records, Objectives())
    assert summary.counts["unfinished"] == 1
    assert summary.tokens_per_s == 5 / 6
    assert summary.good_count is None


@pytest.mark.parametrize(
    ("objectives", "is_good"),
    [
        (Objectives(first_token_s=1.0), True),
        (Objectives(first_token_s=0.9), False),
        (Objectives(per_token_s=1.0), True),
        (Objectives(first_token_s=1.0, per_token_s=0.9), False),
    ],
)
async def test_goodput_counts_requests_that_meet_every_objective(objectives: Objectives, is_good: bool) -> None:
    log = await run([1.0], first_s=1.0, rest_s=3.0)
    assert summarize(log.records, objectives).good_count == is_good


def test_percentiles_interpolate_between_ranks() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (0, 50, 90, 100)] == [1, 2.5, 3.7, 4]
    assert percentile([7.0], 99) == 7


@given(st.lists(st.floats(0, 1e6), min_size=2), st.integers(1, 99))
def test_percentiles_are_those_of_the_standard_library(values: list[float], percent: int) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
    assert percentile(values, percent) == pytest.approx(expected, abs=1e-6)


def test_a_run_without_requests_has_a_summary() -> None:
    summary = summarize([], Objectives(1.0))
    assert (summary.latency_s, summary.tokens_per_s, summary.good_count) == (None, 0, 0)


async def test_files_hold_every_request_and_the_plot_is_a_picture(tmp_path: Path) -> None:
    log = await run([1.0, 2.0, 3.0], 1.0, 3.0, {"1": Overloaded("full")})
    summary = summarize(log.records, Objectives())
    write_json(tmp_path / "load.json", {"rate": 1}, summary, log.records)
    content = json.loads((tmp_path / "load.json").read_text())
    assert content["settings"] == {"rate": 1}
    assert content["summary"]["counts"]["rejected"] == 1
    assert [row["outcome"] for row in content["requests"]] == ["completed", "rejected", "completed"]
    assert content["requests"][0]["usage"]["queued_s"] == 0.25
    unfinished = SentRequest(4.0, 4.0, 9.0, Outcome.UNFINISHED)
    for name, records in (("load.png", [*log.records, unfinished]), ("none.png", [unfinished]), ("empty.png", [])):
        write_plot(tmp_path / name, "a title", summarize(records, Objectives()), records)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_models_name_is_no_formula(tmp_path: Path) -> None:
    """What stands between two $ was set as mathematics, or failed as such at the end of the run."""
    write_plot(tmp_path / "load.png", "2 requests/s on /models/$a_{$, B = 8", summarize([], Objectives()), [])
    assert (tmp_path / "load.png").exists()
