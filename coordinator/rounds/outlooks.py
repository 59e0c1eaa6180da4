"""Makes outlooks: what sources have for a generation, with what was learned of their acceptance.

Knows nothing of costs.
"""

from collections.abc import Mapping, Sequence

from coordinator.requests.generation import Generation
from coordinator.rounds.acceptances import Acceptances, ModelAcceptance
from coordinator.rounds.outlook import Drawn, Outlook
from coordinator.rounds.round_report import NEW_TO_DRAFT, RoundReport
from coordinator.rounds.sources import guesses_of, most_asked
from coordinator.rounds.wishes import Wish
from paceline.types import DraftSource

MAX_GUESSED = 32
"""Most tokens of a source without a model in a round: copies of a text go on for long."""


class Outlooks:
    def __init__(self, max_drawn: int, heads_count: int = 0) -> None:
        """`max_drawn` is the most tokens to ask a draft service for, `heads_count` the target's heads."""
        self._acceptances = Acceptances(max_drawn, heads_count)

    def of(self, group: Sequence[Generation], max_lengths: Mapping[str, int]) -> list[Outlook]:
        """Return what each generation of the group can have. `max_lengths` are of the draft services to weigh."""
        models, of_heads = self._acceptances.of_models(max_lengths), self._acceptances.expected_of_heads()
        return [self._of(one, models, of_heads) for one in group]

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport) -> None:
        self._acceptances.observe(wishes, report)

    def _of(
        self, generation: Generation, models: Mapping[str, ModelAcceptance], expected_of_heads: tuple[float, ...]
    ) -> Outlook:
        most, guesses = generation.max_draft_count, guesses_of(generation, MAX_GUESSED)
        guess_chances = {source: self._acceptances.of_guess(source, one) for source, one in guesses.items()}
        drawn: dict[str, Drawn] = {}
        has_missed = False
        for model, acceptance in models.items() if most else ():
            if most_drawn := most_asked(generation, model, acceptance.max_length):
                missed_count = _missed(generation, model)
                has_missed = has_missed or missed_count > 0
                drawn[model] = Drawn(*acceptance.of(generation, most_drawn), missed_count)
        # Only what a draft service has missed is weighed against what is still to come.
        lengths = self._acceptances.lengths
        remaining = lengths.remaining(generation) if has_missed else generation.output.remaining_count
        has_heads = expected_of_heads and generation.drafting.allows(DraftSource.HEADS)
        heads_chances = expected_of_heads[: min(most, MAX_GUESSED)] if has_heads else ()
        return Outlook(generation, guesses, guess_chances, drawn, remaining, heads_chances)


def _missed(generation: Generation, model: str) -> int:
    """Return the tokens that a draft service of this model has missed and would take in first."""
    length = len(generation.token_ids)
    cached = min(generation.draft_cached_length, length - 1) if model == generation.draft_model else 0
    return max(0, length - cached - NEW_TO_DRAFT)
