"""Seconds of the parts of a round, foreseen from saved costs.

It is of one lane and one draft model, the one that the costs name. Knows nothing of arrivals and queues.
"""

from paceline.errors import InvalidRequest
from paceline.simulate.call_times import CallSeconds, CallTimes, Work
from paceline.simulate.saved_costs import SavedCosts


class MeasuredRounds:
    def __init__(self, saved: SavedCosts, origin: str = "measured costs") -> None:
        """`origin` says in words where the costs are from."""
        self.origin = origin
        self.counts = saved.draft_counts
        """Draft counts that were measured."""
        self._verify = CallTimes(saved.costs.calls_of())
        calls = saved.costs.calls_of(saved.draft.model_id) if saved.draft else []
        self._has_drafts = bool(calls)
        self._propose = CallTimes(calls)
        self._knows_plain = any(not one.step_count and not one.prompt_count for one in saved.costs.calls_of())

    def check_draft_counts(self) -> None:
        """Raise InvalidRequest where costs are of no draft, or of one draft count, which says nothing of others."""
        if not self._has_drafts:
            raise InvalidRequest(
                "costs have no calls of the draft service that they name, or name none; measure them where one drafts",
                field="costs",
            )
        if len(self.counts) < 2:
            raise InvalidRequest(
                f"the costs are of draft counts {self.counts or 'none'}; measure them with --draft-count auto, which "
                "tries several",
                field="costs",
            )

    def check_plain(self) -> None:
        """Raise InvalidRequest where nothing says what a round without drafts costs."""
        if not self._knows_plain and len(self.counts) < 2:
            raise InvalidRequest(
                f"the costs are of draft counts {self.counts or 'none'}, and a target alone has no drafts; measure "
                "them with --draft-count auto, which tries none too",
                field="costs",
            )

    def verify_s(self, row_count: int, draft_count: int, length: int = 0) -> float:
        """Return the seconds of a verify of rows with so many drafts each; costs are of the lengths they met."""
        return _total(self._verify.foresee(_drafting(row_count, draft_count)))

    def draft_s(self, row_count: int, draft_count: int, length: int = 0, *, work_factor: float = 1.0) -> float:
        """Return the seconds in which rows get so many drafts each; `work_factor` is of a draft that works more."""
        if not draft_count:
            return 0.0
        return _total(self._propose.foresee(_drafting(row_count, draft_count)), work_factor)

    def prompt_s(self, token_count: int, pass_count: int) -> float:
        """Return the seconds of both models for so many tokens of prompts in so many passes."""
        work = Work(1, 1, 0, 0, token_count / max(1, pass_count))
        return pass_count * sum(_total(one.foresee(work)) for one in (self._verify, self._propose))


def _drafting(row_count: int, draft_count: int) -> Work:
    return Work(1, row_count, draft_count, row_count * draft_count, 0)


def _total(seconds: CallSeconds, work_factor: float = 1.0) -> float:
    return work_factor * seconds.executed_s + seconds.wire_s + seconds.own_s
