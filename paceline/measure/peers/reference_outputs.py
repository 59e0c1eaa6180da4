"""Hugging Face's own outputs at batch 1, kept in a file as they come, so that an interrupted measurement can resume."""

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from paceline.engine.model.checkpoint import find_checkpoint
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.measure.prompts import MeasuredPrompt
from paceline.model_service.worker import ModelWorker


async def reference_outputs(
    reference: HuggingFaceReference,
    worker: ModelWorker,
    prompts: Sequence[MeasuredPrompt],
    max_new_tokens: int,
    *,
    identity: str,
    file: Path,
    advance: Callable[[], None],
) -> list[list[int]]:
    """Return all outputs, and decode those that `file` lacks. Its keys hold `identity`, so a changed model misses."""
    known = _read(file)
    outputs = []
    with file.open("a", encoding="utf-8") as lines:
        for prompt in prompts:
            key = _key(prompt, max_new_tokens, identity)
            if key not in known:
                known[key] = await worker.run(reference.generate, prompt.token_ids, max_new_tokens)
                lines.write(json.dumps({"key": key, "token_ids": known[key]}) + "\n")
                lines.flush()
            outputs.append(known[key])
            advance()
    return outputs


def identity_of(model: str, dtype: str, device: str, quantization: str) -> str:
    """Describe what Hugging Face's output depends on beside the prompt: files, weights' format, device, libraries."""
    folder = find_checkpoint(model).folder
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*config.json")])
    stated = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    return json.dumps([model, stated, dtype, quantization, device, version("torch"), version("transformers")])


def _read(file: Path) -> dict[str, list[int]]:
    if not file.exists():
        return {}
    known = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by an interruption
        known[row["key"]] = row["token_ids"]
    return known


def _key(prompt: MeasuredPrompt, max_new_tokens: int, identity: str) -> str:
    return hashlib.sha256(json.dumps([identity, max_new_tokens, prompt.token_ids]).encode()).hexdigest()
