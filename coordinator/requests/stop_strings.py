"""A search for stop strings in text that comes in pieces; its time depends on the text's length alone.

The automaton is that of Aho and Corasick. Knows nothing of tokens.
"""

from collections.abc import Sequence


class StopStrings:
    """The automaton for a request's stop strings, shared by all its outputs.

    A state is the longest end of the text that is the beginning of a stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._steps: dict[tuple[int, str], int] = {}
        """The next longer state, by a state and the character after it."""
        self._shorter = [0]
        """For each state the next shorter end of the text that is a state too; state 0 is the empty text."""
        self.lengths = [0]
        """Characters of each state."""
        self.matched_lengths = [0]
        """Characters of the longest stop string that ends with each state; 0: none."""
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for length, character in enumerate(string, 1):
            longer = self._steps.setdefault((state, character), len(self.lengths))
            if longer == len(self.lengths):
                self._shorter.append(0)
                self.lengths.append(length)
                self.matched_lengths.append(0)
            state = longer
        self.matched_lengths[state] = len(string)

    def _link(self) -> None:
        # Shorter states first: the state that a longer one falls back to is then known.
        for (state, character), longer in sorted(self._steps.items(), key=lambda one: self.lengths[one[1]]):
            if state:
                self._shorter[longer] = self.after(self._shorter[state], character)
            self.matched_lengths[longer] = self.matched_lengths[longer] or self.matched_lengths[self._shorter[longer]]

    def after(self, state: int, character: str) -> int:
        """Return the state that a character leads to. n characters take at most 2 n steps in all."""
        while (longer := self._steps.get((state, character))) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return longer


class StopStringMatcher:
    """Passes text on up to the first stop string, holding back what may be the start of a stop string."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return what is safe to show, and whether a stop string was reached.

        If the text completes several stop strings, the one that begins first counts.
        """
        stops, state = self._stops, self._state
        if len(stops.lengths) == 1:  # there are no stop strings
            return text, False
        starts: list[int] = []
        for end, character in enumerate(text, len(self._held) + 1):
            state = stops.after(state, character)
            if length := stops.matched_lengths[state]:
                starts.append(end - length)
        self._state, text = state, self._held + text
        if starts:
            return text[: min(starts)], True
        shown_count = len(text) - stops.lengths[state]
        self._held = text[shown_count:]
        return text[:shown_count], False

    def drain(self) -> str:
        """Return the text held back: the output ended, so it is no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
