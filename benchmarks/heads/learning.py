"""Training of what is compared: every kind and variant from the same outputs, with the same number of steps."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.heads.variants import begun, folder_name
from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.reading import WEIGHTS, write_heads
from training.features import FrozenTarget, Texts
from training.heads import fit_heads

SEED = 4


def learn(
    names: Sequence[str],
    target: FrozenTarget,
    texts: Texts,
    work: Path,
    *,
    step_count: int,
    draft_count: int,
    report: Callable[[str], None],
) -> None:
    """Train what is not in `work` yet."""
    for name in names:
        folder = work / folder_name(name)
        if (folder / WEIGHTS).exists():
            continue
        report(f"{name}: {step_count} steps")
        torch.manual_seed(SEED)
        heads = begun(name, target, draft_count)
        fit_heads(heads, target, texts, step_count=step_count, seed=SEED, report=report)
        write_heads(heads, target.config, folder)


def learnt(name: str, target: FrozenTarget, work: Path, draft_count: int) -> HeadsModule:
    """Return trained heads of a kind or a variant."""
    heads = begun(name, target, draft_count)
    heads.load_state_dict(load_file(work / folder_name(name) / WEIGHTS))
    heads.eval()
    return heads
