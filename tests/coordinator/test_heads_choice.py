"""The choice of what the target's heads draft: by what all rows gain, with few trials."""

from collections.abc import Sequence

import pytest

from coordinator.rounds.costs import RoundCosts, RoundWork
from coordinator.rounds.heads_choice import AT_ONCE, SHARE, HeadsChoice
from coordinator.rounds.outlook import NO_OPTION, Option, Outlook
from coordinator.rounds.promises import prices_of
from paceline.types import DraftingOptions, DraftSource
from tests.fakes.draft_worlds import MODEL, group_of

CALL_S, ROW_S, CONSTANT_S = 0.003, 0.0001, 0.01
"""Times of a pass of heads, of one of their drafts with its verification, and of a round."""
CHANCES = (0.8, 0.6)


def known_costs() -> RoundCosts:
    costs = RoundCosts()
    for number in range(300):
        made, verified = 16 * (number % 2), 8 * (number % 3)
        work = RoundWork(8, verified, heads_count=made, heads_call_count=int(made > 0))
        costs.add([work], CONSTANT_S + CALL_S * (made > 0) + ROW_S / 2 * (made + verified))
    costs.fit()
    return costs


def outlooks_of(count: int, chances: tuple[float, ...] = CHANCES) -> list[Outlook]:
    return [Outlook(one, {}, {}, {}, 100, chances) for one in group_of(count)]


def chosen(choice: HeadsChoice, costs: RoundCosts, outlooks: Sequence[Outlook], asked: Option = NO_OPTION) -> list[int]:
    """Return the counts where a plain round's token of each row is what time is worth."""
    goodput = len(outlooks) * costs.unit_s / CONSTANT_S
    options, prices = [asked] * len(outlooks), prices_of(costs, goodput, 0, 0)
    copies = [one.copies(prices) for one in outlooks]
    return choice.counts(outlooks, copies, options, options, prices, is_first=False)


def without_trials(choice: HeadsChoice) -> HeadsChoice:
    """Use up the time that trials may lose, with heads that cost much and that are never right."""
    costs, dear = known_costs(), outlooks_of(8, (0.0, 0.0))
    for _ in range(100):
        chosen(choice, costs, dear)
    return choice


def test_heads_draft_where_all_rows_together_are_worth_their_pass() -> None:
    """For one row of eight the tokens are worth their own price, and not that of the pass."""
    costs = known_costs()
    choice = without_trials(HeadsChoice(costs))
    all_rows, one_row = outlooks_of(8), outlooks_of(8)
    for outlook in one_row[1:]:
        outlook.heads_chances = ()
    assert chosen(choice, costs, one_row) == [0] * 8
    choice.passed(1 / SHARE, 1)
    counts = [chosen(choice, costs, all_rows) for _ in range(10)]
    assert counts[-1] == [2] * 8


def test_a_request_that_names_heads_first_has_them_whatever_they_cost() -> None:
    costs = known_costs()
    choice, (outlook,) = without_trials(HeadsChoice(costs)), outlooks_of(1, (0.3,))
    assert chosen(choice, costs, [outlook]) == [0]
    outlook.generation.drafting = DraftingOptions((DraftSource.HEADS,), in_order=True)
    assert chosen(choice, costs, [outlook]) == [1]


def test_the_time_that_trials_may_lose_is_bounded_and_comes_back() -> None:
    costs = known_costs()
    choice, useless = HeadsChoice(costs), outlooks_of(8, (0.0, 0.0))
    tried = [any(chosen(choice, costs, useless)) for _ in range(1000)]
    lost_s = sum(tried) * (CALL_S + 16 * ROW_S)
    assert 0 < lost_s <= 1.2 * AT_ONCE * costs.unit_s
    assert not any(tried[500:])
    choice.passed(1 / SHARE, 1)
    assert any(chosen(choice, costs, useless))


def test_a_trial_costs_all_passes_of_its_call() -> None:
    """Each was charged with one. On a far target that runs eight further rounds 5 % of the time was lost, not 0.5."""
    costs = known_costs()
    choice, useless = HeadsChoice(costs), outlooks_of(8, (0.0, 0.0))
    for _ in range(100):
        choice.passed(1.0, pass_count=9)
    tried = sum(any(chosen(choice, costs, useless)) for _ in range(1000))
    lost_s = tried * 9 * (CALL_S + 16 * ROW_S)
    assert 0 < lost_s <= 1.2 * AT_ONCE * costs.unit_s


@pytest.mark.parametrize("asked_count", [0, 8])
def test_rows_that_ask_a_draft_service_gain_nothing_by_a_trial(asked_count: int) -> None:
    """So a trial for them is dearer, and there are fewer."""
    costs = known_costs()
    asked = Option(4, 3.9, 3.9, DraftSource.DRAFT, MODEL) if asked_count else NO_OPTION
    choice, outlooks = HeadsChoice(costs), outlooks_of(8, (0.4, 0.1))
    tried = sum(any(chosen(choice, costs, outlooks, asked)) for _ in range(300))
    assert (0 < tried < 20) if asked_count else tried > 20


def trials_without(pass_count: int) -> int:
    """Return the calls of 2,000 in which heads that pay are left out, each of so many passes."""
    costs, choice, outlooks = known_costs(), HeadsChoice(known_costs()), outlooks_of(8)
    left_out = 0
    for _ in range(2000):
        left_out += not any(chosen(choice, costs, outlooks))
        choice.passed(1.0, pass_count)
    return left_out


def test_a_call_without_heads_is_charged_with_the_further_rounds_that_it_lacks() -> None:
    assert 0 < trials_without(pass_count=2) <= 0.6 * trials_without(pass_count=1)
