"""The target's own greedy outputs, which drafts learn from.

The product itself makes the outputs, so they are those that the pair will be asked for. For a GPU, which a small
target's rounds do not fill, Hugging Face's `generate` makes them of thousands of prompts at once.
"""

import json
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from paceline.client import Client
from paceline.errors import InvalidRequest, PacelineError
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.tasks import side_by_side
from paceline.types import FinishReason, GenerationRequest, SamplingParameters, TokenIds
from training.loop import IGNORED
from training.problems import prompt_text
from training.tokenizer import ASSISTANT, USER

MAX_INVENTED_TOKENS = 160
INVENTION_TEMPERATURE = 0.8
MAX_NEW_TOKENS = 320
Prompt = Callable[[Client], Awaitable[tuple[int, ...]]]
"""Makes the token ids of one prompt; empty if that failed."""


@dataclass(frozen=True)
class Output:
    token_ids: tuple[int, ...]
    """Token ids of the prompt, then of the output."""
    prompt_count: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.token_ids[: self.prompt_count]


_FORM = TypeAdapter(list[Output])
_Item = TypeVar("_Item")


def held_out(
    items: Sequence[_Item], prompt_of: Callable[[_Item], Hashable], count: int, rng: random.Random
) -> tuple[list[_Item], list[_Item]]:
    """Return `count` items or more, all that have their prompts, and the others: many questions come several times."""
    by_prompt: defaultdict[Hashable, list[_Item]] = defaultdict(list)
    for one in items:
        by_prompt[prompt_of(one)].append(one)
    groups, held = rng.sample([*by_prompt.values()], len(by_prompt)), list[_Item]()
    while groups and len(held) < count:
        held += groups.pop()
    return held, [one for group in groups for one in group]


def read_outputs(path: Path, vocabulary_size: int) -> list[Output]:
    """Read what `training outputs` wrote. Raise InvalidRequest for something else, nothing, or a larger vocabulary."""
    remedy = "make some with `training outputs`"
    try:
        outputs = _FORM.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidRequest(f"{path} has no outputs: {place}: {first['msg']}; {remedy}") from error
    for number, one in enumerate(outputs):
        if not 1 <= one.prompt_count < len(one) or min(one.token_ids) < 0:
            raise InvalidRequest(
                f"{path}: output {number} has {len(one)} token_ids and a prompt_count of {one.prompt_count}; give both "
                f"prompt and output tokens, none below 0, or {remedy}"
            )
    if not outputs:
        raise InvalidRequest(f"{path} has no outputs to learn from; {remedy}")
    if (largest := max(max(one.token_ids) for one in outputs)) >= vocabulary_size:
        raise InvalidRequest(
            f"{path} has token id {largest}, and the target has {vocabulary_size} tokens; give outputs of this target"
        )
    return outputs


def write_outputs(path: Path, made: Sequence[Output]) -> None:
    """Raise InvalidRequest when there are none: the file may have those of earlier hours."""
    if not made:
        raise InvalidRequest(f"no output was made, so {path} stays as it is; give more --minutes")
    path.write_text(json.dumps([vars(one) for one in made]))


async def greedy_outputs(
    prompts: Iterable[Prompt],
    cluster: ClusterOptions,
    report: Callable[[str], None],
    *,
    minutes: float,
) -> list[Output]:
    """Let the product answer prompts until the prompts or the minutes run out.

    The minutes begin once the services run. After an error the outputs made so far are returned; if there are none, the
    error is raised. Raise StartupError when the services do not start.
    """
    made: list[Output] = []

    async def answer(source: Iterator[Prompt], client: Client, ends_at: float) -> None:
        for prompt in source:
            if time.monotonic() > ends_at:
                return
            token_ids = await prompt(client)
            if token_ids:
                output = await client.complete(GenerationRequest(TokenIds(token_ids), MAX_NEW_TOKENS))
                made.append(Output((*token_ids, *output.token_ids), len(token_ids)))

    try:
        async with running_cluster(cluster, report) as addresses, Client(addresses.coordinator) as client:
            source, batch_size = iter(prompts), (await client.describe()).batch_size
            ends_at = time.monotonic() + 60 * minutes
            async with side_by_side() as group:
                for _ in range(3 * batch_size):
                    group.create_task(answer(source, client, ends_at))
    except PacelineError as error:
        if not made:
            raise
        report(f"ended early: {error}")
    return made


@torch.inference_mode()
def outputs_at_once(
    model: LlamaForCausalLM,
    batches: Iterable[Sequence[tuple[int, ...]]],
    report: Callable[[str], None],
    *,
    minutes: float,
    max_new_tokens: int,
) -> Iterator[Output]:
    """Answer the prompts of a batch together, greedily; prompts of one batch had better be of similar length.

    No batch begins after `minutes`.
    """
    end, ends_at = model.config.eos_token_id, time.monotonic() + 60 * minutes
    for number, prompts in enumerate(batches):
        if time.monotonic() > ends_at:
            return
        tokens = padded([prompt[::-1] for prompt in prompts]).flip(1).to(model.device)  # padding on the left
        # Of a copy, for `generate` notes with a model how long its longest cache was, and makes none shorter.
        ended = copy(model).generate(
            input_ids=tokens.clamp_min(0),
            attention_mask=tokens.ne(IGNORED).long(),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,  # a compiled step is of use to one shape, and each batch has its own
        )
        for prompt, row in zip(prompts, ended[:, tokens.shape[1] :].tolist(), strict=True):
            made = row[: row.index(end) + 1] if end in row else row
            yield Output((*prompt, *made), len(prompt))
        report(f"{number + 1} batches of outputs")


def given_prompt(question: str, tokenizer: Tokenizer) -> Prompt:
    async def make(client: Client) -> tuple[int, ...]:
        return tuple(tokenizer.encode(prompt_text(question)).ids)

    return make


def invented_prompt(seed: int, tokenizer: Tokenizer) -> Prompt:
    """Return a prompt that the target invents. It learnt questions as well as answers, so the supply has no end."""
    vocabulary = tokenizer.get_vocab()
    request = GenerationRequest(
        TokenIds((vocabulary[USER],)),
        MAX_INVENTED_TOKENS,
        stop_token_ids=(vocabulary[ASSISTANT],),
        max_draft_count=0,  # drafts have learnt answers, not questions
        sampling=SamplingParameters(INVENTION_TEMPERATURE),
        seed=seed,
    )

    async def make(client: Client) -> tuple[int, ...]:
        question = await client.complete(request)
        if question.finish.reason is not FinishReason.STOP_TOKEN:
            return ()
        return tuple(tokenizer.encode(prompt_text(question.text)).ids)

    return make


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Lay rows side by side as [B, T]; `IGNORED` marks padding, on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[IGNORED] * (width - len(row))] for row in rows])


def output_places(batch: Sequence[Output]) -> torch.Tensor:
    """Return where the output's tokens are chosen: indexes into the batch's padded rows, laid end to end."""
    width = max(map(len, batch))
    return torch.cat([torch.arange(one.prompt_count - 1, len(one) - 1) + row * width for row, one in enumerate(batch)])
