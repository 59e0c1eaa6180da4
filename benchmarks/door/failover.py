"""Whether streams outlive a killed coordinator: two coordinators over models that repeat a prompt's last token."""

import asyncio

from benchmarks.door.http import running_door
from benchmarks.instant_models import instant_models
from benchmarks.processes import coordinator_process
from paceline.process.service_process import running_service

MAX_NEW_TOKENS = 500
FIRST_ID = 300
BATCH_SIZE = 8
BEFORE_KILL_S = 1.0


async def outlived_count(stream_count: int) -> int:
    """Kill a coordinator of two under so many streams; return how many ended with all their tokens, each the right one.

    Every stream has a token of its own.
    """
    quiet = ["--log-level", "error"]
    async with instant_models("--echo") as models:
        flags = [*models.flags, "--batch-size", str(BATCH_SIZE), *quiet]
        async with running_service("coordinator", flags) as one, running_service("coordinator", flags) as other:
            doomed = coordinator_process()
            async with running_door(f"{one.address},{other.address}") as http:
                ids = range(FIRST_ID, FIRST_ID + stream_count)
                bodies = [{"prompt": [one], "max_tokens": MAX_NEW_TOKENS, "temperature": 0} for one in ids]
                streams = [asyncio.create_task(http.stream(body)) for body in bodies]
                await asyncio.sleep(BEFORE_KILL_S)
                doomed.kill()
                answers = await asyncio.gather(*streams)
    return sum(answer.token_ids == [one] * MAX_NEW_TOKENS for one, answer in zip(ids, answers, strict=True))
