"""The functions of the library that `suffixes.cpp` becomes, and where they write a guess."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

import structlog

from coordinator.requests.guess import Guess
from paceline.compiled import open_library

log = structlog.get_logger()

SOURCE = Path(__file__).with_name("suffixes.cpp")
LIBRARY = Path(__file__).with_name("libsuffixes.so")
MOST_GUESSED = 64
"""Tokens of the longest guess, as in `suffixes.cpp`."""

_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_tokens = ctypes.c_char_p
"""Bytes of int32 numbers: Python passes them on without a copy, and faster than an array's place."""


class _Guess(ctypes.Structure):
    _fields_ = (
        ("token_count", _number),
        ("match_length", _number),
        ("shares", ctypes.c_double * MOST_GUESSED),
        ("token_ids", ctypes.c_int32 * MOST_GUESSED),
    )


# Half the time of slices of the fields, by the count of tokens.
_read_token_ids = [Struct(f"{count}i").unpack_from for count in range(MOST_GUESSED + 1)]
_read_shares = [Struct(f"{count}d").unpack_from for count in range(MOST_GUESSED + 1)]


class GuessRoom:
    """Memory that a guess is written to."""

    def __init__(self) -> None:
        self._written = _Guess()
        self.at = ctypes.addressof(self._written)

    def guess(self) -> Guess | None:
        """Return what was written last; None: it has no tokens."""
        written = self._written
        count = written.token_count
        if not count:
            return None
        token_ids = _read_token_ids[count](written, _Guess.token_ids.offset)
        return Guess(token_ids, written.match_length, _read_shares[count](written, _Guess.shares.offset))


class Library:
    """The compiled functions. `suffixes.cpp` says what they do."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise AttributeError for a library whose guesses are not those of `_Guess`."""
        # These keep the interpreter's lock, so that no two run at once: rounds and admission's threads share texts.
        quick = ctypes.PyDLL(library._name, handle=library._handle)
        self.index_text = _function(library, "text_of", _pointer, _pointer, _number)
        self.text_with_room = _function(quick, "text_with_room", _pointer, _number)
        self.delete_text = _function(quick, "text_delete", None, _pointer)
        self.extend_text = _function(quick, "text_extend", _number, _pointer, _tokens, _number)
        self.find = _function(quick, "text_find", ctypes.c_int, _pointer, _tokens, _number, _pointer, _pointer)
        self.guess_of_texts = _function(
            quick, "text_guess", None, _pointer, _number, _tokens, _number, _number, _pointer
        )
        self.suffixes_of = _function(quick, "suffixes_of", _pointer, _pointer)
        self.delete_suffixes = _function(quick, "suffixes_delete", None, _pointer)
        self.guess = _function(quick, "suffixes_guess", ctypes.c_bool, _pointer, _tokens, _number, _number, _pointer)
        guess_bytes = _function(quick, "guess_bytes", _number)()
        if guess_bytes != ctypes.sizeof(_Guess):
            raise AttributeError(f"the library's Guess has {guess_bytes} bytes, and _Guess {ctypes.sizeof(_Guess)}")


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = library[f"paceline_{name}"]
    function.restype, function.argtypes = result, arguments
    return function


@cache
def find_library() -> Library | None:
    """Return the functions; None if they were not built, or from another source or for another kind of machine."""
    try:
        return Library(open_library(LIBRARY, [SOURCE]))
    except (OSError, AttributeError) as error:
        log.warning(
            "the sources suffix and prediction are missing: they were not compiled; install the package anew, where "
            "there is a C++17 compiler",
            reason=str(error),
        )
        return None
