"""Bytes of one model service: weights, cache, and the work of its largest call.

The sums follow what the engine allocates on a CPU with compiled kernels, operation by operation; `benchmarks.memory`
compares them with what processes of the services take. On CUDA the same tensors are made, and their memory was not
measured. It knows nothing of the memory that is there.
"""

from dataclasses import dataclass, replace
from typing import Literal

from paceline.checks import DECODED_TOKENS, MAX_DRAFT_COUNT
from paceline.planning.dimensions import VALUE_BYTES, ModelDimensions

PlannedDevice = Literal["cpu", "cuda"]

MIB = 1 << 20
COLUMNS = 16
"""A packed weight's columns are padded to a multiple of this."""
FLOAT_BYTES = 4
"""Hidden states, products and logits are float32."""
CHOICE_LOGITS = 1 << 20
"""Logits from which tokens are drawn at once, or those of one place if there are more."""
CHOICE_BYTES = 44
"""Most bytes beside each of them: changed and scaled logits, and noise of 64 bits."""
LEAST_LOGITS = MAX_DRAFT_COUNT + 1
"""Places of a row with the most drafts, whose logits are held together."""
MOST_LOGITS = 1 << 27
"""Most logits that a call holds at a time: 512 MiB of them."""
SERVING_BYTES = 1 << 19
"""What calls take beside the model's work: messages, threads, and what Python keeps of sequences."""
CONTEXT_BYTES = 1300 << 20
"""What the driver, libraries, kernels and recorded passes take of a CUDA device for a process, beside torch's memory.

An H200 showed 1,281 and 1,294 MiB for the built-in target in float32 and bfloat16. Another device may take less.
"""
PROCESS_BYTES = 540 << 20
"""What Python and the libraries take of a CPU's memory, parts of files that are mapped included."""
STARTED_BYTES = 12 << 20
"""What of it comes after the model is loaded: runner, gRPC's server, and the code that calls bring. 11.5 MiB were seen.
"""
KEPT_BYTES = 24 << 20
"""What a process with a budget keeps of freed memory, of calls that wait, and of calls that ended and are no garbage
yet. 17 MiB were seen under random calls."""
RECORDED_TOKENS = 512
"""Tokens of the largest recorded pass on a CUDA device."""
WORK_SHARE = 8
"""With a budget, a call's work gets at most one part in this many of what the weights leave, if it can do with that."""


@dataclass(frozen=True)
class WeightForm:
    """How a model's weights are held."""

    dtype: str
    """Of weights that are not quantised, and of the cache."""
    is_int8: bool = False
    device: PlannedDevice = "cpu"

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.dtype]

    @property
    def multiplied_bytes(self) -> int:
        """Bytes of a number that passes multiply by."""
        return 1 if self.is_int8 else self.value_bytes


@dataclass(frozen=True)
class CallSize:
    """The largest call that a service gets."""

    logit_count: int
    """Places of all rows of which logits are held at a time."""
    chunk_tokens: int
    """Tokens of prompts beside them."""
    drawn_count: int = LEAST_LOGITS
    """Places of a sequence, for which tokens are drawn together; 0 where none are drawn."""
    lacking_count: int = 0
    """Rows that may lack as many tokens as decoding rows do. Those that run together have logits of a place each."""
    tapped_count: int = 0
    """Results of layers, the last one included, that heads with layers of their own read of every token; 0 without."""

    @staticmethod
    def of_rows(row_count: int, chunk_tokens: int, tapped_count: int = 0) -> "CallSize":
        """Return the size of a call of so many rows, each with the most drafts and lacking the most tokens."""
        return CallSize(row_count * LEAST_LOGITS, chunk_tokens, lacking_count=row_count, tapped_count=tapped_count)


def weight_bytes(model: ModelDimensions, form: WeightForm) -> int:
    """Return the bytes of a loaded model's weights, with its rotations."""
    # Kernels on a CPU have their own arrangement of each product's weight. Elsewhere a tied head stays the embedding.
    is_shared = model.is_tied and not form.is_int8 and form.device != "cpu"
    embedding_bytes = 0 if is_shared else model.embedding_count * form.value_bytes
    known = model.layer_count * model.layer_product_count + model.embedding_count * (1 if model.is_tied else 2)
    # What the sizes do not tell is norms, which are held as float32, or experts, which keep their dtype.
    others_bytes = max(0, model.parameter_count - known) * (form.value_bytes if model.mixes_experts else FLOAT_BYTES)
    return product_bytes(model, form) + embedding_bytes + others_bytes + rotation_bytes(model)


def product_bytes(model: ModelDimensions, form: WeightForm) -> int:
    """Return the bytes of what a pass multiplies by, and so reads."""
    numbers = model.layer_count * model.layer_product_count + _padded(model.vocabulary_size) * model.hidden_size
    if not form.is_int8:
        return numbers * form.value_bytes
    columns = model.layer_count * (model.projection_size + 2 * model.hidden_size + 2 * model.intermediate_size)
    return numbers + (columns + model.vocabulary_size) * FLOAT_BYTES


def rotation_bytes(model: ModelDimensions) -> int:
    """Return the bytes of the cosines and sines at every position."""
    return 2 * model.max_length * model.head_size * FLOAT_BYTES


def token_bytes(model: ModelDimensions, form: WeightForm, heads_layer_count: int = 0) -> int:
    """Return the bytes of a token's keys and values in all layers, those of heads included."""
    layers = model.layer_count + heads_layer_count
    return 2 * layers * model.kv_head_count * model.head_size * form.value_bytes


def kv_bytes(a_token_bytes: int, sequence_count: int, length: int, page_tokens: int) -> int:
    """Return the bytes of the pages of so many sequences of one length."""
    return sequence_count * _rounded(length, page_tokens) * a_token_bytes


def work_bytes(model: ModelDimensions, form: WeightForm, call: CallSize) -> int:
    """Return the most bytes that a call takes beside weights and cache, and gives back."""
    logits = call.logit_count * _padded(model.vocabulary_size) * FLOAT_BYTES
    if model.vocabulary_size % COLUMNS and form.device == "cpu":
        logits *= 2  # the product has gaps between rows, and is copied without
    places = min(call.drawn_count, choice_places(model.vocabulary_size))
    drawn = places * model.vocabulary_size * CHOICE_BYTES
    lacking = min(call.lacking_count, call.logit_count) * (DECODED_TOKENS - 1)
    tokens = call.logit_count + call.chunk_tokens + lacking
    recorded = RECORDED_TOKENS * (model.vocabulary_size * FLOAT_BYTES + layer_token_bytes(model, form))
    kept = recorded if form.device == "cuda" else 0
    token = layer_token_bytes(model, form) + heads_token_bytes(model, form, call.tapped_count)
    return kept + tokens * token + logits + drawn


def choice_places(vocabulary_size: int) -> int:
    """Return at how many places tokens are drawn at once."""
    return max(1, CHOICE_LOGITS // vocabulary_size)


def layer_token_bytes(model: ModelDimensions, form: WeightForm) -> int:
    """Return the bytes that the layers hold for each token of a pass: one room for each kind of result."""
    value, hidden, inner = form.value_bytes, model.hidden_size, model.intermediate_size
    sums = 2 * FLOAT_BYTES * hidden  # what goes through the layers, and what is added to it
    products = FLOAT_BYTES * (model.projection_size + 2 * inner)
    entering = value * (hidden + model.attended_size + inner)
    # Where the processor multiplies no bfloat16, or beside weights of int8, a product's rows become float32 first, and
    # those of float32 perhaps int8 (`w8a8`).
    converted = FLOAT_BYTES * inner if value < FLOAT_BYTES else inner if form.is_int8 else 0
    return sums + products + entering + (converted if form.device == "cpu" else 0)


def heads_token_bytes(model: ModelDimensions, form: WeightForm, tapped_count: int) -> int:
    """Return the bytes that heads hold for each token of a pass, beside what the target's layers hold.

    Features wait, and are joined with those of other sequences. With embeddings they enter one layer, which computes
    keys and values of all tokens, and the rest of the last ones alone, whose states are what the head reads.
    """
    if not tapped_count:
        return 0
    value, hidden = form.value_bytes, model.hidden_size
    features = 2 * FLOAT_BYTES * tapped_count * hidden
    # Embeddings, both beside each other, and what is made of them: before the layer and behind it.
    entering = 3 * (FLOAT_BYTES + value) * hidden
    rooms = value * (hidden + model.attended_size) + FLOAT_BYTES * model.projection_size
    return features + entering + rooms


def serving_work_bytes(model: ModelDimensions, form: WeightForm, call: CallSize) -> int:
    """Return the most bytes that serving a call takes beside weights and cache."""
    return work_bytes(model, form, call) + SERVING_BYTES


def held_logit_count(
    model: ModelDimensions,
    form: WeightForm,
    call: CallSize,
    *,
    left_bytes: int | None = None,
    kv_bytes: int | None = None,
) -> int:
    """Return of how many places a service holds logits at a time, of those that its calls may have.

    Larger calls are run in parts. If `left_bytes`, what the weights leave of a budget, or `kv_bytes`, what is to be
    left for the cache, is given, their work keeps to its share.
    """
    count = max(LEAST_LOGITS, min(call.logit_count, MOST_LOGITS // model.vocabulary_size))
    while count > LEAST_LOGITS:
        work = serving_work_bytes(model, form, replace(call, logit_count=count))
        left = left_bytes if kv_bytes is None else kv_bytes + work
        if left is None or work * WORK_SHARE <= left:
            break
        count = max(LEAST_LOGITS, count // 2)
    return count


def process_bytes(device: PlannedDevice) -> int:
    """Return what a service takes of the device beside its model, with what it keeps of freed memory."""
    return CONTEXT_BYTES if device == "cuda" else PROCESS_BYTES + KEPT_BYTES


def rounded_mib(size_bytes: int) -> int:
    """Return the MiB that hold so many bytes."""
    return -(-size_bytes // MIB)


def _padded(columns: int) -> int:
    return _rounded(columns, COLUMNS)


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
