"""What a model service says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheDescription:
    layout: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    """Held by sequences."""
    idle_bytes: int = 0
    """Kept for prompts that begin alike; given up when memory is wanted."""
    sequence_count: int = 0
    token_bytes: int = 0
    max_length: int = 0
    """Tokens one sequence may have when it has the cache to itself."""
    page_tokens: int = 0
    prefill_chunk_tokens: int = 0
    """Most prompt tokens one call computes for all its rows."""
    shared_token_count: int = 0
    """Tokens that were taken over from earlier prompts instead of being computed, since the start."""
    realigned_bytes: int = 0
    """Copied by the dense layout to keep its rectangle, since the start; 0 in the paged one."""
    realignment_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelDescription:
    model_id: str
    architecture: str
    vocabulary_size: int
    tokenizer_fingerprint: str
    """Empty when the model has no tokenizer."""
    max_length: int
    end_token_ids: tuple[int, ...]
    device: str
    dtype: str
    parameter_count: int
    has_chat_template: bool = False
    numerics: str = "fast"
    cache: CacheDescription = CacheDescription()

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that the model takes and the cache can hold."""
        return min(self.max_length, self.cache.max_length)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as text, so that it can travel."""

    tokenizer_json: str
    """In the `tokenizers` library's form."""
    chat_template: str = ""
    """Jinja; empty when the model has none."""
    special_tokens_json: str = "{}"
    """JSON object of the special tokens a chat template may name."""


@dataclass(frozen=True, slots=True)
class PassTraffic:
    """Bytes that one pass of a model cannot do without. Every expert of a mixture counts, read or not."""

    weight_bytes: int
    """Once a pass, whatever the rows; without an embedding of which only single rows are read."""
    token_bytes: int
    """Keys and values of one cached token."""
