"""Further rounds in the engine: what heads drafted is verified in the same call, as in a call of its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.checks import MAX_FURTHER_COUNT
from paceline.engine.cache.paged import KvPool
from paceline.engine.calls import Call
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Outcome, Runner
from paceline.engine.sampling import Choosing
from paceline.errors import CacheFull, InvalidRequest
from paceline.scope import Caller
from paceline.types import GREEDY, ChoiceRule, SamplingParameters, Verdict, VerifyRow
from target_service.verifier import Verifier
from tests.conftest import PairOfCheckpoints
from tests.engine.test_heads import OPTIONS, PROMPT, verified, verifier_with
from tests.heads import DRAFT_COUNT, write_random_heads

ROW = VerifyRow("a", 0, PROMPT, (), propose_count=DRAFT_COUNT)

SAMPLED = ChoiceRule(SamplingParameters(temperature=1.0), seed=7)


@pytest.mark.parametrize("further_count", [1, 3])
@pytest.mark.parametrize(
    "rule", [GREEDY, ChoiceRule(SamplingParameters(temperature=1.0), seed=7)], ids=["greedy", "sampled"]
)
def test_further_rounds_give_what_calls_of_their_own_give(
    rule: ChoiceRule, further_count: int, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs["Llama"].target
    folder = write_random_heads(tmp_path / "heads", "eagle", target)
    expected = []
    alone = verifier_with(folder, target)
    (verdict,) = verified(alone, VerifyRow("a", 0, PROMPT, (), rule, 2, propose_count=DRAFT_COUNT))
    for _ in range(further_count + 1):
        expected.append(verdict)
        drafts = verdict.draft_token_ids
        row = VerifyRow(
            "a", verdict.cached_length, (verdict.next_token_id,), drafts, None, 2, propose_count=DRAFT_COUNT
        )
        (verdict,) = verified(alone, row)
    together = verifier_with(folder, target)
    rows = [
        VerifyRow("a", 0, PROMPT, (), rule, 2, propose_count=DRAFT_COUNT, further_count=further_count),
        VerifyRow("b", 0, PROMPT[:7], (), rule, propose_count=DRAFT_COUNT),
        VerifyRow("c", 0, PROMPT[:9], (), rule, further_count=further_count),
    ]
    first, unasked, undrafted = verified(together, *rows)
    assert [replace(first, further=()), *first.further] == expected
    assert together.runner.cache.length("a") == expected[-1].cached_length
    assert not unasked.further
    assert [one.next_token_id for one in (undrafted, *undrafted.further)] == _plain(alone, rows[2], further_count + 1)


def _plain(verifier: Verifier, row: VerifyRow, count: int) -> list[int]:
    """Return the tokens of so many rounds without drafts, each in a call of its own."""
    found: list[int] = []
    for _ in range(count):
        (verdict,) = verified(verifier, replace(row, further_count=0))
        found.append(verdict.next_token_id)
        row = replace(row, base_length=verdict.cached_length, token_ids=(verdict.next_token_id,))
    return found


def test_none_runs_where_calls_of_several_callers_share_a_pass(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    """A caller that asked for one round waited for the further ones of the others."""
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "eagle", target), target)
    calls = [
        Call([replace(ROW, sequence_id="a", token_ids=PROMPT[:9], further_count=3)], Caller("one")),
        Call([replace(ROW, sequence_id="b", token_ids=PROMPT[:9])], Caller("other")),
    ]
    (first,), (second,) = verifier.verify_calls(calls)
    assert isinstance(first, Verdict) and isinstance(second, Verdict)
    assert not first.further
    assert first == second


def test_no_further_round_begins_where_its_drafts_have_no_place(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "eagle", target), target)
    limits = replace(verifier.runner.limits, cache_max_length=len(PROMPT) + DRAFT_COUNT)
    monkeypatch.setattr(Runner, "limits", limits)
    (verdict,) = verified(verifier, VerifyRow("a", 0, PROMPT, (), propose_count=DRAFT_COUNT, further_count=1))
    assert len(verdict.draft_token_ids) == DRAFT_COUNT and not verdict.further


def test_a_further_round_without_room_in_the_cache_costs_nothing_of_the_first(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "eagle", target), target)
    (expected,) = verified(verifier, ROW)
    verifier.runner.release(["a"])
    forward = verifier.runner.forward
    monkeypatch.setattr(
        verifier.runner,
        "forward",
        lambda rows: [CacheFull("full")] if rows[0].base_length else forward(rows),
    )
    (verdict,) = verified(verifier, replace(ROW, further_count=1))
    assert replace(verdict, reused_count=0) == expected


@pytest.mark.parametrize("count", [-1, MAX_FURTHER_COUNT + 1])
def test_too_many_further_rounds_are_refused(count: int, pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "eagle", target), target)
    (refused,) = verifier.verify([VerifyRow("a", 0, PROMPT, (), propose_count=2, further_count=count)])
    assert isinstance(refused, InvalidRequest) and refused.field == "further_count"


def test_further_rounds_hold_no_more_logits_at_once_than_others(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of the first pass ran in one further one, which wants several times their logits."""
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "eagle", target), target)
    runner, counts = verifier.runner, list[int]()
    monkeypatch.setattr(runner, "most_logits", 8)
    forward = runner.forward

    def counted(rows: Sequence[PackedRow]) -> list[Outcome]:
        counts.append(sum(one.logit_count for one in rows))
        return forward(rows)

    monkeypatch.setattr(runner, "forward", counted)
    rows = [replace(ROW, sequence_id=f"s{at}", token_ids=PROMPT[at : at + 8], further_count=1) for at in range(6)]
    assert all(one.further for one in verified(verifier, *rows))
    assert counts[0] == 6 and len(counts) > 2 and max(counts) <= 8


def test_memory_that_runs_out_in_a_further_round_costs_nothing_of_the_first(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "eagle", target), target)
    choose = verifier.runner.choose

    def run_out(choosing: Sequence[Choosing]) -> object:
        if len(choosing[0].logits) > 1:
            raise torch.OutOfMemoryError
        return choose(choosing)

    monkeypatch.setattr(verifier.runner, "choose", run_out)
    (verdict,) = verified(verifier, replace(ROW, further_count=1))
    assert verdict.draft_token_ids and not verdict.further


def test_a_cache_given_up_before_a_further_round_is_told_in_the_next_call(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one notice was used up, so the coordinator sent the whole text at once in place of waiting for room.

    Another caller's pass may come between two of a call where a target has stages.
    """
    target = pairs["Llama"].target
    folder = write_random_heads(tmp_path / "heads", "eagle", target)
    pool = verifier_with(folder, target).runner.cache
    assert isinstance(pool, KvPool)
    options = replace(OPTIONS, kv_memory=str(14 * pool.least_bytes), prefix_sharing=False)
    verifier = verifier_with(folder, target, options)
    runner, older, younger = verifier.runner, Caller("older"), Caller("younger")
    verifier.verify_calls([Call([replace(ROW, sequence_id="older", token_ids=PROMPT[:28])], older)])
    forward = runner.forward

    def after_others(rows: Sequence[PackedRow]) -> list[Outcome]:
        if rows[0].base_length:
            monkeypatch.setattr(runner, "forward", forward)
            while runner.cache.length("younger"):
                row = VerifyRow("older", runner.cache.length("older"), PROMPT[:4], ())
                verifier.verify_calls([Call([row], older)])
        return forward(rows)

    monkeypatch.setattr(runner, "forward", after_others)
    row = replace(ROW, sequence_id="younger", token_ids=PROMPT[5:33], further_count=1)
    ((first,),) = verifier.verify_calls([Call([row], younger)])
    assert isinstance(first, Verdict) and not first.further and not runner.cache.length("younger")
    next_row = replace(row, base_length=first.cached_length, token_ids=(first.next_token_id,))
    ((refused,),) = verifier.verify_calls([Call([next_row], younger)])
    assert isinstance(refused, CacheFull) and refused.gave_cache_up
