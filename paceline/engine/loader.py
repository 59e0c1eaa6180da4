"""Read a checkpoint directory into a model that runs packed passes.

Owns what is accepted: safetensors only, remote code never, architectures whose attention the engine was checked with.
Everything refused is refused by name, before the service listens.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from paceline.builtin import resolve_model
from paceline.engine.attention import ATTENTION_NAME, PackedPass
from paceline.engine.kv_pool import KvShape
from paceline.errors import ModelNotUsable
from paceline.text import fingerprint
from paceline.types import ModelDescription, TokenizerFiles

SUPPORTED_ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen3ForCausalLM", "Glm4ForCausalLM"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

DtypeName = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class LoadedModel:
    module: PreTrainedModel
    description: ModelDescription
    kv_shape: KvShape
    head_count: int
    tokenizer: TokenizerFiles | None

    @property
    def group_count(self) -> int:
        """Query heads that share one KV head."""
        return self.head_count // self.kv_shape.kv_head_count

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, packed_pass: PackedPass
    ) -> torch.Tensor:
        """Run one packed row: `token_ids` and `positions` [1, T], `wanted` [W] indices into T. Returns [W, V]."""
        output = self.module(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=wanted,
            packed_pass=packed_pass,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def load_model(model: str, dtype: DtypeName = "auto") -> LoadedModel:
    """Load a directory or `builtin:NAME`. Raises ModelNotUsable, saying what is wrong with the checkpoint."""
    folder = resolve_model(model)
    config = _read_config(model, folder)
    module = _read_weights(model, folder, _resolve_dtype(model, dtype, config))
    tokenizer = _read_tokenizer(model, folder)
    head_count: int = config.num_attention_heads
    shape = KvShape(
        layer_count=config.num_hidden_layers,
        kv_head_count=getattr(config, "num_key_value_heads", None) or head_count,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // head_count,
        dtype=module.dtype,
        device=module.device,
    )
    description = ModelDescription(
        model_id=model,
        architecture=type(module).__name__,
        vocabulary_size=config.vocab_size,
        tokenizer_fingerprint=fingerprint(Tokenizer.from_str(tokenizer.tokenizer_json)) if tokenizer else "",
        max_length=config.max_position_embeddings,
        end_token_ids=_end_token_ids(module),
        device=str(module.device),
        dtype=str(module.dtype).removeprefix("torch."),
        parameter_count=module.num_parameters(),
        has_chat_template=bool(tokenizer and tokenizer.chat_template),
    )
    return LoadedModel(module, description, shape, head_count, tokenizer)


def _read_config(model: str, folder: Path) -> Any:
    if not folder.is_dir():
        raise ModelNotUsable(f"model {model!r} is not a directory; give the path of a Hugging Face checkpoint")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotUsable(f"model {model!r} has no config.json; the directory is not a checkpoint, or half written")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        architectures = raw.get("architectures") or []
    except (ValueError, AttributeError) as error:
        raise ModelNotUsable(f"model {model!r}: config.json is not a JSON object: {error}") from error
    unsupported = [name for name in architectures if name not in SUPPORTED_ARCHITECTURES]
    if unsupported or not architectures:
        supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
        named = ", ".join(map(str, architectures)) or "none"
        raise ModelNotUsable(f"model {model!r} has the architecture {named}; this version runs {supported}")
    if raw.get("use_sliding_window"):
        raise ModelNotUsable(f"model {model!r} uses sliding-window attention, which this version does not run")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # config validation raises many kinds
        raise ModelNotUsable(f"model {model!r}: config.json does not describe a {architectures[0]}: {error}") from error


def _resolve_dtype(model: str, dtype: DtypeName, config: Any) -> torch.dtype | Literal["auto"]:
    if dtype != "auto":
        return DTYPES[dtype]
    stated = getattr(config, "dtype", None)
    if stated is not None and stated not in DTYPES.values():
        raise ModelNotUsable(f"model {model!r} states dtype {stated}; start with --dtype float32 or --dtype bfloat16")
    return stated or "auto"


def _read_weights(model: str, folder: Path, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    if not any(folder.glob("*.safetensors")):
        raise ModelNotUsable(f"model {model!r} has no safetensors weights; other formats are not loaded")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelNotUsable(f"model {model!r}: the weights cannot be read, perhaps half written: {error}") from error
    module: PreTrainedModel
    module, report = loaded
    # transformers fills what a file lacks with random numbers and only warns.
    if missing := sorted(report["missing_keys"]):
        raise ModelNotUsable(
            f"model {model!r}: {len(missing)} tensors are missing from the weights, {missing[0]} first"
        )
    if module.dtype not in DTYPES.values():
        raise ModelNotUsable(f"model {model!r} holds {module.dtype} weights; start with --dtype float32 or bfloat16")
    module.eval()  # type: ignore[no-untyped-call]
    return module


def _read_tokenizer(model: str, folder: Path) -> TokenizerFiles | None:
    """Read the tokenizer as Hugging Face users get it; None when the directory has none, and then only ids can pass."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the libraries below raise bare Exception
        raise ModelNotUsable(f"model {model!r}: the tokenizer cannot be read: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelNotUsable(
            f"model {model!r}: {type(tokenizer).__name__} has no fast form; convert it to tokenizer.json"
        )
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return TokenizerFiles(
        tokenizer_json=tokenizer.backend_tokenizer.to_str(),
        chat_template=template or "",
        special_tokens_json=json.dumps(
            {name: str(text) for name, text in tokenizer.special_tokens_map.items() if text}
        ),
    )


def _end_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    generation = module.generation_config
    value = generation.eos_token_id if generation is not None else module.config.eos_token_id
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
