"""Formats of outputs at the door: what cannot be followed is refused there, and the rule carries what can."""

from dataclasses import replace
from typing import Any

import pytest

from coordinator.door.served import Served, read_served
from paceline.errors import InvalidRequest
from paceline.types import GREEDY, GenerationRequest, ReceivedOutput, ResponseFormat, TokenIds, TokenizerFiles
from tests.coordinators import admission
from tests.fakes.model_services import describe
from tests.fakes.tokenizers import byte_tokenizer

END, STOP = 256, 300
TARGET = replace(describe("target"), vocabulary_size=320, end_token_ids=(END,))
SERVED = read_served(TARGET, TokenizerFiles(byte_tokenizer().to_str()))
WORD = ResponseFormat(regex="(ab)+")
ASKED = GenerationRequest(TokenIds((1, 2, 3)), response_format=WORD)
A, B = byte_tokenizer().encode("ab", add_special_tokens=False).ids


def test_a_rule_has_the_format_and_every_token_that_ends_the_output() -> None:
    (generation,) = admission(SERVED).admit(replace(ASKED, stop_token_ids=(STOP,))).generations
    assert generation.rule.response_format == WORD
    assert (generation.rule.prompt_count, generation.rule.end_token_ids) == (3, (END, STOP))
    (generation,) = admission(SERVED).admit(replace(ASKED, response_format=None)).generations
    assert generation.rule == GREEDY


@pytest.mark.parametrize(
    ("served", "changes", "words"),
    [
        (Served(TARGET), {}, "is set, and the models have no tokenizer"),
        (SERVED, {"ignore_end_tokens": True}, "and ignore_end_tokens are both set"),
        (replace(SERVED, target=replace(TARGET, end_token_ids=())), {}, "is set, and the model has no end token"),
        (SERVED, {"response_format": ResponseFormat()}, "cannot be followed: 0 of json_schema"),
        (SERVED, {"response_format": ResponseFormat(regex="(")}, "cannot be followed: .*unclosed group"),
        (SERVED, {"response_format": ResponseFormat(json_schema='{"not": {}}')}, "cannot be followed: .*Unimplemented"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused(served: Served, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^response_format {words}") as refusal:
        admission(served).admit(replace(ASKED, **changes))
    assert refusal.value.field == "response_format"


def test_no_request_waits_for_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    served = read_served(TARGET, TokenizerFiles(byte_tokenizer().to_str()))
    monkeypatch.setattr("paceline.grammars.LLTokenizer", lambda *_, **__: pytest.fail("the vocabulary is read"))
    for form in (WORD, ResponseFormat(json_schema='{"type": "integer"}')):
        assert admission(served).admit(replace(ASKED, response_format=form)).generations


def test_an_output_goes_on_where_it_follows_the_format_and_is_refused_where_it_does_not() -> None:
    for token_ids in ((), (A,), (A, B), (A, B, END)):
        admission(SERVED).admit(replace(ASKED, seed=1, received_outputs=(ReceivedOutput(0, token_ids),)))
    with pytest.raises(InvalidRequest, match="received_outputs has an output 0 that response_format does not allow"):
        admission(SERVED).admit(replace(ASKED, seed=1, received_outputs=(ReceivedOutput(0, (B,)),)))
