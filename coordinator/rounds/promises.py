"""What a round with each count of the draft services promises a group, by the prices of now.

Owns the best use of a count; knows nothing of earlier rounds, and decides no count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.rounds.costs import BENDS, CAUGHT_UP, HEADS, HEADS_CALL, OVER, TOKEN, RoundCosts, RoundWork
from coordinator.rounds.outlook import Option, Outlook, Prices
from coordinator.rounds.round_report import DraftCall
from paceline.types import DraftSource

BETWEEN_BENDS = (0.25, 0.5, 0.75)
"""Parts of a bend's price that are tried where the whole leaves drafts out that still cost nothing of it."""


@dataclass(slots=True)
class Promise:
    """What a round with one count promises."""

    tokens: float
    time: float
    token_count: int
    """Tokens that the target verifies."""
    bend_count: float
    """Bends in the time of a verify by which its drafts were priced, the last perhaps in part."""
    catching_up: float
    """Time in which draft services take in what they have missed, in all. A round's `time` has its share alone."""

    @property
    def goodput(self) -> float:
        return self.tokens / self.time


@dataclass(slots=True)
class _View:
    """The rows of a group at the prices beyond so many bends. More than the last count of `asked` changes nothing."""

    bend_count: float
    heads_call: float
    """Price of a pass of the target's heads, in tokens."""
    copies: Sequence[Option]
    """The best of what each row has at hand if they do not draft."""
    asked: Sequence[Sequence[Option]]
    """By count, what each row would ask for."""
    taken: Sequence[Sequence[Option]]
    """By count, what each row would have: that, or what is at hand."""
    promises: dict[tuple[int, bool], Promise] = field(default_factory=dict)
    """Those worked out so far, by count and whether it is a trial."""


class Promises:
    """Of one group, by count. Times are multiples of the costs' unit."""

    def __init__(
        self, outlooks: Sequence[Outlook], costs: RoundCosts, goodput: float, best: int, beside_tokens: float
    ) -> None:
        """`goodput` is what a unit of time is worth, in tokens. Counts other than `best` are trials.

        `beside_tokens` come in the same time, whatever the count, from groups of other sizes.
        """
        self._outlooks = outlooks
        self._costs = costs
        self._goodput = goodput
        self._best = best
        self._beside_tokens = beside_tokens
        self._most = max((len(drawn.chances) for one in outlooks for drawn in one.drawn.values()), default=0)
        self._cached_count = sum([len(one.generation.token_ids) for one in outlooks])
        self._views: dict[float, _View] = {}

    def all(self) -> list[Promise]:
        """Return what each count promises, from 0 on."""
        # No row wants more than that, even at the lowest prices, so more promise what one more does.
        last = min(self._most, len(self._view(0).asked))
        promises = [self._promise(count) for count in range(last + 1)]
        return promises + [promises[-1]] * (self._most - last)

    def _promise(self, count: int) -> Promise:
        """Return the best that the count promises: tokens beyond a bend must be worth what they cost there."""
        best = self._promise_at(self._view(0), count)
        for bend_count, bend in enumerate(BENDS, 1):
            if best.token_count <= bend:
                break
            if not self._costs.price(OVER[bend_count - 1]):
                continue  # beyond it no draft costs more
            found = [self._promise_at(self._view(bend_count), count)]
            if found[0].token_count < bend:  # a lower price may reach just as far as the bend
                found += [self._promise_at(self._view(bend_count - part), count) for part in BETWEEN_BENDS]
            best = max(*found, best, key=lambda one: one.goodput)
        return best

    def _view(self, bend_count: float) -> _View:
        if bend_count not in self._views:
            self._views[bend_count] = self._new_view(bend_count)
        return self._views[bend_count]

    def _new_view(self, bend_count: float) -> _View:
        # Of one pass: what follows in the same call is left to the round's own plan, for it depends on its rows.
        prices = prices_of(self._costs, self._goodput, bend_count, further_count=0.0)
        asked = [one.asks(prices, self._most) for one in self._outlooks]
        copies = [one.copies(prices) for one in self._outlooks]
        taken = []
        for outlook, options, copied in zip(self._outlooks, asked, copies, strict=True):
            own = outlook.expected(copied, prices)
            taken.append([own, *(outlook.better(ask, own) for ask in options[1:])])
        return _View(bend_count, prices.heads_call, copies, _by_count(asked), _by_count(taken))

    def _options(self, view: _View, count: int) -> Sequence[Option]:
        """Return what each row would have. The target's heads draft if that of all rows is worth their call."""
        taken = view.taken[count]
        of_heads = [place for place, one in enumerate(taken) if one.source is DraftSource.HEADS]
        if not of_heads or any(self._outlooks[place].is_ordered for place in of_heads):
            return taken
        without = [*taken]
        for place in of_heads:
            without[place] = self._outlooks[place].better(view.asked[count][place], view.copies[place])
        gain = sum([taken[place].worth - without[place].worth for place in of_heads])
        return taken if gain > view.heads_call else without

    def _promise_at(self, view: _View, count: int) -> Promise:
        kind = count_or_last, is_trial = min(count, len(view.asked) - 1), count != self._best
        if kind not in view.promises:
            view.promises[kind] = self._new_promise(view, count_or_last, is_trial=is_trial)
        return view.promises[kind]

    def _new_promise(self, view: _View, count: int, *, is_trial: bool) -> Promise:
        options = self._options(view, count)
        if is_trial and not any(one.model for one in options):
            options = with_trial(options, view.asked[count], self._outlooks, options)
        work = self._work_of(options)
        tokens = self._beside_tokens + len(options) + sum([one.tokens for one in options])
        time = missed_time = 0.0
        for outlook, one in zip(self._outlooks, options, strict=True):
            if one.caught_up_count:
                missed = self._costs.price(CAUGHT_UP, one.model) * one.caught_up_count
                time += missed / outlook.rounds_left(one.tokens)
                missed_time += missed
        time += self._costs.predict(work)
        return Promise(tokens, time, work.row_count + work.drafted_count, view.bend_count, missed_time)

    def _work_of(self, options: Sequence[Option]) -> RoundWork:
        work = work_of(options, expecting_heads=True)
        work.cached_count = self._cached_count
        return work


def prices_of(costs: RoundCosts, goodput: float, bend_count: float, further_count: float) -> Prices:
    """Return what drafts cost where a unit of time is worth `goodput` tokens, in calls with so many further rounds."""
    models = costs.models
    return Prices(
        goodput * costs.drafted_price(bend_count),
        goodput * costs.price(HEADS),
        goodput * costs.price(HEADS_CALL),
        {model: goodput * costs.price(TOKEN, model) for model in models},
        {model: goodput * costs.price(CAUGHT_UP, model) for model in models},
        goodput,
        further_count,
    )


def with_trial(
    options: Sequence[Option], asked: Sequence[Option], outlooks: Sequence[Outlook], at_hand: Sequence[Option]
) -> Sequence[Option]:
    """Return options of which one asks, where any may: a trial must ask for something.

    The row that costs least to ask for tells as much as any. `at_hand` is what each has in place of it.
    """
    rows = enumerate(zip(asked, outlooks, at_hand, strict=True))
    able = [place for place, (ask, outlook, own) in rows if ask.count and outlook.may_try(own)]
    if not able:
        return options
    place = max(able, key=lambda one: asked[one].worth)
    return [*options[:place], asked[place], *options[place + 1 :]]


def work_of(options: Sequence[Option], *, expecting_heads: bool = False) -> RoundWork:
    """Return the work of a round with these options; with `expecting_heads` the target's heads draft theirs in it."""
    drafted_count = heads_count = 0
    asked: dict[str, list[int]] = {}
    for one in options:
        drafted_count += one.count
        if one.model:
            asked.setdefault(one.model, []).append(one.count)
        elif expecting_heads and one.source is DraftSource.HEADS:
            heads_count += one.count
    calls = {model: DraftCall(len(own), max(own), sum(own), 0) for model, own in asked.items()}
    return RoundWork(len(options), drafted_count, 0, calls, heads_count, int(heads_count > 0))


def _by_count(options: Sequence[Sequence[Option]]) -> list[Sequence[Option]]:
    """Return the options of all rows by count, from those of each row: its last is for all later counts."""
    longest = max(map(len, options))
    return [*zip(*([*one, *[one[-1]] * (longest - len(one))] for one in options), strict=True)]
