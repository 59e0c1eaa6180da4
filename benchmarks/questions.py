"""Questions: the files they come from, and as token ids in the target's chat template, the same for every system."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.measure.prompts import encode_lines, read_text_codec
from paceline.process.cluster_plan import ClusterOptions
from paceline.prompt_file import InputLine

Gsm8kFile = Annotated[Path, typer.Option(help="GSM8K train.jsonl", exists=True, dir_okay=False)]
SpecBenchFile = Annotated[Path, typer.Option(help="SpecBench's question.jsonl", exists=True, dir_okay=False)]


def encode_questions(questions: Sequence[str], options: ClusterOptions) -> list[tuple[int, ...]]:
    codec = read_text_codec(options.target_model, options.draft_model)
    lines = [InputLine(number, question) for number, question in enumerate(questions)]
    return [prompt.token_ids for prompt in encode_lines(lines, codec, chat=True)]
