"""Passes of fixed shapes: they choose the same tokens as ragged passes, and never wait for the device midway."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from draft_service.drafter import Drafter
from paceline.engine.fixed_shapes.attention import GatheredBlocks, VarlenBlocks
from paceline.engine.fixed_shapes.choice import choose_rows
from paceline.engine.fixed_shapes.kernels import choose_kernel
from paceline.engine.fixed_shapes.passes import MAX_ROWS
from paceline.engine.fixed_shapes.rows import BlockBuffer, BlockRows, BlockShape, HostRow, fitting_shape
from paceline.engine.interfaces import KvShape
from paceline.engine.loading import load_model
from paceline.engine.model.model import LoadedModel
from paceline.engine.noise import signed64
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import PassSize, Runner
from paceline.engine.sampling import Choosing, choose
from paceline.errors import Overloaded, RuleUnknown
from paceline.types import ChoiceRule, Proposal, ProposeRow, SamplingParameters
from tests.checkpoints import FAMILIES, write_model
from tests.fakes.model_services import Clock

FIXED = EngineOptions(kv_memory="1MiB", page_tokens=4, fixed_shapes=True)
RAGGED = EngineOptions(kv_memory="1MiB", page_tokens=4)
SAMPLED = ChoiceRule(SamplingParameters(temperature=0.8), seed=2**63 + 11)
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::item", "aten::masked_select"}
"""Operators whose result the host must have before it can continue."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
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
        assert any(at_once.runner.drafts_at_once(row) for row in asked)
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
    """Review B11: beside the scratch page there are three pages; the long row takes two, and one is left."""
    page_bytes = 4 * model.kv_shape.token_bytes
    drafter = Drafter(Runner(model, EngineOptions(str(4 * page_bytes), page_tokens=4, fixed_shapes=True)))
    long, short = ProposeRow("long", 0, (5,), 8), ProposeRow("short", 0, (6, 7, 8), 2)
    together = drafter.propose([long, short])
    drafter.runner.release(["long", "short"])
    assert together == [*drafter.propose([long]), *drafter.propose([short])]


def test_a_rule_with_filters_or_penalties_goes_step_by_step(model: LoadedModel) -> None:
    runner = Runner(model, FIXED)
    for sampling in (SamplingParameters(0.8, top_k=3), SamplingParameters(presence_penalty=0.5)):
        assert not runner.drafts_at_once(ProposeRow("a", 0, (1, 2), 3, ChoiceRule(sampling)))
    assert not runner.drafts_at_once(ProposeRow("a", 0, tuple(range(17)), 3))
    assert not Runner(model, RAGGED).drafts_at_once(ProposeRow("a", 0, (1, 2), 3))


def test_a_row_without_room_for_its_drafts_fails_alone_and_keeps_its_cache(model: LoadedModel) -> None:
    page_bytes = 4 * model.kv_shape.token_bytes
    # Four pages and the scratch page.
    drafter = Drafter(Runner(model, EngineOptions(str(5 * page_bytes), page_tokens=4, fixed_shapes=True)))
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


@pytest.mark.parametrize("rule", [ChoiceRule(), SAMPLED], ids=["greedy", "sampled"])
def test_nothing_between_two_drafts_waits_for_the_device(
    model: LoadedModel, rule: ChoiceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = NoWaiting()

    def watched(work: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with watch:
                return work()

        return run

    monkeypatch.setattr("paceline.engine.fixed_shapes.passes.recorded", watched)
    runner = Runner(model, FIXED)
    (drafts,) = runner.draft([ProposeRow("a", 0, (5, 6, 7), 5, rule)])
    assert isinstance(drafts, list) and len(drafts) == 5
    runner.forward([PackedRow("a", 7, (9, 10, 11), 2)])
    assert watch.count > 100


def test_choices_of_many_rows_are_those_of_each_alone() -> None:
    torch.manual_seed(3)
    logits = torch.randn(40, 500)
    rules = [ChoiceRule(SamplingParameters(temperature=(0, 0.5, 1.3)[n % 3]), seed=7**n % 2**64) for n in range(40)]
    prefixes = [[1] * (n * 37 + 1) for n in range(40)]
    expected = choose([Choosing(logits[n : n + 1], rules[n], prefixes[n]) for n in range(40)])
    chosen = choose_rows(
        logits,
        torch.tensor([rule.sampling.temperature for rule in rules]),
        torch.tensor([signed64(rule.seed) for rule in rules]),
        torch.tensor([len(prefix) for prefix in prefixes]),
    )
    assert [[token] for token in chosen.tolist()] == expected


def test_shapes_hold_what_is_asked_and_end_where_decoding_does() -> None:
    assert fitting_shape(3, 5, longest_base=131, page_tokens=16) == BlockShape(4, 6, 16)
    assert fitting_shape(1, 1, longest_base=0, page_tokens=16) == BlockShape(1, 1, 8)
    assert fitting_shape(1, 1, longest_base=127, later_count=1, page_tokens=16) == BlockShape(1, 1, 16)
    assert fitting_shape(64, 16, longest_base=112, page_tokens=16) == BlockShape(64, 16, 8)
    assert fitting_shape(65, 1, longest_base=0, page_tokens=16) is None
    assert fitting_shape(1, 17, longest_base=0, page_tokens=16) is None


@pytest.mark.review  # B4
def test_padding_past_the_last_page_stays_within_the_table(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.fixed_shapes.passes.find_varlen", lambda: varlen_peer)
    fixed, ragged = (Runner(model, EngineOptions("1MiB", fixed_shapes=one)) for one in (True, False))
    prompt = tuple(range(20, 147))
    # 127 tokens are cached; the next one fills 8 pages of 16, and its row is padded to the other's 6 tokens.
    rows = [PackedRow("full", 127, (9,)), PackedRow("other", 0, (5, 6, 7, 8, 9, 10), 5)]
    outcomes = []
    for runner in (fixed, ragged):
        runner.forward([PackedRow("full", 0, prompt)])
        outcomes.append(runner.forward(rows))
    for one, other in zip(*outcomes, strict=True):
        assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_padding_is_written_to_the_scratch_page_only() -> None:
    buffer = BlockBuffer(BlockShape(4, 4, 8), scratch_page=9, device=torch.device("cpu"))
    buffer.fill([HostRow((1, 2, 3), 6, (5, 7, 2)), HostRow((4,), 0, (1,))])
    slots = buffer.rows.slots(page_tokens=4, scratch_page=9).view(4, 4)
    assert slots[0].tolist()[:3] == [7 * 4 + 2, 7 * 4 + 3, 2 * 4]
    assert slots[1, 0] == 4
    padding = [*slots[0, 3:], *slots[1, 1:], *slots[2], *slots[3]]
    assert all(slot // 4 == 9 for slot in padding)
    assert buffer.rows.last.tolist() == [2, 4, 8, 12]


def varlen_peer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Compute torch's documented `varlen_attn` with a block table in plain operations, a sequence at a time."""
    assert window_size == (-1, 0) and block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    outputs = []
    for row in range(len(seqused_k)):
        start, stop, length = int(cu_seq_q[row]), int(cu_seq_q[row + 1]), int(seqused_k[row])
        assert stop - start <= max_q and length <= max_k
        pages = block_table[row].long()
        keys, values = (one[pages].flatten(0, 1)[:length].transpose(0, 1) for one in (key, value))
        mask = torch.ones(stop - start, length, dtype=torch.bool).tril(length - (stop - start))
        attended = F.scaled_dot_product_attention(
            query[start:stop].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def test_the_variable_length_kernel_is_asked_for_what_gathering_gives() -> None:
    torch.manual_seed(1)
    table = torch.tensor([[5, 0, 3, 9], [1, 4, 9, 9], [9, 9, 9, 9]])
    block = BlockRows(torch.zeros((3, 3), dtype=torch.int64), torch.tensor([3, 1, 0]), torch.tensor([9, 2, 0]), table)
    keys, values, query = torch.randn(2, 40, 16), torch.randn(2, 40, 16), torch.randn(4, 9, 16)
    gathered = GatheredBlocks(block, 4)(query, keys, values, 0.25)
    varlen = VarlenBlocks(block, 4, varlen_peer)(query, keys, values, 0.25)
    # Results of padding differ and are unused.
    real = (torch.arange(3) < block.counts[:, None]).flatten()
    torch.testing.assert_close(varlen[:, real], gathered[:, real], atol=1e-6, rtol=1e-5)


@pytest.mark.review
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_a_released_page_held_reaches_no_row(number: float) -> None:
    """Review B3: behind a row's last token its page holds the previous owner's data."""
    torch.manual_seed(1)
    block = BlockRows(
        torch.zeros((1, 2), dtype=torch.int64), torch.tensor([1]), torch.tensor([4]), torch.tensor([[1, 0]])
    )
    keys, values, query = torch.randn(2, 8, 16), torch.randn(2, 8, 16), torch.randn(4, 2, 16)
    expected = GatheredBlocks(block, 4)(query, keys, values, 0.25)[:, 0]
    keys[:, 1:4], values[:, 1:4] = number, number
    assert torch.equal(GatheredBlocks(block, 4)(query, keys, values, 0.25)[:, 0], expected)


SHAPE = KvShape(2, 4, 2, 16, torch.float32, torch.device("cpu"))


def test_a_kernel_is_taken_only_when_it_does_what_gathering_does() -> None:
    def refuses(*_: Any, **__: Any) -> torch.Tensor:
        raise TypeError("no argument block_table")

    def is_wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return varlen_peer(*arguments, **options | {"block_table": options["block_table"].flip(1)})

    assert choose_kernel(SHAPE, 4, None) is GatheredBlocks
    assert choose_kernel(SHAPE, 4, refuses) is GatheredBlocks
    assert choose_kernel(SHAPE, 4, is_wrong) is GatheredBlocks
    assert choose_kernel(SHAPE, 4, varlen_peer) is not GatheredBlocks


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no memory"), RuntimeError("the device is gone")])
def test_drafts_that_could_not_be_made_leave_nothing_that_is_never_freed(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty sequences stayed, as did the rules of rows after the part that failed."""
    clock = Clock()
    runner = Runner(load_model("builtin:draft"), replace(FIXED, kv_memory="16MiB", sequence_ttl_s=10), clock)

    def fail(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(runner._passes, "draft", fail)
    with suppress(RuntimeError):
        Drafter(runner).propose([ProposeRow(str(n), 0, (300 + n,), 3, SAMPLED) for n in range(MAX_ROWS + 3)])
    assert runner.cache.sequence_count == 0
    clock.advance(20)
    runner.drop_idle()
    with pytest.raises(RuleUnknown):
        raise runner.ruled([ProposeRow(str(MAX_ROWS + 2), 0, (9,), 3, None)], "", lambda row: None)[1][0]
