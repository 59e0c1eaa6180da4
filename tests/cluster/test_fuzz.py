"""Bad input on the wire: a short fuzz run, and single cases found by longer runs."""

import asyncio
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from google.protobuf.descriptor import MethodDescriptor

from paceline.engine.sampling import token_logprobs
from paceline.v1 import common_pb2, draft_service_pb2, target_service_pb2
from tests.fuzzing.arena import VOCABULARY_SIZE, Arena
from tests.fuzzing.attack import attack_until, running_arena
from tests.fuzzing.calls import METHODS, Answer, Call, Code, Ending

INPUTS = 30
METHOD = {method.name: method for method in METHODS}
ALL_TOKENS = range(VOCABULARY_SIZE)
SAMPLED = common_pb2.SamplingParameters(temperature=1, min_new_tokens=100)


@pytest.fixture(scope="module")
def attacked() -> Iterator[tuple[asyncio.Runner, Arena]]:
    with running_arena() as found:
        yield found


def answer(attacked: tuple[asyncio.Runner, Arena], call: Call) -> Answer:
    """Make one call; raise Unsound if healthy requests beside it suffer or something is left behind."""
    runner, arena = attacked
    (found,) = runner.run(arena.attack([call], at_once=False))
    runner.run(arena.check())
    return found


def test_random_input_gets_canonical_answers_and_harms_nobody(attacked: tuple[asyncio.Runner, Arena]) -> None:
    runner, arena = attacked
    attack_until(runner, arena, INPUTS, first_seed=1, connection_batches=3)
    assert arena.input_count >= INPUTS
    assert arena.connection_count > 0
    assert arena.called == set(METHOD)
    assert {"OK", "INVALID_ARGUMENT", "CANCELLED"} <= {code for _, code in arena.codes}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_request_that_cannot_be_parsed_is_an_invalid_argument(
    method: MethodDescriptor, attacked: tuple[asyncio.Runner, Arena]
) -> None:
    found = answer(attacked, Call(method, b"\xff\xff\xff"))
    assert found.code is Code.INVALID_ARGUMENT
    assert "cannot be parsed" in found.details


RULES = {
    "end token too high": (
        common_pb2.ChoiceRule(sampling=SAMPLED, end_token_ids=[VOCABULARY_SIZE]),
        "outside the vocab",
    ),
    "end token negative": (common_pb2.ChoiceRule(sampling=SAMPLED, end_token_ids=[-1]), "outside the vocabulary"),
    "every token ruled out": (common_pb2.ChoiceRule(sampling=SAMPLED, end_token_ids=ALL_TOKENS), "every token of the"),
    "prompt count negative": (common_pb2.ChoiceRule(sampling=SAMPLED, prompt_count=-1), "cannot be negative"),
}
FOLLOWED = ("ProposeTokens", "end token too high")
"""A draft may lack tokens that the target has."""


@pytest.mark.parametrize(
    ("name", "rule_name"), [one for one in product(("ProposeTokens", "VerifyTokens"), RULES) if one != FOLLOWED]
)
def test_a_rule_that_cannot_be_followed_fails_its_row_alone(
    name: str, rule_name: str, attacked: tuple[asyncio.Runner, Arena]
) -> None:
    rule, words = RULES[rule_name]
    module = draft_service_pb2 if name == "ProposeTokens" else target_service_pb2
    counts = {"draft_count": 2} if name == "ProposeTokens" else {}
    row = {"token_ids": [9, 10], **counts}
    request = getattr(module, f"{name}Request")(
        rows=[{"sequence_id": "wrong", "rule": rule, **row}, {"sequence_id": "right", **row}]
    )
    found = answer(attacked, Call(METHOD[name], request.SerializeToString()))
    (response,) = found.responses
    wrong, right = getattr(module, f"{name}Response").FromString(response).results
    assert wrong.status.code == Code.INVALID_ARGUMENT.value[0]
    assert words in wrong.status.message
    assert not right.HasField("status")


def test_a_message_beyond_the_limit_is_refused_and_the_connection_goes_on(
    attacked: tuple[asyncio.Runner, Arena],
) -> None:
    assert answer(attacked, Call(METHOD["VerifyTokens"], bytes(17 << 20))).code is Code.RESOURCE_EXHAUSTED
    assert answer(attacked, Call(METHOD["DescribeTargetModel"], b"")).code is Code.OK


def test_a_request_that_never_comes_leaves_nothing_behind(attacked: tuple[asyncio.Runner, Arena]) -> None:
    found = answer(attacked, Call(METHOD["GenerateText"], b"", Ending.NOTHING))
    assert found.code in (Code.DEADLINE_EXCEEDED, Code.CANCELLED)


def test_a_path_that_is_no_text_stops_no_service(attacked: tuple[asyncio.Runner, Arena]) -> None:
    runner, arena = attacked
    broken = [one.replace(b"/paceline", b"/\xffaceline") for one in arena.recorded]
    assert not set(broken) & set(arena.recorded)
    for _ in range(2):
        runner.run(arena.disturb(broken))
    runner.run(arena.attack([], at_once=True))
    runner.run(arena.check())


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    (found,) = token_logprobs(torch.zeros(1, 3), [1], 20)
    assert sorted(token_id for token_id, _ in found.top) == [0, 1, 2]
