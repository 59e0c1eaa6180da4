"""How much the target's heads draft for the next round of each row, which they do where all of it is worth their pass.

Where they do not seem to pay they are asked now and then, and where they do they are left out now and then, to notice a
change: asking shows what they are worth, and leaving them out what a round takes without them. Trials of each kind lose
a small share of the time. To draft more is tried at its price less the standard error of it (optimism, as in UCB, Auer
et al. 2002), as far as that may be won: else prices that a few slow rounds made too high would keep heads out, and
nothing would put them right. Times are multiples of the costs' unit, which is about a plain round.
"""

from collections.abc import Sequence

from coordinator.rounds.costs import RoundCosts, RoundWork
from coordinator.rounds.outlook import HEADS_UNUSED, HeadsUse, Option, Outlook, Prices
from coordinator.rounds.trial_share import trial_share
from coordinator.smoothing import smoothed
from paceline.types import DraftSource

SHARE = 0.005
"""Share of all time that trials of a kind may lose at first."""
AT_ONCE = 4.0
"""Time that they may lose at first, or after a long time without any. One that loses more waits until it is made up."""
LEAST = 0.03
"""Least time that a trial is taken to lose: what seems to cost nothing was measured badly."""


class HeadsChoice:
    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs
        self._more, self._none = _Trials(), _Trials()
        """Trials of more drafts than seem worth it, and of none."""
        self._spent = 0.0
        """Time of all calls so far."""
        self._pass_count = 1.0
        """Mean passes of a call in which they draft: as much after each, in the rounds that the target goes on with."""

    def passed(self, time: float, pass_count: int) -> None:
        """Count the time of a call, in which they drafted after so many passes."""
        if pass_count:
            self._pass_count = smoothed(self._pass_count, pass_count)
        may_lose = trial_share(SHARE, self._spent) * time
        self._spent += time
        self._more.gain(may_lose)
        self._none.gain(may_lose)

    def counts(
        self,
        outlooks: Sequence[Outlook],
        copies: Sequence[Option],
        asks: Sequence[Option],
        asked: Sequence[Option],
        prices: Prices,
        *,
        is_first: bool,
    ) -> list[int]:
        """Return the tokens that the target's heads should draft for the next round of each row.

        `copies` is what each row has without them, `asks` what draft services may be asked for then, `asked` what this
        round asks them for. With `is_first` heads that do not pay are not tried beside draft services.
        """
        if not any(one.heads_chances for one in outlooks):
            return [0] * len(outlooks)
        uses = [
            one.heads_use(chosen, ask, copied, prices)
            for one, chosen, ask, copied in zip(outlooks, asked, asks, copies, strict=True)
        ]
        if any(use.count and one.is_ordered for one, use in zip(outlooks, uses, strict=True)):
            return [use.count for use in uses]
        if (gain := _worth(uses, prices) / prices.time) > 0:
            uses = self._where_they_pay(outlooks, copies, uses, prices, gain)
        elif is_first and any(ask.count for ask in asked) or any(DraftSource.HEADS in one.guesses for one in outlooks):
            return [0] * len(uses)  # a trial shows most in rounds of its own: to draft in one, to verify in the next
        else:
            uses = self._where_they_do_not(outlooks, copies, asked, prices)
        return [use.count for use in uses]

    def _where_they_pay(
        self,
        outlooks: Sequence[Outlook],
        copies: Sequence[Option],
        uses: list[HeadsUse],
        prices: Prices,
        gain: float,
    ) -> list[HeadsUse]:
        """Return these uses, or those of a trial: none, or as many drafts as there may be."""
        # Without heads no further round runs in this call, and the next round has no drafts.
        if any(use.are_best for use in uses) and self._none.is_due(self._pass_count * gain):
            return [HEADS_UNUSED] * len(uses)
        if not self._more.may_begin:
            return uses
        more = [
            one.most_heads(copied, prices) if use.are_best and use.count < len(one.heads_chances) else use
            for one, copied, use in zip(outlooks, copies, uses, strict=True)
        ]
        return more if more != uses and self._is_due(more, uses, prices) else uses

    def _where_they_do_not(
        self, outlooks: Sequence[Outlook], copies: Sequence[Option], asked: Sequence[Option], prices: Prices
    ) -> list[HeadsUse]:
        """Return no uses, or those of a trial."""
        none = [HEADS_UNUSED] * len(outlooks)
        if not self._more.may_begin:
            return none
        # Where a draft service is asked, its drafts save already what the heads' would.
        most = [
            one.most_heads(copied, prices, are_useful=not ask.count)
            for one, copied, ask in zip(outlooks, copies, asked, strict=True)
        ]
        return most if self._is_due(most, none, prices) else none

    def _is_due(self, more: Sequence[HeadsUse], uses: Sequence[HeadsUse], prices: Prices) -> bool:
        """Return whether to try more drafts than these uses."""
        loss = (_worth(uses, prices) - _worth(more, prices)) / prices.time
        saved = (sum([use.tokens for use in more]) - sum([use.tokens for use in uses])) / prices.time
        doubt = self._costs.doubt(_work(more), _work(uses))
        return self._more.is_due(self._pass_count * (loss - min(doubt, max(0.0, saved))))


class _Trials:
    """The time that trials of a kind may lose."""

    def __init__(self) -> None:
        self._left = AT_ONCE

    @property
    def may_begin(self) -> bool:
        return self._left >= LEAST

    def gain(self, time: float) -> None:
        """Note that they may lose so much more."""
        self._left = min(AT_ONCE, self._left + time)

    def is_due(self, loss: float) -> bool:
        """Return whether to try now what is expected to lose so much time; if so, it counts as lost."""
        loss = max(LEAST, loss)
        if self._left < min(loss, AT_ONCE):
            return False
        self._left -= loss
        return True


def _worth(uses: Sequence[HeadsUse], prices: Prices) -> float:
    """Return what drafts are worth beyond their cost, in tokens: 0 for none."""
    call = prices.heads_call if any(use.count for use in uses) else 0.0
    return sum([use.worth for use in uses]) - call


def _work(uses: Sequence[HeadsUse]) -> RoundWork:
    """Return the work of a round with such drafts in each, in whole numbers: doubt about the same is known already."""
    made = sum(use.count for use in uses)
    verified = round(sum(use.chance * use.count for use in uses))
    return RoundWork(len(uses), verified, heads_count=made, heads_call_count=int(made > 0))
