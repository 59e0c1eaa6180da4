"""The HTTP door beside gRPC: `python -m benchmarks.door [PART ...]`; without parts all of them.

`pair`: whether outputs are the same ids by each way, and which share of the built-in pair's tokens/s comes by HTTP.
`formats`, `calls`: whether outputs follow JSON Schemas, and calls of tools are read, the same as by plain decoding.
`malformed`: whether bad requests are refused, and harm nothing. `instant`: what the door adds to the first token over
instant models, and whether many streams at once are all whole. `failover`: whether they outlive a killed coordinator.
Exit status 1 when an output differs, a stream is not whole or a refusal is wrong.
"""

import asyncio
import sys
from typing import Annotated

import typer

from benchmarks.commands import run_command
from benchmarks.door.parts import PARTS, TARGET, Sizes
from paceline.cli.options import InputFile
from paceline.cli.prompts import selected_lines
from paceline.measure.prompts import encode_lines, read_text_codec

MAX_PROMPT_TOKENS = 400


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(PARTS)}. Unset: all.")] = None,
    input_file: InputFile = None,
    prompt_count: int = 80,
    max_new_tokens: int = 64,
    runs: int = 5,
    first_token_count: int = 200,
    stream_count: int = 200,
) -> None:
    if unknown := set(parts or ()) - PARTS.keys():
        raise typer.BadParameter(f"no such part: {', '.join(sorted(unknown))}; give some of {', '.join(PARTS)}")
    lines = selected_lines(input_file, None, prompt_count)
    codec = read_text_codec(TARGET, "builtin:draft")
    encoded = encode_lines(lines, codec, chat=True, max_prompt_tokens=MAX_PROMPT_TOKENS)
    prompts = [one.token_ids for one in encoded]
    sizes = Sizes(prompts, max_new_tokens, runs, first_token_count, stream_count)
    is_right = [asyncio.run(PARTS[name](sizes)) for name in parts or PARTS]
    sys.exit(not all(is_right))


if __name__ == "__main__":
    run_command(main)
