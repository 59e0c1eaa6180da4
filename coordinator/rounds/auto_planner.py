"""The drafts that pay best, by measured costs and acceptance.

Knows nothing of services. The objective is the goodput of SmartSpec (arXiv 2406.14066): expected tokens over seconds of
the group at hand. A budget is shared among rows, as in DSpark (arXiv 2607.05147): each draft goes where its chance of
being accepted is worth more than the seconds that it adds, at the tokens that the group makes in a second.

One number is chosen for the whole group: the most tokens that draft services are asked for, which costs as many steps
of their model; none is one of the choices. Every eighth round it is decided anew which count the next eight have. At
first a few counts are taken in turn, to measure each; later the best by measured prices. Another count is tried
again, for eight rounds, when the loss of its last trial is a small share of the time since: this bounds the cost of all
trials, and counts that are nearly as good are tried most. Groups of about one size share their prices.

So it is with the number of lanes: full groups have prices, and a search, for each number, and the number is used that
promises most tokens in a second to the group at hand (`lane_choice`).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from coordinator.replicas.way import Way
from coordinator.requests.generation import Generation
from coordinator.rounds.costs import LONGEST, RoundCosts, RoundWork
from coordinator.rounds.heads_choice import HeadsChoice
from coordinator.rounds.lane_choice import LaneChoice
from coordinator.rounds.outlook import NO_OPTION, Option, Outlook
from coordinator.rounds.outlooks import Outlooks
from coordinator.rounds.promises import Promise, Promises, prices_of, with_trial, work_of
from coordinator.rounds.round_report import RoundReport
from coordinator.rounds.trial_share import trial_share
from coordinator.rounds.wishes import Wish
from coordinator.smoothing import smoothed

MAX_AUTO = 12
"""Most tokens that a draft service is asked for."""
HYSTERESIS = 0.01
"""Share of goodput that a change must promise to gain."""
WINDOW = 8
"""Least rounds of each lane with one count: groups change slowly, and no model works during a decision."""
BEST_MEMORY = 0.97
"""Weight of earlier rounds in the tokens and seconds of the best count, which trials are compared with."""
TRUSTED_ROUNDS = 8.0
"""Weight of a promise itself, in rounds, where it is put right by what came of others."""
GIVEN_MEMORY = 0.99
"""Weight of earlier rounds in what came of promises."""
FIRST_COUNTS = (4, 0, 8, 2, 1)
"""Counts measured first."""
FIRST_WINDOWS = 12
"""Windows in which the first counts must be measured: a draft service that is away is not waited for."""
NONE_SHARE, NEAR_SHARE, FAR_SHARE = 0.005, 0.003, 0.0005
"""Share of all time that trials of a count may lose at first. NONE: asking nobody, which may be a tenth better for
another text. NEAR: neighbours of the best, or the best count above none while nobody is asked. FAR: all others."""
AUTO_LEEWAY = 4.0
"""`auto` asks a slow draft for fewer tokens by itself. It times whole rounds; their parts say too little to overrule
it. A trial may also take longer than its drafts are worth. So only an extremely slow draft service is at fault."""


class AutoPlanner:
    leeway: ClassVar[float] = AUTO_LEEWAY

    def __init__(
        self, lanes: int, heads_count: int = 0, way: Way | None = None, *, chooses_lanes: bool = False
    ) -> None:
        """`heads_count` is the most tokens that the target's heads draft, `way` to the services is measured by others.

        With `chooses_lanes` at most `lanes` groups are in flight, else always as many.
        """
        self._lanes = LaneChoice(lanes, is_free=chooses_lanes)
        self._outlooks = Outlooks(MAX_AUTO, heads_count)
        self._searches: dict[tuple[int, int], _Search] = {}
        """By the class of the group's size, and lanes."""
        self._largest = 0
        """The class of the largest groups."""
        self._recent: deque[tuple[int, RoundWork]] = deque(maxlen=lanes)
        """The latest rounds of all lanes, whatever their groups' sizes: the round of another lane takes its time from
        this one's. Each with the class of its size."""
        self._way = way or Way()

    @property
    def lane_count(self) -> int:
        return self._lanes.count

    def plan(self, group: Sequence[Generation], max_lengths: Mapping[str, int]) -> dict[Generation, Wish]:
        self._largest = max(self._largest, _size_class(len(group)))
        # What draft services would give matters where one may be asked, or where that is decided.
        outlooks = self._outlooks.of(group, max_lengths if self._search(len(group)).may_ask else {})
        if not self._search(len(group)).rounds_left:
            self._decide(outlooks)
        return self._search(len(group)).plan(outlooks)

    def _decide(self, outlooks: Sequence[Outlook]) -> None:
        """Choose the lanes if it is time to, and the count of the next rounds."""
        size = len(outlooks)
        foreseen: dict[int, list[Promise]] = {}
        if _size_class(size) == self._largest and self._lanes.is_due():
            searches = {lanes: one for (own, lanes), one in self._searches.items() if own == self._largest}
            known = {lanes: one for lanes, one in searches.items() if one.is_known}
            foreseen = {lanes: one.promises(outlooks) for lanes, one in known.items()}
            self._lanes.decide({lanes: one.seconds_of_token(foreseen[lanes]) for lanes, one in known.items()})
            if self._lanes.is_trial and self._lanes.count in known:
                known[self._lanes.count].forget()
        search = self._search(size)
        if not search.rounds_left:
            search.decide(foreseen.get(self._lanes.count) or search.promises(outlooks))

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport, cycle_s: float) -> None:
        self._outlooks.observe(wishes, report)
        is_usual = self._lanes.passed(cycle_s)
        if report.rows and is_usual:
            own = _size_class(len(wishes))
            self._recent.append((own, RoundWork.of(report)))
            works = [work for size, work in self._recent if size == own]
            # Where the way is long it hides what other lanes do: no round takes longer for it.
            beside = [] if self._way.is_far else [work for size, work in self._recent if size != own]
            search = self._search(len(wishes))
            count = next(iter(wishes.values())).planned_count
            search.observe(works, beside, cycle_s, count=count, is_decoding=report.is_decoding)

    def _search(self, group_size: int) -> "_Search":
        """Return the search shared by groups up to the same power of two, and for full groups by the lanes in use.

        Smaller groups are in flight alone, whatever the lanes.
        """
        size, most = _size_class(group_size), self._lanes.most
        lanes = self._lanes.count if size == self._largest else most
        if (size, lanes) not in self._searches:
            other = next((one for (own, _), one in self._searches.items() if own == size), None)
            self._searches[size, lanes] = other.for_other_lanes() if other else _Search(most)
        return self._searches[size, lanes]


def _size_class(group_size: int) -> int:
    return (group_size - 1).bit_length()


@dataclass
class _Trial:
    """Rounds with a count that is not the best."""

    ended: float = 0.0
    lost: float = 0.0


class _Search:
    """The search for the best count of groups of about one size. Times are multiples of the costs' unit."""

    def __init__(self, lanes: int, costs: RoundCosts | None = None, first_counts: Sequence[int] = FIRST_COUNTS) -> None:
        """`lanes` is the most that run: a row waits for as many rounds until it is in one again."""
        self._lanes = lanes
        self._costs = costs or RoundCosts()
        self._first_counts = first_counts
        self._count = first_counts[0]
        self._best = first_counts[0]
        self._bend_count = 0.0
        self._goodput = 0.0
        """Tokens of a mean round of all lanes in a unit of time, with the best count; 0: not known yet. So it does not
        depend on what else is in flight, which changes from round to round."""
        self._beside_mean = self._beside_tokens = 0.0
        """Those of groups of other sizes in a cycle, for each pass of this size's: as it was the last times that there
        were any, and now."""
        self.rounds_left = 0
        """Rounds until it is decided anew."""
        self._window_count = 0
        self.is_known = False
        """Whether the first counts were measured."""
        self._spent = 0.0
        self._best_tokens: float | None = None
        self._best_time: float | None = None
        self._promised = self._given = 0.0
        """Tokens that rounds with the best count were to give in their time, and that they gave; sums that forget."""
        self._trials: dict[int, _Trial] = {}
        self._heads = HeadsChoice(self._costs)
        self._further_count = 0.0
        """Further rounds of a call, in the mean of late."""

    @property
    def may_ask(self) -> bool:
        """Whether the next round may ask draft services."""
        return self._count > 0 or not self.rounds_left

    def for_other_lanes(self) -> "_Search":
        """Return a search that begins with what this one has learned, and measures it anew."""
        other = _Search(self._lanes, self._costs.as_guess(), tuple(dict.fromkeys((self._best, 0))))
        other._goodput = self._goodput
        return other

    def forget(self) -> None:
        """Soon follow what is measured now: what is known may be of long ago."""
        self._costs.forget()
        self._promised = self._given = 0.0

    def seconds_of_token(self, promises: Sequence[Promise]) -> float:
        """Return the seconds of a token that the best count promises.

        Promises are put right by what came of the latest ones: a price that is too low promises too much.
        """
        best = max(promises, key=lambda one: one.goodput)
        share = self._costs.share
        trust = TRUSTED_ROUNDS * best.tokens * share
        return self._costs.unit_s / (best.goodput * share) * (trust + self._promised) / (trust + self._given)

    def plan(self, outlooks: Sequence[Outlook]) -> dict[Generation, Wish]:
        self.rounds_left -= 1
        worth = self._worth(outlooks)
        prices = prices_of(self._costs, worth, self._bend_count, self._further_count)
        copies = [one.copies(prices) for one in outlooks]
        at_hand = [one.at_hand(copied, prices) for one, copied in zip(outlooks, copies, strict=True)]
        asks = [one.asked(prices, self._count) if self._count else NO_OPTION for one in outlooks]
        asked = self._asked(outlooks, asks, at_hand) if self._count else asks
        heads_counts = self._heads.counts(outlooks, copies, asks, asked, prices, is_first=not self._goodput)
        return {
            one.generation: one.wish(ask, own, heads_count, self._count)
            for one, ask, own, heads_count in zip(outlooks, asked, at_hand, heads_counts, strict=True)
        }

    def _worth(self, outlooks: Sequence[Outlook]) -> float:
        """Return the tokens that a unit of time is worth, for each group of this size that is in flight.

        At first a group makes one a row in a plain round.
        """
        return self._goodput / self._costs.share or len(outlooks) + self._beside_tokens

    def _asked(
        self, outlooks: Sequence[Outlook], asks: Sequence[Option], at_hand: Sequence[Option]
    ) -> Sequence[Option]:
        """Return what to ask draft services for in this round, for each row; `asks` is the best that they have."""
        chosen = [
            ask if outlook.prefers(ask, own) else NO_OPTION
            for outlook, ask, own in zip(outlooks, asks, at_hand, strict=True)
        ]
        if not any(ask.count for ask in chosen):
            return chosen if self._count == self._best else with_trial(chosen, asks, outlooks, at_hand)
        if self._count == self._best and self._is_better_without_call(outlooks, chosen, at_hand):
            return [NO_OPTION] * len(outlooks)
        return chosen

    def _is_better_without_call(
        self, outlooks: Sequence[Outlook], asked: Sequence[Option], at_hand: Sequence[Option]
    ) -> bool:
        """Return whether what is at hand promises more in this round than a call of the draft services.

        The call takes time that no row is charged with.
        """
        asking = [(one, ask, own) for one, ask, own in zip(outlooks, asked, at_hand, strict=True) if ask.count]
        is_ordered = any(one.is_ordered for one, _, _ in asking)
        if not self._goodput or is_ordered or not any(own.count for _, _, own in asking):
            return False
        gained = sum(ask.tokens - own.tokens for _, ask, own in asking)
        work = work_of([ask if ask.count else own for ask, own in zip(asked, at_hand, strict=True)])
        without = work_of(at_hand)
        return gained < self._worth(outlooks) * (self._costs.predict(work) - self._costs.predict(without))

    def observe(
        self, works: Sequence[RoundWork], beside: Sequence[RoundWork], cycle_s: float, *, count: int, is_decoding: bool
    ) -> None:
        """Learn from the last of these rounds; the others ran in its cycle too, those `beside` with other sizes.

        `count` is the one with which it was planned: another may have been chosen since.
        """
        tokens = works[-1].committed_count
        others = sum(one.committed_count for one in beside) / len(works)
        self._costs.add(works, cycle_s, beside)
        if not self.rounds_left:
            self._costs.fit()  # the next plan decides, and while it does no model works
        if beside:
            self._beside_mean = smoothed(self._beside_mean, others / self._costs.pass_count)
        self._beside_tokens = self._beside_mean if beside else 0.0
        time = cycle_s / self._costs.unit_s
        self._spent += time
        self._heads.passed(time, works[-1].heads_call_count)
        self._further_count = smoothed(self._further_count, len(works[-1].further))
        if not self._best and count in self._trials:
            # Nobody else needs what draft services take in for a trial.
            self._trials[count].lost += self._costs.catching_up(works[-1])
        if not is_decoding:
            return  # prompts come with any count
        if count == self._best:
            self._best_tokens = smoothed(self._best_tokens, tokens, BEST_MEMORY)
            self._best_time = smoothed(self._best_time, time, BEST_MEMORY)
            if self.is_known:
                usual = min(time, LONGEST * self._best_time)
                self._promised = GIVEN_MEMORY * self._promised + self._goodput * usual
                self._given = GIVEN_MEMORY * self._given + (tokens + others) * self._costs.share
        elif count in self._trials and self._best_tokens and self._best_time:
            trial = self._trials[count]
            trial.lost += time - tokens / self._best_tokens * self._best_time
            trial.ended = self._spent

    def decide(self, promises: Sequence[Promise]) -> None:
        """Choose the count of the next rounds."""
        self.rounds_left = WINDOW * self._lanes
        self._window_count += 1
        if self._window_count <= FIRST_WINDOWS and (missing := self._missing(promises)):
            self._count = missing[0]
            self._bend_count = promises[self._count].bend_count
            return
        self.is_known = True
        self._best = _shortest_of_best([one.goodput for one in promises], self._best)
        self._goodput = promises[self._best].goodput * self._costs.share
        self._count = self._due(promises)
        self._bend_count = promises[self._count].bend_count

    def promises(self, outlooks: Sequence[Outlook]) -> list[Promise]:
        """Return what each count promises now, from 0 on."""
        self._costs.fit()
        return Promises(outlooks, self._costs, self._worth(outlooks), self._best, self._beside_tokens).all()

    def _missing(self, promises: Sequence[Promise]) -> list[int]:
        """Return the first counts that were not measured yet and that may be the best."""
        counts = [count for count in self._first_counts if count < len(promises)]
        known = [count for count in counts if self._costs.round_count(count) >= WINDOW / 2]
        best = max((promises[count].goodput for count in known), default=0.0)

        def may_be_best(count: int) -> bool:
            # More drafts take no less time than fewer.
            least = max((promises[one].time for one in known if one < count), default=0.0)
            return promises[count].tokens > best * least

        return [count for count in counts if count not in known and may_be_best(count)]

    def _due(self, promises: Sequence[Promise]) -> int:
        """Return the count to try now; the best one if no trial is due."""
        best = self._best
        goodputs = [one.goodput for one in promises]
        # If asking does not pay, the best count that asks.
        other = goodputs.index(max(goodputs[1:]), 1) if not best and len(goodputs) > 1 else best
        for count in range(len(promises)):
            if count == best:
                continue
            trial = self._trials.setdefault(count, _Trial(ended=self._spent))
            lost = promises[count].time - promises[count].tokens / goodputs[best]
            expected = WINDOW * self._lanes * max(lost, HYSTERESIS * promises[best].time)
            if not best:
                expected += promises[count].catching_up
            is_near = count == other or abs(count - best) == 1
            share = NONE_SHARE if not count else NEAR_SHARE if is_near else FAR_SHARE
            if trial_share(share, self._spent) * (self._spent - trial.ended) > max(expected, trial.lost):
                trial.ended, trial.lost = self._spent, 0.0
                return count
        return best


def _shortest_of_best(goodputs: Sequence[float], current: int) -> int:
    """Return the smallest count that is as good as the best: tokens not drafted cannot be wrong.

    Keep the current count if the found one is larger and hardly better.
    """
    best = next(count for count, one in enumerate(goodputs) if one >= max(goodputs) * (1 - HYSTERESIS))
    if current < len(goodputs) and best > current and goodputs[best] <= goodputs[current] * (1 + HYSTERESIS):
        return current
    return best
