"""What looking up drafts costs the coordinator, without models and without calls.

The text is made of phrases that come again and again, the frequent ones more often: nearly every search finds places,
and as many as it looks at.
"""

import random
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import psutil
import typer
from rich.console import Console

from coordinator.drafting.calibration import Calibration
from coordinator.drafting.indexed_text import IndexedText
from coordinator.drafting.native import Library, find_library
from coordinator.drafting.shared_suffixes import SharedSuffixes
from coordinator.drafting.suffix_index import SuffixIndex
from coordinator.requests.committed_tokens import CommittedTokens, packed

console = Console(highlight=False)

VOCABULARY = 4096
PHRASES = 400
ROUND_TOKENS = 3
"""Tokens that a round commits for each row."""


def suffixes(
    rows: int = 64, rounds: int = 200, draft_count: int = 12, prompt_tokens: int = 1000, long_prompt: int = 1_000_000
) -> None:
    """Microseconds a row a round of the sources without a model, and the time and memory of a long prompt's index."""
    library, phrases = find_library(), _Phrases()
    if library is None:
        raise typer.Exit(1)  # it is told why
    own = [_Row.of(library, phrases.text(prompt_tokens)) for _ in range(rows)]
    _print_rounds(own, SharedSuffixes(library, 100_000), rounds, draft_count, phrases)
    prompt, process = packed(phrases.text(long_prompt)), psutil.Process()
    before_bytes, began_s = process.memory_info().rss, time.perf_counter()
    index = IndexedText(library, prompt)
    elapsed_s, held_bytes = time.perf_counter() - began_s, process.memory_info().rss - before_bytes
    count = len(index.token_ids)
    console.print(
        f"a prompt of {count} tokens: {1e3 * elapsed_s:.0f} ms, {held_bytes / count:.1f} bytes a token beside its ids"
    )


def _print_rounds(
    rows: "list[_Row]", shared: SharedSuffixes, rounds: int, draft_count: int, phrases: "_Phrases"
) -> None:
    calibration = Calibration()
    shared.add(phrases.text(24_000))
    spent: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        spent[name].append(time.perf_counter() - began_s)

    for _ in range(rounds):
        # Each step for all rows before the next step, as rounds do it.
        committed = [phrases.text(ROUND_TOKENS) for _ in rows]
        with timed("index and guess"):
            guesses = [row.index.guess(row.context, draft_count) for row in rows]
        with timed("guess of shared outputs"):
            for row in rows:
                shared.guess(row.context, draft_count)
        found = [(guess, right) for guess, right in zip(guesses, committed, strict=True) if guess]
        with timed("chances"):
            for guess, _ in found:
                calibration.chances(guess)
        with timed("observe"):
            for guess, right in found:
                calibration.observe(guess, right)
        for row, token_ids in zip(rows, committed, strict=True):
            row.context += token_ids
    for name, times_s in spent.items():
        us, least_us = (1e6 * time_s / len(rows) for time_s in (median(times_s), min(times_s)))
        console.print(f"{name}: {us:.1f} us a row a round, the median of {rounds}; least {least_us:.1f}")


@dataclass
class _Row:
    context: CommittedTokens
    index: SuffixIndex

    @staticmethod
    def of(library: Library, token_ids: list[int]) -> "_Row":
        prompt: array[int] = packed(token_ids)
        return _Row(CommittedTokens(prompt), SuffixIndex(IndexedText(library, prompt)))


@dataclass
class _Phrases:
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        draw = self._random
        self._phrases = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(4, 12))] for _ in range(PHRASES)]
        self._weights = [1 / number for number in range(1, PHRASES + 1)]
        self._left: list[int] = []

    def text(self, count: int) -> list[int]:
        while len(self._left) < count:
            for phrase in self._random.choices(self._phrases, self._weights, k=100):
                self._left += phrase
        token_ids, self._left = self._left[:count], self._left[count:]
        return token_ids
