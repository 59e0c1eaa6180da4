"""Passes of fixed shapes: they choose the same tokens as ragged passes, and never wait for the device midway."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draft_service.drafter import Drafter
from paceline.engine.calls import Call
from paceline.engine.fixed_shapes.recording import Recorder
from paceline.engine.fixed_shapes.rows import BlockBuffer, BlockShape, HostRow, fitting_shape, most_rows
from paceline.engine.loading import load_model
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import PassSize, Runner
from paceline.engine.steps import StepRow, Steps
from paceline.errors import Overloaded, RuleUnknown, StartupError
from paceline.types import ChoiceRule, Proposal, ProposeRow, SamplingParameters
from tests.checkpoints import FAMILIES, write_model
from tests.fakes.device_kernels import models_of_a_device
from tests.fakes.model_services import Clock
from tests.tools import kernels_of_a_gpu

FIXED = EngineOptions(kv_memory="1MiB", page_tokens=4)
RAGGED = replace(FIXED, fixed_shapes=False)
SAMPLED = ChoiceRule(SamplingParameters(temperature=0.8), seed=2**63 + 11)
ROW_COUNT = most_rows(1) + 3
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::item", "aten::masked_select"}
"""Operators whose result the host must have before it can continue."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with models_of_a_device():
        return load_model(str(write_model(tmp_path_factory.mktemp("blocks"), request.param)))


def rows(draft_counts: tuple[int, ...], rules: tuple[ChoiceRule, ...]) -> list[ProposeRow]:
    prompts = [(9, 10, 11), tuple(range(20, 61)), (300,), (5, 6), tuple(range(30, 46))]
    return [
        ProposeRow(str(number), 0, prompt, draft_counts[number % len(draft_counts)], rules[number % len(rules)])
        for number, prompt in enumerate(prompts)
    ]


def later(row: ProposeRow, proposal: Proposal) -> ProposeRow:
    """Return the next round's row: two drafts were right, then comes a token of the target's."""
    kept = proposal.draft_token_ids[:2]
    base_length = min(proposal.cached_length, len(row.token_ids) + len(kept))
    tokens = (*row.token_ids, *kept, 17)
    return ProposeRow(row.sequence_id, base_length, tokens[base_length:], row.draft_count, row.rule)


@pytest.mark.parametrize(
    "rules", [(ChoiceRule(),), (SAMPLED,), (ChoiceRule(), SAMPLED)], ids=["greedy", "sampled", "both"]
)
def test_drafts_made_at_once_are_those_made_step_by_step(model: LoadedModel, rules: tuple[ChoiceRule, ...]) -> None:
    at_once, stepwise = Drafter(Runner(model, FIXED)), Drafter(Runner(model, RAGGED))
    asked = rows((5, 1, 3), rules)
    for _ in range(4):
        proposals, expected = at_once.propose(asked), stepwise.propose(asked)
        assert proposals == expected
        for row in asked:
            assert at_once.runner.cache.token_ids(row.sequence_id) == stepwise.runner.cache.token_ids(row.sequence_id)
        asked = [later(row, one) for row, one in zip(asked, proposals, strict=True) if isinstance(one, Proposal)]
        asked = [ProposeRow(row.sequence_id, row.base_length, row.token_ids, 4, row.rule) for row in asked]


@pytest.mark.review
def test_rows_that_want_different_counts_share_their_passes(model: LoadedModel) -> None:
    """Review B11: these counts once took 15 passes."""
    counts, passes = (5, 5, 4, 3, 5, 2, 1, 5), Counter[bool]()
    asked = [ProposeRow(str(number), 0, (5, 6, number), count) for number, count in enumerate(counts)]
    proposals = []
    for options in (FIXED, RAGGED):
        at_once = options is FIXED

        def count(_: PassSize, at_once: bool = at_once) -> None:
            passes[at_once] += 1

        drafter = Drafter(Runner(model, options, on_pass=count))
        proposals.append(drafter.propose(asked))
        assert passes[at_once] == max(counts)
        for row in asked:
            # A row with all its drafts holds no pages for drafts of others.
            assert drafter.runner.cache.length(row.sequence_id) == 3 + row.draft_count - 1
    assert proposals[0] == proposals[1]


@pytest.mark.review
def test_a_row_needs_room_for_its_own_drafts_only(model: LoadedModel) -> None:
    """Review B11: there are three pages; the long row takes two, and one is left."""
    page_bytes = 4 * model.kv_shape.token_bytes
    drafter = Drafter(Runner(model, replace(FIXED, kv_memory=str(3 * page_bytes))))
    long, short = ProposeRow("long", 0, (5,), 8), ProposeRow("short", 0, (6, 7, 8), 2)
    together = drafter.propose([long, short])
    drafter.runner.release(["long", "short"])
    assert together == [*drafter.propose([long]), *drafter.propose([short])]


def test_a_rule_that_knows_earlier_tokens_and_a_prompt_go_step_by_step(model: LoadedModel) -> None:
    def is_at_once(
        options: EngineOptions, sampling: SamplingParameters, token_count: int = 2, following: int = 0
    ) -> bool:
        row = PackedRow("a", 0, tuple(range(token_count)), following_count=following)
        return Steps(Runner(model, options)).can_run_at_once(StepRow(row, ChoiceRule(sampling), 3))

    assert is_at_once(FIXED, SamplingParameters(0.8, top_k=3, top_p=0.9, min_p=0.1), 16)
    assert not is_at_once(FIXED, SamplingParameters(0.5, presence_penalty=0.5))
    assert not is_at_once(FIXED, SamplingParameters(logit_bias=((4, 1.0),)))
    assert not is_at_once(FIXED, SamplingParameters(min_new_tokens=3))
    assert not is_at_once(FIXED, SamplingParameters(), 17)
    assert not is_at_once(FIXED, SamplingParameters(), following=1)
    assert not is_at_once(RAGGED, SamplingParameters())


def test_a_row_without_room_for_its_drafts_fails_alone_and_keeps_its_cache(model: LoadedModel) -> None:
    page_bytes = 4 * model.kv_shape.token_bytes
    drafter = Drafter(Runner(model, replace(FIXED, kv_memory=str(4 * page_bytes))))
    fits, big = ProposeRow("fits", 0, (1, 2, 3), 3), ProposeRow("big", 0, tuple(range(10, 18)), 3)
    first, second = drafter.propose([fits, big])
    assert isinstance(first, Proposal)
    assert isinstance(second, Overloaded)
    assert drafter.runner.cache.length("fits") == 5
    assert drafter.runner.cache.length("big") == 0
    drafter.runner.release(["fits"])
    assert drafter.runner.cache.describe().used_bytes == 0


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails on every operator that returns a number to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        assert func.name().partition(".")[0] not in WAITS, f"{func.name()} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # hashes overflow, as they are to
def test_nothing_between_two_steps_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = NoWaiting()

    def watched(recorder: Recorder, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with watch:
                return work()

        return run

    with kernels_of_a_gpu():
        # Small: every head and token takes the interpreter's time.
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 70}
        runner = Runner(load_model(str(write_model(tmp_path, "Llama", **heads, **sizes))), FIXED)
    monkeypatch.setattr(Recorder, "recorded", watched)
    rules = [ChoiceRule(), SAMPLED, ChoiceRule(SamplingParameters(0.8, top_k=9, top_p=0.9, min_p=0.01), 5)]
    rows = [StepRow(PackedRow(str(n), 0, (5,)), rule, 3) for n, rule in enumerate(rules)]
    outcomes = Steps(runner).run(rows)
    assert all(isinstance(one, list) and len(one) == 3 for one in outcomes)
    runner.forward([PackedRow("0", 3, (9, 10), 1)])
    assert watch.count > 100


def test_shapes_hold_what_is_asked() -> None:
    assert fitting_shape(3, 5, longest=131, page_tokens=16) == BlockShape(4, 6, 64)
    assert fitting_shape(1, 1, longest=1, page_tokens=16) == BlockShape(1, 1, 64)
    assert fitting_shape(1, 1, longest=1024, page_tokens=16) == BlockShape(1, 1, 64)
    assert fitting_shape(1, 1, longest=1025, page_tokens=16) == BlockShape(1, 1, 256)
    assert fitting_shape(32, 16, longest=112, page_tokens=100) == BlockShape(32, 16, 11)
    assert [most_rows(count) for count in (1, 6, 8, 9, 16)] == [64, 64, 64, 32, 32]


def test_more_rows_than_a_block_holds_run_in_parts(model: LoadedModel) -> None:
    options = replace(FIXED, kv_memory="16MiB")
    fixed, ragged = Runner(model, options), Runner(model, replace(options, fixed_shapes=False))
    rows = [PackedRow(str(n), 0, (9, *range(n % 12)), n % 3 % (n % 12 + 1)) for n in range(40)]
    for one, other in zip(fixed.forward(rows), ragged.forward(rows), strict=True):
        assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    asked = [ProposeRow(f"d{n}", 0, (9, *range(n % 12)), 2) for n in range(40)]
    assert Drafter(fixed).propose(asked) == Drafter(ragged).propose(asked)


@pytest.mark.review  # B4, B11
def test_a_prompt_runs_beside_recorded_rows_and_padding_stays_within_the_table(model: LoadedModel) -> None:
    fixed, ragged = (Runner(model, replace(FIXED, page_tokens=16, fixed_shapes=one)) for one in (True, False))
    prompt = tuple(range(20, 147))
    # 127 tokens are cached; the next one fills 8 pages of 16, and its row is padded to another's 6 tokens.
    rows = [
        PackedRow("full", 127, (9,)),
        PackedRow("prompt", 0, prompt[:40]),
        PackedRow("other", 0, (5, 6, 7, 8, 9, 10), 5),
    ]
    outcomes = []
    for runner in (fixed, ragged):
        runner.forward([PackedRow("full", 0, prompt)])
        outcomes.append(runner.forward(rows))
    for one, other in zip(*outcomes, strict=True):
        assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_padding_is_stored_nowhere() -> None:
    buffer = BlockBuffer(BlockShape(4, 4, 8), device=torch.device("cpu"))
    buffer.fill([HostRow((1, 2, 3), 6, (5, 7, 2)), HostRow((4,), 0, (1,))])
    slots = buffer.rows.slots(page_tokens=4).view(4, 4)
    assert slots[0].tolist() == [7 * 4 + 2, 7 * 4 + 3, 2 * 4, -1]
    assert slots[1].tolist() == [4, -1, -1, -1]
    assert (slots[2:] == -1).all()
    assert buffer.rows.last.tolist() == [2, 4, 8, 12]


def test_likely_shapes_are_recorded_at_start_and_the_first_calls_record_none(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []

    def record(recorder: Recorder, work: Any) -> Any:
        recorded.append(work)
        return work

    monkeypatch.setattr(Recorder, "recorded", record)
    for steps in (False, True):
        runner = Runner(model, replace(FIXED, takes_steps=steps))
        runner.record()
        recorded.clear()
        if steps:
            Drafter(runner).propose([ProposeRow("a", 0, (5, 6), 3), ProposeRow("b", 0, (5,), 5)])
        else:
            runner.forward([PackedRow("a", 0, (5, 6)), PackedRow("b", 0, (5, 6, 7, 8, 9, 10), 5)])
        assert not recorded


def spoilt_by(first: Exception) -> Exception:
    """Return what the end of a recording raises that another error has spoilt."""
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = first
    return error


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (torch.OutOfMemoryError("no memory"), True),
        (spoilt_by(torch.OutOfMemoryError("no memory")), True),
        (RuntimeError("not permitted when stream is capturing"), False),
        (spoilt_by(RuntimeError("not permitted when stream is capturing")), False),
    ],
)
def test_a_cache_that_leaves_no_memory_for_recorded_passes_does_not_start_and_names_the_setting(
    error: Exception, is_refused: bool, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It started, and launched its passes kernel by kernel for as long as they found memory."""

    def fail(recorder: Recorder, work: Any) -> Any:
        raise error

    monkeypatch.setattr(Recorder, "_graph", fail)
    runner = Runner(model, FIXED)
    recorder: Any = vars(runner.passes)["_recorder"]
    monkeypatch.setattr(recorder, "_can_record", True)
    words = "--kv-memory 1MiB leaves no memory for passes that are recorded"
    with pytest.raises(StartupError, match=words) if is_refused else nullcontext():
        runner.record()


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no memory"), RuntimeError("the device is gone")])
def test_drafts_that_could_not_be_made_leave_nothing_that_is_never_freed(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty sequences stayed, as did the rules of rows after the part that failed."""
    clock = Clock()
    with models_of_a_device():
        runner = Runner(load_model("builtin:draft"), replace(FIXED, kv_memory="16MiB", sequence_ttl_s=10), clock)

    def fail(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(runner.passes, "steps", fail)
    with suppress(RuntimeError):
        Drafter(runner).propose([ProposeRow(str(n), 0, (300 + n,), 3, SAMPLED) for n in range(ROW_COUNT)])
    assert runner.cache.sequence_count == 0
    clock.advance(20)
    runner.drop_idle()
    with pytest.raises(RuleUnknown):
        row = ProposeRow(str(ROW_COUNT - 1), 0, (9,), 3, None)
        raise runner.ruled([Call([row])], lambda row: None).results([])[0][0]
