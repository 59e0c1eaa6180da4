"""Makes what the sources without a model know of a request's outputs.

Owns which of them there are. Knows nothing of rounds.
"""

from array import array
from collections.abc import Callable

from coordinator.drafting.indexed_text import IndexedText
from coordinator.drafting.native import Library
from coordinator.drafting.prediction import Prediction
from coordinator.drafting.shared_suffixes import SharedSuffixes
from coordinator.drafting.suffix_index import SuffixIndex
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.guess import Guess, Guesser
from paceline.types import DraftingOptions, DraftSource

GuessersOf = dict[DraftSource, Guesser]


class Guessers:
    def __init__(self, library: Library, shared: SharedSuffixes | None = None) -> None:
        """`shared` has what all outputs have in common; None: each generation knows its own text only."""
        self._library = library
        self._shared = shared

    def of_request(
        self, prompt: "array[int]", drafting: DraftingOptions, predicted_token_ids: "array[int]"
    ) -> Callable[[], GuessersOf]:
        """Return what makes the guessers of each output. Takes as long as the prompt is; any thread may call."""
        own = IndexedText(self._library, prompt) if drafting.allows(DraftSource.SUFFIX) else None
        has_prediction = bool(predicted_token_ids) and drafting.allows(DraftSource.PREDICTION)
        expected = IndexedText(self._library, predicted_token_ids) if has_prediction else None

        def guessers() -> GuessersOf:
            found: GuessersOf = {}
            if expected:
                found[DraftSource.PREDICTION] = Prediction(expected, len(prompt))
            if own:
                index = SuffixIndex(own)
                shared = self._shared
                found[DraftSource.SUFFIX] = _OwnAndShared(index, shared, len(prompt)) if shared else index
            return found

        return guessers


class _OwnAndShared:
    """A generation's own text, and what all outputs have in common where that knows a longer match."""

    def __init__(self, own: SuffixIndex, shared: SharedSuffixes, prompt_count: int) -> None:
        self._own = own
        self._shared = shared
        self._prompt_count = prompt_count

    def read(self, context: TokenList) -> None:
        # Not the shared texts, which rounds change meanwhile.
        self._own.read(context)

    def guess(self, context: TokenList, most: int) -> Guess | None:
        own = self._own.guess(context, most)
        others = self._shared.guess(context, most)
        if own and others:
            return others if others.match_length > own.match_length else own
        return own or others

    def ended(self, context: TokenList) -> None:
        self._shared.add(context[self._prompt_count :])
