"""What the library writes out of a schema: which subschemas meet in one place, and which regexes in one string.

Where a `$ref` stands alone it is a name, and what it names is written once. Where it meets anything, by `allOf` or by
what stands beside it, all that it names is written again, for each alternative of each `anyOf` it meets.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any
from urllib.parse import unquote

from paceline.format_work.regexes import LITERAL_CHARACTERS, TooMuchWork, check_meetings, regex_size

MAX_PARTS = 30_000
"""Parts that a schema is written out to, of which a property or an alternative has about three."""
_FORMAT_SIZE = 60
"""Places that take as long as a `format`. The library's regexes have up to 800, with few ways through."""
_ALTERNATIVES = ("anyOf", "oneOf")
_IN_PLACE = {"allOf", "$ref", *_ALTERNATIVES}
_ANNOTATIONS = {"$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "default"}
_ANNOTATIONS |= {"definitions", "description", "examples", "id", "readOnly", "title", "writeOnly", "x-guidance"}

_NOT_OWN = _IN_PLACE | _ANNOTATIONS
VALUES = {"const", "default", "enum", "examples"}
"""Keywords that hold values, in which nothing is a schema."""
MAPS = {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
"""Keywords that hold schemas by name, and a name may be that of any keyword."""

_Schema = dict[str, Any]
_Sizes = dict[tuple[str, str], int]


class SchemaWork:
    """Counts the work of the schemas of one format, which adds up."""

    def __init__(self) -> None:
        self._parts = 0
        self._meetings: set[frozenset[tuple[str, str]]] = set()
        self._meeting_work = 0
        self._known: dict[int, tuple[_Schema, _Schema, _Sizes]] = {}
        """Of each subschema itself, what it constrains without others, and the sizes of regexes in that."""
        self._root: Any = None
        self._named: set[str] = set()
        self._has_ids = False
        self._waiting: deque[list[Any]] = deque()

    def add(self, schema: Any) -> None:
        """Raise TooMuchWork when this schema is too much after those before."""
        self._root, self._named, self._has_ids = schema, set(), _has_ids(schema)
        self._waiting.append([schema])
        references = (one["$ref"] for one in _objects(schema) if isinstance(one.get("$ref"), str))
        if self._has_ids or any(name != "#" and not name.startswith("#/") for name in references):
            self._waiting.extend([one] for one in _objects(schema))  # any of them may be what a `$ref` names
        while self._waiting:
            self._write(self._waiting.popleft())

    def _write(self, members: list[Any]) -> None:
        """Count what schemas that meet in a place are written out to, for each choice between their alternatives."""
        left: list[tuple[list[Any], list[_Schema], list[str]]] = [(members, [], [])]
        while left:
            members, plain, names = left.pop()
            members, plain, names = list(members), list(plain), list(names)
            self._count(len(members) + len(plain) + len(names))
            choices = self._take_apart(members, plain, names)
            if choices is not None:
                left += [([*members, one], plain, names) for one in choices]
            elif plain:
                self._write_plain(plain)
            elif names and names[0] not in self._named:
                self._named.add(names[0])
                self._waiting.append([self._resolved(names[0])])

    def _take_apart(self, members: list[Any], plain: list[_Schema], names: list[str]) -> list[Any] | None:
        """Move members to what constrains by itself, until one has alternatives; return them, or None without any.

        A name is left over if nothing else meets it; else what it names stands for it.
        """
        while True:
            while members:
                member = members.pop()
                if not isinstance(member, dict):
                    continue
                plain += [member] if self._own(member)[0] else []
                self._count(1 + len(_list(member.get("allOf"))))
                members += _list(member.get("allOf"))
                names += [name] if isinstance(name := member.get("$ref"), str) else []
                found = [_list(member[key]) for key in _ALTERNATIVES if key in member]
                if found:
                    members += [{"anyOf": one} for one in found[1:]]
                    self._count(len(found[0]) * (1 + len(members)))
                    return found[0]
            if not names or (len(names) == 1 and not plain):
                return None
            members.append(self._resolved(names.pop(), meets=True))

    def _own(self, schema: _Schema) -> tuple[_Schema, _Sizes]:
        """Return what a schema constrains without others, and the sizes of what a string in it has to match."""
        if id(schema) not in self._known:
            own = {key: value for key, value in schema.items() if key not in _NOT_OWN}
            self._known[id(schema)] = schema, own, _sizes(own)
        return self._known[id(schema)][1:]

    def _write_plain(self, members: list[_Schema]) -> None:
        """Count what meets in one place without references and alternatives, and note what meets in its parts."""
        sizes = {key: size for one in members for key, size in self._own(one)[1].items()}
        if len(sizes) > 1:
            self._meet(frozenset(sizes), prod(sizes.values()))
        plain = [self._own(one)[0] for one in members]
        names = [pattern for one in plain for pattern in _dict(one.get("patternProperties"))]
        if len(set(names)) > 1:  # the library holds each against each: they may have no name in common
            self._meet(frozenset(("name", one) for one in names), sum(regex_size(one) + 2 for one in names) ** 2)
        parts = len(names) + sum(len(_dict(one.get("properties"))) for one in plain)
        self._count(parts * (len(names) + len(plain)))
        children = list(_children(plain))
        times = prod(max(1, len(_list(one.get("enum")))) for one in plain)
        self._count((times - 1) * sum(map(len, children)))
        self._waiting.extend(children)

    def _meet(self, regexes: frozenset[tuple[str, str]], work: int) -> None:
        if regexes not in self._meetings:
            self._meetings.add(regexes)
            self._meeting_work += work
            check_meetings(self._meeting_work)

    def _count(self, parts: int) -> None:
        self._parts += parts
        if self._parts > MAX_PARTS:
            raise TooMuchWork(
                f"with each $ref, allOf, anyOf and oneOf written out it has over {MAX_PARTS} parts; let fewer of "
                "them meet"
            )

    def _resolved(self, name: str, meets: bool = False) -> Any:
        """Return what a `$ref` names; True, which is no constraint, where that is not known and it meets nothing."""
        if name == "#":
            return self._root
        is_place = name.startswith("#/") and not self._has_ids
        if is_place and (found := _at(self._root, unquote(name[2:]).split("/"))):
            return found[0]
        if meets or is_place:
            raise TooMuchWork(
                f"$ref {name[:100]!r} is no place of this schema; name places by #/, without an $id within"
            )
        return True


def _at(root: Any, keys: Iterable[str]) -> list[Any]:
    """Return the schema that stands at a place, alone in a list; empty where there is no such place, or a value."""
    found, is_map = root, False
    for key in keys:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and re.fullmatch(r"\+?[0-9]{1,9}", key) and int(key) < len(found):
            found, is_map = found[int(key)], False
        elif isinstance(found, dict) and key in found and (is_map or key not in VALUES):
            found, is_map = found[key], not is_map and key in MAPS
        else:
            return []
    return [found]


def _sizes(own: _Schema) -> _Sizes:
    sizes: _Sizes = {}
    if isinstance(pattern := own.get("pattern"), str):
        sizes["pattern", pattern] = regex_size(pattern) + 2  # what may stand before and behind
    if isinstance(name := own.get("format"), str):
        sizes["format", name] = _FORMAT_SIZE
    for key in ("enum", "const"):
        texts = [text for text in _list(own.get(key)) or [own.get(key)] if isinstance(text, str)]
        if texts:
            sizes[key, json.dumps(texts)] = max(1, sum(map(len, texts)) // LITERAL_CHARACTERS)
    return sizes


def _children(plain: list[_Schema]) -> Iterator[list[Any]]:
    """Yield the schemas that meet in each part of a value: in its properties, and in its items."""
    properties = [_dict(one.get("properties")) for one in plain]
    patterns = [_dict(one.get("patternProperties")) for one in plain]
    closing = [one for one in plain if "additionalProperties" in one]
    others = [one["additionalProperties"] for one in closing]
    for name in {name: None for names in properties for name in names}:
        # One's own additional properties are those that it does not name.
        additional = (one["additionalProperties"] for one in closing if name not in _dict(one.get("properties")))
        yield [*(names[name] for names in properties if name in names), *_values(patterns), *additional]
    for pattern in {name: None for names in patterns for name in names}:
        yield [*(names[pattern] for names in patterns if pattern in names), *others]
    first = [_list(one.get("prefixItems")) or _list(one.get("items")) for one in plain]
    rest = [one[key] for one in plain for key in ("items", "additionalItems") if key in one]
    rest = [one for one in rest if not isinstance(one, list)]
    for index in range(max(map(len, first))):
        yield [*(items[index] for items in first if index < len(items)), *rest]
    yield from (one for one in (others, rest) if one)


def _has_ids(schema: Any) -> bool:
    """Return whether a `$ref` may start from another place than the whole schema."""
    inner = (one for one in _objects(schema) if one is not schema)
    is_old = isinstance(schema, dict) and "draft-04" in str(schema.get("$schema"))
    return any(isinstance(one.get(key), str) for one in inner for key in ("$id", *(["id"] if is_old else [])))


def _objects(schema: Any) -> Iterator[_Schema]:
    """Yield a schema and all that stand in it, those of keywords that are not known too."""
    waiting = [(schema, False)]
    while waiting:
        one, is_map = waiting.pop()
        if isinstance(one, list):
            waiting += [(value, False) for value in one]
        elif isinstance(one, dict):
            if not is_map:
                yield one
            inner = ((key, value) for key, value in one.items() if is_map or key not in VALUES)
            waiting += [(value, not is_map and key in MAPS) for key, value in inner]


def _values(maps: Iterable[dict[str, Any]]) -> list[Any]:
    return [value for one in maps for value in one.values()]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
