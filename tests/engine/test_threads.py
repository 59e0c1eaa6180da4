"""A pass is shared among threads if a layer is enough work; the caller's thread count stays unchanged."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch.overrides import TorchFunctionMode

from paceline.engine import threads
from paceline.engine.interfaces import Attention
from paceline.engine.loading import load_model
from paceline.engine.model.decoder import Decoder
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.engine.sampling import Choosing, choose
from paceline.engine.threads import (
    READING_TOKENS,
    SHARED_LOGITS,
    SHARED_WORK,
    at_most,
    choice_threads,
    kernel_threads,
    kernels_alone,
    pass_threads,
)
from paceline.types import GREEDY, VerifyRow
from target_service.verifier import LONG_PROMPT, Verifier
from tests.conftest import PairOfCheckpoints


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Watched:
    """A decoder that notes how many threads each pass may use."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.kernels, self.is_row_independent = decoder.kernels, decoder.is_row_independent
        self.shares_work = False
        self.thread_counts: list[int] = []

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        self.thread_counts.append(torch.get_num_threads())
        return self._decoder.logits(token_ids, positions, wanted, attention)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("parameter_count", "token_count", "expected"),
    [
        pytest.param(1_000_000, 24, 1, id="little work"),
        pytest.param(1_000_000, 25, 2, id="many tokens"),
        pytest.param(SHARED_WORK // READING_TOKENS + 1, 1, 2, id="one token, but weights that take long to read"),
        pytest.param(SHARED_WORK // READING_TOKENS, 1, 1, id="one token, small weights"),
    ],
)
def test_threads_follow_the_work_of_a_layer(parameter_count: int, token_count: int, expected: int) -> None:
    with pass_threads(parameter_count, token_count):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_failed_pass_leaves_the_threads_as_they_were() -> None:
    with pytest.raises(ZeroDivisionError), pass_threads(1, 1):
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_compiled_pass_leaves_all_threads_to_its_kernels() -> None:
    with kernels_alone():
        assert (torch.get_num_threads(), kernel_threads()) == (1, 2)
    assert (torch.get_num_threads(), kernel_threads()) == (2, 2)
    with kernels_alone(), kernels_alone():
        assert (torch.get_num_threads(), kernel_threads()) == (1, 2)
    with at_most(1), kernels_alone():
        assert kernel_threads() == 1
    with pytest.raises(ZeroDivisionError), kernels_alone():
        1 / 0  # noqa: B018
    assert (torch.get_num_threads(), kernel_threads()) == (2, 2)


def test_one_allowed_thread_stays_one() -> None:
    assert torch.get_num_threads() == 1
    with pass_threads(10**9, 100):
        assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("two_threads")
def test_a_prompt_is_shared_out_and_a_decoded_token_is_not(pairs: dict[str, PairOfCheckpoints]) -> None:
    loaded = load_model(str(pairs["Llama"].target))
    long_count = SHARED_WORK // loaded.layer_parameter_count + 1
    watched = Watched(loaded.decoder)
    runner = Runner(replace(loaded, decoder=watched), EngineOptions(kv_memory="64MiB", prefill_chunk_tokens=long_count))
    prompt = tuple(1 + number % 50 for number in range(long_count))
    runner.forward([PackedRow("a", 0, prompt)])
    runner.forward([PackedRow("a", long_count, (7,))])
    assert watched.thread_counts == [2, 1]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("numerics", "is_independent", "thread_counts"),
    [("fast", False, [2, 1, 2, 2]), ("strict", False, [1, 1, 1, 1]), ("strict", True, [2, 1, 2, 2])],
)
def test_a_call_leaves_cores_to_the_draft_where_it_verifies_its_drafts_or_where_threads_change_strict_results(
    numerics: Literal["fast", "strict"],
    is_independent: bool,
    thread_counts: list[int],
    pairs: dict[str, PairOfCheckpoints],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "SHARED_WORK", 1)
    loaded = load_model(str(pairs["Llama"].target))
    watched = Watched(loaded.decoder)
    watched.is_row_independent = lambda layout: is_independent
    runner = Runner(replace(loaded, decoder=watched), EngineOptions(kv_memory="64MiB", numerics=numerics))
    verifier = Verifier(runner, threads_beside_draft=1)
    long_prompt, counts = (1,) * (LONG_PROMPT + 1), list[int]()
    for sequence_id, prompt, drafts, is_without_model in (
        ("a", (1, 2, 3), (), False),
        ("b", (1, 2, 3), (1,), False),
        ("c", (1, 2, 3), (1,), True),
        ("d", long_prompt, (1,), False),
    ):
        row = VerifyRow(sequence_id, 0, prompt, drafts, GREEDY, draft_is_idle=is_without_model)
        watched.thread_counts.clear()
        verifier.verify([row])
        counts.extend(set(watched.thread_counts))
    assert counts == thread_counts
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_choices_among_few_logits_wake_no_other_thread() -> None:
    """`max` shares out the fewest rows, and idle threads would spin on a core that the draft needs."""
    with choice_threads(SHARED_LOGITS - 1):
        assert torch.get_num_threads() == 1
    with choice_threads(SHARED_LOGITS):
        assert torch.get_num_threads() == 2
    with _Noting() as noting:
        assert choose([Choosing(torch.zeros(6, 4096), GREEDY, prefix=(1,), following=(1,) * 5)]) == [[0] * 6]
    assert ("max", 1) in noting.calls
    assert ("max", 2) not in noting.calls


class _Noting(TorchFunctionMode):
    """Notes how many threads each function of torch may use."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.append((func.__name__, torch.get_num_threads()))
        return func(*args, **(kwargs or {}))
