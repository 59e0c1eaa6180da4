"""The pair that ships with Paceline: a small Llama target and a draft distilled from it. See MODEL_CARD.md."""

from pathlib import Path

from paceline.errors import ModelNotUsable

PREFIX = "builtin:"
NAMES = ("target", "draft")


def resolve_model(model: str) -> Path:
    """Turn a model setting, a directory or `builtin:NAME`, into a directory; whether it exists is not checked here."""
    if not model.startswith(PREFIX):
        return Path(model).expanduser()
    name = model.removeprefix(PREFIX)
    if name not in NAMES:
        choices = " and ".join(PREFIX + known for known in NAMES)
        raise ModelNotUsable(f"model {model!r} is not built in; {choices} are, anything else must be a directory")
    return Path(__file__).parent / name
