"""Edits: how fast outputs come of which the client predicts nine lines in ten.

python -m benchmarks.edits --input question.jsonl

Requests predict what plain decoding gives, with every tenth line, counted through all outputs, turned round by words.
Then plain decoding, the prediction alone and all sources run in turn. Exit status 1 when an output differs.
"""

import asyncio
import json
from collections.abc import Iterable, Sequence
from itertools import count

import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.questions import SpecBenchFile
from paceline.client import Client
from paceline.measure.alternate import equal_count, median_tokens_per_s, timed_passes
from paceline.measure.cluster import ClusterSystem, Predictions
from paceline.measure.contention import MachineWatch, median_ratio, was_quiet
from paceline.measure.prompts import MeasuredPrompt, encode_lines, read_text_codec, select_lines
from paceline.measure.system import Measured
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.text import TextCodec
from paceline.types import DraftSource, Text

PLAIN = "plain"
console = Console(highlight=False)


def main(
    input: SpecBenchFile,
    prompt_count: int = 48,
    runs: int = 3,
    batch_size: int = 1,
    max_new_tokens: int = 128,
) -> None:
    options = ClusterOptions(batch_size=batch_size, draft_count="auto", prefix_sharing=False)
    codec = read_text_codec(options.target_model, options.draft_model)
    prompts = encode_lines(select_lines(input, count=prompt_count), codec, chat=True)
    measured = asyncio.run(measure(prompts, codec, options, runs, max_new_tokens))
    console.print_json(json.dumps(summary(measured)))
    raise typer.Exit(int(any(count < len(prompts) for count in identical_counts(measured).values())))


async def measure(
    prompts: Sequence[MeasuredPrompt], codec: TextCodec, options: ClusterOptions, runs: int, max_new_tokens: int
) -> dict[str, list[Measured]]:
    ids = [prompt.token_ids for prompt in prompts]
    async with running_cluster(options) as addresses, Client(addresses.coordinator) as client:
        plain = ClusterSystem(client, addresses, max_new_tokens, 0)
        predictions = predicted(ids, (await plain.run(ids)).outputs, codec)

        def drafting(*sources: DraftSource) -> ClusterSystem:
            return ClusterSystem(client, addresses, max_new_tokens, None, sources, predictions)

        systems = {PLAIN: plain, "prediction": drafting(DraftSource.PREDICTION), "all": drafting()}
        return await timed_passes(systems, ids, runs, MachineWatch())


def predicted(prompts: Iterable[tuple[int, ...]], outputs: Iterable[Sequence[int]], codec: TextCodec) -> Predictions:
    """Return what each prompt's request is to predict: its output, edited."""
    places = count()
    texts = [codec.tokenizer.decode(list(output)) for output in outputs]
    edits = ["\n".join(edited(line, next(places)) for line in text.split("\n")) for text in texts]
    return dict(zip(prompts, map(Text, edits), strict=True))


def edited(line: str, place: int) -> str:
    return " ".join(reversed(line.split(" "))) if place % 10 == 9 else line


def summary(measured: dict[str, list[Measured]]) -> dict[str, object]:
    rates = {name: median_tokens_per_s(runs) for name, runs in measured.items()}
    plain = measured[PLAIN]
    return {
        "prompts": len(plain[0].outputs),
        "tokens_per_s": {name: round(rate) for name, rate in rates.items()},
        "of_plain": {name: round(median_ratio(runs, plain), 2) for name, runs in measured.items()},
        "quiet_runs": {name: sum(map(was_quiet, runs)) for name, runs in measured.items()},
        "identical": identical_counts(measured),
    }


def identical_counts(measured: dict[str, list[Measured]]) -> dict[str, int]:
    """Return how many outputs of each system are those of plain decoding, in every run."""
    expected = measured[PLAIN][0].outputs
    return {name: equal_count(runs, expected) for name, runs in measured.items()}


if __name__ == "__main__":
    run_command(main)
