"""Laws of drafts: their fit, their intervals, and what they choose."""

import json
import random
from dataclasses import replace
from math import inf, log, sqrt
from pathlib import Path
from statistics import fmean

import pytest

from paceline.errors import InvalidRequest, StartupError
from paceline.laws.drafts import DraftLaws, RoundTimes, best_choice
from paceline.laws.fitting import fit, student_quantile
from paceline.laws.points import Point, read_points, write_points
from tests.commands import paceline_here
from tests.simulate.made_up_costs import propose_s, saved_costs, verify_s

GRID = [(depth, 500_000 * 2**power) for depth in (1, 2, 3, 5) for power in range(5)]


def acceptance(depth: int, tokens: float) -> float:
    return -0.4 + 0.06 * log(tokens) + 0.05 * log(depth)


def points(noise: float = 0.0) -> list[Point]:
    """Drafts that follow the law; training a layer takes 10 us a token, a step 1 ms and 0.5 a layer."""
    rng = random.Random(1)
    return [
        Point(
            depth,
            tokens,
            acceptance(depth, tokens) + rng.gauss(0, noise),
            train_s=tokens * depth * 1e-5,
            step_s=1e-3 + 5e-4 * depth,
        )
        for depth, tokens in GRID
    ]


def test_a_law_without_noise_is_found() -> None:
    law = DraftLaws(points()).acceptance
    assert [one.value for one in law.coefficients] == pytest.approx([-0.4, 0.06, 0.05])
    assert law.r_squared == pytest.approx(1.0)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """200 fits; with 95 % the chance of fewer than 180 hits is below 1 in 1000."""
    rng, hits = random.Random(1), 0
    for _ in range(200):
        xs = [(rng.uniform(1, 100),) for _ in range(8)]
        law = fit(xs, [2 + 3 * log(x) + rng.gauss(0, 0.5) for (x,) in xs])
        hits += abs(law.coefficients[1].value - 3) <= law.coefficients[1].margin
    assert 180 <= hits <= 199


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (100, 1.9840)])
def test_the_quantile_is_students(freedom: int, quantile: float) -> None:
    """The quantiles are those of the usual tables, for 97.5 %."""
    assert student_quantile(freedom) == pytest.approx(quantile, rel=0.02)


def test_a_point_that_was_held_out_changes_no_law_and_is_foreseen() -> None:
    held = replace(points(0.01)[7], held_out=True)
    known = DraftLaws([*points(0.01)[:7], held, *points(0.01)[8:]])
    assert known.held_out == [held] and len(known.used) == len(GRID) - 1
    found = known.draft(held.depth, held.token_count).acceptance
    assert abs(found.value - held.acceptance) <= 2 * found.margin


@pytest.mark.parametrize("few", [points()[:3], [one for one in points() if one.depth == 1]])
def test_points_that_say_too_little_are_refused(few: list[Point]) -> None:
    with pytest.raises(InvalidRequest, match="give|vary"):
        DraftLaws(few)


def test_what_is_missed_of_a_point_left_out_is_what_a_law_of_the_others_misses() -> None:
    xs, rng = [(one,) for one in (1.0, 2.0, 3.0, 5.0, 9.0, 20.0)], random.Random(3)
    ys = [rng.random() for _ in xs]
    others = [fit([*xs[:n], *xs[n + 1 :]], [*ys[:n], *ys[n + 1 :]]).predict(x).value for n, x in enumerate(xs)]
    missed = [found - y for found, y in zip(others, ys, strict=True)]
    assert fit(xs, ys).left_out_error == pytest.approx(sqrt(fmean(one**2 for one in missed)))


def test_depth_that_gains_with_tokens_is_seen_and_foreseen() -> None:
    def grown(one: Point) -> Point:
        return replace(one, acceptance=one.acceptance + 0.02 * log(one.depth) * log(one.token_count / 500_000))

    made = [replace(grown(one), held_out=number == 11) for number, one in enumerate(points(0.002))]
    known = DraftLaws(made)
    assert known.acceptance.coefficients[3].value == pytest.approx(0.02, abs=0.003)
    found = known.draft(made[11].depth, made[11].token_count).acceptance
    assert found.value == pytest.approx(made[11].acceptance, abs=0.01)
    assert len(DraftLaws(points(0.002)).acceptance.coefficients) == 3, "depth and tokens apart say as much"


def test_what_two_points_alone_say_of_depth_and_tokens_together_is_no_law() -> None:
    """A part for both goes through the two deep points whatever they are, so nothing foresees them."""
    rng, tokens = random.Random(1), [count for depth, count in GRID if depth == 1]
    made = [Point(1, one, acceptance(1, one) + rng.gauss(0, 0.01)) for one in tokens]
    made += [Point(2, one, acceptance(2, one) + rng.choice((-0.02, 0.02))) for one in tokens[:2]]
    assert len(DraftLaws(made).acceptance.coefficients) == 3


def test_a_budget_buys_a_deeper_draft_fewer_tokens() -> None:
    drafts = DraftLaws(points()).affordable(60)
    assert [one.depth for one in drafts] == [1, 2, 3, 5]
    assert drafts[0].token_count > drafts[1].token_count > drafts[-1].token_count
    with pytest.raises(InvalidRequest, match="train_s"):
        DraftLaws([replace(one, train_s=None) for one in points()]).affordable(60)


def round_s(rows: int, count: int) -> float:
    return verify_s(rows, rows * count) + 0.0015 + (propose_s(rows, count) + 0.0015 if count else 0.0)


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_the_best_count_is_that_of_the_measured_curve(batch_size: int) -> None:
    known = DraftLaws(points())
    draft = known.draft(2, 8_000_000)
    found = best_choice([draft], batch_size, RoundTimes(saved_costs(), known, 2))
    rates = [
        sum(draft.acceptance.value**place for place in range(count + 1)) / round_s(batch_size, count)
        for count in range(9)
    ]
    assert rates[found.draft_count] > 0.97 * max(rates)


def test_a_deeper_draft_pays_for_its_steps() -> None:
    known = DraftLaws(points())
    assert known.step_factor(2, 2) == 1
    assert known.step_factor(5, 1) == pytest.approx(3.5 / 1.5, rel=0.01)


def test_costs_of_one_draft_count_say_nothing_of_others() -> None:
    saved = saved_costs()
    few = [one for one in saved.costs.calls if one.step_count in (0, 5)]
    with pytest.raises(InvalidRequest, match="auto"):
        RoundTimes(replace(saved, costs=replace(saved.costs, calls=tuple(few))), DraftLaws(points()), 2)


def test_points_survive_their_file_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    write_points(path, points())
    assert read_points(path) == points()
    wrong: list[dict[str, float]] = [{"depth": 0}, {"depth": 10**190}, {"token_count": 10**190}, {"acceptance": 1.5}]
    cells = [json.dumps([{"depth": 1, "token_count": 5, "acceptance": 0.5} | one]) for one in wrong]
    for text in ("", "{}", '[{"depth": 1}]', *cells):
        path.write_text(text)
        with pytest.raises(StartupError, match="give"):
            read_points(path)


@pytest.mark.parametrize("wrong", [{"train_s": -5.0}, {"step_s": 0.0}, {"train_s": inf}, {"train_s": 1e-300}])
def test_times_that_none_took_are_refused(tmp_path: Path, wrong: dict[str, float]) -> None:
    path = tmp_path / "points.json"
    fields = {"depth": 1, "token_count": 5, "acceptance": 0.5}
    path.write_text(json.dumps([fields, fields | wrong]))
    with pytest.raises(StartupError, match="point 1 .* give train_s and step_s of 1e-12 to"):
        read_points(path)


def test_a_budget_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    write_points(path, points())
    status, out, err = paceline_here("laws", "fit", str(path), "--budget-s", "inf")
    assert (status, out) == (1, "")
    assert "--budget-s is inf; give seconds" in err


@pytest.mark.parametrize("depth", [1, 2, 10**6])
@pytest.mark.parametrize("token_count", [1, 10**6, 10**18])
def test_no_draft_that_may_be_asked_for_overflows(depth: int, token_count: int) -> None:
    """Of tokens and depth together the power of both overflowed, which ended the command by a traceback."""
    grown = [replace(one, acceptance=0.01 * log(one.token_count) * (1 + log(one.depth))) for one in points()]
    known = DraftLaws([*grown, Point(10**6, 10**18, 0.9), Point(10**6, 1, 0.1)])
    assert 0 <= known.draft(depth, token_count).acceptance.value <= 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--depth", f"{10**190}", "--tokens", "5"), "--depth"),
        (("--depth", "5", "--tokens", f"{10**190}"), "--tokens"),
        (("--budget-s", "1e300"), "--budget-s is 1e+300, time for 1e+305 tokens; give a budget for"),
    ],
)
def test_drafts_beyond_all_that_are_trained_are_refused(flags: tuple[str, ...], words: str, tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    write_points(path, points())
    status, out, err = paceline_here("laws", "fit", str(path), *flags)
    assert status != 0 and "tokens/s" not in out
    assert words in err


def test_the_command_prints_the_law(tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    write_points(path, points())
    status, out, err = paceline_here("laws", "fit", str(path), "--depth", "4", "--tokens", "16000000")
    assert (status, err) == (0, "")
    assert "0.060 ± 0.000 ln(tokens)" in out and f"{acceptance(4, 16e6):.3f}" in out


@pytest.mark.parametrize("points", [[], [Point(1, 1000, 0.5, held_out=True)] * 9])
def test_no_points_to_learn_from_are_no_law_of_too_few(points: list[Point]) -> None:
    """The error told of a law of 0 numbers, and asked for two points, which would have been too few."""
    with pytest.raises(InvalidRequest, match="all of them are held out"):
        DraftLaws(points)
