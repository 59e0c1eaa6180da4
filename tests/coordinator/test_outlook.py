"""What draft services offer a row, at any price and count."""

from itertools import accumulate
from operator import mul

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.outlook import Drawn, Option, Outlook, Prices
from tests.fakes.draft_worlds import group_of

MOST = 6
SHARES = st.lists(st.floats(0.1, 0.99), min_size=MOST, max_size=MOST)
PRICES = st.floats(0.0, 1.0)


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
