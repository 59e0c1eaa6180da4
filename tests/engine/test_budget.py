"""The memory that an engine may use: a budget for all, and calls in parts whose results are those of the whole."""

import ctypes
import gc
import re
import subprocess
import sys
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace
from typing import Any
from weakref import ref

import psutil
import pytest
import torch

from benchmarks.chats import fitting
from paceline.engine import budget
from paceline.engine.backend import Backend
from paceline.engine.loading import load_model
from paceline.engine.memory import shares_of, taken_bytes
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import PassSize, Runner
from paceline.engine.sampling import Choosing, choose, ranked
from paceline.engine.scratch import Scratch
from paceline.engine.steps import StepRow, Steps
from paceline.errors import PacelineError, StartupError
from paceline.kv_memory import parse_memory
from paceline.model_service import serving
from paceline.planning.memory import MIB, PROCESS_BYTES, STARTED_BYTES, CallSize, choice_places
from paceline.process.ranks import Ranks
from paceline.types import GREEDY, ChoiceRule, Dtype, RankGrid, RankPlace, SamplingParameters, Verdict, VerifyRow
from paceline.wire import ServerOptions
from target_service.config import TargetSettings
from target_service.verifier import Verifier
from tests.conftest import PairOfCheckpoints
from tests.planning.pairs import BUILTIN
from tests.tools import built_kernels

MAPPED = """
import ctypes
from paceline.engine.memory import keep_free_lists_short

class Allocated(ctypes.Structure):
    _fields_ = (("before", ctypes.c_size_t * 4), ("mapped_bytes", ctypes.c_size_t), ("after", ctypes.c_size_t * 5))

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes, library.mallinfo2.restype = [ctypes.c_void_p], Allocated
keep_free_lists_short()
library.free(library.malloc(16 << 20))  # from which it would learn to keep blocks of this size
before = library.mallinfo2().mapped_bytes
block = library.malloc(8 << 20)
held = library.mallinfo2().mapped_bytes
library.free(block)
print(before, held, library.mallinfo2().mapped_bytes)
"""
"""Prints what the system has given as mappings: before, with, and after a block of 8 MiB. `mallinfo2` is glibc's."""
OPTIONS = EngineOptions(kv_memory="1MiB", page_tokens=4, max_rows=8, prefill_chunk_tokens=32)
DRAWN = ChoiceRule(SamplingParameters(temperature=0.9, top_p=0.9, repetition_penalty=1.2), seed=5)
ROWS = [
    VerifyRow(str(number), 0, tuple(range(9 + number, 14 + 2 * number)), (20, 21, 22)[:number], rule)
    for number, rule in enumerate((GREEDY, DRAWN, GREEDY, DRAWN))
]


def test_a_call_in_parts_gives_what_the_whole_call_gives(pairs: dict[str, PairOfCheckpoints]) -> None:
    model = load_model(str(pairs["Llama"].target))
    whole = Verifier(Runner(model, OPTIONS)).verify(ROWS)
    for logit_count in (1, 4, 7):
        sizes: list[PassSize] = []
        runner = Runner(model, OPTIONS, on_pass=sizes.append)
        runner.most_logits = logit_count
        assert Verifier(runner).verify(ROWS) == whole
        assert [size.row_count for size in sizes] == [len(ROWS[part]) for part in runner.parts([1, 2, 3, 4])]


def test_a_refused_row_keeps_nothing_of_its_call_until_the_garbage_collector_comes(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = load_model(str(pairs["Llama"].target)), list[ref[Choosing]]()
    small = replace(OPTIONS, kv_memory=str(64 * model.kv_shape.token_bytes), prefill_chunk_tokens=64)
    runner = Runner(model, small)
    verifier, choosing = Verifier(runner), runner.choosing

    def noted(*args: Any) -> Choosing:
        one = choosing(*args)
        made.append(ref(one))
        return one

    monkeypatch.setattr(runner, "choosing", noted)
    gc.disable()
    try:
        for refused in (VerifyRow("long", 0, (9,) * 64, (), GREEDY), VerifyRow("unknown", 7, (9,), (), GREEDY)):
            verdict, error = verifier.verify([ROWS[3], refused])
            assert isinstance(verdict, Verdict) and isinstance(error, PacelineError)
            assert len(made) == 1 and made.pop()() is None, f"{error.reason} holds the logits of its call"
    finally:
        gc.enable()


def test_parts_hold_all_rows_in_order_and_few_logits_or_one_row(pairs: dict[str, PairOfCheckpoints]) -> None:
    runner = Runner(load_model(str(pairs["Llama"].target)), OPTIONS)
    runner.most_logits = 6
    assert [*runner.parts([])] == [slice(0, 0)]
    assert [*runner.parts([3, 3, 1, 9, 2])] == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]


def test_steps_in_parts_choose_the_same(pairs: dict[str, PairOfCheckpoints]) -> None:
    model = load_model(str(pairs["Llama"].draft))
    rows = [StepRow(PackedRow(row.sequence_id, 0, row.token_ids), row.rule or GREEDY, 3) for row in ROWS]
    whole, runner = Steps(Runner(model, OPTIONS)).run(rows), Runner(model, OPTIONS)
    runner.most_logits = 1
    assert Steps(runner).run(rows) == whole


def test_choices_of_few_places_at_once_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((7, 50), generator=torch.Generator().manual_seed(3))
    following = (4, 9, 4, 30, 9, 1)
    plain = replace(DRAWN, sampling=SamplingParameters(temperature=0.9))
    sequences = [Choosing(logits[:, :], rule, (9, 4), following) for rule in (DRAWN, plain, GREEDY)]
    together, known = choose(sequences), ranked(sequences[1:2] * 3, 4)
    monkeypatch.setattr("paceline.planning.memory.CHOICE_LOGITS", 100)
    assert choice_places(50) == 2
    assert choose(sequences) == together
    assert ranked(sequences[1:2] * 3, 4) == known


def test_a_memory_for_all_leaves_the_cache_what_process_and_calls_do_not_take(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    built_kernels()
    model = load_model(str(pairs["Llama"].target))
    taken = taken_bytes(model.kv_shape.device)  # without what earlier tests have left
    runner = Runner(model, replace(OPTIONS, memory=f"{taken // MIB + 200}MiB"))
    assert 100 * MIB < runner.describe().cache.capacity_bytes < 250 * MIB


@pytest.mark.parametrize("budget_mib", [64, 256])
def test_the_memory_that_is_planned_leaves_the_cache_what_is_planned(
    budget_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan did not count what services leave free, so the smallest did not start."""
    chosen = fitting(BUILTIN, 128, 5, budget_mib * MIB).chosen(budget_mib * MIB)
    need, setting = chosen.target, chosen.setting
    loaded = SimpleNamespace(rss=PROCESS_BYTES - STARTED_BYTES + need.weights)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda process: loaded)
    call, form = CallSize.of_rows(setting.row_count, setting.chunk_tokens), BUILTIN.target_form(setting.int8)
    taken = taken_bytes(torch.device("cpu"))
    assert shares_of(f"{need.total}", taken, BUILTIN.target, form, call).kv_bytes >= need.kv


def test_with_short_free_lists_the_system_has_large_blocks_back_whatever_was_freed_before() -> None:
    """In a process of its own: a heap with room for a block would give that."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("another C library")
    found = subprocess.check_output([sys.executable, "-c", MAPPED], text=True)
    before, while_held, after = map(int, found.split())
    assert while_held >= before + 8 * MIB
    assert after == before


async def test_ranks_that_follow_keep_free_lists_short_too(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    async def follow(*_: object) -> None:
        done.append("follow")

    monkeypatch.setattr(serving, "keep_free_lists_short", lambda: done.append("short"))
    monkeypatch.setattr(serving, "engine_options", lambda _: OPTIONS)
    monkeypatch.setattr(serving, "follow", follow)
    settings: Any = SimpleNamespace(memory="1GiB")
    second: Any = SimpleNamespace(place=SimpleNamespace(rank=1))
    await serving.serve_model("target_service", settings, ServerOptions(), second, "", lambda *_: None)
    assert done == ["short", "follow"]


def test_a_memory_for_all_holds_the_work_of_all_calls_that_follow_each_other_through_stages(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache got what one call leaves, and a target over three stages took two calls' work more than its memory."""
    built_kernels()
    monkeypatch.setattr(budget, "taken_bytes", lambda device: 0)
    model, options = load_model(str(pairs["Llama"].target)), replace(OPTIONS, memory="200MiB")
    one, three = (budget.budget_of(model, replace(options, lanes=lanes)) for lanes in (1, 3))
    assert one.logit_count == three.logit_count
    work_bytes = 200 * MIB - one.kv_bytes
    assert work_bytes > 0
    assert 200 * MIB - three.kv_bytes == 3 * work_bytes


@pytest.mark.parametrize(("overlaps", "lanes"), [(True, 3), (False, 1)])
async def test_a_first_rank_counts_a_call_for_each_stage_that_calls_follow_each_other_through(
    overlaps: bool, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EngineOptions] = []

    def runner(model: Any, options: EngineOptions, **_: Any) -> Any:
        asked.append(options)
        raise StartupError("enough is known")

    model = SimpleNamespace(group=None, description=SimpleNamespace(device="cpu"))
    monkeypatch.setattr(serving, "share_loader", lambda *_: lambda *_: model)
    monkeypatch.setattr(serving, "Runner", runner)
    first = Ranks(RankPlace(grid=RankGrid(1, 3)), are_here=False)
    with pytest.raises(StartupError, match="enough"):
        await serving.serve_model(
            "target_service", TargetSettings(), ServerOptions(), first, "", lambda *_: None, overlaps=overlaps
        )
    assert [one.lanes for one in asked] == [lanes]


def test_a_memory_that_is_too_little_is_refused_with_what_would_do(pairs: dict[str, PairOfCheckpoints]) -> None:
    built_kernels()
    model = load_model(str(pairs["Llama"].target))
    with pytest.raises(StartupError, match="--memory 64MiB does not hold this model: ") as refused:
        Runner(model, replace(OPTIONS, memory="64MiB"))
    (least,) = re.findall(r"give at least (\d+MiB)", refused.value.message)
    assert parse_memory(least) > 64 * MIB


def test_a_model_without_the_sizes_is_refused_a_memory_for_all(pairs: dict[str, PairOfCheckpoints]) -> None:
    model = replace(load_model(str(pairs["Llama"].target)), dimensions=None)
    with pytest.raises(StartupError, match="give --kv-memory instead"):
        Runner(model, replace(OPTIONS, memory="64GiB"))


@pytest.mark.parametrize(
    "dtype, backend, words",
    [
        ("float32", Backend(), ("which are not there", "compiler")),
        ("float16", None, ("which do not run LlamaForCausalLM in float16", "for the cache alone")),
    ],
)
def test_a_memory_for_all_is_refused_where_torch_computes(
    dtype: Dtype,
    backend: Backend | None,
    words: tuple[str, str],
    pairs: dict[str, PairOfCheckpoints],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was taken, and not kept: oneDNN keeps what it made for each number of rows."""
    if backend:
        monkeypatch.setattr("paceline.engine.model.loader.find_backend", lambda device: backend)
    else:
        built_kernels()
    model = load_model(str(pairs["Llama"].target), dtype)
    reason, remedy = words
    with pytest.raises(StartupError, match=f"--memory 64GiB .*{reason}.*give --kv-memory instead.* {remedy}$"):
        Runner(model, replace(OPTIONS, memory="64GiB"))
    assert Runner(model, OPTIONS).cache


def test_rooms_are_used_again_and_grow_with_the_largest_result_alone() -> None:
    scratch = Scratch()
    small, other = scratch.room("a")((2, 3), torch.float32), scratch.room("b")((2, 3), torch.float32)
    large = scratch.room("a")((8, 3), torch.bfloat16)
    again = scratch.room("a")((4, 3), torch.float32)
    assert large.data_ptr() == again.data_ptr() and large.data_ptr() != other.data_ptr()
    assert (small.shape, large.dtype, again.shape) == ((2, 3), torch.bfloat16, (4, 3))
    found: list[torch.Tensor] = []
    thread = Thread(target=lambda: found.append(scratch.room("a")((4, 3), torch.float32)))
    thread.start()
    thread.join()
    assert found[0].data_ptr() != again.data_ptr()
