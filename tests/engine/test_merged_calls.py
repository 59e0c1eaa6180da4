"""Calls of several callers in one pass: each gets what it would have alone, and room and chunk are shared fairly."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from draft_service.drafter import Drafter
from paceline.checks import MAX_DRAFT_COUNT
from paceline.engine.calls import Call
from paceline.engine.loading import load_model
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.owners import IDLE_S, PATIENCE_S
from paceline.engine.passes import Piece
from paceline.engine.runner import PassSize, Runner
from paceline.errors import CacheFull, DuplicateSequence, InvalidRequest, PacelineError, PrefixNotCached, RuleUnknown
from paceline.scope import Caller
from paceline.types import Prefilled, ProposeRow, SamplingParameters, Verdict, VerifyOutcome, VerifyRow
from paceline.types.sampling import ChoiceRule
from target_service.verifier import Verifier
from tests.conftest import PairOfCheckpoints
from tests.fakes.model_services import Clock

OLD, YOUNG, OTHER = Caller("old"), Caller("young"), Caller("other", "scope/")
PROMPT = tuple(range(20, 60))
SAMPLED = ChoiceRule(SamplingParameters(temperature=1.0), seed=7)


@pytest.fixture(scope="module")
def model(pairs: dict[str, PairOfCheckpoints]) -> LoadedModel:
    return load_model(str(pairs["Llama"].target))


def runner_of(
    model: LoadedModel, pages: int = 200, chunk_tokens: int = 64, clock: Callable[[], float] = time.monotonic
) -> Runner:
    page_tokens = 4
    kv_memory = str(pages * page_tokens * model.kv_shape.token_bytes)
    return Runner(
        model,
        EngineOptions(
            kv_memory=kv_memory,
            page_tokens=page_tokens,
            prefill_chunk_tokens=chunk_tokens,
            numerics="strict",
            prefix_sharing=False,
        ),
        clock,
    )


CALLS = [
    Call(
        [
            VerifyRow("a", 0, PROMPT[:9], (5, 6), SAMPLED),
            VerifyRow("unknown", 4, (9,), ()),
            VerifyRow("a", 0, (9,), ()),
        ],
        OLD,
    ),
    Call([VerifyRow("no rule", 0, (9,), (), None), VerifyRow("b", 0, PROMPT[3:6], (7, 8, 9))], YOUNG),
    Call([VerifyRow("a", 0, PROMPT[5:7], (1,))], OTHER),
]


def test_a_calls_results_are_those_that_it_has_alone(model: LoadedModel) -> None:
    together = Verifier(runner_of(model)).verify_calls(CALLS)
    alone = [Verifier(runner_of(model)).verify_calls([call])[0] for call in CALLS]
    assert [[one for one in results if isinstance(one, Verdict)] for results in together] == [
        [one for one in results if isinstance(one, Verdict)] for results in alone
    ]
    assert [list(map(type, results)) for results in together] == [
        [Verdict, PrefixNotCached, DuplicateSequence],
        [RuleUnknown, Verdict],
        [Verdict],
    ]


def test_a_calls_proposals_are_those_that_it_has_alone(model: LoadedModel) -> None:
    calls = [
        Call([ProposeRow("a", 0, PROMPT[:9], 4, SAMPLED), ProposeRow("b", 0, PROMPT[3:6], 1)], OLD),
        Call([ProposeRow("unknown", 4, (9,), 2)], YOUNG),
        Call([ProposeRow("a", 0, PROMPT[5:7], 6)], OTHER),
    ]
    together = Drafter(runner_of(model)).propose_calls(calls)
    alone = [Drafter(runner_of(model)).propose_calls([call])[0] for call in calls]
    assert (together[0], together[2]) == (alone[0], alone[2])
    assert isinstance(together[1][0], PrefixNotCached)


def test_callers_have_equal_parts_of_the_chunk_and_what_one_leaves_goes_to_others(model: LoadedModel) -> None:
    def lengths(*prompts: tuple[Caller, Sequence[int]]) -> list[int]:
        calls = [
            Call([VerifyRow(str(number), 0, tuple(prompt), (), following_count=1)], caller)
            for number, (caller, prompt) in enumerate(prompts)
        ]
        results = Verifier(runner_of(model, chunk_tokens=48)).verify_calls(calls)
        return [one.cached_length for (one,) in results if isinstance(one, Prefilled)]

    long = PROMPT * 3
    assert lengths((OLD, long)) == [48]
    assert lengths((OLD, long), (YOUNG, long[1:])) == [24, 24]
    first, others, second = lengths((OLD, long), (YOUNG, long[1:]), (OLD, long[2:]))
    assert others == 24 and first > 0 and second > 0 and first + second <= 24
    assert lengths((OLD, PROMPT[:20]), (YOUNG, long)) == [20, 28]


def held(runner: Runner, *sequence_ids: str) -> list[int]:
    return [runner.cache.length(one) for one in sequence_ids]


def prompt(caller: Caller, name: str, count: int) -> Call[VerifyRow]:
    return Call([VerifyRow(name, 0, tuple(range(5, 5 + count)), ())], caller)


def grow(caller: Caller, name: str, base_length: int, count: int) -> Call[VerifyRow]:
    return Call([VerifyRow(name, base_length, tuple(range(40, 40 + count)), ())], caller)


@pytest.mark.parametrize("is_scored", [False, True])
def test_a_light_callers_scored_prompt_takes_no_more_than_its_part_of_the_chunk(
    model: LoadedModel, is_scored: bool
) -> None:
    """Scored tokens were shared evenly and the chunk by weight: what was left for the caller's other prompts was
    below 0, which ran them nearly whole."""
    sizes = list[PassSize]()
    runner = Runner(model, EngineOptions(kv_memory="16MiB", prefill_chunk_tokens=64), on_pass=sizes.append)
    first = VerifyRow("first", 0, PROMPT * 8, (), top_logprob_count=0, scores_tokens=True)
    second = VerifyRow("second", 0, PROMPT[1:] * 6, (), top_logprob_count=0, scores_tokens=is_scored)
    light = Call([first, second], Caller("light", "light/", 1.0))
    heavy = Call([VerifyRow("heavy", 0, PROMPT[::-1] * 8, ())], Caller("heavy", "heavy/", 10.0))
    results = Verifier(runner).verify_calls([light, heavy])
    assert all(isinstance(one, Prefilled) for rows in results for one in rows)
    assert [one.token_count for one in sizes if one.token_count > 64] == []


def test_a_row_with_more_drafts_than_a_round_has_is_refused(model: LoadedModel) -> None:
    """Their logits are held together, whatever memory was planned for."""
    most, more = (VerifyRow("a", 0, (5,), (7,) * count) for count in (MAX_DRAFT_COUNT, MAX_DRAFT_COUNT + 1))
    verifier = Verifier(runner_of(model))
    (refused,) = verifier.verify([more])
    assert isinstance(refused, InvalidRequest) and refused.field == "draft_token_ids"
    assert isinstance(verifier.verify([most])[0], Verdict)


def test_the_youngest_sequence_of_all_gives_its_cache_up_and_is_told_once(model: LoadedModel) -> None:
    runner = runner_of(model, pages=10)
    verifier = Verifier(runner)
    for call in (prompt(OLD, "1", 12), prompt(YOUNG, "2", 12), prompt(YOUNG, "3", 12)):
        verifier.verify_calls([call])
    assert isinstance(verifier.verify_calls([grow(OLD, "1", 12, 8)])[0][0], Verdict)
    assert held(runner, "1", "2", "3") == [20, 12, 0]
    (refused,) = verifier.verify_calls([grow(YOUNG, "3", 12, 1)])[0]
    assert isinstance(refused, CacheFull) and refused.gave_cache_up and refused.missing_bytes
    (gone,) = verifier.verify_calls([grow(YOUNG, "3", 12, 1)])[0]
    assert isinstance(gone, PrefixNotCached)
    (whole,) = verifier.verify_calls([prompt(YOUNG, "3", 8)])[0]
    assert isinstance(whole, Verdict)


def test_a_sequence_keeps_its_age_when_it_gives_its_cache_up(model: LoadedModel) -> None:
    runner = runner_of(model, pages=6)
    verifier = Verifier(runner)
    for call in (prompt(OLD, "1", 12), prompt(YOUNG, "2", 8), grow(OLD, "1", 12, 8)):
        verifier.verify_calls([call])
    assert held(runner, "1", "2") == [20, 0]
    runner.release(["1"])
    verifier.verify_calls([prompt(OLD, "3", 12)])
    assert isinstance(verifier.verify_calls([prompt(YOUNG, "2", 16)])[0][0], Verdict)
    assert held(runner, "2", "3") == [16, 0]


def test_the_youngest_gives_way_in_the_same_pass_whatever_the_order_of_the_calls(model: LoadedModel) -> None:
    runner = runner_of(model, pages=6)
    verifier = Verifier(runner)
    verifier.verify_calls([prompt(OLD, "1", 12), prompt(YOUNG, "2", 12)])
    (young,), (old,) = verifier.verify_calls([grow(YOUNG, "2", 12, 1), grow(OLD, "1", 12, 1)])
    assert isinstance(old, Verdict)
    assert isinstance(young, CacheFull) and young.gave_cache_up
    assert held(runner, "1", "2") == [13, 0]


def test_between_its_own_sequences_a_caller_decides(model: LoadedModel) -> None:
    runner = runner_of(model, pages=6)
    verifier = Verifier(runner)
    verifier.verify_calls([prompt(YOUNG, "0", 4)])
    verifier.verify_calls([prompt(OLD, "1", 12)])
    verifier.verify_calls([prompt(OLD, "2", 8)])
    (refused,) = verifier.verify_calls([grow(OLD, "1", 12, 1)])[0]
    assert isinstance(refused, CacheFull) and not refused.gave_cache_up
    assert held(runner, "0", "1", "2") == [4, 12, 8]


def test_a_caller_with_less_than_half_its_share_takes_from_those_with_more(model: LoadedModel) -> None:
    runner = runner_of(model, pages=8)
    verifier = Verifier(runner)
    for name in ("1", "2"):
        verifier.verify_calls([prompt(OLD, name, 16)])
    assert isinstance(verifier.verify_calls([prompt(YOUNG, "3", 8)])[0][0], Verdict)
    assert held(runner, "1", "2", "3") == [16, 0, 8]
    (refused,) = verifier.verify_calls([prompt(OLD, "2", 16)])[0]
    assert isinstance(refused, CacheFull) and held(runner, "3") == [8], "nor does it lose that to them"


@pytest.mark.parametrize(
    ("old_weight", "young_weight", "young_tokens", "is_certain"),
    [(1, 1, 8, True), (1, 1, 12, False), (1, 3, 12, True), (1, 3, 16, False), (3, 1, 4, True), (3, 1, 8, False)],
)
def test_what_is_certain_to_a_caller_goes_by_its_weight(
    old_weight: float, young_weight: float, young_tokens: int, is_certain: bool, model: LoadedModel
) -> None:
    """Half of the cache of 32 tokens is certain to both together."""
    old, young = replace(OLD, weight=old_weight), replace(YOUNG, weight=young_weight)
    runner, old_tokens = runner_of(model, pages=8), 32 - young_tokens
    verifier = Verifier(runner)
    verifier.verify_calls([prompt(old, "1", old_tokens)])
    verifier.verify_calls([prompt(young, "2", young_tokens)])
    (result,) = verifier.verify_calls([grow(old, "1", old_tokens, 1)])[0]
    assert isinstance(result, CacheFull if is_certain else Verdict)
    assert held(runner, "2") == [young_tokens if is_certain else 0]


@pytest.mark.parametrize("dead_tokens", [8, 24], ids=["within its certain share", "beyond it"])
def test_what_nobody_named_for_long_gives_way_whatever_its_age(model: LoadedModel, dead_tokens: int) -> None:
    """A coordinator that was killed frees nothing: its sequences are older than all that come after it."""
    clock = Clock()
    runner = runner_of(model, pages=10, clock=clock)
    verifier = Verifier(runner)
    verifier.verify_calls([prompt(OLD, "1", dead_tokens)])
    verifier.verify_calls([prompt(YOUNG, "2", 12)])
    clock.advance(IDLE_S)
    longer = 36 - dead_tokens
    (refused,) = verifier.verify_calls([grow(YOUNG, "2", 12, longer)])[0]
    assert isinstance(refused, CacheFull) and not refused.gave_cache_up
    clock.advance(1)
    assert isinstance(verifier.verify_calls([grow(YOUNG, "2", 12, longer)])[0][0], Verdict)
    assert held(runner, "1", "2") == [0, 12 + longer]
    (told,) = verifier.verify_calls([grow(OLD, "1", dead_tokens, 1)])[0]
    assert isinstance(told, CacheFull) and told.gave_cache_up


def test_who_lacked_room_for_long_gets_it_before_what_others_are_certain_of(model: LoadedModel) -> None:
    """A sequence of more than others left waited for as long as these had work, and lost all that it had to them."""
    clock = Clock()
    runner = runner_of(model, pages=8, clock=clock)
    verifier = Verifier(runner)

    def asked(call: Call[VerifyRow]) -> VerifyOutcome | PacelineError:
        ((result,),) = verifier.verify_calls([call])
        return result

    asked(prompt(OLD, "1", 24))
    asked(prompt(YOUNG, "2", 8))
    for _ in range(4):
        refused = asked(grow(OLD, "1", 24, 1))
        assert isinstance(refused, CacheFull) and not refused.gave_cache_up
        assert isinstance(asked(grow(YOUNG, "2", 7, 1)), Verdict)
        clock.advance(PATIENCE_S / 4)
    clock.advance(1)
    assert isinstance(asked(grow(OLD, "1", 24, 1)), Verdict)
    assert held(runner, "1", "2") == [25, 0]
    told = asked(grow(YOUNG, "2", 8, 1))
    assert isinstance(told, CacheFull) and told.gave_cache_up
    assert isinstance(asked(prompt(YOUNG, "2", 8)), CacheFull) and held(runner, "1") == [25], "it keeps what it got"
    assert isinstance(asked(grow(OLD, "1", 25, 7)), Verdict)
    runner.release(["1"])
    assert isinstance(asked(prompt(YOUNG, "2", 8)), Verdict)


def test_who_gave_its_cache_up_to_what_others_are_certain_of_loses_it_no_more_for_ever(model: LoadedModel) -> None:
    clock = Clock()
    runner = runner_of(model, pages=8, clock=clock)
    verifier = Verifier(runner)
    verifier.verify_calls([prompt(OLD, "1", 32)])
    for _ in range(3):
        verifier.verify_calls([prompt(YOUNG, "2", 8)])
        assert held(runner, "1", "2") == [0, 8]
        runner.release(["2"])
        verifier.verify_calls([grow(OLD, "1", 31, 1)])
        assert isinstance(verifier.verify_calls([prompt(OLD, "1", 32)])[0][0], Verdict)
        clock.advance(PATIENCE_S / 2)
        verifier.verify_calls([grow(OLD, "1", 31, 1)])
    clock.advance(1)
    assert isinstance(verifier.verify_calls([prompt(YOUNG, "2", 8)])[0][0], CacheFull)
    assert held(runner, "1") == [32]


Results = list[VerifyOutcome | PacelineError]


def overlapped(
    runner: Runner, call: Call[VerifyRow], meanwhile: Call[VerifyRow], monkeypatch: pytest.MonkeyPatch
) -> tuple[Results, Results]:
    """Return the results of a call, and of another one that is served while the first's pass waits for other ranks."""
    verifier, run, found = Verifier(runner), runner.passes.run, Results()

    def waiting(pieces: Sequence[Piece]) -> Sequence[Tensor]:
        monkeypatch.setattr(runner.passes, "run", run)
        found.extend(verifier.verify_calls([meanwhile])[0])
        return run(pieces)

    monkeypatch.setattr(runner.passes, "run", waiting)
    return verifier.verify_calls([call])[0], found


def test_nobody_takes_the_cache_of_a_pass_that_waits_for_other_ranks(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(model, pages=10)
    for call in (prompt(OLD, "1", 12), prompt(YOUNG, "2", 12), prompt(YOUNG, "3", 12)):
        Verifier(runner).verify_calls([call])
    (own,), (other,) = overlapped(runner, grow(YOUNG, "3", 12, 1), grow(OLD, "1", 12, 8), monkeypatch)
    assert isinstance(own, Verdict) and isinstance(other, Verdict)
    assert held(runner, "1", "2", "3") == [20, 0, 13]


def test_nor_that_of_a_prompt_which_the_pass_left_for_a_later_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(model, pages=11, chunk_tokens=16)
    for call in (prompt(OLD, "1", 12), prompt(YOUNG, "2", 8), prompt(YOUNG, "3", 8)):
        Verifier(runner).verify_calls([call])
    rows = [VerifyRow("2", 8, tuple(range(40, 60)), ()), VerifyRow("3", 8, tuple(range(40, 72)), ())]
    own, (other,) = overlapped(runner, Call(rows, YOUNG), grow(OLD, "1", 12, 5), monkeypatch)
    assert isinstance(other, CacheFull)
    assert [one.cached_length for one in own if isinstance(one, Prefilled)] == [24, 8]
