"""The compiled index of suffixes: where it is missing, or of another source, requests are served without it."""

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from coordinator.drafting import indexed_text
from coordinator.drafting.native import library
from coordinator.drafting.native.library import LIBRARY, Library, find_library
from paceline.checks import MAX_DRAFT_COUNT
from paceline.errors import StartupError
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, TokenIds
from tests.coordinators import collect, dispatching, fake_cluster
from tests.fakes.model_services import FakeDrafter, FakeVerifier, continuation
from tests.tools import built_suffixes

PROMPT = (4, 4)


@pytest.fixture
def not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr("coordinator.wiring.find_library", find_library.__wrapped__)


async def warnings_at_start(target: FakeVerifier, **settings: Any) -> list[str]:
    """Return what a coordinator without drafts warns of."""
    with capture_logs() as logs:
        async with dispatching([], [target], draft="none", **settings):
            return [one["event"] for one in logs if one["log_level"] == "warning"]


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(
    ("drafting", "drafted_by"),
    [
        (DraftingOptions(), {DraftSource.DRAFT}),
        (DraftingOptions((DraftSource.SUFFIX, DraftSource.DRAFT), in_order=True), {DraftSource.DRAFT}),
        (DraftingOptions((DraftSource.SUFFIX, DraftSource.PREDICTION)), set()),
        (DraftingOptions((DraftSource.PREDICTION,), in_order=True), set()),
        (DraftingOptions(forbidden_sources=(DraftSource.SUFFIX,)), {DraftSource.DRAFT}),
    ],
    ids=["any", "suffix before draft", "looked up", "predicted", "no suffix"],
)
async def test_a_request_for_a_source_that_is_not_there_gets_its_output_from_the_others_and_usage_tells(
    drafting: DraftingOptions, drafted_by: set[DraftSource]
) -> None:
    async with dispatching([FakeDrafter(0.6)], [FakeVerifier()], draft_count=4) as running:
        request = running.admission.admit(
            GenerationRequest(TokenIds(PROMPT), 30, drafting=drafting, predicted_output=TokenIds((1, 2, 3)))
        )
        assert not request.generations[0].guessers
        running.dispatcher.submit(request)
        token_ids, last = await collect(request)
    assert token_ids == continuation(PROMPT, 30)
    assert last.finish and {one.source for one in last.finish.usage.sources} == drafted_by


@pytest.mark.usefixtures("not_compiled")
async def test_without_the_library_the_log_names_the_remedy() -> None:
    with capture_logs() as logs:
        async with dispatching([FakeDrafter(0.6)], [FakeVerifier()]):
            pass
    (told,) = (one for one in logs if one["log_level"] == "warning")
    assert "suffix and prediction are missing" in told["event"] and "C++17 compiler" in told["event"]


@pytest.mark.usefixtures("not_compiled")
async def test_suffixes_that_cannot_be_shared_are_refused_at_start() -> None:
    with pytest.raises(StartupError, match=r"--shared-suffixes is true, .* C\+\+17 compiler, or give false"):
        async with dispatching([FakeDrafter(0.6)], [FakeVerifier()], shared_suffixes=True):
            pass


@pytest.mark.usefixtures("not_compiled")
async def test_a_coordinator_that_nothing_drafts_for_says_so() -> None:
    _, told = await warnings_at_start(FakeVerifier())
    assert "nothing drafts" in told and "--draft is none" in told and "--draft-count 0" in told


@pytest.mark.usefixtures("not_compiled")
async def test_a_coordinator_that_heads_draft_for_does_not_say_that_nothing_drafts() -> None:
    target = FakeVerifier()
    target.description = replace(target.description, heads_draft_count=3)
    assert len(await warnings_at_start(target)) == 1
    assert "nothing drafts" in (await warnings_at_start(target, policy="eqspec"))[-1]


async def test_plain_decoding_that_is_meant_is_not_warned_of() -> None:
    assert not await warnings_at_start(FakeVerifier(), draft_count=0)


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


async def described_sources(heads_count: int = 0, **settings: Any) -> tuple[DraftSource, ...] | None:
    target = FakeVerifier()
    target.description = replace(target.description, heads_draft_count=heads_count)
    async with fake_cluster(FakeDrafter(0.6), target, CollectorRegistry(), **settings) as client:
        return (await client.describe()).sources


async def test_a_coordinator_tells_which_sources_it_has() -> None:
    draft, suffix, prediction, heads = DraftSource.DRAFT, DraftSource.SUFFIX, DraftSource.PREDICTION, DraftSource.HEADS
    assert await described_sources() == (draft, suffix, prediction)
    assert await described_sources(heads_count=3, draft_count="auto") == (draft, suffix, prediction, heads)
    assert await described_sources(heads_count=3, policy="eqspec") == (draft,)
    assert await described_sources(heads_count=3, draft_count=0) == ()


@pytest.mark.usefixtures("not_compiled")
async def test_a_coordinator_without_the_library_tells_that_it_has_neither_of_its_sources() -> None:
    assert await described_sources() == (DraftSource.DRAFT,)
