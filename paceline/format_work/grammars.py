"""How large a grammar's terminals are where a text has to match several regexes by `&`, or none by `~`."""

import json
import re
from collections.abc import Iterator

from paceline.format_work.regexes import COUNT, LITERAL_CHARACTERS, Sums, TooMuchWork, check_meetings, most, regex_size

MAX_NESTED_TERMINALS = 100
_TOKEN = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|[ \t\r]+)
    |(?P<line>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<json>%(?:json|regex|llguidance))
    |(?P<name>[!?_]*[A-Za-z][A-Za-z0-9_-]*)
    |(?P<special><[^<>\s]+>)
    |(?P<other>.)""",
    re.VERBOSE,
)
_OTHER_SIZE = 30
"""Of a terminal that is imported: those of the library are smaller."""
_Token = tuple[str, str | int]


def check_grammar(text: str) -> None:
    """Raise TooMuchWork when regexes that meet by `&` and `~` in a grammar's terminals are too large."""
    terminals = _Terminals(text)
    if terminals.have_operators:
        check_meetings(terminals.work())


class _Terminals:
    """The definitions of a grammar; those of grammars within it are among them."""

    def __init__(self, text: str) -> None:
        self.have_operators = False
        self._bodies: list[tuple[bool, list[_Token]]] = [(False, [])]
        self._named: dict[str, list[list[_Token]]] = {}
        self._known: dict[str, tuple[int, bool]] = {}
        begins_line = True
        for kind, value in _tokens(text):
            if kind == "name" and begins_line:
                self._bodies.append((_is_rule(str(value)), []))
                self._named.setdefault(str(value), []).append(self._bodies[-1][1])
            else:
                self._bodies[-1][1].append((kind, value))
            begins_line = kind == "line"
            self.have_operators |= _is_operator((kind, value))

    def work(self) -> int:
        """Return the sizes of all definitions in which regexes meet."""
        # What a rule names is counted where it is defined.
        bodies = [one for is_rule, one in self._bodies if not is_rule or any(map(_is_operator, one))]
        measured = [self._measured(body, depth=0) for body in bodies]
        return sum(size for size, has_operator in measured if has_operator)

    def _measured(self, body: list[_Token], depth: int) -> tuple[int, bool]:
        """Return the size of a definition, and whether regexes meet in it or in a terminal that it names."""
        sums, has_operator = Sums(), False
        changes = {"(": sums.open, "[": sums.open, ")": sums.close, "]": sums.close, "&": sums.conjoin}
        changes["|"] = sums.alternate
        for kind, value in body:
            has_operator |= _is_operator((kind, value))
            if kind == "size":
                sums.add(int(value))
            elif kind == "count":
                sums.repeat(int(value))
            elif kind == "name":
                size, has_one = self._named_size(str(value), depth + 1)
                sums.add(size)
                has_operator |= has_one
            elif value in changes:
                changes[str(value)]()
        return sums.all(), has_operator

    def _named_size(self, name: str, depth: int) -> tuple[int, bool]:
        if _is_rule(name):
            return 1, False  # a rule, which is in no regex
        if depth > MAX_NESTED_TERMINALS:
            raise TooMuchWork(
                f"terminals of a grammar with & or ~ name each other {depth} deep; {MAX_NESTED_TERMINALS} are taken at "
                "most"
            )
        if name not in self._known:
            self._known[name] = _OTHER_SIZE, False  # one that names itself is no terminal
            sizes = [self._measured(body, depth) for body in self._named.get(name, ())]
            if sizes:
                self._known[name] = sum(size for size, _ in sizes), any(has_one for _, has_one in sizes)
        return self._known[name]


def _is_rule(name: str) -> bool:
    return name.lstrip("!?_")[:1].islower()


def _is_operator(token: _Token) -> bool:
    return token in (("other", "&"), ("other", "~"))


def _tokens(text: str) -> Iterator[_Token]:
    """Yield what the library reads a grammar as; texts and regexes as their sizes, counts as the most."""
    index = 0
    while index < len(text):
        if (count := COUNT.match(text, index)) and "\n" not in count.group():
            yield "count", most(count)
            index = count.end()
            continue
        token = _TOKEN.match(text, index)
        assert token and token.lastgroup
        kind, value, index = token.lastgroup, token.group(), token.end()
        if kind == "text":
            yield "size", max(1, (len(value) - 2) // LITERAL_CHARACTERS)
        elif kind == "regex":
            inner, _, flags = value[1:].rpartition("/")
            yield "size", regex_size(f"(?{flags}){inner}" if flags else inner)
        elif kind == "json":
            end = _end_of_json(text, index)
            yield "size", end - index if value == "%regex" else 1
            index = end
        elif value in ('"', "/"):
            return  # it has no end, which the library refuses
        elif kind != "skip":
            yield kind, value


def _end_of_json(text: str, index: int) -> int:
    while text[index : index + 1].isspace():
        index += 1
    try:
        return json.JSONDecoder().raw_decode(text, index)[1]
    except RecursionError as error:
        raise TooMuchWork("grammar has JSON that is nested too deeply") from error
