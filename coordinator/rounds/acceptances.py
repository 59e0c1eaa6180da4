"""How often the drafts of each source are right, and how long outputs become: learned from rounds.

Knows nothing of costs and decides nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from coordinator.drafting.calibration import Calibration
from coordinator.drafting.heads_acceptance import HeadsAcceptance
from coordinator.requests.acceptance import PlaceAcceptance
from coordinator.requests.generation import Generation
from coordinator.requests.guess import Guess
from coordinator.rounds.output_lengths import OutputLengths
from coordinator.rounds.round_report import RoundReport, RowReport
from coordinator.rounds.sources import MOST_MODELS
from coordinator.rounds.wishes import Wish
from paceline.types import DraftSource

GUESSED_ROWS = 16
"""Rows of a round whose guesses are learned from; of more, a part by turns. A class forgets in a few hundred tokens."""
LIKELIER_STEPS = 20
"""Steps of the factor on a generation's acceptance: rows of about one factor share a computation."""


class Acceptances:
    def __init__(self, max_drawn: int, heads_count: int = 0) -> None:
        """`max_drawn` is the most tokens to ask a draft service for, `heads_count` the target's heads."""
        self._max_drawn = max_drawn
        self._heads = HeadsAcceptance(heads_count)
        self._places: dict[str, PlaceAcceptance] = {}
        """By model, those asked last at the end."""
        self._calibrations: dict[DraftSource, Calibration] = {}
        self._turn = 0
        """Rounds so far."""
        self.lengths = OutputLengths()

    def of_guess(self, source: DraftSource, guess: Guess) -> tuple[float, ...]:
        """Return the chance that the first 1, 2, ... tokens of a guess are all right."""
        if source is DraftSource.HEADS:
            return self._heads.chances()[: len(guess.token_ids)]
        return self._calibration(source).chances(guess)

    def of_models(self, max_lengths: Mapping[str, int]) -> dict[str, "ModelAcceptance"]:
        """Return what is known of draft services now, by model; they draft for generations of so many tokens."""
        found: dict[str, ModelAcceptance] = {}
        for model, most in max_lengths.items():
            # To look is not to ask: what could be asked takes no place of what is.
            places = self._places.get(model) or PlaceAcceptance(self._max_drawn)
            found[model] = ModelAcceptance(model, places, most)
        return found

    def expected_of_heads(self) -> tuple[float, ...]:
        """Return the same for drafts that the target's heads would be asked for."""
        return self._heads.expected_chances()

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport) -> None:
        """Learn from a round: of drafts by place, and of guesses, whether they were used or not."""
        self._heads.age()
        for places in self._places.values():
            places.age()
        for row in report.all_rows:
            if row.source is DraftSource.DRAFT:
                count = min(row.drafted_count, self._max_drawn)
                self._at(row.draft_model).add(min(row.accepted_count, count), count)
            if row.heads_draft:
                self._heads.take_in(row.heads_draft)
            if row.generation and row.is_last:
                self._ended(row.generation)
        self._observe_guesses(wishes, report.rows)
        for before, rows in pairwise((report.rows, *report.further)):
            self._observe_heads(before, rows)

    def _observe_guesses(self, wishes: Mapping[Generation, Wish], rows: Sequence[RowReport]) -> None:
        self._turn += 1
        step = -(-len(rows) // GUESSED_ROWS)
        for row in rows[self._turn % step :: step] if rows else ():
            if row.generation and (guesses := wishes[row.generation].guesses):
                for source, guess in guesses.items():
                    self._observe(source, guess, row.token_ids)

    def _observe_heads(self, before: Sequence[RowReport], rows: Sequence[RowReport]) -> None:
        """Learn from a further round, which verified what the heads drafted in the one before."""
        drafted = {row.generation: row.heads_draft.token_ids for row in before if row.heads_draft}
        for row in rows:
            if row.generation in drafted:
                self._heads.observe(drafted[row.generation], row.token_ids)

    def _observe(self, source: DraftSource, guess: Guess, committed: Sequence[int]) -> None:
        if source is DraftSource.HEADS:
            self._heads.observe(guess.token_ids, committed)
        else:
            self._calibration(source).observe(guess, committed)

    def _ended(self, generation: Generation) -> None:
        self.lengths.ended(generation)
        for guesser in generation.guessers.values():
            guesser.ended(generation.token_ids)

    def _at(self, model: str) -> PlaceAcceptance:
        places = self._places.pop(model, None) or PlaceAcceptance(self._max_drawn)
        self._places[model] = places
        if len(self._places) > MOST_MODELS:
            del self._places[next(iter(self._places))]
        return places

    def _calibration(self, source: DraftSource) -> Calibration:
        if source not in self._calibrations:
            self._calibrations[source] = Calibration()
        return self._calibrations[source]


class ModelAcceptance:
    """What is known of a draft service's model when a round is planned."""

    def __init__(self, model: str, places: PlaceAcceptance, max_length: int) -> None:
        self._model = model
        self.max_length = max_length
        """Most tokens of a generation that its services draft for."""
        self._places = places
        self._usual = places.rate
        self._known: dict[int, tuple[list[float], list[float]]] = {}
        """Chances and tokens by the factor on a generation's acceptance, in steps."""

    def of(self, generation: Generation, most: int) -> tuple[Sequence[float], Sequence[float]]:
        """Return what at most `most` drafts for the generation promise.

        First the chance that the first 1, 2, ... are all right, then how many of 0, 1, 2, ... are right.
        """
        own = generation.acceptances.get(self._model)
        likelier = round(LIKELIER_STEPS * own.rate(self._usual) / self._usual) if own else LIKELIER_STEPS
        if likelier not in self._known:
            chances = self._places.survival(likelier / LIKELIER_STEPS)
            self._known[likelier] = chances, [*accumulate(chances, initial=0.0)]
        chances, tokens = self._known[likelier]
        return (chances, tokens) if most >= len(chances) else (chances[:most], tokens[: most + 1])

    def tokens(self, generation: Generation, most: int) -> float:
        """Return how many of at most `most` drafts for the generation are right, as is to be expected."""
        return self.of(generation, most)[1][-1]
