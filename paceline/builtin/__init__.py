"""The pair that ships with Paceline: a small Llama target, a draft distilled from it, and heads. See MODEL_CARD.md."""

from pathlib import Path

from paceline.errors import ModelNotUsable

PREFIX = "builtin:"
NAMES = ("target", "draft")
HEADS = ("clover", "eagle")
"""Heads of the target, in a folder each below `heads`."""


def resolve_model(model: str) -> Path:
    """Turn a model setting, a directory or `builtin:NAME`, into a directory; whether it exists is not checked here."""
    if not model.startswith(PREFIX):
        return Path(model).expanduser()
    return Path(__file__).parent / _name("model", model, NAMES)


def resolve_heads(heads: str) -> Path:
    """Turn a setting of heads, a directory or `builtin:NAME`, into a directory."""
    if not heads.startswith(PREFIX):
        return Path(heads).expanduser()
    return Path(__file__).parent / "heads" / _name("heads", heads, HEADS)


def _name(what: str, setting: str, names: tuple[str, ...]) -> str:
    name = setting.removeprefix(PREFIX)
    if name not in names:
        choices = " and ".join(PREFIX + known for known in names)
        are = "are" if len(names) > 1 else "is"
        raise ModelNotUsable(f"{what} {setting!r} is not built in; {choices} {are}, anything else must be a directory")
    return name
