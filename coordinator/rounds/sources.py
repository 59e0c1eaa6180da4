"""What a generation's sources have for it in a round, and how much it may ask of draft services."""

from coordinator.requests.generation import Generation
from coordinator.requests.guess import Guess
from paceline.types import DraftSource

MOST_MODELS = 16
"""Draft models of which is kept what rounds taught; of more, those asked last. A peer that renames its model at every
look would else slow each plan down, for ever more: prices take the cube of their number."""


def guesses_of(generation: Generation, most: int) -> dict[DraftSource, Guess]:
    """Return at most `most` tokens of each source that has some at hand, in the generation's order of sources."""
    most = min(most, generation.most_useful_drafts)
    guesses: dict[DraftSource, Guess] = {}
    if most < 1:
        return guesses
    drafting, guessers = generation.drafting, generation.guessers
    for source in drafting.sources if drafting.in_order else (*guessers, DraftSource.HEADS):
        if source is DraftSource.HEADS:
            guess = _of_heads(generation, most)
        else:
            guess = guessers[source].guess(generation.token_ids, most) if source in guessers else None
        if guess and guess.token_ids:
            guesses[source] = guess
    return guesses


def _of_heads(generation: Generation, most: int) -> Guess | None:
    """Return what the target's heads drafted in the last round, if it is about the text as it is."""
    drafted = generation.heads_draft
    if drafted is None or drafted.length != len(generation.token_ids):
        return None
    token_ids = drafted.token_ids[:most]
    return Guess(token_ids, 0, (1.0,) * len(token_ids))


def most_asked(generation: Generation, model: str, max_length: int) -> int:
    """Return the most tokens that draft services of this model may be asked for now; 0: they may not.

    They draft for generations of at most `max_length` tokens.
    """
    drafting = generation.drafting
    named = not drafting.draft_model or drafting.draft_model == model
    if not named or not drafting.allows(DraftSource.DRAFT) or not generation.may_ask(model):
        return 0
    return max(0, min(generation.max_draft_count, max_length + 1 - len(generation.token_ids)))
