"""A model service's description of itself."""

from dataclasses import dataclass, replace
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["none", "int8", "w8a8"]
"""`int8` is weights alone; `w8a8` is weights and the rows that they multiply."""
Layout = Literal["paged", "dense"]
Numerics = Literal["auto", "fast", "strict"]


@dataclass(frozen=True, slots=True)
class CacheDescription:
    layout: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    """Bytes held by sequences."""
    idle_bytes: int = 0
    """Bytes kept for prompts that begin alike; given up when memory is needed."""
    sequence_count: int = 0
    token_bytes: int = 0
    max_length: int = 0
    """Most tokens of a sequence that has the cache to itself."""
    page_tokens: int = 0
    prefill_chunk_tokens: int = 0
    """Most prompt tokens that one call computes for all its rows."""
    shared_token_count: int = 0
    """Tokens taken over from earlier prompts instead of being computed, since the start."""
    realigned_bytes: int = 0
    """Bytes that the dense layout copied to keep its rectangle, since the start; 0 in the paged layout."""
    realignment_s: float = 0.0
    prefix_sharing: bool = False
    """Whether equal beginnings of prompts are computed once."""


@dataclass(frozen=True, slots=True)
class ComputeDescription:
    """What passes of a model run on: cores of a host, or a device there."""

    digest: str = ""
    """Equal for services that may use the same ones, whatever their containers; empty if unknown."""
    core_count: int = 0
    """How many cores those are; 1 for a device."""
    thread_count: int = 0
    """Threads that compute a pass, of all ranks; 1 for a device."""

    def has_room_beside(self, other: "ComputeDescription") -> bool:
        """Return whether passes here and passes of the other are known not to slow each other down."""
        are_known = self.digest != "" and other.digest != ""
        return are_known and (self.digest != other.digest or self.thread_count + other.thread_count <= self.core_count)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Identity of the model and the process that answer. Both parts are empty from a service that tells neither."""

    model_digest: str = ""
    """Digest over all of `ModelDescription.decides_output`: equal if outputs are those of the same model."""
    incarnation: str = ""
    """128 random bits that the process drew when it loaded the model. Another process has none of its caches."""

    @property
    def words(self) -> str:
        """Both parts, as short as people can still compare them."""
        return f"model {self.model_digest[:12] or 'unknown'}, process {self.incarnation[:12] or 'unknown'}"


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
    """Dtype of the weights, unless they are quantised, and of the cache."""
    parameter_count: int
    has_chat_template: bool = False
    numerics: str = "fast"
    cache: CacheDescription = CacheDescription()
    weights_digest: str = ""
    """SHA-256 over the loaded weight files, in hexadecimal; empty from a service that tells none."""
    configuration_digest: str = ""
    """SHA-256 over configuration and tokenizer, without names and versions."""
    revision: str = ""
    """Commit of the hub's repository; empty if unknown."""
    kernels: str = ""
    """Kernels chosen at load, which may change the last bits of a result."""
    identity: ModelIdentity = ModelIdentity()
    quantization: str = ""
    """What the weights of products were quantised to at load, such as `int8`; empty if they were not."""
    heads: str = ""
    """Kind of the heads that draft inside the service; empty without any."""
    heads_draft_count: int = 0
    """Most tokens that the heads draft after a row."""
    max_rows: int = 0
    """Most rows of a call; 0 from a service that does not tell."""
    compute: ComputeDescription = ComputeDescription()

    @property
    def decides_output(self) -> dict[str, object]:
        """Fields that outputs depend on. Kernels count only where equal bits are promised."""
        own = ["weights_digest", "configuration_digest", "tokenizer_fingerprint", "vocabulary_size", "end_token_ids"]
        own += ["dtype", "quantization", "numerics", *(["kernels"] if self.numerics == "strict" else [])]
        return {name: getattr(self, name) for name in own}

    @property
    def rounds_rows(self) -> bool:
        """Whether rows are rounded to int8 too, so that a number on the edge of two may fall to either."""
        return self.quantization == "w8a8"

    @property
    def precision(self) -> str:
        """The dtype for people, with what the weights were quantised to."""
        return f"{self.dtype} with {self.quantization} weights" if self.quantization else self.dtype

    @property
    def lasting(self) -> "ModelDescription":
        """The part of the description that is the same in any process with this model and settings, at any time."""
        cache = replace(self.cache, used_bytes=0, idle_bytes=0, sequence_count=0, shared_token_count=0)
        cache = replace(cache, realigned_bytes=0, realignment_s=0.0)
        identity = ModelIdentity(self.identity.model_digest)
        return replace(self, cache=cache, identity=identity, compute=ComputeDescription())

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a sequence that the model takes and the cache can hold."""
        return min(self.max_length, self.cache.max_length)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as text, so that it can travel."""

    tokenizer_json: str
    """JSON in the form of the `tokenizers` library."""
    chat_template: str = ""
    """Jinja template; empty when the model has none."""
    special_tokens_json: str = "{}"
    """JSON object of the special tokens that a chat template may name."""
    tool_template: str = ""
    """Jinja template of conversations with tools; empty when they take `chat_template` too."""


@dataclass(frozen=True, slots=True)
class PassTraffic:
    """Bytes that one pass of a model must read at least. Every expert of a mixture counts, read or not."""

    weight_bytes: int
    """Weights, read once a pass whatever the rows; without an embedding of which only single rows are read."""
    token_bytes: int
    """Bytes of the keys and values of one cached token."""
