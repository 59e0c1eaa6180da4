"""Messages of a stream that are too large for gRPC, made into several. Few are, so this may take its time."""

from collections.abc import Container, Iterator

from paceline.errors import MessageTooLarge
from paceline.v1 import generation_service_pb2 as pb


def too_large(byte_count: int, most_bytes: int) -> MessageTooLarge:
    """Return the error of a call with so large a part that no message can carry it."""
    return MessageTooLarge(
        f"a part of the answer has {byte_count} bytes, and a message has at most {most_bytes}; "
        "ask for a lower top_logprob_count, leave echo_prompt out, or have the coordinator's --max-message-bytes raised"
    )


def divided(
    message: pb.GenerateStreamResponse, most_bytes: int, refusable: Container[int]
) -> tuple[list[bytes], dict[int, int]]:
    """Return messages with what one holds, serialized, and the bytes of what is too large for any by its call.

    Nothing is sent of such a call, which must be one of `refusable`: its output would have a gap.
    """
    parts = [(update.call_id, part) for update in message.updates for part in _parts(update, most_bytes)]
    refused = {call_id: len(part) for call_id, part in parts if len(part) > most_bytes and call_id in refusable}
    messages = [pb.GenerateStreamResponse(closing=message.closing).SerializeToString()]
    for call_id, part in parts:
        if call_id in refused:
            continue
        if len(messages[-1]) + len(part) > most_bytes:
            messages.append(b"")
        # Serialized messages that follow each other are one message, with the updates of all.
        messages[-1] += part
    return [one for one in messages if one], refused


def _parts(update: pb.CallUpdate, most_bytes: int) -> Iterator[bytes]:
    """Yield serialized messages with one update each, halved while it is too large and has several tokens."""
    whole = pb.GenerateStreamResponse(updates=[update]).SerializeToString()
    halves = _halves(update) if len(whole) > most_bytes else []
    if not halves:
        yield whole
    for half in halves:
        yield from _parts(half, most_bytes)


def _halves(update: pb.CallUpdate) -> list[pb.CallUpdate]:
    """Return two updates for one; none if it is not to be divided, as the tokens of a round that is told."""
    response = update.response
    tokens, runs = len(response.tokens) // 2, len(response.runs) // 2
    if response.HasField("round") or not (tokens or runs):
        return []
    first, second = pb.CallUpdate(call_id=update.call_id), pb.CallUpdate()
    first.response.completion_index = response.completion_index
    first.response.tokens.extend(response.tokens[:tokens])
    first.response.runs.extend(response.runs[:runs])
    second.CopyFrom(update)
    del second.response.tokens[:tokens], second.response.runs[:runs]
    return [first, second]
