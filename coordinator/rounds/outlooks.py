"""Makes outlooks: asks a generation's guessers, and applies what was learned of the sources' acceptance.

Owns what is learned of acceptance; knows nothing of costs.
"""

from collections.abc import Mapping, Sequence

from coordinator.drafting.calibration import Calibration
from coordinator.drafting.heads_acceptance import HeadsAcceptance
from coordinator.requests.acceptance import PlaceAcceptance
from coordinator.requests.generation import Generation
from coordinator.requests.guess import Guess
from coordinator.rounds.outlook import Drawn, Outlook
from coordinator.rounds.output_lengths import OutputLengths
from coordinator.rounds.round_report import NEW_TO_DRAFT, RoundReport
from coordinator.rounds.wishes import Wish
from paceline.types import DraftSource

MAX_GUESSED = 32
"""Most tokens of a source without a model in a round: copies of a text go on for long."""
LIKELIER_STEPS = 20
"""Steps of the factor on a generation's acceptance: rows of about one factor share a computation."""


class Outlooks:
    def __init__(self, max_drawn: int, heads_count: int = 0) -> None:
        """`max_drawn` is the most tokens to ask a draft service for, `heads_count` the target's heads."""
        self._max_drawn = max_drawn
        self._heads = HeadsAcceptance(heads_count)
        self._places: dict[str, PlaceAcceptance] = {}
        self._calibrations: dict[DraftSource, Calibration] = {}
        self._lengths = OutputLengths()

    def of(self, group: Sequence[Generation], draft_models: Sequence[str]) -> list[Outlook]:
        """Return what each generation of the group can have. Draft services of `draft_models` can be asked now."""
        acceptances = {model: _ModelAcceptance(self._at(model)) for model in draft_models}
        heads, expected = self._heads.chances(), self._heads.expected_chances()
        return [self._of(one, acceptances, heads, expected) for one in group]

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport) -> None:
        """Learn from a round: of drafts by place, and of every guess, whether it was used or not."""
        self._heads.age()
        for places in self._places.values():
            places.age()
        for row in report.rows:
            generation = row.generation
            if row.source is DraftSource.DRAFT:
                count = min(row.drafted_count, self._max_drawn)
                self._at(row.draft_model).add(min(row.accepted_count, count), count)
            if generation is None:
                continue
            if generation.heads_draft:
                self._heads.take_in(generation.heads_draft)
            if guesses := wishes[generation].guesses:
                committed = generation.token_ids[len(generation.token_ids) - row.committed_count :]
                for source, guess in guesses.items():
                    self._observe(source, guess, committed)
            if generation.ended:
                self._ended(generation)

    def _observe(self, source: DraftSource, guess: Guess, committed: Sequence[int]) -> None:
        if source is DraftSource.HEADS:
            self._heads.observe(guess.token_ids, committed)
        else:
            self._calibration(source).observe(guess, committed)

    def _ended(self, generation: Generation) -> None:
        self._lengths.ended(generation)
        for guesser in generation.guessers.values():
            guesser.ended(generation.token_ids)

    def _of(
        self,
        generation: Generation,
        acceptances: Mapping[str, "_ModelAcceptance"],
        heads: Sequence[float],
        expected_of_heads: Sequence[float],
    ) -> Outlook:
        most, guesses = generation.max_draft_count, _guesses(generation)
        # `_guesses` asks for no more tokens than the most that help.
        guess_chances = {
            source: heads[: len(one.token_ids)]
            if source is DraftSource.HEADS
            else self._calibration(source).chances(one)
            for source, one in guesses.items()
        }
        drawn: dict[str, Drawn] = {}
        has_missed = False
        for model, acceptance in acceptances.items() if most else ():
            if _may_ask(generation, model):
                missed_count = _missed(generation, model)
                has_missed = has_missed or missed_count > 0
                drawn[model] = Drawn(acceptance.chances(generation)[:most], missed_count)
        # Only what a draft service has missed is weighed against what is still to come.
        remaining = self._lengths.remaining(generation) if has_missed else generation.output.remaining_count
        heads_chances = expected_of_heads[:most] if generation.drafting.allows(DraftSource.HEADS) else ()
        return Outlook(generation, guesses, guess_chances, drawn, remaining, heads_chances)

    def _at(self, model: str) -> PlaceAcceptance:
        if model not in self._places:
            self._places[model] = PlaceAcceptance(self._max_drawn)
        return self._places[model]

    def _calibration(self, source: DraftSource) -> Calibration:
        if source not in self._calibrations:
            self._calibrations[source] = Calibration()
        return self._calibrations[source]


class _ModelAcceptance:
    """The acceptance of a draft service's model, as it is when a round is planned."""

    def __init__(self, places: PlaceAcceptance) -> None:
        self._places = places
        self._usual = places.rate
        self._known: dict[int, list[float]] = {}
        """Chances by the factor on a generation's acceptance, in steps."""

    def chances(self, generation: Generation) -> list[float]:
        likelier = round(LIKELIER_STEPS * generation.acceptance.rate(self._usual) / self._usual)
        if likelier not in self._known:
            self._known[likelier] = self._places.survival(likelier / LIKELIER_STEPS)
        return self._known[likelier]


def _guesses(generation: Generation) -> dict[DraftSource, Guess]:
    most = min(MAX_GUESSED, generation.max_draft_count, generation.output.remaining_count - 1)
    guesses: dict[DraftSource, Guess] = {}
    if most < 1:
        return guesses
    guessers = generation.guessers
    for source in generation.drafting.sources if generation.drafting.in_order else guessers:
        if source in guessers and (guess := guessers[source].guess(generation.token_ids, most)) and guess.token_ids:
            guesses[source] = guess
    if heads := _of_heads(generation, most):
        guesses[DraftSource.HEADS] = heads
    return guesses


def _of_heads(generation: Generation, most: int) -> Guess | None:
    """Return what the target's heads drafted in the last round, if it is about the text as it is."""
    drafted = generation.heads_draft
    if drafted is None or drafted.length != len(generation.token_ids):
        return None
    token_ids = drafted.token_ids[:most]
    return Guess(token_ids, 0, (1.0,) * len(token_ids)) if token_ids else None


def _missed(generation: Generation, model: str) -> int:
    """Return the tokens that a draft service of this model has missed and would take in first."""
    length = len(generation.token_ids)
    cached = min(generation.draft_cached_length, length - 1) if model == generation.draft_model else 0
    return max(0, length - cached - NEW_TO_DRAFT)


def _may_ask(generation: Generation, model: str) -> bool:
    drafting = generation.drafting
    named = not drafting.draft_model or drafting.draft_model == model
    return named and drafting.allows(DraftSource.DRAFT) and model not in generation.refused_draft_models
