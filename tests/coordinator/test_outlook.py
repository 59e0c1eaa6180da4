"""What draft services offer a row, at any price and count."""

from dataclasses import replace
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.requests.guess import Guess
from coordinator.rounds.outlook import HEADS_UNUSED, Drawn, HeadsUse, Option, Outlook, Prices
from paceline.types import DraftingOptions, DraftSource
from tests.fakes.draft_worlds import group_of

MOST = 6
SHARES = st.lists(st.floats(0.1, 0.99), min_size=MOST, max_size=MOST)
PRICES = st.floats(0.0, 1.0)
DEAR_HEADS = Prices(drafted=0.2, heads=0.1)


def drawn(rates: list[float], missed_count: int) -> Drawn:
    chances = [*accumulate(rates, mul)]
    return Drawn(chances, [*accumulate(chances, initial=0.0)], missed_count)


@given(
    rates=st.lists(SHARES, max_size=3),
    missed_count=st.sampled_from([0, 40]),
    verified=PRICES,
    price=PRICES,
    missed=st.floats(0.0, 0.1),
)
def test_a_row_asks_at_each_count_for_what_it_asks_for_with_that_count_alone(
    rates: list[list[float]], missed_count: int, verified: float, price: float, missed: float
) -> None:
    (generation,) = group_of(1)
    offers = {f"draft {number}": drawn(own, number * missed_count) for number, own in enumerate(rates)}
    prices = Prices(verified, token={"draft 0": price}, caught_up=dict.fromkeys(offers, missed))
    outlook = Outlook(generation, {}, {}, offers, 20.0)
    asks = outlook.asks(prices, MOST)
    assert asks[0] == Option()
    assert [asks[min(count, len(asks) - 1)] for count in range(MOST + 1)] == [
        outlook.asked(prices, count) for count in range(MOST + 1)
    ]


def with_guess(*chances: float) -> Outlook:
    """A row that copies, with these chances of each token, of a target whose heads are right by 0.7, 0.5 and 0.3."""
    (generation,) = group_of(1)
    guess = Guess(tuple(range(len(chances))), 8, (1.0,) * len(chances))
    return Outlook(generation, {DraftSource.SUFFIX: guess}, {DraftSource.SUFFIX: chances}, {}, 20.0, (0.7, 0.5, 0.3))


def use_of_heads(outlook: Outlook, asked: Option, ask: Option) -> HeadsUse:
    return outlook.heads_use(asked, ask, outlook.copies(DEAR_HEADS), DEAR_HEADS)


@pytest.mark.parametrize(
    ("chances", "use"),
    [
        pytest.param((0.9, 0.8, 0.6), (2, 0.4), id="a copy that ends or not"),
        pytest.param((0.99, 0.98, 0.97), (0, 0.03), id="a copy that goes on"),
        pytest.param((0.1,), (2, 1.0), id="a copy that is worse"),
    ],
)
def test_heads_draft_beside_a_copy_as_far_as_it_is_likely_to_end(
    chances: tuple[float, ...], use: tuple[int, float]
) -> None:
    found = use_of_heads(with_guess(*chances), Option(), Option())
    assert (found.count, found.chance) == pytest.approx(use)


@pytest.mark.parametrize(
    ("rate", "further_count", "count"),
    [
        pytest.param(0.85, 0.0, 9, id="whole where no round follows"),
        pytest.param(0.85, 1.0, 3, id="cut where it is worth less than the further round"),
        pytest.param(0.97, 1.0, 20, id="whole where it is worth more"),
    ],
)
def test_a_copy_is_longer_than_what_heads_draft_if_it_is_worth_the_further_round_that_its_row_loses(
    rate: float, further_count: float, count: int
) -> None:
    copying = with_guess(*accumulate([rate] * 20, mul))
    assert copying.copies(replace(DEAR_HEADS, further_count=further_count)).count == count


def test_heads_draft_beside_a_copy_for_the_further_round_of_its_row() -> None:
    copying, prices = with_guess(0.99, 0.98, 0.97), replace(DEAR_HEADS, further_count=1.0)
    use = copying.heads_use(Option(), Option(), copying.copies(prices), prices)
    assert use.count == 2
    assert use.tokens == pytest.approx(0.7 + 0.5)  # whatever becomes of the copy


def test_heads_draft_nothing_for_a_row_that_asks_a_better_draft_service() -> None:
    asked = Option(3, 2.5, 2.4, DraftSource.DRAFT, "draft")
    assert use_of_heads(with_guess(0.9, 0.8, 0.6), asked, asked) == HEADS_UNUSED


def test_heads_draft_nothing_beside_a_copy_where_a_better_draft_service_is_asked_once_it_ends() -> None:
    copying = with_guess(0.9, 0.8, 0.6)
    copying.drawn = {"draft": drawn([0.9] * MOST, 0)}
    assert use_of_heads(copying, Option(), copying.asked(DEAR_HEADS, 4)) == HEADS_UNUSED
    assert use_of_heads(copying, Option(), copying.asked(DEAR_HEADS, 0)).count == 2


@pytest.mark.parametrize("sources", [(DraftSource.SUFFIX, DraftSource.HEADS), (DraftSource.HEADS, DraftSource.SUFFIX)])
@pytest.mark.parametrize("chance", [0.99, 0.3])
def test_in_an_order_of_sources_the_first_that_has_tokens_counts_and_not_the_better(
    sources: tuple[DraftSource, ...], chance: float
) -> None:
    copying = with_guess(chance)
    copying.generation.drafting = DraftingOptions(sources, in_order=True)
    assert copying.expected(copying.copies(DEAR_HEADS), DEAR_HEADS).source is sources[0]
    copying.generation.drafting = DraftingOptions(sources)
    better = DraftSource.SUFFIX if chance > 0.7 else DraftSource.HEADS
    assert copying.expected(copying.copies(DEAR_HEADS), DEAR_HEADS).source is better
