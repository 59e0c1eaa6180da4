"""The bench itself: its comparisons and its report of the runs. Its systems are made up."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from paceline.measure.bench import bench, grid
from paceline.measure.bench.bench import Bench, Observer
from paceline.measure.bench.grid import BenchPlan
from paceline.measure.bench.report import bench_report
from paceline.measure.bench.result import BenchResult
from paceline.measure.bench.summary import summaries
from paceline.measure.equivalence.precision import Precision
from paceline.measure.prompts import MeasuredPrompt
from paceline.measure.system import Measured
from paceline.measure.traffic import pass_traffic
from paceline.process.launcher import ClusterOptions
from paceline.types import ModelDescription
from tests.fakes.model_services import describe
from tests.fakes.watches import FakeWatch

PROMPTS = [MeasuredPrompt(str(number), "all", (number,)) for number in range(4)]


class Answering:
    """Our system, with other outputs when its numerics are fast."""

    def __init__(self, options: ClusterOptions) -> None:
        self._output = [2 if options.numerics == "fast" else 1]

    async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
        return Measured([self._output for _ in prompts], 1.0)

    async def models(self) -> tuple[ModelDescription, ModelDescription]:
        return describe("target"), replace(describe("draft"), quantization="int8")


@asynccontextmanager
async def answering(options: ClusterOptions, max_new_tokens: int) -> AsyncIterator[Answering]:
    yield Answering(options)


async def benched(
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    policies: tuple[str, ...] = ("continuous",),
    batch_sizes: tuple[int, ...] = (2,),
    watch: FakeWatch | None = None,
) -> BenchResult:
    """Return the last result of a bench of our systems in these precisions."""
    monkeypatch.setattr(bench, "running_system", answering)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1e9)
    precisions = tuple(map(Precision.parse, words))
    plan = BenchPlan(ClusterOptions(), grid.OURS, batch_sizes, policies, ("5",), precisions, 1, 1)
    told: list[BenchResult] = []
    observer = Observer(lambda name, steps: None, lambda: None, told.append)
    await Bench(plan, PROMPTS, "made up", observer, watch or FakeWatch()).run()
    return told[-1]


async def test_numerics_that_differ_are_compared_with_the_first_system_of_the_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fast numerics were compared with their own warm-up, and so found equal."""
    paper = await benched(monkeypatch, "bfloat16", policies=("continuous", "eqspec"))
    assert {one.system: one.equal_count for one in summaries(paper)} == {
        "Paceline, plain, bfloat16": 4,
        "Paceline, 5 drafts, bfloat16": 4,
        "Paceline, eqspec, 5 drafts, bfloat16-fast": 0,
    }
    named = await benched(monkeypatch, "float32", "bfloat16", "bfloat16-fast")
    assert [one.equal_count for one in summaries(named)] == [4, 4, 4, 4, 0, 0]
    firsts = "Paceline, plain, float32 at B = 2; Paceline, plain, bfloat16 at B = 2."
    assert f"of the dtype: {firsts}" in bench_report(named)


async def test_one_watch_sees_every_pass_so_that_it_knows_how_fast_the_machine_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each batch size began with a new watch, which took a slow machine for its best."""
    watch = FakeWatch()
    await benched(monkeypatch, "float32", batch_sizes=(1, 2), watch=watch)
    assert watch.watched_count == 2 * 2 * (1 + 1)


@pytest.mark.parametrize(("variable", "lanes"), [(None, 2), ("1", 1)])
async def test_the_report_names_the_lanes_that_services_have_by_a_variable_too(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, lanes: int
) -> None:
    if variable:
        monkeypatch.setenv("PACELINE_COORDINATOR_LANES", variable)
    assert f"Lanes of speculation at B > 1: {lanes}." in bench_report(await benched(monkeypatch, "float32"))


async def test_the_floor_counts_the_bytes_of_the_models_as_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's weights are its own service's choice, whatever dtype is measured."""
    (one,) = (await benched(monkeypatch, "float32")).floors
    assert one.dtype == "float32"
    assert one.draft == pass_traffic("builtin:draft", replace(describe("draft"), quantization="int8"))
    assert one.target == pass_traffic("builtin:target", describe("target"))
