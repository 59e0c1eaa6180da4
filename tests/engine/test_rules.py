"""Rules sent once: what a service keeps, when a rule is sent again, and no decoding without a rule."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from draft_service.drafter import Drafter
from paceline.codec.rounds import verify_rows_from_pb, verify_rows_to_pb
from paceline.engine.loading import load_model
from paceline.engine.options import EngineOptions
from paceline.engine.runner import Runner
from paceline.errors import InvalidRequest, PacelineError, PrefixNotCached, RuleUnknown
from paceline.types import (
    GREEDY,
    ChoiceRule,
    GenerationRequest,
    Proposal,
    ProposeRow,
    RolledBack,
    SamplingParameters,
    SequenceLength,
    TokenIds,
    Verdict,
    VerifyOutcome,
    VerifyRow,
)
from paceline.v1 import target_service_pb2 as pb
from target_service.verifier import Verifier
from tests.checkpoints import END_TOKEN_ID, VOCABULARY_SIZE
from tests.conftest import PairOfCheckpoints
from tests.coordinators import collect, scheduling, submit
from tests.fakes.model_services import Clock, FakeDrafter, FakeVerifier, continuation

pytestmark = pytest.mark.review
PROMPT = (20, 21, 22, 23)
HOT = ChoiceRule(SamplingParameters(temperature=5.0), seed=7, prompt_count=len(PROMPT))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runner(pairs: dict[str, PairOfCheckpoints], clock: Clock) -> Runner:
    model = load_model(str(pairs["Llama"].target))
    return Runner(model, EngineOptions(kv_memory="1MiB", sequence_ttl_s=100), clock)


@pytest.fixture
def verifier(runner: Runner) -> Verifier:
    return Verifier(runner)


def only(results: Sequence[VerifyOutcome | PacelineError]) -> VerifyOutcome | PacelineError:
    (result,) = results
    return result


def decode(verifier: Verifier, rules: Sequence[ChoiceRule | None], sequence_id: str = "a") -> list[int]:
    """Decode one token for each rule; the row brings the rule."""
    token_ids, cached = list(PROMPT), 0
    for rule in rules:
        verdict = only(verifier.verify([VerifyRow(sequence_id, cached, tuple(token_ids[cached:]), (), rule)]))
        assert isinstance(verdict, Verdict)
        token_ids.append(verdict.next_token_id)
        cached = verdict.cached_length
    return token_ids[len(PROMPT) :]


@pytest.mark.parametrize("rule", [GREEDY, HOT])
def test_a_rule_told_once_is_the_rule_of_all_rows_that_follow(verifier: Verifier, rule: ChoiceRule) -> None:
    """review C5"""
    told_each_time = decode(verifier, [rule] * 6, "other")
    assert decode(verifier, [rule, None, None, None, None, None]) == told_each_time


def test_a_draft_keeps_rules_as_a_target_does(runner: Runner) -> None:
    """review C5"""
    drafter = Drafter(runner)
    whole, rest = ProposeRow("a", 0, PROMPT, 3, HOT), ProposeRow("a", 2, PROMPT[2:], 3, None)
    (unknown,) = drafter.propose([ProposeRow("b", 0, PROMPT, 3, None)])
    assert isinstance(unknown, RuleUnknown)
    assert drafter.propose([whole]) == drafter.propose([rest])
    assert drafter.propose([rest]) != drafter.propose([ProposeRow("c", 0, PROMPT, 3)])


BEYOND = (END_TOKEN_ID, VOCABULARY_SIZE, VOCABULARY_SIZE + 1)
BIASED = SamplingParameters(temperature=0.7, logit_bias=((5, 1.0), (VOCABULARY_SIZE, -9.0)))


@pytest.mark.parametrize("sampling", [BIASED, SamplingParameters(repetition_penalty=1.1, min_new_tokens=9)])
def test_a_draft_that_lacks_tokens_of_the_target_drafts_by_the_rest_of_the_rule(
    sampling: SamplingParameters, runner: Runner
) -> None:
    """It refused every request that was not greedy, where the target's tuning had added its end token."""
    drafter = Drafter(runner)
    rest = replace(sampling, logit_bias=sampling.logit_bias[:1])
    rule, known = ChoiceRule(sampling, 7, 4, BEYOND), ChoiceRule(rest, 7, 4, BEYOND[:1])
    (first,), (second,) = (
        drafter.propose([ProposeRow(name, 0, PROMPT, 6, one)]) for name, one in (("a", rule), ("b", known))
    )
    assert isinstance(first, Proposal) and first == second
    again = drafter.propose([ProposeRow("a", 2, PROMPT[2:], 6, rule)])
    assert again == [first]


def test_nothing_is_decoded_without_a_rule(verifier: Verifier) -> None:
    """review C5"""
    row = VerifyRow("a", 0, PROMPT, (), None)
    assert isinstance(only(verifier.verify([row])), RuleUnknown)
    assert verifier.runner.cache.sequence_count == 0
    # A row that relies on an uncached prefix still gets that error.
    gone = only(verifier.verify([VerifyRow("a", 2, PROMPT[2:], (), None)]))
    assert type(gone) is PrefixNotCached


def test_a_rule_goes_with_its_sequence_and_outlasts_what_is_cached_of_it(verifier: Verifier, clock: Clock) -> None:
    """review C5"""
    again = VerifyRow("a", 0, PROMPT, (), None)
    decode(verifier, [HOT])
    (rolled_back,) = verifier.runner.rollback([SequenceLength("a", 0)])
    assert isinstance(rolled_back, RolledBack)
    assert isinstance(only(verifier.verify([again])), Verdict)
    verifier.runner.release(["a"])
    assert isinstance(only(verifier.verify([again])), RuleUnknown)
    decode(verifier, [HOT])
    clock.advance(101)
    assert verifier.runner.drop_idle() == 1
    assert isinstance(only(verifier.verify([again])), RuleUnknown)


def test_a_rule_replaces_the_one_before(verifier: Verifier) -> None:
    """review C5"""
    decode(verifier, [HOT])
    assert decode(verifier, [GREEDY, None, None]) == decode(verifier, [GREEDY] * 3, "other")


def test_rules_of_two_callers_are_two_rules(verifier: Verifier) -> None:
    """review C5"""
    whole, rest = VerifyRow("a", 0, PROMPT, (), HOT), VerifyRow("a", 0, PROMPT, (), None)
    told = only(verifier.verify([whole], "one/"))
    assert isinstance(only(verifier.verify([rest], "other/")), RuleUnknown)
    assert only(verifier.verify([VerifyRow("a", 0, PROMPT, ())], "other/")) != told
    assert only(verifier.verify([rest], "one/")) == told


def test_a_wrong_rule_is_refused_once_and_not_kept(verifier: Verifier) -> None:
    """review C5"""
    wrong = ChoiceRule(SamplingParameters(logit_bias=((VOCABULARY_SIZE, 1.0),)))
    assert isinstance(only(verifier.verify([VerifyRow("a", 0, PROMPT, (), wrong)])), InvalidRequest)
    assert isinstance(only(verifier.verify([VerifyRow("a", 0, PROMPT, (), None)])), RuleUnknown)


def test_a_coordinator_of_before_rules_were_kept_is_served_as_before() -> None:
    """review C5: its rows bring a rule each time, and no rule means greedy."""
    request = verify_rows_to_pb([VerifyRow("a", 3, (5,), (), None), VerifyRow("b", 3, (5,), (), None)])
    assert [row.rule for row in verify_rows_from_pb(request)] == [None, None]
    request.context.ClearField("wire_version")
    request.rows[1].rule.seed = 5
    assert [row.rule for row in verify_rows_from_pb(request)] == [GREEDY, ChoiceRule(seed=5)]


def test_a_rule_is_checked_when_it_is_told_and_not_each_round(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """review C5"""
    checked: list[ChoiceRule] = []
    monkeypatch.setattr("paceline.engine.rules.check_rule", lambda rule, vocabulary_size: checked.append(rule))
    decode(verifier, [HOT, None, None])
    decode(verifier, [HOT, HOT, HOT], "as it was before")
    assert checked == [HOT, HOT]


async def test_rules_are_told_with_the_first_row_and_with_a_lost_cache_and_never_else() -> None:
    """review C5: 1,024 biases were sent each round, 130 KB a hop at 8 rows."""
    drafter = FakeDrafter(0.8, before=lambda number: drafter.evict() if number == 3 else None)
    verifier = FakeVerifier(before=lambda number: verifier.evict() if number == 4 else None)
    sampling = SamplingParameters(logit_bias=tuple((token_id, 0.0) for token_id in range(4, 50)))
    prompt = (5, 6, 7)
    async with scheduling(drafter, verifier) as (admission, scheduler):
        request = admission.admit(GenerationRequest(TokenIds(prompt), 30, sampling=sampling))
        output, _ = await collect(submit(scheduler, request))
    assert output == continuation(prompt, 30)
    told = [row.rule is not None for call in verifier.calls for row in call]
    assert len(told) > 5
    assert sum(told) == 2, "with its first row, and with the whole sequence once it was lost"
    assert {row.base_length for call in verifier.calls for row in call if row.rule is not None} == {0}
    assert sum(row.rule is not None for call in drafter.calls for row in call) == 2
    sizes = [verify_rows_to_pb(call).ByteSize() for call in verifier.calls]
    assert min(sizes) < 60 < 200 < sizes[0]


def test_an_empty_message_says_greedy() -> None:
    """review C5: an empty message is a rule, not the lack of one."""
    request = verify_rows_to_pb([VerifyRow("a", 0, PROMPT, ())])
    assert request.rows[0].HasField("sequence_rule")
    assert request.rows[0].sequence_rule.ByteSize() == 0
    parsed = pb.VerifyTokensRequest.FromString(request.SerializeToString())
    assert verify_rows_from_pb(parsed)[0].rule == GREEDY
