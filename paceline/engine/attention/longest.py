"""The longest sequence that a model serves, and whether a window hides any of it. Knows configurations alone."""

from typing import Any

from paceline.planning.dimensions import longest_served


def max_length_of(config: Any) -> int:
    """Return the length of the longest sequence that may be served, by a configuration of transformers."""
    return longest_served(int(config.max_position_embeddings), getattr(config, "rope_parameters", None) or {})


def hides_tokens(window: Any, config: Any) -> bool:
    """Return whether a window is shorter than the longest sequence.

    One that is not stays in the configuration, for some architectures turn queries and keys by it alone (EXAONE 4).
    """
    longest = getattr(config, "max_position_embeddings", None)
    return not (isinstance(window, int) and isinstance(longest, int) and window >= max_length_of(config))
