"""A fixed draft count: each generation gets at most so many drafts, from the source that promises most of them."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from coordinator.requests.generation import Generation
from coordinator.requests.guess import Guess
from coordinator.rounds.acceptances import Acceptances, ModelAcceptance
from coordinator.rounds.round_report import RoundReport
from coordinator.rounds.sources import guesses_of, most_asked
from coordinator.rounds.wishes import Wish
from paceline.types import DraftSource


class FixedPlanner:
    leeway: ClassVar[float] = 1.0

    def __init__(self, count: int, heads_count: int = 0, *, lanes: int = 1) -> None:
        """`heads_count` is the most tokens that the target's heads draft."""
        self.lane_count = lanes
        self._count = count
        self._heads_count = min(count, heads_count)
        self._acceptances = Acceptances(count, heads_count)

    def plan(self, group: Sequence[Generation], max_lengths: Mapping[str, int]) -> dict[Generation, Wish]:
        models = self._acceptances.of_models(max_lengths)
        return {one: self._wish(one, models) for one in group}

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport, cycle_s: float) -> None:
        self._acceptances.observe(wishes, report)

    def _wish(self, one: Generation, models: Mapping[str, ModelAcceptance]) -> Wish:
        """Return the wish for a generation: what is at hand is wanted too where a draft service should be asked."""
        guesses = guesses_of(one, self._count)
        source, worth = self._at_hand(one, guesses) if guesses else (None, 0.0)
        model = self._model_to_ask(one, models, source, worth)
        return Wish(
            self._count if model else 0,
            model,
            source,
            guesses[source].token_ids if source else (),
            guesses,
            self._heads_count if one.drafting.allows(DraftSource.HEADS) else 0,
        )

    def _at_hand(self, one: Generation, guesses: Mapping[DraftSource, Guess]) -> tuple[DraftSource, float]:
        """Return the best source at hand, the first where the generation has an order, and the tokens it promises."""
        best, most = DraftSource.UNSPECIFIED, -1.0
        for source, guess in guesses.items():
            worth = sum(self._acceptances.of_guess(source, guess))
            if worth > most:
                best, most = source, worth
            if one.drafting.in_order:
                break
        return best, most

    def _model_to_ask(
        self, one: Generation, models: Mapping[str, ModelAcceptance], source: DraftSource | None, worth: float
    ) -> str:
        """Return the model of the draft service to ask; empty where none promises more than what is at hand."""
        before = source if one.drafting.in_order else None
        best, least = "", 0.0 if before else worth
        for model, own in models.items():
            most = min(self._count, most_asked(one, model, own.max_length))
            if most and (tokens := own.tokens(one, most)) > least:
                best, least = model, tokens
        return "" if best and before and not one.drafting.puts_first(DraftSource.DRAFT, before) else best
