"""The runner: one call's rows through the cache, and the state after failures."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.engine.loading import load_model
from paceline.engine.memory import is_out_of_memory
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import PassSize, Runner
from paceline.errors import CacheFull, Overloaded, StartupError
from paceline.model_service.worker import ModelWorker
from paceline.types import GREEDY, Prefilled, VerifyRow
from target_service.verifier import Verifier
from tests.conftest import PairOfCheckpoints
from tests.fakes.model_services import Clock

PROMPT = tuple(range(20, 60))


@pytest.fixture
def model(pairs: dict[str, PairOfCheckpoints]) -> LoadedModel:
    return load_model(str(pairs["Llama"].target))


def test_sequences_that_no_call_names_for_their_time_to_live_are_dropped(model: LoadedModel) -> None:
    clock = Clock()
    runner = Runner(model, EngineOptions(kv_memory="1MiB", sequence_ttl_s=100), clock)
    verifier = Verifier(runner)
    verifier.verify([VerifyRow("gone", 0, PROMPT, (), GREEDY), VerifyRow("used", 0, (9,), (), GREEDY)])
    clock.advance(90)
    verifier.verify([VerifyRow("used", 1, (8,), ())])
    assert runner.drop_idle() == 0
    clock.advance(11)
    assert runner.drop_idle() == 1
    assert [runner.cache.length(one) for one in ("gone", "used")] == [0, 2]


def test_each_pass_tells_what_it_computed_prompts_apart_from_decoding(model: LoadedModel) -> None:
    passes: list[PassSize] = []
    options = EngineOptions(kv_memory="1MiB", prefill_chunk_tokens=24)
    runner = Runner(model, options, on_pass=passes.append)
    runner.forward([PackedRow("prompt", 0, PROMPT[:40]), PackedRow("decoding", 0, (9, 8, 7), draft_count=2)])
    runner.forward([PackedRow("unknown", 5, (9,))])
    taken = runner.cache.length("prompt")
    runner.forward([PackedRow("prompt", taken, PROMPT[taken:40])])
    assert 0 < taken <= 24
    assert passes == [PassSize(2, taken + 3, taken), PassSize(1, 40 - taken, 40 - taken)]


def fail(error: Exception) -> Any:
    def logits(*arguments: Any) -> torch.Tensor:
        raise error

    return logits


@pytest.mark.parametrize("layout", ["paged", "dense"])
def test_a_pass_that_fails_leaves_what_rows_relied_on(
    model: LoadedModel, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(model, EngineOptions(kv_memory="1MiB", layout=layout, prefix_sharing=False))
    rows = [PackedRow("a", 0, PROMPT), PackedRow("b", 0, PROMPT[3:])]
    expected = runner.forward([*rows, PackedRow("c", 0, PROMPT[:20])])
    again = [PackedRow("a", 30, PROMPT[30:]), PackedRow("b", 0, PROMPT[3:])]
    with monkeypatch.context() as patch:
        patch.setattr(type(model.decoder), "logits", fail(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            runner.forward(again)
        assert [runner.cache.length(one) for one in "abc"] == [30, 0, 20]
        patch.setattr(type(model.decoder), "logits", fail(torch.OutOfMemoryError("none left")))
        assert all(isinstance(one, Overloaded) for one in runner.forward(again))
        assert [runner.cache.length(one) for one in "abc"] == [30, 0, 20]
    for outcome, before in zip(runner.forward(again), expected, strict=False):
        assert isinstance(outcome, torch.Tensor)
        assert isinstance(before, torch.Tensor)
        torch.testing.assert_close(outcome, before, rtol=1e-4, atol=1e-4)


@pytest.mark.review
def test_a_refused_row_holds_no_more_than_its_caller_knows_of(model: LoadedModel) -> None:
    """Review C6: its shared prefix stayed and nobody could free it: the cache was full for ever."""
    runner = Runner(model, EngineOptions(kv_memory="32KiB", page_tokens=16))
    room = runner.cache.max_length
    first = tuple(range(20, 20 + 33))
    runner.forward([PackedRow("first", 0, first)])
    longer = (*first[:32], *(7 + number % 3 for number in range(room - 32)))
    for base_length in (0, 16):
        if base_length:
            runner.forward([PackedRow("other", 0, longer[:17])])
        (refused,) = runner.forward([PackedRow("other", base_length, longer[base_length:])])
        assert isinstance(refused, CacheFull)
        assert runner.cache.length("other") == base_length


@pytest.mark.review
def test_a_row_whose_pass_fails_holds_no_more_than_its_caller_knows_of(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review C6"""
    runner = Runner(model, EngineOptions(kv_memory="1MiB", page_tokens=16))
    runner.forward([PackedRow("first", 0, PROMPT)])
    monkeypatch.setattr(type(model.decoder), "logits", fail(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        runner.forward([PackedRow("second", 0, PROMPT)])
    assert [runner.cache.length(one) for one in ("first", "second")] == [len(PROMPT), 0]


def ask_for_too_much() -> None:
    torch.empty(2**62, dtype=torch.int8)


def ask_python_for_too_much() -> None:
    bytearray(2**62)


@pytest.mark.review
@pytest.mark.parametrize("ask", [ask_for_too_much, ask_python_for_too_much])
def test_a_pass_for_which_no_memory_is_left_is_refused_in_the_words_of_any_system(
    model: LoadedModel, ask: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review B8: this system's own refusal, as torch and Python report it."""
    runner = Runner(model, EngineOptions(kv_memory="1MiB"))
    monkeypatch.setattr(type(model.decoder), "logits", lambda *_: ask())
    (refused,) = runner.forward([PackedRow("a", 0, PROMPT)])
    assert isinstance(refused, Overloaded)
    assert f"{len(PROMPT)} tokens" in refused.message
    assert runner.cache.length("a") == 0


@pytest.mark.review
async def test_work_outside_a_pass_for_which_no_memory_is_left_is_refused_too() -> None:
    """Review B8: choosing among large vocabularies needs memory too."""
    worker = ModelWorker(threads=None)
    try:
        with pytest.raises(Overloaded, match="no memory"):
            await worker.run(ask_for_too_much)
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("could not create a memory object"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, is_so: bool) -> None:
    assert is_out_of_memory(error) is is_so


@pytest.mark.review
@pytest.mark.parametrize("layout", ["paged", "dense"])
def test_a_cache_that_holds_nothing_does_not_start_and_says_the_least_that_would_do(
    model: LoadedModel, layout: Any
) -> None:
    """Review B10: 1 KiB gave a service that refused every row."""
    options = EngineOptions("1KiB", layout)
    with pytest.raises(StartupError, match=r"--kv-memory 1KiB gives the cache 1024 bytes") as refused:
        Runner(model, options)
    (least,) = re.findall(r"at least (\d+) bytes", refused.value.message)
    assert Runner(model, replace(options, kv_memory=least)).limits.cache_max_length > 0
    with pytest.raises(StartupError):
        Runner(model, replace(options, kv_memory=str(int(least) - 1)))


@pytest.mark.review
def test_a_cache_beyond_all_memory_does_not_start_and_names_the_setting(model: LoadedModel) -> None:
    """Review B8: the start failed with torch's error and a traceback."""
    with pytest.raises(StartupError, match="--kv-memory 8000000TiB is .* more than can be had"):
        Runner(model, EngineOptions("8000000TiB"))


def test_long_prompts_share_one_chunk_and_decoding_rows_never_wait(model: LoadedModel) -> None:
    runner = Runner(model, EngineOptions(kv_memory="1MiB", prefill_chunk_tokens=48))
    runner.forward([PackedRow("decoding", 0, PROMPT)])
    first, second = tuple(range(100, 200)), tuple(range(200, 300))
    rows = [PackedRow("first", 0, first), PackedRow("second", 0, second), PackedRow("decoding", 40, (9,))]
    outcomes = runner.forward(rows)
    assert outcomes[:2] == [Prefilled(48), Prefilled(0)]
    assert isinstance(outcomes[2], torch.Tensor)


class Cached(NamedTuple):
    """The cached length of each prompt after a call."""

    lengths: list[int]
    taken_count: int
    """Prompt tokens computed by the call."""


def prefill(model: LoadedModel, lengths: Sequence[int], chunk_tokens: int, call_limit: int) -> list[Cached]:
    """Call until all prompts are cached; each call names all prompts, in order."""
    passes: list[PassSize] = []
    options = EngineOptions(kv_memory="4MiB", prefill_chunk_tokens=chunk_tokens, prefix_sharing=False)
    runner = Runner(model, options, on_pass=passes.append)
    cached, found = [0] * len(lengths), list[Cached]()
    while cached != list(lengths):
        assert len(found) < call_limit
        left = [number for number, length in enumerate(lengths) if cached[number] < length]
        runner.forward([PackedRow(str(n), cached[n], (n + 20,) * (lengths[n] - cached[n])) for n in left])
        cached = [runner.cache.length(str(n)) for n in range(len(lengths))]
        found.append(Cached(cached, passes[-1].prompt_token_count))
    return found


@pytest.mark.review
@pytest.mark.parametrize("chunk_tokens", [16, 48, 64])
def test_a_short_prompt_does_not_wait_for_a_long_one_before_it(model: LoadedModel, chunk_tokens: int) -> None:
    """Review B10: 60 tokens behind 32,768 waited 128 calls."""
    calls = prefill(model, [500, 60], chunk_tokens, 500 // chunk_tokens + 30)
    done = next(number for number, call in enumerate(calls, 1) if call.lengths[1] == 60)
    assert done <= -(-60 // (chunk_tokens - chunk_tokens // 4)) + 1


@pytest.mark.review
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(17, 300), min_size=1, max_size=5),
    chunk_tokens=st.integers(1, 128),
)
def test_the_first_prompt_always_goes_on_and_no_call_takes_more_than_the_chunk(
    model: LoadedModel, lengths: list[int], chunk_tokens: int
) -> None:
    """Review B10. The last tokens of a prompt, no more than a decoding row's, are outside the chunk."""
    before = [0] * len(lengths)
    for call in prefill(model, lengths, chunk_tokens, sum(lengths) + 1):
        first = next(n for n, length in enumerate(lengths) if before[n] < length)
        assert call.lengths[first] > before[first]
        assert call.taken_count <= chunk_tokens
        before = call.lengths


def test_equal_prompts_in_one_call_are_computed_once(model: LoadedModel) -> None:
    runner = Runner(model, EngineOptions(kv_memory="1MiB"))
    rows = [PackedRow(name, 0, (*PROMPT, number)) for number, name in enumerate("abc")]
    outcomes = runner.forward(rows)
    assert isinstance(outcomes[0], torch.Tensor)
    assert outcomes[1:] == [Prefilled(0), Prefilled(0)]
    assert all(isinstance(one, torch.Tensor) for one in runner.forward(rows[1:]))
    assert runner.describe().cache.shared_token_count == 2 * 32


def test_strict_numerics_need_the_paged_layout_where_rows_depend_on_each_other(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    model = load_model(str(pairs["Llama"].target), "float16")
    with pytest.raises(
        StartupError, match="--numerics strict cannot be had with --layout dense: .* take --layout paged"
    ):
        Runner(model, EngineOptions(numerics="strict", layout="dense"))


@pytest.mark.parametrize(("setting", "share"), [("50%", 0.5), ("100%", 1.0)])
def test_memory_may_be_a_share_of_what_is_free(
    model: LoadedModel, setting: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.memory.CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("3000000")
    (tmp_path / "memory.current").write_text("1000000\n")
    capacity_bytes = Runner(model, EngineOptions(kv_memory=setting)).describe().cache.capacity_bytes
    page_bytes = 16 * model.kv_shape.token_bytes
    assert share * 2_000_000 - page_bytes < capacity_bytes <= share * 2_000_000


@pytest.mark.parametrize("told", ["12.5", "-3", "many", ""])
def test_a_shortage_whose_size_is_no_number_has_none(told: str) -> None:
    """A peer's wrong number ended rounds of which some rows were committed."""
    assert CacheFull("full", {"missing_bytes": told}).missing_bytes == 0
