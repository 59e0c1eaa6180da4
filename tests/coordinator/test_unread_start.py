"""The call that a message begins, without reading what it asks for."""

import random

import pytest

from coordinator.door.unread_start import begun_call_id
from paceline.v1 import generation_service_pb2 as pb

DESCRIPTOR = pb.GenerateStreamRequest.DESCRIPTOR
BEGUN = pb.StartedCall(request=pb.GenerateTextRequest(text="a" * 300))


@pytest.mark.parametrize("call_id", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_the_name_of_a_call_is_found_whatever_it_is(call_id: int) -> None:
    message = pb.GenerateStreamRequest(call_id=call_id, start=BEGUN)
    assert begun_call_id(message.SerializeToString(), DESCRIPTOR) == call_id


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateStreamRequest(call_id=7),
        pb.GenerateStreamRequest(call_id=7, cancel=pb.CancelledCall()),
        pb.GenerateStreamRequest(call_id=7, hold=True),
    ],
    ids=["nothing", "cancel", "hold"],
)
def test_what_begins_no_call_names_none(message: pb.GenerateStreamRequest) -> None:
    assert begun_call_id(message.SerializeToString(), DESCRIPTOR) is None


def test_neither_does_a_message_that_is_cut_off() -> None:
    whole = pb.GenerateStreamRequest(call_id=7, start=BEGUN).SerializeToString()
    assert {begun_call_id(whole[:end], DESCRIPTOR) for end in range(len(whole))} == {None}


def test_of_any_bytes_a_name_is_found_that_protobuf_can_hold_or_none() -> None:
    chance = random.Random(5)
    for _ in range(2000):
        found = begun_call_id(chance.randbytes(chance.randrange(40)), DESCRIPTOR)
        assert found is None or pb.GenerateStreamRequest(call_id=found).call_id == found
