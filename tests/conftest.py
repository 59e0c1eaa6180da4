"""Fixtures that cost seconds, made once a session."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.checkpoints import FAMILIES, write_model, write_related_draft


@dataclass(frozen=True)
class PairOfCheckpoints:
    target: Path
    draft: Path


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Small passes on few cores: more threads than cores only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairOfCheckpoints]:
    """A tiny random target of each family, with a draft that is often right."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        target = write_model(folder / "target", family)
        found[family] = PairOfCheckpoints(target, write_related_draft(folder / "draft", target, family, noise=0.05))
    return found
