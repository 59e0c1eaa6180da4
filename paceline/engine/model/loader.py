"""Reading of a checkpoint into a model that runs packed passes.

It owns what is accepted: safetensors only, never remote code, and decoders that can run the engine's attention.
Anything else is refused by name, before the service listens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.engine.attention.common import ATTENTION_NAME
from paceline.engine.attention.longest import max_length_of
from paceline.engine.backend import find_backend
from paceline.engine.interfaces import KvShape
from paceline.engine.memory import is_out_of_memory
from paceline.engine.model.checkpoint import Checkpoint, label_of
from paceline.engine.model.decoder import Decoder, make_decoder, make_ranked_decoder
from paceline.engine.model.experts import mixes_experts
from paceline.engine.model.identity import Origin, origin_of_files, origin_of_module
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.weights_digest import reading_with_digest
from paceline.engine.ranks.group import Group
from paceline.errors import ModelNotUsable, StartupError
from paceline.planning.dimensions import ModelDimensions, dimensions_of
from paceline.text import fingerprint
from paceline.types import Dtype, ModelDescription, Quantization, RankPlace, TokenizerFiles

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = ("F64", "F32", "BF16", "F16")
"""Names in safetensors of the dtypes in which weights are stored as the numbers that they are."""
_NARROW = ("F4", "F6", "F8", "I8", "U8")
"""What the names of the dtypes of eight bits and less begin with."""


def described(
    module: PreTrainedModel,
    model_id: str,
    tokenizer: TokenizerFiles | None,
    origin: Origin | None = None,
    quantization: Quantization = "none",
) -> ModelDescription:
    """Describe a module whose layers will be quantised so, and are not yet.

    `origin` is None for a module that was not read from files.
    """
    origin = origin or origin_of_module(module)
    config: Any = module.config
    return ModelDescription(
        model_id=label_of(model_id, config),
        architecture=type(module).__name__,
        vocabulary_size=config.vocab_size,
        tokenizer_fingerprint=fingerprint(Tokenizer.from_str(tokenizer.tokenizer_json)) if tokenizer else "",
        max_length=max_length_of(config),
        end_token_ids=end_token_ids_of(module),
        device=str(module.device),
        dtype=str(module.dtype).removeprefix("torch."),
        quantization="" if quantization == "none" else quantization,
        parameter_count=module.num_parameters(),
        has_chat_template=bool(tokenizer and tokenizer.chat_template),
        weights_digest=origin.weights_digest,
        configuration_digest=origin.configuration_digest,
        revision=origin.revision,
    )


def made_of(
    module: PreTrainedModel, description: ModelDescription, tokenizer: TokenizerFiles | None, group: Group | None = None
) -> LoadedModel:
    """Make the decoder of a module that was made with `ATTENTION_NAME` as its attention; this uses it up.

    With a group, all of whose ranks call this, it is the decoder of this rank's share. `loading` checks the result.
    """
    config: Any = module.config
    dimensions, has_experts = _dimensions(config), mixes_experts(module)  # before the module is used up
    layer_parameter_count = description.parameter_count // config.num_hidden_layers
    if group is None:
        backend, shape = find_backend(module.device), kv_shape(module, module.device)
        decoder: Decoder = make_decoder(module, backend)
    else:
        layer_parameter_count //= group.place.grid.share_count
        backend = find_backend(group.device)
        decoder = make_ranked_decoder(module, backend, group)
        shape = kv_shape(module, group.device)
    return LoadedModel(
        decoder, description, dimensions, shape, backend, tokenizer, has_experts, layer_parameter_count, group
    )


def kv_shape(module: PreTrainedModel, device: torch.device) -> KvShape:
    """Return the shape that the module's configuration tells."""
    config: Any = module.config
    head_count: int = config.num_attention_heads
    return KvShape(
        layer_count=config.num_hidden_layers,
        head_count=head_count,
        kv_head_count=getattr(config, "num_key_value_heads", None) or head_count,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // head_count,
        dtype=module.dtype,
        device=device,
    )


def _dimensions(config: Any) -> ModelDimensions | None:
    try:
        return dimensions_of(config.to_dict())
    except (KeyError, TypeError, ValueError):
        return None


def resolve_device(device: str) -> str:
    """Turn the setting into a torch device; raise StartupError when it does not exist."""
    if device == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device is cuda and this torch sees no CUDA device; install a CUDA build or take cpu")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def rank_device(device: str, place: RankPlace) -> torch.device:
    """Return the device of a rank; raise StartupError when the machine has none for it."""
    kind = resolve_device(device)
    if kind == "cpu":
        return torch.device(kind)
    if place.device_index >= torch.cuda.device_count():
        raise StartupError(
            f"rank {place.rank} of {place.grid.rank_count} is to take GPU {place.device_index}, and torch sees "
            f"{torch.cuda.device_count()}; give each rank a GPU of its own, or take --device cpu"
        )
    found = torch.device(kind, place.device_index)
    torch.cuda.set_device(found)
    return found


def architecture_of(checkpoint: Checkpoint) -> str:
    """Return the name of the class that a checkpoint is read into."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.config)]
    return str(kind.__name__)


def _resolve_dtype(model: str, dtype: Dtype, config: Any) -> torch.dtype | Literal["auto"]:
    if dtype != "auto":
        return DTYPES[dtype]
    stated = getattr(config, "dtype", None)
    if stated is not None and stated not in DTYPES.values():
        raise ModelNotUsable(f"model {model!r} states dtype {stated}; start with --dtype float32, bfloat16 or float16")
    return stated or "auto"


def keep_float32() -> None:
    """Have products of float32 computed in float32.

    NVIDIA's containers have torch round what enters them to ten bits (TF32, `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`), which
    other rows of a pass may then show.
    """
    torch.set_float32_matmul_precision("highest")


def read_module(checkpoint: Checkpoint, dtype: Dtype, device: str) -> tuple[PreTrainedModel, Origin]:
    """Read the weights and tell their origin. Raise ModelNotUsable."""
    keep_float32()
    chosen = _resolve_dtype(checkpoint.model, dtype, checkpoint.config)
    files = checkpoint.weight_files
    try:
        _check_stored(checkpoint.model, files)
        module, digest = reading_with_digest(
            checkpoint.folder, files, lambda: _read_weights(checkpoint, chosen, device)
        )
        return module, origin_of_files(checkpoint.folder, digest)
    except (OSError, ValueError, SafetensorError) as error:
        raise _half_written(checkpoint, error) from error


def _check_stored(model: str, files: Sequence[Path]) -> None:
    """Refuse weights in eight bits and less, of which transformers reads the numbers without their scales.

    It does so where config.json does not say that they are quantised; some tools tell it in another file.
    """
    stored: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names: list[str] = opened.keys()
            stored |= {name: opened.get_slice(name).get_dtype() for name in names}
    coded = [name for name, dtype in stored.items() if dtype not in _STORED and _is_weight(name, dtype)]
    if coded:
        raise ModelNotUsable(
            f"model {model!r} is quantised: {len(coded)} weights are stored in other numbers than their own, "
            f"{coded[0]} as {stored[coded[0]]} first, which the engine does not run; give the checkpoint that it was "
            "made from"
        )


def _is_weight(name: str, dtype: str) -> bool:
    # Experts in one tensor have names of their own (`experts.gate_up_proj`). Masks have eight bits too (`attn.bias`).
    return name.endswith("weight") or (dtype.startswith(_NARROW) and not name.endswith("bias"))


def convert(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights, as if they had been read so. Buffers, such as rotary frequencies, keep their dtype."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _half_written(checkpoint: Checkpoint, error: Exception) -> ModelNotUsable:
    return ModelNotUsable(f"model {checkpoint.model!r}: the weights cannot be read, perhaps half written: {error}")


def _read_weights(checkpoint: Checkpoint, dtype: torch.dtype | Literal["auto"], device: str) -> PreTrainedModel:
    model = checkpoint.model
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.config)]
    if not getattr(kind, "_supports_attention_backend", False):
        raise ModelNotUsable(
            f"model {model!r}: {kind.__name__} does not call transformers' attention interface, so the engine cannot "
            "keep its keys and values"
        )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Its log lines go where those of all libraries go.
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=checkpoint.config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_report` names them
        )
    except Exception as error:  # what a configuration may say wrong raises many kinds
        if is_out_of_memory(error):
            raise
        if isinstance(error, SafetensorError | OSError | RuntimeError | ValueError):
            raise _half_written(checkpoint, error) from error
        raise ModelNotUsable(
            f"model {model!r}: config.json, or an index of its weights, describes no model that can be made: {error!r}"
        ) from error
    module: PreTrainedModel
    module, report = loaded
    _check_report(model, report)
    if module.dtype not in DTYPES.values():
        raise ModelNotUsable(f"model {model!r} holds {module.dtype} weights; start with --dtype {' or '.join(DTYPES)}")
    module.eval()  # type: ignore[no-untyped-call]
    module.to(device)  # type: ignore[arg-type]
    return module


def _check_report(model: str, report: dict[str, Any]) -> None:
    """Refuse what transformers fills with random numbers: tensors that a file lacks, or has in another shape."""
    if other := sorted(map(str, report["mismatched_keys"])):
        raise ModelNotUsable(
            f"model {model!r}: {len(other)} tensors have other shapes than config.json says, {other[0]} first"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelNotUsable(
            f"model {model!r}: {len(missing)} tensors are missing from the weights, {missing[0]} first"
        )


def end_token_ids_of(module: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end outputs. Some configurations name one that no output can have, such as -1."""
    config: Any = module.config
    generation = module.generation_config
    value = generation.eos_token_id if generation is not None else config.eos_token_id
    named = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(one for one in named if 0 <= one < config.vocab_size)
