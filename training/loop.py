"""One training loop for both models: length-bucketed batches, AdamW, a schedule that ends when the time is spent.

It knows nothing of problems or of where batches and losses come from.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.engine.model.loader import resolve_device
from paceline.errors import InvalidRequest
from training.tokenizer import END, PAD

MAX_LENGTH = 4096
IGNORED = -100

Row = TypeVar("Row", bound=Sized)
Batch = TypeVar("Batch")
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Shape:
    """The numbers in which the two Llamas of the pair differ."""

    hidden_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    mlp_size: int


@dataclass(frozen=True)
class Progress:
    step_count: int
    token_count: int
    loss: float
    """Mean loss over the last tenth of the time."""


def new_model(shape: Shape, vocabulary: dict[str, int]) -> LlamaForCausalLM:
    """Build a freshly initialised Llama whose special token ids are the tokenizer's."""
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layer_count,
        num_attention_heads=shape.head_count,
        num_key_value_heads=shape.kv_head_count,
        intermediate_size=shape.mlp_size,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    return LlamaForCausalLM(config)


def read_model(folder: Path, kind: Any = LlamaForCausalLM) -> Any:
    """Read a checkpoint by one of transformers' classes, in float32. Raise InvalidRequest when it is none."""
    try:
        return kind.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
        raise InvalidRequest(f"{folder} has no model that can be read: {error}; name a checkpoint's folder") from error


def placed(model: LlamaForCausalLM, device: str) -> LlamaForCausalLM:
    """Move the model to a device: auto, cpu or cuda. Raise StartupError when there is none."""
    nn.Module.to(model, resolve_device(device))  # transformers' own `to` has a type that takes no device
    return model


def mixed_precision(device: torch.device) -> torch.autocast:
    """Multiply in bfloat16 where the hardware does: a processor that emulates it takes three times as long."""
    # Some of the supported versions of torch lack this function.
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    fast = device.type != "cpu" or any(known.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast)


def bucketed(rows: Sequence[Row], token_budget: int, rng: random.Random, growth: int = 0) -> Iterator[list[Row]]:
    """Yield batches of similar length, at most `token_budget` tokens with padding, in random order.

    A row will have `growth` more tokens than it has.
    """
    if not rows:
        return
    ordered = sorted(rows, key=lambda row: len(row) + rng.random() * 8)
    batches: list[list[Row]] = [[]]
    for row in ordered:
        if batches[-1] and (len(batches[-1]) + 1) * (len(row) + growth) > token_budget:
            batches.append([])
        batches[-1].append(row)
    rng.shuffle(batches)
    yield from batches


def fit(
    model: Model,
    batches: Iterator[Batch],
    loss_of: Callable[[Model, Batch], tuple[torch.Tensor, int]],
    *,
    minutes: float = math.inf,
    most_tokens: float = math.inf,
    most_steps: float = math.inf,
    peak_rate: float,
    report: Callable[[str], None],
) -> Progress:
    """Train until `minutes` have passed, `most_tokens` were seen, or `most_steps` were done.

    `loss_of` returns the mean loss of a batch and its token count.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    began, last_report = time.monotonic(), 0.0
    step_count = token_count = 0
    tail: list[float] = []
    model.train()

    def share_done() -> float:
        by_steps = step_count / most_steps if most_steps else 1.0
        return max((time.monotonic() - began) / (60 * minutes), token_count / most_tokens, by_steps)

    while (share := share_done()) < 1:
        rate = peak_rate * min(1.0, (step_count + 1) / 100) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, count = loss_of(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step_count, token_count = step_count + 1, token_count + count
        if share > 0.9:
            tail.append(loss.item())
        if time.monotonic() - last_report > 20:
            last_report = time.monotonic()
            report(f"{share:5.1%} step {step_count} tokens {token_count} loss {loss.item():.4f} rate {rate:.2e}")
    model.eval()
    return Progress(step_count, token_count, sum(tail) / max(1, len(tail)))


def save(model: LlamaForCausalLM, progress: Progress, folder: Path) -> None:
    """Store bfloat16 weights, to ship half the bytes, under a config that says to run them in float32."""
    model.bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps(vars(progress)))
