"""The compiled index of suffixes: where it is missing, or of another source, requests are served without it."""

import ctypes
import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.drafting import indexed_text
from coordinator.drafting.native import library
from coordinator.drafting.native.library import LIBRARY, Library, find_library
from paceline.checks import MAX_DRAFT_COUNT
from paceline.types import GenerationRequest, TokenIds
from tests.coordinators import dispatching
from tests.fakes.model_services import FakeDrafter, FakeVerifier, continuation
from tests.tools import built_suffixes

PROMPT = (4, 4)


async def test_without_the_library_outputs_are_the_same_and_the_log_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr("coordinator.wiring.find_library", find_library.__wrapped__)
    with capture_logs() as logs:
        async with dispatching([FakeDrafter(0.6)], [FakeVerifier()], draft_count=4, shared_suffixes=True) as running:
            request = running.admission.admit(
                GenerationRequest(TokenIds(PROMPT), 30, predicted_output=TokenIds((1, 2, 3)))
            )
            assert not request.generations[0].guessers
            running.dispatcher.submit(request)
            pieces = [piece async for piece in request.stream.pieces()]
    assert [token.token_id for piece in pieces for token in piece.tokens] == continuation(PROMPT, 30)
    (told,) = (one for one in logs if one["log_level"] == "warning")
    assert "suffix and prediction are missing" in told["event"] and "C++ compiler" in told["event"]


def test_a_library_of_another_source_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built_suffixes()
    (tmp_path / "changed.cpp").write_text("// Something else.")
    monkeypatch.setattr(library, "SOURCE", tmp_path / "changed.cpp")
    assert find_library.__wrapped__() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COMPARED", indexed_text.COMPARED),
        ("FOUND", indexed_text.MOST_PLACES),
        ("MOST_GUESSED", library.MOST_GUESSED),
        ("MOST_GUESSED", MAX_DRAFT_COUNT),
    ],
)
def test_a_number_that_both_languages_name_is_the_same(name: str, value: int) -> None:
    assert re.findall(rf"constexpr \w+ {name} = (\d+);", library.SOURCE.read_text(encoding="utf-8")) == [str(value)]


def test_a_guess_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built_suffixes()
    monkeypatch.setattr(library, "_Guess", ctypes.c_int64)
    with pytest.raises(AttributeError, match="the library's Guess has 784 bytes, and _Guess 8"):
        Library(ctypes.CDLL(str(LIBRARY)))
