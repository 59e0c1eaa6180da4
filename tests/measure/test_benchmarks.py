"""Benchmarks without services: their evaluation of kept passes."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from benchmarks import builtin_pair, choice, draft_lengths, edits, hostile, laws, scheduling, sharing, sticky
from benchmarks.overload import holds
from benchmarks.overload.watched_coordinator import LoopWatch
from paceline.errors import InvalidRequest
from paceline.measure.contention import Contention
from paceline.measure.rounds import RoundUse
from paceline.measure.system import Measured
from paceline.process.cluster_plan import ClusterOptions
from paceline.types import ClusterStatistics, GenerationRequest, TokenIds
from tests.fakes.watches import FakeWatch
from training import problems

QUIET, SPOILED = Contention(0.0, 1.0), Contention(0.5, 1.0)
ROUNDS = RoundUse(verified_row_count=10, committed_count=30, drafted_count=50, accepted_count=20)
COUNTED = ClusterStatistics(
    round_count=10, round_counts_by_group_size=((1, 10),), committed_count=30, drafted_count=50, accepted_count=20
)


def measured(tokens_per_s: int, contention: Contention = QUIET, rounds: RoundUse = ROUNDS) -> Measured:
    return Measured([[1] * tokens_per_s], 1.0, rounds, contention)


def cells(table: str) -> list[dict[str, str]]:
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_a_spoiled_pass_counts_in_no_median_of_the_built_in_pair() -> None:
    spoiled = measured(9, SPOILED, RoundUse())
    found = builtin_pair.summary(
        ClusterOptions(draft_count="5"),
        {"plain": [measured(20), spoiled, spoiled], "speculative": [measured(50), spoiled, spoiled]},
    )
    assert (found["plain_tokens_per_s"], found["speculative_tokens_per_s"], found["speedup"]) == (20, 50, 2.5)
    assert found["acceptance"] == 0.4
    assert found["quiet_runs"] == {"plain": 1, "speculative": 1}


def test_figures_of_edits_are_of_neighbouring_runs_and_of_the_outputs_of_all() -> None:
    """Each side had the median of its own runs, and the last ones' outputs alone were compared."""

    def run(seconds: float, output: tuple[int, ...] = (5, 6)) -> Measured:
        return Measured([[1, 2], [*output]], seconds, ROUNDS, QUIET)

    plain = [run(1.0), run(0.1), run(0.5)]
    found = edits.summary({edits.PLAIN: plain, "all": [run(0.5, (5, 7)), run(0.2), run(0.1)]})
    assert found["of_plain"] == {edits.PLAIN: 1.0, "all": 2.0}
    assert found["identical"] == {edits.PLAIN: 2, "all": 1}


def test_a_spoiled_pass_counts_in_no_median_of_a_policy() -> None:
    row = scheduling.row_of("eqspec", [measured(9, SPOILED), measured(50), measured(9, SPOILED)], COUNTED, [])
    assert (row["tokens_per_s"], row["quiet_runs"]) == (50, 1)


@pytest.mark.parametrize("place", range(3))
def test_outputs_of_a_policy_are_equal_if_those_of_every_run_are(place: int) -> None:
    """The last run's alone were compared."""
    runs = [measured(5), measured(5), measured(5)]
    assert scheduling.row_of("eqspec", runs, COUNTED, [[1] * 5])["outputs_equal"]
    runs[place] = Measured([[1, 1, 2, 1, 1]], 1.0, ROUNDS, QUIET)
    assert not scheduling.row_of("eqspec", runs, COUNTED, [[1] * 5])["outputs_equal"]


@pytest.mark.parametrize("differing", [0, 1])
def test_an_output_that_hostile_drafts_changed_is_the_commands_failure(
    differing: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was printed, and the exit status was 0."""
    prompts = tmp_path / "question.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["What?"]}))

    async def compare(*_: object) -> list[dict[str, int]]:
        plain = measured(5)
        return [hostile.counts(plain, plain), hostile.counts(plain, measured(5 + differing))]

    monkeypatch.setattr(hostile, "compare", compare)
    with pytest.raises(typer.Exit) as ended:
        hostile.main(prompts)
    assert ended.value.exit_code == differing


def returned(value: object) -> Callable[..., Any]:
    """Return a coroutine function that has measured this."""

    async def measure(*_: object) -> object:
        return value

    return measure


@pytest.mark.parametrize("differing", [0, 1])
@pytest.mark.parametrize("name", ["builtin_pair", "edits", "scheduling", "sticky"])
def test_an_output_that_is_not_plain_decodings_is_the_commands_failure(
    name: str, differing: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was printed, and the exit status was 0."""
    question = tmp_path / "question.jsonl"
    question.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["What?"]}))
    systems = {"plain": [measured(5)], "speculative": [measured(5 + differing)]}
    monkeypatch.setattr(problems, "load", lambda data: ([], []))
    monkeypatch.setattr(
        builtin_pair, "measure", returned(builtin_pair.summary(ClusterOptions(draft_count="5"), systems))
    )
    monkeypatch.setattr(edits, "measure", returned(systems))
    rows = [scheduling.row_of(one, runs, COUNTED, [[1] * 5]) for one, runs in systems.items()]
    monkeypatch.setattr(scheduling, "throughput", returned(rows))
    monkeypatch.setattr(sticky, "compare", returned(differing))
    commands: dict[str, Callable[[], None]] = {
        "builtin_pair": lambda: builtin_pair.main(question),
        "edits": lambda: edits.main(question),
        "scheduling": lambda: scheduling.policies(question),
        "sticky": sticky.sticky,
    }
    with pytest.raises(typer.Exit) as ended:
        commands[name]()
    assert ended.value.exit_code == differing


def test_a_ratio_of_draft_lengths_is_of_two_quiet_passes_where_there_are_such_two() -> None:
    others = {name: [measured(10)] * 3 for name in (draft_lengths.PLAIN, *draft_lengths.FIXED)}
    best = {"5": [measured(100), measured(100), measured(20, SPOILED)]}
    auto = {draft_lengths.AUTO: [measured(10, SPOILED), measured(90), measured(95)]}
    table = draft_lengths.table({"some": others | best | auto, "busy": others | best | {"auto": auto["auto"][:1] * 3}})
    some, busy = cells(table)
    assert (some["5"], some["auto"], some["of best"], some["quiet"]) == ("100", "92", "0.90", "19 of 21")
    assert (busy["auto"], busy["of best"], busy["quiet"]) == ("10", "0.10", "17 of 21")


def test_the_choice_is_measured_by_the_fixed_source_that_is_best_and_by_its_neighbouring_runs() -> None:
    def runs(*rates: int) -> list[Measured]:
        return [measured(rate) for rate in rates]

    spoiled = measured(500, SPOILED)
    row = choice.row_of(
        {choice.CHOICE: [*runs(90, 110), spoiled], "draft": runs(70, 80, 900), "heads": runs(100, 100, 100)},
        [[1] * 90],
    )
    assert (row["choice"], row["draft"], row["heads"]) == ("100", "80", "100")
    assert (row["of best"], row["quiet"]) == ("1.000", "8 of 9")
    assert (row["equal"], row["prompts"]) == ("0", "1")  # one run alone has the expected output


class CountedCluster:
    """A cluster and its client: ten rounds a pass, each costing the coordinator 2 ms."""

    def __init__(self) -> None:
        self.round_count = 0

    async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
        self.round_count += 10
        return Measured([[1]], 1.0, RoundUse(round_count=10))

    async def describe(self) -> Any:
        counts = ((1, self.round_count),)
        return SimpleNamespace(
            statistics=ClusterStatistics(round_count=self.round_count, round_counts_by_group_size=counts)
        )

    @property
    def cpu_s(self) -> float:
        return 5.0 + 0.002 * self.round_count


async def test_a_coordinators_cpu_time_is_of_the_rounds_it_was_spent_on_spoiled_ones_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Repeated passes counted as time and not as rounds."""
    cluster = CountedCluster()

    async def clusters(*_: object) -> Any:
        return {"one": (cluster, None)}, {"one": cluster}

    monkeypatch.setattr(scheduling, "_clusters", clusters)
    monkeypatch.setattr(scheduling, "ClusterSystem", lambda cluster, *_: cluster)
    monkeypatch.setattr(scheduling, "cpu_s", lambda cluster: cluster.cpu_s)
    monkeypatch.setattr(scheduling, "encode_questions", lambda *_: [(1,)])
    warm_up_then_spoiled_twice = (0.0, 0.5, 0.5)
    monkeypatch.setattr(scheduling, "MachineWatch", lambda: FakeWatch(*warm_up_then_spoiled_twice))
    await scheduling.throughput({"one": ClusterOptions()}, [], 1, 1)
    row = json.loads(capsys.readouterr().out)
    assert row["coordinator_cpu_ms_per_round"] == 2.0


class Refusing:
    """A client whose requests are all refused."""

    async def complete(self, request: GenerationRequest) -> Any:
        raise InvalidRequest("max_new_tokens is 100000; give less")

    async def describe(self) -> Any:
        return SimpleNamespace(statistics=COUNTED)


async def test_a_request_that_fails_ends_what_coordinators_are_measured_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose requests failed asked no more, and what the others were given counted as that of all."""
    monkeypatch.setattr(sharing, "WARM_UP_S", 0.01)
    refusing: Any = Refusing()
    watch: Any = FakeWatch()
    coordinators = sharing.Coordinators([refusing], [], 2, {})
    with pytest.raises(InvalidRequest, match="give less"):
        await coordinators.work([GenerationRequest(TokenIds((1,)))], 0.01, watch)


async def test_the_longest_hold_of_a_loop_is_told_once() -> None:
    watch = LoopWatch()
    watch.look()
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    await asyncio.sleep(0.01)
    assert watch.take() >= 0.05
    assert watch.take() == 0


def test_an_input_that_always_holds_beyond_the_limit_is_named_and_fails() -> None:
    once, always = (holds.LIMIT_S, 2 * holds.LIMIT_S, 2 * holds.LIMIT_S), (2 * holds.LIMIT_S,) * 3
    found = {"short": holds.Hold(once, "OK"), "long": holds.Hold(always, "OK")}
    assert not holds.are_short(found)
    assert list(holds.table(found).columns[3].cells) == ["", "over 20"]
    assert holds.are_short({"short": found["short"]})


def test_the_loss_of_laws_is_that_of_the_foreseen_best_among_all_drafts() -> None:
    speeds = [laws.Speeds("a", 3, measured=100, foreseen=90), laws.Speeds("b", 5, measured=97, foreseen=95)]
    chosen, loss = laws.loss_of_foreseen(speeds)
    assert chosen is speeds[1]
    assert loss == pytest.approx(0.03)


def test_the_runs_without_drafts_are_one_choice_and_the_luckiest_is_not_the_best() -> None:
    plain = [laws.Speeds(name, 0, measured=speed, foreseen=90) for name, speed in (("a", 90), ("b", 106))]
    chosen, loss = laws.loss_of_foreseen([*plain, laws.Speeds("a", 3, measured=97, foreseen=99)])
    assert chosen.draft_count == 3
    assert loss == pytest.approx(1 - 97 / 98)
