"""Hostile drafts: whether outputs stay plain decoding's whatever a draft service answers.

python -m benchmarks.hostile --input question.jsonl

Target and coordinator are real processes; the draft service answers what no model would. Each kind of answers has a
coordinator of its own, which has learnt nothing of the kinds before. Exit status 1 when an output differs.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from random import Random

import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.instant_models import InstantDrafter, NoModel, builtin_tokenizer, served
from benchmarks.questions import SpecBenchFile
from paceline.client import Client
from paceline.measure.cluster import ClusterSystem
from paceline.measure.prompts import encode_lines, read_text_codec, select_lines
from paceline.measure.system import Measured
from paceline.process.launcher import Addresses
from paceline.process.service_process import running_service
from paceline.types import DraftSource, Proposal, ProposeRow

MAX_LENGTH = 4096
VOCABULARY_SIZE = 4096
"""The built-in target's."""
BEYOND = (-1, VOCABULARY_SIZE, 2**31 - 1)
"""Ids that it does not have."""
SLOW_S, TOO_LATE_S = 0.1, 3.5
"""Seconds that a late answer takes: longer than it helps, and longer than the coordinator waits."""
SOURCES = (DraftSource.DRAFT,)
console = Console(highlight=False)

Answer = Callable[[Random, ProposeRow], tuple[int, ...]]


def random_ids(rng: Random, row: ProposeRow) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY_SIZE) for _ in range(row.draft_count))


def repeated(rng: Random, row: ProposeRow) -> tuple[int, ...]:
    return row.token_ids[-1:] * row.draft_count


def out_of_range(rng: Random, row: ProposeRow) -> tuple[int, ...]:
    return tuple(rng.choice((*BEYOND, *range(4))) for _ in range(row.draft_count))


def too_many(rng: Random, row: ProposeRow) -> tuple[int, ...]:
    return random_ids(rng, row) * (3 if rng.random() < 0.02 else 1)


def late(rng: Random, row: ProposeRow) -> tuple[int, ...]:
    chance = rng.random()
    time.sleep(TOO_LATE_S if chance < 0.002 else SLOW_S if chance < 0.02 else 0)
    return random_ids(rng, row)


def any_of_these(rng: Random, row: ProposeRow) -> tuple[int, ...]:
    return rng.choice((random_ids, repeated, out_of_range, too_many, late))(rng, row)


KINDS: tuple[Answer, ...] = (random_ids, repeated, out_of_range, too_many, late, any_of_these)


class HostileDrafter(InstantDrafter):
    def __init__(self, answer: Answer) -> None:
        super().__init__(NoModel(builtin_tokenizer(), MAX_LENGTH))
        self._answer = answer
        self._rng = Random(0)

    def drafts(self, row: ProposeRow) -> tuple[int, ...]:
        return self._answer(self._rng, row)

    def _propose(self, row: ProposeRow, length: int) -> Proposal:
        drafts = () if row.following_count else self.drafts(row)
        return Proposal(drafts, length + max(0, len(drafts) - 1))


def main(
    input: SpecBenchFile,
    prompt_count: int | None = None,
    batch_size: int = 8,
    draft_count: str = "5",
    max_new_tokens: int = 16,
    max_prompt_tokens: int = 400,
) -> None:
    codec = read_text_codec("builtin:target", "builtin:draft")
    lines = select_lines(input, count=prompt_count)
    prompts = encode_lines(lines, codec, chat=False, max_prompt_tokens=max_prompt_tokens)
    flags = ("--batch-size", str(batch_size), "--draft-count", draft_count)
    found = asyncio.run(compare([one.token_ids for one in prompts], flags, max_new_tokens))
    raise typer.Exit(int(any(one["equal"] < one["prompts"] for one in found)))


async def compare(
    prompts: Sequence[tuple[int, ...]], flags: Sequence[str], max_new_tokens: int
) -> list[dict[str, int]]:
    """Return how many outputs are equal, and what was drafted, for each kind of answers; print it as it comes."""
    found = list[dict[str, int]]()
    async with running_service("target_service", ["--log-level", "error"]) as target:
        plain: Measured | None = None
        for answer in KINDS:
            async with AsyncExitStack() as stack:
                draft = await stack.enter_async_context(served(HostileDrafter(answer)))
                models = ("--draft", draft, "--target", target.address, "--log-level", "error")
                service = await stack.enter_async_context(running_service("coordinator", [*models, *flags]))
                client = await stack.enter_async_context(Client(service.address))
                addresses = Addresses(service.address, draft, target.address, ())
                plain = plain or await ClusterSystem(client, addresses, max_new_tokens, 0).run(prompts)
                measured = await ClusterSystem(client, addresses, max_new_tokens, None, SOURCES).run(prompts)
            found.append(counts(plain, measured))
            console.print_json(json.dumps({"answers": answer.__name__} | found[-1]), indent=None)
    return found


def counts(plain: Measured, measured: Measured) -> dict[str, int]:
    return {
        "prompts": len(plain.outputs),
        "equal": sum(a == b for a, b in zip(plain.outputs, measured.outputs, strict=True)),
        "drafted": sum(one.drafted_count for one in measured.usages),
        "accepted": sum(one.accepted_count for one in measured.usages),
    }


if __name__ == "__main__":
    run_command(main)
