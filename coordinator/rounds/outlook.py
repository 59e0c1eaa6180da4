"""What a generation can have drafted, and what of it pays at a price.

Owns the choice of one row's source and count; knows nothing of other rows. A draft is worth its chance of being
accepted. It costs the seconds that it adds to the round, and a second is worth the tokens that the group makes in it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from operator import neg

from coordinator.requests.generation import Generation
from coordinator.requests.guess import Guess
from coordinator.rounds.wishes import Wish
from paceline.types import DraftSource


@dataclass(slots=True)
class Drawn:
    """Drafts that a draft service of one model would give."""

    chances: Sequence[float]
    """Chance that the first 1, 2, ... of them are all right."""
    tokens: Sequence[float]
    """Accepted tokens to expect of the first 0, 1, 2, ... of them."""
    caught_up_count: int
    """Tokens that the service has to take in first."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What drafts cost a row, in tokens that the group makes in the time."""

    drafted: float = 0.0
    """For each draft token that the target verifies."""
    heads: float = 0.0
    """For each token that the target's heads draft."""
    heads_call: float = 0.0
    """For a pass after which they draft, for all rows together."""
    token: Mapping[str, float] = field(default_factory=dict)
    """For each token that a draft service drafts, by model."""
    caught_up: Mapping[str, float] = field(default_factory=dict)
    """For each token that a draft service had missed, by model."""
    time: float = 1.0
    """For a unit of time."""
    further_count: float = 0.0
    """Further rounds that a call has in the mean; a row that brings more drafts than the heads make is not in them."""

    def drawn(self, model: str) -> float:
        """Return the price of each token that a draft service drafts and the target verifies."""
        return self.drafted + self.token.get(model, 0.0)


@dataclass(slots=True)
class Option:
    """Drafts of one source."""

    count: int = 0
    tokens: float = 0.0
    """Accepted tokens to expect."""
    worth: float = 0.0
    """Those without what they cost."""
    source: DraftSource | None = None
    model: str = ""
    """Model of the draft service that is asked; empty for other sources."""
    caught_up_count: int = 0


NO_OPTION = Option()


@dataclass(slots=True)
class HeadsUse:
    """Drafts of the target's heads for the next round."""

    count: int = 0
    tokens: float = 0.0
    """Accepted tokens to expect."""
    worth: float = 0.0
    """Those without what they cost, beyond what else is at hand is worth."""
    chance: float = 1.0
    """Chance that they are used: 1 where no other source is better now."""

    @property
    def are_best(self) -> bool:
        return self.count > 0 and self.chance == 1.0


HEADS_UNUSED = HeadsUse()


@dataclass(slots=True)
class Outlook:
    """What one generation can have."""

    generation: Generation
    guesses: Mapping[DraftSource, Guess]
    guess_chances: Mapping[DraftSource, tuple[float, ...]]
    drawn: Mapping[str, Drawn]
    """By model of a draft service."""
    remaining_count: float
    """Tokens that its output is expected to have still."""
    heads_chances: tuple[float, ...] = ()
    """Chances of what the target's heads would draft, whether they were asked in the last round or not."""

    def copies(self, prices: Prices) -> Option:
        """Return the best of what needs neither a draft service nor the target's heads."""
        best = NO_OPTION
        for source, chances in self.guess_chances.items():
            if source is not DraftSource.HEADS:
                best = self.better(self._copy(source, chances, prices), best)
        return best

    def _copy(self, source: DraftSource, chances: tuple[float, ...], prices: Prices) -> Option:
        """Return the best of a copy: all of it that is worth its price, or as much as leaves the row further rounds."""
        whole, most = _worthwhile_option(source, chances, prices.drafted), len(self.heads_chances)
        if not (prices.further_count and 0 < most < whole.count):
            return whole
        # A further round brings a token at least.
        heads = _of_heads(self.heads_chances, prices.drafted + prices.heads)
        lost = prices.further_count * (1.0 - prices.drafted + heads.worth)
        part = _option(source, chances[:most], prices.drafted)
        return part if part.worth >= whole.worth - lost else replace(whole, worth=whole.worth - lost)

    def at_hand(self, copies: Option, prices: Prices) -> Option:
        """Return the better of the copies and of what the target's heads drafted in the last round.

        That is made: it costs its verification alone.
        """
        chances = self.guess_chances.get(DraftSource.HEADS)
        if not chances:
            return copies
        best = self.better(_of_heads(chances, prices.drafted), copies)
        # If nothing is worth it they are verified nevertheless, to show what verifying costs and what they are worth.
        return best if best.count else _option(DraftSource.HEADS, chances, prices.drafted)

    def expected(self, copies: Option, prices: Prices) -> Option:
        """Return the better of the copies and of what the target's heads draft for the next round if asked."""
        if not self.heads_chances:
            return copies
        return self.better(_of_heads(self.heads_chances, prices.drafted + prices.heads), copies)

    def heads_use(self, asked: Option, ask: Option, copies: Option, prices: Prices) -> HeadsUse:
        """Return what the target's heads should draft for the next round: nothing where other sources are better.

        Copies are at hand in the next round only if all of them are right in this one. If not, draft services may be
        asked for `ask` then, as this round asks them for `asked`. What they draft for further rounds is used at once.
        """
        if not self.heads_chances:
            return HEADS_UNUSED
        expected = self.expected(copies, prices)
        if expected.source is None or (asked.count and self.prefers(asked, expected)):
            return HEADS_UNUSED
        if expected.source is DraftSource.HEADS:
            return HeadsUse(expected.count, expected.tokens, expected.worth - copies.worth)
        chance = 1.0 - self.guess_chances[expected.source][expected.count - 1]
        is_used_at_once = prices.further_count > 0 and expected.count <= len(self.heads_chances)
        used = 1.0 if is_used_at_once else chance
        price = prices.drafted + (prices.heads / used if used else inf)
        count = _worthwhile(self.heads_chances, price)
        heads = _option(DraftSource.HEADS, self.heads_chances[:count], prices.drafted)
        if self.prefers(ask, heads):
            return HEADS_UNUSED
        # Made in any case, and verified in the further round, or else by that chance.
        return HeadsUse(count, used * heads.tokens, used * heads.worth - prices.heads * count, chance)

    def most_heads(self, copies: Option, prices: Prices, *, are_useful: bool = True) -> HeadsUse:
        """Return all that the target's heads can draft; if not `are_useful`, a draft service's drafts are used."""
        count = len(self.heads_chances)
        if not are_useful:
            return HeadsUse(count, 0.0, -prices.heads * count)
        heads = _option(DraftSource.HEADS, self.heads_chances, prices.drafted + prices.heads)
        return HeadsUse(count, heads.tokens, heads.worth - copies.worth)

    def asked(self, prices: Prices, most: int) -> Option:
        """Return the best of what draft services would give, of at most `most` tokens."""
        offers = []
        for model, drawn in self.drawn.items():
            if count := _worthwhile(drawn.chances, prices.drawn(model), most):
                offers += self._offers(model, prices, range(count, count + 1))
        return _best(offers)

    def asks(self, prices: Prices, most: int) -> list[Option]:
        """Return the same for at most 0, 1, ... tokens, up to where more change nothing."""
        offers = []
        for model, drawn in self.drawn.items():
            if last := _worthwhile(drawn.chances, prices.drawn(model), most):
                offers.append(self._offers(model, prices, range(1, last + 1)))
        if len(offers) == 1:
            return [NO_OPTION, *offers[0]]
        longest = max(map(len, offers), default=0)
        return [NO_OPTION, *(_best([one[min(place, len(one) - 1)] for one in offers]) for place in range(longest))]

    def _offers(self, model: str, prices: Prices, counts: Iterable[int]) -> list[Option]:
        """Return what so many tokens of a model's draft service are worth, for each of the counts."""
        drawn, price = self.drawn[model], prices.drawn(model)
        missed_count, tokens = drawn.caught_up_count, drawn.tokens
        source, offers = DraftSource.DRAFT, []
        for count in counts:
            worth = tokens[count] - price * count
            if missed_count:
                # What is missed is taken in once, for all rounds to come.
                worth -= prices.caught_up.get(model, 0.0) * missed_count / self.rounds_left(tokens[count])
            offers.append(Option(count, tokens[count], worth, source, model, missed_count))
        return offers

    def rounds_left(self, accepted: float) -> float:
        """Return the rounds until its end if so many drafts are accepted in each."""
        return max(1.0, self.remaining_count / (1.0 + accepted))

    def prefers(self, one: Option, other: Option) -> bool:
        """Return whether to have the one and not the other: by the request's order of sources or, without it, worth."""
        if one.source and other.source and self.is_ordered:
            return self.generation.drafting.puts_first(one.source, other.source)
        return one.worth > other.worth

    def better(self, one: Option, other: Option) -> Option:
        """Return what to have of the two."""
        return one if self.prefers(one, other) else other

    def may_try(self, own: Option) -> bool:
        """Return whether a trial may ask a draft service in place of `own`: never against the request's order."""
        return not (own.source and self.is_ordered)

    @property
    def is_ordered(self) -> bool:
        """Whether the request's order of sources counts, and not what they are worth."""
        return self.generation.drafting.in_order

    def wish(self, asked: Option, at_hand: Option, propose_count: int, planned_count: int) -> Wish:
        """Return the wish for both: tokens at hand are for when no draft service answers."""
        guess = self.guesses.get(at_hand.source) if at_hand.source else None
        token_ids = guess.token_ids[: at_hand.count] if guess else ()
        return Wish(asked.count, asked.model, at_hand.source, token_ids, self.guesses, propose_count, planned_count)


def _worthwhile(chances: Sequence[float], price: float, most: int | None = None) -> int:
    """Return how many drafts are worth their price: each is right only if all before it are, so chances never rise."""
    return bisect_left(chances, -price, hi=len(chances) if most is None else min(len(chances), most), key=neg)


def _option(source: DraftSource, chances: Sequence[float], price: float) -> Option:
    """Return all these drafts of a source."""
    count, tokens = len(chances), sum(chances)
    return Option(count, tokens, tokens - price * count, source)


def _worthwhile_option(source: DraftSource, chances: Sequence[float], price: float) -> Option:
    """Return those that are worth their price."""
    count = _worthwhile(chances, price)
    return _option(source, chances[:count], price) if count else NO_OPTION


@lru_cache(maxsize=64)
def _of_heads(chances: tuple[float, ...], price: float) -> Option:
    """Return those drafts of the target's heads that are worth their price: most rows of a group have the same."""
    return _worthwhile_option(DraftSource.HEADS, chances, price)


def _best(offers: Sequence[Option]) -> Option:
    """Return the offer that is worth most, the first of equals."""
    return offers[0] if len(offers) == 1 else max(offers, default=NO_OPTION, key=lambda one: one.worth)
