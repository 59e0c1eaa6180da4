"""Who drafts for a generation, and for how many tokens: of a fixed draft count, and what both planners keep to."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.drafting.calibration import Calibration
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.generation import Generation, HeadsDraft
from coordinator.requests.guess import Guess
from coordinator.rounds import acceptances
from coordinator.rounds.acceptances import GUESSED_ROWS
from coordinator.rounds.auto_planner import AutoPlanner
from coordinator.rounds.fixed_planner import FixedPlanner
from coordinator.rounds.round_report import RoundReport, RowReport
from coordinator.rounds.wishes import DraftPlanner, Wish
from paceline.types import DraftingOptions, DraftSource, HopTime
from tests.fakes.draft_worlds import MAX_LENGTHS, World, simulate
from tests.generations import generation_of

COUNT = 3
SURE, WEAK = 20, 0
"""Tokens that match: after many a guess is worth more than a draft service, and after none less."""
ASKED = Wish(COUNT, "small")
MAX_LENGTH = 100
"""Most tokens of a generation that draft services take."""
ANY_SOURCE = DraftingOptions()


class Says:
    """Guesses the same tokens always."""

    def __init__(self, match_length: int) -> None:
        self._match_length = match_length

    def read(self, context: TokenList) -> None:
        pass

    def guess(self, context: TokenList, most: int) -> Guess:
        token_ids = (7, 8, 9, 10, 11)[:most]
        return Guess(token_ids, self._match_length, (1.0,) * len(token_ids))

    def ended(self, context: TokenList) -> None:
        pass


def generation(match_length: int | None = None, drafting: DraftingOptions = ANY_SOURCE) -> Generation:
    guessers = {} if match_length is None else {DraftSource.SUFFIX: Says(match_length)}
    return generation_of(guessers=guessers, drafting=drafting)


def wish_of(one: Generation, *models: str, planner: FixedPlanner | None = None) -> Wish:
    """Return what a planner wishes, without what it learns from."""
    return replace((planner or FixedPlanner(COUNT)).plan([one], dict.fromkeys(models, MAX_LENGTH))[one], guesses={})


@pytest.mark.parametrize(
    ("match_length", "models", "expected"),
    [
        (None, (), Wish()),
        (None, ("small",), ASKED),
        (SURE, (), Wish(source=DraftSource.SUFFIX, token_ids=(7, 8, 9))),
        (SURE, ("small",), Wish(source=DraftSource.SUFFIX, token_ids=(7, 8, 9))),
        (WEAK, ("small",), Wish(COUNT, "small", DraftSource.SUFFIX, (7, 8, 9))),
    ],
)
def test_the_source_drafts_that_promises_most_and_what_is_at_hand_stands_by(
    match_length: int | None, models: tuple[str, ...], expected: Wish
) -> None:
    assert wish_of(generation(match_length), *models) == expected


@pytest.mark.parametrize("match_length", [SURE, WEAK])
def test_an_order_of_sources_decides_whatever_they_promise(match_length: int) -> None:
    order = (DraftSource.DRAFT, DraftSource.SUFFIX)
    assert wish_of(generation(match_length, DraftingOptions(order, in_order=True)), "small").asked_count == COUNT
    assert wish_of(generation(match_length, DraftingOptions(order[::-1], in_order=True)), "small").asked_count == 0


@pytest.mark.parametrize(
    "planner", [FixedPlanner(COUNT, heads_count=COUNT), AutoPlanner(1, heads_count=COUNT)], ids=["fixed", "auto"]
)
def test_heads_have_the_place_that_an_order_of_sources_gives_them(planner: DraftPlanner) -> None:
    """They came last, whatever the order."""
    for order in ((DraftSource.HEADS, DraftSource.SUFFIX), (DraftSource.SUFFIX, DraftSource.HEADS)):
        one = generation(SURE, DraftingOptions(order, in_order=True))
        one.heads_draft = HeadsDraft(len(one.token_ids), (4, 5, 6), COUNT)
        assert planner.plan([one], {})[one].source is order[0]


def test_a_draft_service_that_may_not_draft_is_not_asked() -> None:
    forbidden = DraftingOptions(forbidden_sources=(DraftSource.DRAFT,))
    assert wish_of(generation(drafting=forbidden), "small") == Wish()
    assert wish_of(generation(drafting=DraftingOptions(draft_model="large")), "small", "large") == Wish(COUNT, "large")


def test_a_trial_of_auto_keeps_to_an_order_of_sources() -> None:
    """One row in each round of a trial was drafted for by the service that its request names last."""
    planner = AutoPlanner(1)
    simulate([World(0.8, 0.0008, 0.0009, 0.006, 0.0003)] * 200, planner, seed=1)
    one = generation(SURE, DraftingOptions((DraftSource.SUFFIX, DraftSource.DRAFT), in_order=True))
    for _ in range(3000):
        wishes = planner.plan([one], MAX_LENGTHS)
        assert wishes[one].asked_count == 0
        rows = [RowReport(1, 1, 2, DraftSource.SUFFIX, "", one, (7, 8))]
        planner.observe(wishes, RoundReport(rows, 0.008, HopTime(), HopTime(), None, None), 0.008)


def test_of_several_models_the_one_is_asked_whose_drafts_were_right() -> None:
    planner, one = FixedPlanner(COUNT), generation()
    for model, accepted in (("small", 0), ("large", COUNT)):
        rows = [RowReport(COUNT, accepted, accepted + 1, DraftSource.DRAFT, model)] * 50
        planner.observe({}, RoundReport(rows, 0.1, HopTime(), HopTime(), None, None), 0.1)
    assert wish_of(one, "small", "large", planner=planner) == Wish(COUNT, "large")


class Noting(Calibration):
    """Notes the guesses that it is to learn from."""

    def __init__(self) -> None:
        super().__init__()
        self.guesses: list[Guess] = []

    def observe(self, guess: Guess, committed: Sequence[int]) -> None:
        self.guesses.append(guess)


@pytest.mark.parametrize(("row_count", "turns"), [(1, 1), (GUESSED_ROWS, 1), (2 * GUESSED_ROWS, 2), (100, 7)])
def test_a_round_learns_from_few_guesses_and_in_turns_from_those_of_all_rows(
    row_count: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting = Noting()
    monkeypatch.setattr(acceptances, "Calibration", lambda: noting)
    planner, rows = FixedPlanner(COUNT), [generation(SURE) for _ in range(row_count)]
    wishes = planner.plan(rows, {})
    reports = [RowReport(COUNT, COUNT, COUNT + 1, DraftSource.SUFFIX, "", one) for one in rows]
    for _ in range(turns):
        before = len(noting.guesses)
        planner.observe(wishes, RoundReport(reports, 0.1, HopTime(), HopTime(), None, None), 0.1)
        assert len(noting.guesses) - before <= GUESSED_ROWS
    expected = {id(wish.guesses[DraftSource.SUFFIX]) for wish in wishes.values()}
    assert {id(guess) for guess in noting.guesses} == expected and len(noting.guesses) == row_count


def test_plain_decoding_and_generations_without_drafts_want_none() -> None:
    assert wish_of(generation(SURE), "small", planner=FixedPlanner(0)) == Wish()
    assert wish_of(replace(generation(SURE), max_draft_count=0), "small") == Wish()


def test_heads_that_have_drafted_are_verified_and_are_asked_again() -> None:
    one = generation()
    one.heads_draft = HeadsDraft(len(one.token_ids), (5, 6), 2)
    planner = FixedPlanner(COUNT, heads_count=2)
    assert wish_of(one, planner=planner) == Wish(source=DraftSource.HEADS, token_ids=(5, 6), propose_count=2)
