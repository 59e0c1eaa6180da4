"""How large regexes are, and how much they are together where all of them have to match one text."""

import re
from functools import lru_cache
from math import prod

MAX_MEETING = 20_000
"""Most that the sizes of regexes that have to match one text, multiplied, come to: all such texts of a format together.

Regexes that have no match in common take the longest. The library's limits do not bound what they take.
"""


class TooMuchWork(ValueError):
    """What a format has too much of, and what is allowed."""


def check_meetings(work: int) -> None:
    """Raise TooMuchWork when the regexes that meet in a format's texts come to too much."""
    if work > MAX_MEETING:
        raise TooMuchWork(
            f"the sizes of regexes that have to match one text come to over {MAX_MEETING}, multiplied; shorten them, "
            "or make one of them"
        )


COUNT = re.compile(  # possessive, so that long runs of spaces or digits are read once
    r"\{\s*+(\+?\d*+)\s*+(,?)\s*+(\+?\d*+)\s*+\}|~[ \t]*+(\+?\d++)(?:[ \t]*+(\.\.)[ \t]*+(\+?\d++))?"
)
_NAMED = re.compile(r"\\[pPxuU]\{[^}]*\}")
_CLASS = re.compile(r"\[\^?\]?")
_PREFIX = re.compile(r"\?(?:P?<\w+>|[a-zA-Z-]*:?)")
_LITERALS = re.compile(r"[A-Za-z0-9_ |-]*")
_WIDE = re.compile(r"\\[wWdDsSpP]|[^\x00-\x7f]")
"""What stands for many characters beyond ASCII."""
_WIDE_SIZE = 10
"""Places that take as long as such a class."""
LITERAL_CHARACTERS = 16
"""Characters of given texts that take as long as one place: each text is a single way through other regexes."""


@lru_cache(256)
def regex_size(text: str) -> int:
    """Return about how many places a regex has, with each counted repetition written out."""
    if _LITERALS.fullmatch(text):
        return max(1, len(text) // LITERAL_CHARACTERS)
    if re.search(r"\(\?[a-zA-Z-]*x", text):  # comments may stand anywhere, so who repeats what is unknown
        return _WIDE_SIZE * len(text) * prod(max(1, int(one[:10])) for one in re.findall("[0-9]+", text))
    sums, index = Sums(), 0
    while index < len(text):
        one = text[index]
        if one == "{" and (count := COUNT.match(text, index)):
            sums.repeat(most(count))
            index = count.end()
            continue
        end = _end_of_atom(text, index)
        if one == "(":
            sums.open()
            prefix = _PREFIX.match(text, end)
            end = prefix.end() if prefix else end
        elif one == ")":
            sums.close()
        elif one == "|":
            sums.alternate()
        elif one not in "*+?":  # these are no places, and a count behind one repeats what it stands behind
            sums.add(_WIDE_SIZE if _WIDE.search(text, index, end) else 1)
        index = end
    return sums.all()


def _end_of_atom(text: str, index: int) -> int:
    """Return where an escape, a class or a character ends that begins at an index."""
    if text[index] == "\\":
        named = _NAMED.match(text, index)
        return named.end() if named else index + 2
    if text[index] != "[":
        return index + 1
    depth = 0
    while index < len(text):
        if text[index] == "[":
            depth += 1
            first = _CLASS.match(text, index)
            assert first
            index = first.end()
            continue
        depth -= text[index] == "]"
        index += 2 if text[index] == "\\" else 1
        if not depth:
            break
    return index


def most(count: "re.Match[str]") -> int:
    """Return how often at most is repeated what a count stands behind; where there is no most, the least."""
    # No regex repeats a billion times, and many digits take long to read.
    return max(int(one.lstrip("+0")[:10] or "0") for one in (*count.groups(), "1") if one and one[-1].isdecimal())


class Sums:
    """Size of an expression of which one part after the other is told. Conjuncts multiply, all else adds up."""

    def __init__(self) -> None:
        self._groups = [[0, 1, 0, 0]]
        """Of each open group: the alternatives, the conjuncts, the sequence, and the last of it."""

    def add(self, size: int) -> None:
        group = self._groups[-1]
        group[2] += group[3]
        group[3] = size

    def repeat(self, times: int) -> None:
        self._groups[-1][3] *= max(1, times)

    def conjoin(self) -> None:
        group = self._groups[-1]
        group[1:] = [group[1] * max(1, group[2] + group[3]), 0, 0]

    def alternate(self) -> None:
        self.conjoin()
        group = self._groups[-1]
        group[:2] = [group[0] + group[1], 1]

    def open(self) -> None:
        self._groups.append([0, 1, 0, 0])

    def close(self) -> None:
        self.alternate()
        size = self._groups.pop()[0]
        if not self._groups:  # it was never opened: all before is in it
            self._groups = [[0, 1, 0, 0]]
        self.add(size)

    def all(self) -> int:
        while len(self._groups) > 1:
            self.close()
        self.alternate()
        return self._groups[0][0]
