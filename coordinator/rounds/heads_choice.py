"""How much the target's heads draft for the next round, where they pay; knows nothing of what draft services are asked.

Where they do not seem to pay they are asked now and then, and where they do they are left out now and then, to notice a
change: asking shows what they are worth, and leaving them out what a round takes without them. All trials lose a small
share of the time. To draft more is tried at its price less the standard error of it (optimism, as in UCB, Auer et al.
2002): else prices that a few slow rounds made too high would keep heads out, and nothing would put them right. Times
are multiples of the costs' unit, which is about a plain round.
"""

from collections.abc import Sequence

from coordinator.rounds.costs import RoundCosts, RoundWork
from coordinator.rounds.outlook import NO_HEADS, HeadsUse, Option, Outlook, Prices
from coordinator.rounds.outlooks import MAX_GUESSED
from paceline.types import DraftSource

SHARE = 0.005
"""Share of all time that trials may lose."""
AT_ONCE = 4.0
"""Time that trials may lose at first, or after a long time without any."""
LEAST = 0.03
"""Least time that a trial is taken to lose: what seems to cost nothing was measured badly."""


class HeadsChoice:
    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs
        self._left = AT_ONCE
        """Time that trials may lose now."""

    def passed(self, time: float) -> None:
        """Count the time of a round."""
        self._left = min(AT_ONCE, self._left + SHARE * time)

    def counts(
        self,
        outlooks: Sequence[Outlook],
        asks: Sequence[Option],
        asked: Sequence[Option],
        prices: Prices,
        goodput: float,
        *,
        is_first: bool,
    ) -> list[int]:
        """Return the tokens that the target's heads should draft for the next round of each row.

        `asks` is what draft services may be asked for then, `asked` what this round asks them for; `goodput` is what a
        unit of time is worth, in tokens. With `is_first` nothing is tried while a draft service is asked.
        """
        if not any(one.heads_chances for one in outlooks):
            return [0] * len(outlooks)
        uses = [
            one.heads_use(chosen, ask, prices, MAX_GUESSED)
            for one, chosen, ask in zip(outlooks, asked, asks, strict=True)
        ]
        if (gain := self._gain(outlooks, uses, goodput)) > 0:
            chosen_uses = self._where_they_pay(outlooks, uses, gain, goodput)
        else:
            may_try = not (is_first and any(ask.count for ask in asked))
            chosen_uses = self._where_they_do_not(outlooks, asked, goodput) if may_try else []
        return [use.count for use in chosen_uses] or [0] * len(outlooks)

    def _where_they_pay(
        self, outlooks: Sequence[Outlook], uses: Sequence[HeadsUse], gain: float, goodput: float
    ) -> Sequence[HeadsUse]:
        """Return these uses, or those of a trial: none, or as many drafts as there may be."""
        if any(use.are_best for use in uses) and self._is_due(gain):
            return []
        more = [_most(one) if use.are_best else use for one, use in zip(outlooks, uses, strict=True)]
        if more == uses:
            return uses
        loss = gain - self._gain(outlooks, more, goodput) - self._doubt(more, uses)
        return more if self._is_due(loss) else uses

    def _where_they_do_not(
        self, outlooks: Sequence[Outlook], asked: Sequence[Option], goodput: float
    ) -> Sequence[HeadsUse]:
        """Return no uses, or those of a trial."""
        if any(DraftSource.HEADS in one.guesses for one in outlooks):
            return []  # a trial shows most in rounds of its own: to draft in one, to verify in the next
        most = [*map(_most, outlooks)]
        # Where a draft service is asked, its drafts save already what the heads' would.
        useful = [NO_HEADS if ask.count else use for ask, use in zip(asked, most, strict=True)]
        loss = self._cost(most) - self._saved(outlooks, useful, goodput) - self._doubt(most, [NO_HEADS] * len(most))
        return most if self._is_due(loss) else []

    def _is_due(self, loss: float) -> bool:
        """Return whether to try now what is expected to lose so much time; if so, it counts as lost."""
        loss = max(LEAST, loss)
        if self._left < min(loss, AT_ONCE):
            return False
        self._left -= loss
        return True

    def _gain(self, outlooks: Sequence[Outlook], uses: Sequence[HeadsUse], goodput: float) -> float:
        """Return the time that these drafts are expected to save beyond what they take."""
        return self._saved(outlooks, uses, goodput) - self._cost(uses) if any(use.count for use in uses) else 0.0

    def _saved(self, outlooks: Sequence[Outlook], uses: Sequence[HeadsUse], goodput: float) -> float:
        """Return the time that these drafts are expected to save."""
        tokens = [use.chance * sum(one.heads_chances[: use.count]) for one, use in zip(outlooks, uses, strict=True)]
        return sum(tokens) / goodput

    def _cost(self, uses: Sequence[HeadsUse]) -> float:
        """Return the time that it takes to make these drafts, and to verify those in use."""
        return self._costs.predict(_work(uses)) - self._costs.predict(RoundWork(len(uses)))

    def _doubt(self, uses: Sequence[HeadsUse], beside: Sequence[HeadsUse]) -> float:
        """Return the standard error of what these drafts take beyond those beside them."""
        return self._costs.doubt(_work(uses), _work(beside))


def _most(outlook: Outlook) -> HeadsUse:
    return HeadsUse(len(outlook.heads_chances))


def _work(uses: Sequence[HeadsUse]) -> RoundWork:
    """Return the work of a round with such drafts in each."""
    made = sum(use.count for use in uses)
    verified = sum(use.chance * use.count for use in uses)
    return RoundWork(len(uses), verified, heads_count=made, heads_call_count=int(made > 0))
