"""Pairs of random weights, written once into a folder: small ones of every family, and large ones with fewer layers."""

from dataclasses import replace
from pathlib import Path

from paceline.measure.synthetic.pair import PairOrder, write_pair
from paceline.measure.synthetic.shapes import ModelShape, PairShape

FAMILIES = {
    "llama": PairShape(
        ModelShape("Llama", 4, 512, 8, 8, 64, 1024, 4096, 4096),
        ModelShape("Llama", 2, 256, 4, 4, 64, 512, 4096, 4096),
        "bfloat16",
    ),
    "qwen3": PairShape(
        ModelShape("Qwen3", 4, 512, 8, 2, 128, 1024, 4096, 4096, 1e6),
        ModelShape("Qwen3", 2, 256, 4, 2, 128, 512, 4096, 4096, 1e6),
        "bfloat16",
    ),
    "glm4": PairShape(
        ModelShape("Glm4", 4, 512, 32, 2, 128, 1024, 4096, 4096),
        ModelShape("Qwen2", 2, 256, 4, 2, 64, 512, 4096, 4096, 1e6),
        "bfloat16",
    ),
}
"""Small shapes with the head sizes and groups of the real ones, and the built-in pair's tokenizer."""
FACTOR = 3.0
"""Scale of the target's layers at which these shapes accept some of the drafts and refuse others."""


def written_pair(folder: Path, name: str, shape: PairShape, acceptance: float | None = None) -> Path:
    """Write a pair unless it is there, and return its folder. With `acceptance`, look for the factor that gives it."""
    if not (folder / "MODEL_CARD.md").exists():
        wanted = PairOrder(name, shape, folder)
        wanted = replace(wanted, factor=FACTOR) if acceptance is None else replace(wanted, acceptance=acceptance)
        write_pair(wanted, lambda factor, measured: None)
    return folder


def cut(shape: PairShape, layers: int | None, vocabulary_size: int | None = None) -> PairShape:
    """Return the shape with at most so many layers in each model, and so many tokens."""

    def one(model: ModelShape) -> ModelShape:
        return replace(
            model,
            layer_count=min(model.layer_count, layers or model.layer_count),
            vocabulary_size=min(model.vocabulary_size, vocabulary_size or model.vocabulary_size),
        )

    return replace(shape, target=one(shape.target), draft=one(shape.draft))
