"""Checkpoints: finding one, and reading the files beside its weights.

It owns which files are read and which configurations are refused. It reads no weights; `hub` knows where models are.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from paceline.engine.attention.longest import hides_tokens
from paceline.engine.model.hub import folder_of
from paceline.errors import ModelNotUsable
from paceline.types import TokenizerFiles

READ_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
"""Patterns of what is fetched from the hub to load a model."""
PICKLED_WEIGHTS = "pytorch_model*.bin"
_REFUSED = {
    "is_encoder_decoder": "is an encoder-decoder",
    "use_sliding_window": "uses sliding-window attention",
    "attn_logit_softcapping": "soft-caps its attention scores",
    "kv_lora_rank": "compresses keys and values (multi-head latent attention)",
    "alibi": "uses ALiBi position biases",
    "quantization_config": "is quantised, so that rows of a pass may be rounded together",
}
"""Configuration fields that, when set, mean a kind of model the engine does not run."""
_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Checkpoint:
    model: str
    """Name by which the user asked for it."""
    folder: Path
    config: Any

    @property
    def weight_files(self) -> list[Path]:
        """The weight files that transformers reads; the folder may have others. Raises ModelNotUsable."""
        stated = getattr(self.config, "transformers_weights", None)
        return self._files(stated or SAFE_WEIGHTS_NAME, stated or SAFE_WEIGHTS_INDEX_NAME)

    @property
    def pickled_files(self) -> list[Path]:
        """The weight files in pickled form, which only `conversion` reads. Raises ModelNotUsable."""
        return self._files(WEIGHTS_NAME, WEIGHTS_INDEX_NAME)

    @property
    def has_safetensors(self) -> bool:
        return any(self.folder.glob("*.safetensors"))

    @property
    def has_only_sentencepiece(self) -> bool:
        """Whether there is a tokenizer, but not as tokenizer.json."""
        return (self.folder / "tokenizer.model").is_file() and not (self.folder / "tokenizer.json").is_file()

    @property
    def how_to_convert(self) -> str:
        return f"`paceline convert {shlex.quote(self.model)}` writes a checkpoint that can be loaded"

    def _files(self, whole: str, index: str) -> list[Path]:
        first = self.folder / whole
        if not first.is_file():
            first = self.folder / index
        if first.suffix != ".json":
            return [first]
        if not first.exists():
            raise ModelNotUsable(
                f"model {self.model!r} has neither {whole} nor {index}, and files of other names are not read; name "
                "its weights so, or fetch what is missing"
            )
        try:
            places = json.loads(first.read_text(encoding="utf-8"))["weight_map"]
            return [self.folder / name for name in sorted(set(places.values()))]
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ModelNotUsable(
                f"model {self.model!r}: {first.name} does not name the files of the weights; it may be half written"
            ) from error


def open_checkpoint(model: str, patterns: Sequence[str] = READ_FILES) -> Checkpoint:
    """Locate a directory, `builtin:NAME` or hub id in whatever form and read its configuration. Raise ModelNotUsable.

    Of a hub id the files that match a pattern are fetched.
    """
    folder = folder_of(model, patterns)
    return Checkpoint(model, folder, _read_config(model, folder))


def find_checkpoint(model: str) -> Checkpoint:
    """Open a checkpoint that can be loaded. Raise ModelNotUsable."""
    checkpoint = open_checkpoint(model)
    if not checkpoint.has_safetensors:
        raise ModelNotUsable(
            f"model {model!r} has no safetensors weights; if it has pytorch_model.bin, {checkpoint.how_to_convert}"
        )
    return checkpoint


def label_of(model: str, config: Any) -> str:
    """Return the name under which a model is shown; it marks a synthetic one, which is no language model."""
    return f"{model} (synthetic)" if getattr(config, "synthetic", None) else model


def _read_config(model: str, folder: Path) -> Any:
    if (folder / "adapter_config.json").is_file():
        raise ModelNotUsable(
            f"model {model!r} has an adapter (adapter_config.json), which the engine adds to no weights; merge the two "
            "by PEFT's merge_and_unload and give the folder that this makes, or remove the file if that was done here"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotUsable(f"model {model!r} has no config.json; the directory is not a checkpoint, or half written")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        architectures = [str(name) for name in raw.get("architectures") or []]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ModelNotUsable(f"model {model!r}: config.json is not a JSON object: {error}") from error
    _check_architecture(model, architectures, raw)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # config validation raises many kinds
        raise ModelNotUsable(f"model {model!r}: config.json does not describe a {architectures[0]}: {error}") from error
    _check_layers_alike(model, config)
    _check_sizes(model, config)
    _check_kind(model, config)
    _check_end_tokens(model, folder / "generation_config.json")
    return config


def _check_layers_alike(model: str, config: Any) -> None:
    """Refuse settings by layer (Gemma 4's): transformers raises where one of them is read for the whole model."""
    if differing := getattr(config, "per_layer_attributes", None):
        raise ModelNotUsable(
            f"model {model!r} has layers that differ in {', '.join(sorted(differing))} (per_layer_config); the engine "
            "runs layers that are all alike"
        )


def _check_kind(model: str, config: Any) -> None:
    """Refuse what is read from the configuration and not the file, which may leave out a default (Mistral's window)."""
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelNotUsable(
            f"model {model!r}: config.json has model_type {config.model_type!r}, of which transformers has no causal "
            "language model; give the one that its architectures name"
        )
    try:
        is_text_alone = config.get_text_config() is config
    except ValueError:  # several models of text are inside
        is_text_alone = False
    if not is_text_alone:
        raise ModelNotUsable(
            f"model {model!r} reads more than text ({type(config).__name__} has a model of text inside); give a "
            "checkpoint of the text model alone"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ModelNotUsable(f"model {model!r} has layers of kind {', '.join(sorted(kinds))}; only full_attention runs")
    window = getattr(config, "sliding_window", None)
    # An architecture with a window and without such a field does not read one that the file has all the same.
    has_switch = hasattr(type(config), "use_sliding_window") or not hasattr(type(config), "sliding_window")
    is_used = not has_switch or getattr(config, "use_sliding_window", True)
    if window and is_used and hides_tokens(window, config):
        raise ModelNotUsable(
            f"model {model!r} uses sliding-window attention (sliding_window is {window}), which the engine does not "
            "run; with max_position_embeddings no larger than that in config.json it serves sequences of which the "
            "window hides nothing"
        )
    if getattr(config, "attn_temperature_tuning", None):
        # transformers takes the place in a pass for the position, where rows are packed.
        raise ModelNotUsable(f"model {model!r} scales queries by position (attn_temperature_tuning is set)")


def _check_sizes(model: str, config: Any) -> None:
    """Refuse sizes with which transformers makes a model without layers, say, or divides by zero."""
    for name in _SIZES:
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise ModelNotUsable(f"model {model!r}: config.json has {name} {size}; it takes at least 1")


def _check_end_tokens(model: str, path: Path) -> None:
    """Refuse a file that transformers would pass over: outputs would end at other tokens, or not at all."""
    if not path.is_file():
        return
    try:
        stated = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelNotUsable(
            f"model {model!r}: {path.name} is not a JSON object, perhaps half written: {error}"
        ) from error
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(type(one) is int for one in ids):
        raise ModelNotUsable(f"model {model!r}: {path.name} has eos_token_id {stated!r}; give a token id, or a list")


def _check_architecture(model: str, architectures: list[str], raw: dict[str, Any]) -> None:
    unknown = [name for name in architectures if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()]
    if unknown or not architectures:
        named = ", ".join(architectures) or "none"
        raise ModelNotUsable(
            f"model {model!r} has the architecture {named}; causal language models of transformers run, "
            "such as LlamaForCausalLM, Qwen3ForCausalLM or Glm4ForCausalLM"
        )
    for field, meaning in _REFUSED.items():
        if raw.get(field):
            raise ModelNotUsable(f"model {model!r} {meaning} ({field} is set), which the engine does not run")


def read_tokenizer(checkpoint: Checkpoint) -> TokenizerFiles | None:
    """Read the tokenizer as Hugging Face users get it; None when the directory has none, and only ids can be served."""
    model, folder = checkpoint.model, checkpoint.folder
    if checkpoint.has_only_sentencepiece:
        raise ModelNotUsable(
            f"model {model!r} has its tokenizer in sentencepiece form alone (tokenizer.model); "
            f"{checkpoint.how_to_convert}"
        )
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the libraries below raise bare Exception
        raise ModelNotUsable(f"model {model!r}: the tokenizer cannot be read: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelNotUsable(
            f"model {model!r}: {type(tokenizer).__name__} has no fast form; convert it to tokenizer.json"
        )
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        templates = {"default": templates}
    return TokenizerFiles(
        tokenizer_json=tokenizer.backend_tokenizer.to_str(),
        chat_template=templates.get("default") or "",
        special_tokens_json=json.dumps(
            {name: str(text) for name, text in tokenizer.special_tokens_map.items() if text}
        ),
        # As transformers chooses among several: this one for conversations with tools, the default for all others.
        tool_template=templates.get("tool_use") or "",
    )
