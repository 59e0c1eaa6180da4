"""The bench itself: its comparisons and its report of the runs. Its systems are made up."""

import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest

from paceline.measure.bench import bench, grid
from paceline.measure.bench.bench import Bench, Observer
from paceline.measure.bench.grid import BenchPlan
from paceline.measure.bench.report import bench_report
from paceline.measure.bench.result import BenchResult
from paceline.measure.bench.summary import summaries
from paceline.measure.cluster import Predictions
from paceline.measure.equivalence.precision import Precision
from paceline.measure.prompts import MeasuredPrompt
from paceline.measure.source_sets import SourceSet
from paceline.measure.system import Measured
from paceline.measure.traffic import pass_traffic
from paceline.process.cluster_plan import ClusterOptions
from paceline.types import ModelDescription, Text, Usage
from tests.fakes.model_services import describe
from tests.fakes.watches import FakeWatch

PROMPTS = [MeasuredPrompt(str(number), "all", (number,)) for number in range(4)]


class Answering:
    """Our system, with other outputs when its numerics are fast. A token takes it a second."""

    def __init__(self, options: ClusterOptions, max_new_tokens: int) -> None:
        self._options = options
        self.is_plain = options.draft_count == "0"
        self._output = [2 if options.numerics == "fast" else 1] * max_new_tokens

    def with_limit(self, max_new_tokens: int) -> "Answering":
        return Answering(self._options, max_new_tokens)

    async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
        usages = tuple(Usage(len(one), len(self._output), round_count=sum(one)) for one in prompts)
        return Measured([self._output for _ in prompts], len(self._output), usages=usages)

    async def models(self) -> tuple[ModelDescription, ModelDescription]:
        return describe("target"), replace(describe("draft"), quantization="int8")


@asynccontextmanager
async def answering(
    options: ClusterOptions, max_new_tokens: int, sources: SourceSet, predictions: Predictions
) -> AsyncIterator[Answering]:
    yield Answering(options, max_new_tokens)


async def benched(
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    policies: tuple[str, ...] = ("continuous",),
    batch_sizes: tuple[int, ...] = (2,),
    watch: FakeWatch | None = None,
    max_new_tokens: int = 1,
    prompts: Sequence[MeasuredPrompt] = PROMPTS,
    by_category: bool = False,
    services: Callable[..., AbstractAsyncContextManager[Answering]] = answering,
) -> BenchResult:
    """Return the last result of a bench of our systems in these precisions."""
    monkeypatch.setattr(bench, "running_system", services)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1e9)
    precisions = tuple(map(Precision.parse, words))
    plan = BenchPlan(
        *(ClusterOptions(), grid.OURS, batch_sizes, policies, ("5",), precisions, max_new_tokens, 1),
        by_category=by_category,
    )
    told: list[BenchResult] = []
    observer = Observer(lambda name, steps: None, lambda: None, told.append)
    await Bench(plan, prompts, "made up", observer, watch or FakeWatch()).run()
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


async def test_garbage_collection_scans_no_peers_libraries_during_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of a tenth of a second took a core from services that were measured. Later groups' models are freed."""
    frozen: list[int] = []

    class Looking(Answering):
        async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
            frozen.append(gc.get_freeze_count())
            return await super().run(prompts)

    @asynccontextmanager
    async def looking(options: ClusterOptions, max_new_tokens: int, **_: object) -> AsyncIterator[Answering]:
        yield Looking(options, max_new_tokens)

    await benched(monkeypatch, "float32", services=looking)
    assert frozen and min(frozen) > 1000
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("variable", "lanes"), [(None, 2), ("1", 1)])
async def test_the_report_names_the_lanes_that_services_have_by_a_variable_too(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, lanes: int
) -> None:
    if variable:
        monkeypatch.setenv("PACELINE_COORDINATOR_LANES", variable)
    assert f"Lanes of speculation at B > 1: {lanes}." in bench_report(await benched(monkeypatch, "float32"))


async def test_the_prompts_time_is_measured_in_turn_and_taken_out_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = FakeWatch()
    found = await benched(monkeypatch, "float32", max_new_tokens=5, watch=watch)
    assert watch.watched_count == 2 * 2 * (1 + 1)
    assert [(len(one.runs), len(one.prompt_passes)) for one in found.systems] == [(1, 1), (1, 1)]
    assert [one.decoding_tokens_per_s for one in summaries(found)] == [4 * (5 - 1) / (5 - 1)] * 2


async def test_categories_are_measured_together_and_by_themselves_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [MeasuredPrompt(str(number), "qa" if number % 2 else "rag", (number,)) for number in range(1, 6)]
    together = await benched(monkeypatch, "float32", prompts=prompts)
    assert (together.categories, together.by_category) == ({"qa": 3, "rag": 2}, {})
    rows = [one.runs[0].categories for one in together.systems]
    assert [{name: use.verified_row_count for name, use in one.items()} for one in rows] == [{"qa": 9, "rag": 6}] * 2

    alone = await benched(monkeypatch, "float32", prompts=prompts, by_category=True)
    assert alone.systems == together.systems
    assert {name: [one.spec.kind for one in systems] for name, systems in alone.by_category.items()} == {
        "qa": [grid.PLAIN, grid.SPECULATIVE],
        "rag": [grid.PLAIN, grid.SPECULATIVE],
    }
    assert [list(one.runs[0].categories) for one in alone.by_category["rag"]] == [["rag"]] * 2
    assert [one.output_count for one in alone.by_category["rag"][0].runs] == [2]


async def test_outputs_of_a_category_by_itself_are_compared_with_those_of_all_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await benched(monkeypatch, "bfloat16", "bfloat16-fast", by_category=True)
    assert [one.mismatch_count for one in found.by_category["all"]] == [0, 0, 4, 4]


async def test_the_floor_counts_a_draft_that_only_a_later_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(self: Answering) -> tuple[ModelDescription, ModelDescription | None]:
        return describe("target"), None if self.is_plain else describe("draft")

    monkeypatch.setattr(Answering, "models", models)
    (one,) = (await benched(monkeypatch, "float32")).floors
    assert one.draft == pass_traffic("builtin:draft", describe("draft"))


async def test_the_floor_counts_the_bytes_of_the_models_as_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's weights are its own service's choice, whatever dtype is measured."""
    (one,) = (await benched(monkeypatch, "float32")).floors
    assert one.dtype == "float32"
    assert one.draft == pass_traffic("builtin:draft", replace(describe("draft"), quantization="int8"))
    assert one.target == pass_traffic("builtin:target", describe("target"))


async def test_a_lines_prediction_goes_with_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Predictions] = []

    @asynccontextmanager
    async def telling(
        options: ClusterOptions, max_new_tokens: int, sources: SourceSet, predictions: Predictions
    ) -> AsyncIterator[Answering]:
        given.append(predictions)
        yield Answering(options, max_new_tokens)

    prompts = [MeasuredPrompt("a", "all", (1,), "x", "y"), MeasuredPrompt("b", "all", (2,))]
    await benched(monkeypatch, "float32", prompts=prompts, services=telling)
    assert given == [{(1,): Text("y")}] * 2


def test_systems_of_other_numerics_have_other_labels() -> None:
    precisions = tuple(map(Precision.parse, ("auto-fast", "auto-strict")))
    plan = BenchPlan(ClusterOptions(), ("plain",), (1,), ("continuous",), ("5",), precisions, 8, 1)
    labels = [one.label for one in grid.groups(plan)[0]]
    assert len(set(labels)) == len(labels) == 2
