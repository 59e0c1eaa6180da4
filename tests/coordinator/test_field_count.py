"""The number of fields in a message, counted without parsing it."""

import random

import pytest

from coordinator.door.field_count import MAX_FIELDS, MAX_NUMBERS, check_field_count
from paceline.errors import InvalidRequest
from paceline.v1 import common_pb2
from paceline.v1 import generation_service_pb2 as pb

DESCRIPTOR = pb.GenerateTextRequest.DESCRIPTOR
MANY = MAX_FIELDS + 1


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateTextRequest(received_outputs=[pb.ReceivedOutput()] * MANY),
        pb.GenerateTextRequest(stop_strings=[""] * MANY),
        pb.GenerateTextRequest(sampling=common_pb2.SamplingParameters(logit_bias=[common_pb2.LogitBias()] * MANY)),
    ],
    ids=["outputs", "strings", "within a message"],
)
def test_millions_of_small_parts_are_refused_before_they_are_made(message: pb.GenerateTextRequest) -> None:
    with pytest.raises(InvalidRequest, match="fields"):
        check_field_count(message.SerializeToString(), DESCRIPTOR)


def test_so_are_more_numbers_than_any_context_takes() -> None:
    message = pb.GenerateTextRequest(token_ids=common_pb2.TokenIds(values=[3] * (MAX_NUMBERS + 1)))
    with pytest.raises(InvalidRequest, match="values") as refused:
        check_field_count(message.SerializeToString(), DESCRIPTOR)
    assert refused.value.field == "values"


def test_what_a_client_has_of_many_long_outputs_is_not() -> None:
    """Its bytes were bounded, so a request for 64 outputs of 16,000 tokens failed where its coordinator was lost."""
    received = pb.ReceivedOutput(token_ids=[127_000] * (MAX_NUMBERS // 64))
    message = pb.GenerateTextRequest(received_outputs=[received] * 64)
    check_field_count(message.SerializeToString(), DESCRIPTOR)
    message.received_outputs.add(token_ids=[127_000])
    with pytest.raises(InvalidRequest, match="token_ids"):
        check_field_count(message.SerializeToString(), DESCRIPTOR)


def test_long_prompts_are_not() -> None:
    ids = pb.GenerateTextRequest(token_ids=common_pb2.TokenIds(values=[127_000] * 600_000))
    text = pb.GenerateTextRequest(text="a" * 7_000_000, stop_strings=["."] * 16)
    for message in (ids, text):
        check_field_count(message.SerializeToString(), DESCRIPTOR)


def test_what_is_no_message_is_left_to_the_parser() -> None:
    chance = random.Random(5)
    for _ in range(20):
        noise = chance.randbytes(2 * MAX_FIELDS + 9)
        try:
            check_field_count(noise, DESCRIPTOR)
        except InvalidRequest:
            continue


def test_it_ends_for_any_bytes() -> None:
    """Zero lengths and groups have no content, but each field takes at least one byte."""
    for byte in (b"\x0b", b"\x0c", b"\xff", b"\x12\x00", b"\x00", b"\x80"):
        with_end = byte * (3 * MAX_FIELDS)
        try:
            check_field_count(with_end, DESCRIPTOR)
        except InvalidRequest as refused:
            assert "fields" in refused.message
