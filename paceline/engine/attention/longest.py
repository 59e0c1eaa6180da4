"""The longest sequence that a model serves, and whether a window hides any of it. Knows configurations alone."""

from typing import Any


def max_length_of(config: Any) -> int:
    """Return the length of the longest sequence that may be served.

    With `longrope` it is the original length: one token beyond it changes the frequencies of all tokens of a call,
    those of other sequences too.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
    original = [int(one["original_max_position_embeddings"]) for one in kinds if one.get("rope_type") == "longrope"]
    return min([int(config.max_position_embeddings), *original])


def hides_tokens(window: Any, config: Any) -> bool:
    """Return whether a window is shorter than the longest sequence.

    One that is not stays in the configuration, for some architectures turn queries and keys by it alone (EXAONE 4).
    """
    longest = getattr(config, "max_position_embeddings", None)
    return not (isinstance(window, int) and isinstance(longest, int) and window >= max_length_of(config))
