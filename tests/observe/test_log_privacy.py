"""Text of prompts and outputs, which a kept log must never contain."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from paceline.engine.runner import Runner
from paceline.errors import CallTimedOut, InvalidRequest
from paceline.types import GenerationRequest, Text, UserMessage
from tests.clusters import cluster

PROMPT = "Zebediah keeps 17 xylophones in 3 sheds."
MARKS = ("Zebediah", "xylophones", "sheds")


@contextmanager
def held(runner: Runner) -> Iterator[None]:
    """End no pass before this block does, so that a deadline comes first on any machine."""
    over, forward = threading.Event(), runner.forward
    runner.forward = lambda rows: over.wait() and forward(rows)  # type: ignore[method-assign, assignment, return-value]
    try:
        yield
    finally:
        over.set()


@pytest.mark.slow
async def test_no_prompt_and_no_output_is_in_a_line_at_info_or_above() -> None:
    asked = GenerationRequest(UserMessage(PROMPT), 24)
    with capture_logs() as lines:
        async with cluster("builtin:target", "builtin:draft") as served:
            output = (await served.client.complete(asked)).text
            with pytest.raises(InvalidRequest):
                await served.client.complete(GenerationRequest(Text(PROMPT), 24, stop_strings=("",)))
            with pytest.raises(InvalidRequest):
                await served.client.complete(GenerationRequest(Text(PROMPT * 1000), 24))
            with held(served.target), pytest.raises(CallTimedOut):
                await served.client.complete(GenerationRequest(Text(PROMPT), 24), timeout_s=2)
    kept = [line for line in lines if line["log_level"] != "debug"]
    assert sum(line["event"] == "request ended" for line in kept) == 4
    words = {word for word in output.split() if len(word) > 4}
    assert words
    assert not [mark for mark in (*MARKS, output, *words) if mark in str(kept)]
