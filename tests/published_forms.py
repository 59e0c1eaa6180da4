"""Tiny random checkpoints in the forms in which the three pairs of arXiv 2510.22876 are published.

Shapes and weights are those of `checkpoints`; files, their names and what stands in them are as on the hub.
"""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceTrainer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM

from tests.checkpoints import write_json, write_model, write_related_draft

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "LICENSE").read_text(encoding="utf-8")
"""What tokenizers are trained on: a text that does not change."""
VOCABULARY_SIZE = 512
GLM4_TOKENS = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>")
GLM45_TOKENS = (*GLM4_TOKENS, "<think>", "</think>", "/nothink")
QWEN3_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% endfor %}"


def write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Write `vicuna`, `qwen3` or `glm4`; return the folders of target and draft as they are published."""
    return {"vicuna": _vicuna, "qwen3": _qwen3, "glm4": _glm4}[name](folder / "target", folder / "draft")


def _vicuna(target: Path, draft: Path) -> tuple[Path, Path]:
    write_model(target, "Llama", vocab_size=VOCABULARY_SIZE, num_key_value_heads=4, bos_token_id=1, eos_token_id=2)
    write_related_draft(draft, target, "Llama", noise=0.05)
    for folder, shard_count in ((target, 2), (draft, 1)):
        as_vicuna(folder, shard_count)
    return target, draft


def as_vicuna(folder: Path, shard_count: int) -> None:
    """Turn a Llama into the form of lmsys/vicuna-7b-v1.3: pickled float16 shards and a tokenizer.model."""
    config = json.loads((folder / "config.json").read_text())
    for later in ("rope_parameters", "dtype", "head_dim", "num_key_value_heads"):
        config.pop(later, None)
    write_json(folder / "config.json", config | {"torch_dtype": "float16", "transformers_version": "4.28.1"})
    tensors = {name: one.half() for name, one in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    # Checkpoints of that time have the rotary frequencies of each layer.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(8.0)
    write_pickled(folder, tensors, shard_count)
    write_sentencepiece(folder)


def write_pickled(folder: Path, tensors: dict[str, torch.Tensor], shard_count: int) -> None:
    if shard_count == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names = list(tensors)
    places: dict[str, str] = {}
    for number in range(shard_count):
        file = f"pytorch_model-{number + 1:05}-of-{shard_count:05}.bin"
        shard = names[number::shard_count]
        torch.save({name: tensors[name] for name in shard}, folder / file)
        places |= dict.fromkeys(shard, file)
    write_json(folder / "pytorch_model.bin.index.json", {"metadata": {}, "weight_map": places})


def write_sentencepiece(folder: Path, **settings: Any) -> None:
    """Train a tokenizer with Llama's settings and write it with the files of that time beside it."""
    model = BytesIO()
    llama: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    }
    llama |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        vocab_size=VOCABULARY_SIZE,
        minloglevel=2,
        num_threads=1,
        **(llama | settings),
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    marks: dict[str, Any] = {
        name: {"content": text, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))
    }
    write_json(folder / "special_tokens_map.json", marks | {"pad_token": "<unk>"})
    typed: dict[str, Any] = {name: {"__type": "AddedToken"} | mark for name, mark in marks.items()}
    stated: dict[str, Any] = {"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False}
    stated |= {"model_max_length": 2048, "pad_token": None, "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer"}
    write_json(folder / "tokenizer_config.json", typed | stated)


def _qwen3(target: Path, draft: Path) -> tuple[Path, Path]:
    write_model(target, "Qwen3", vocab_size=VOCABULARY_SIZE, tie_word_embeddings=False)
    write_model(draft, "Qwen3", vocab_size=VOCABULARY_SIZE, tie_word_embeddings=True, num_hidden_layers=1)
    _in_shards(target)
    for folder in (target, draft):
        _write_byte_level(folder, QWEN3_TOKENS, "Qwen2Tokenizer")
    return target, draft


def _glm4(target: Path, draft: Path) -> tuple[Path, Path]:
    """The draft is a Qwen2 that was given the tokenizer of GLM-4.5, which has more added tokens than its target's."""
    write_model(target, "Glm4", vocab_size=VOCABULARY_SIZE, eos_token_id=[7, 8], attention_bias=True)
    write_model(draft, "Qwen2", vocab_size=VOCABULARY_SIZE)
    _in_shards(target)
    _write_byte_level(target, GLM4_TOKENS, "PreTrainedTokenizer")
    _write_byte_level(draft, GLM45_TOKENS, "PreTrainedTokenizerFast")
    return target, draft


def _in_shards(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")


def _write_byte_level(folder: Path, added: tuple[str, ...], kind: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = VOCABULARY_SIZE - len(GLM45_TOKENS)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    stated = {"tokenizer_class": kind, "eos_token": added[0], "pad_token": added[0], "chat_template": TEMPLATE}
    write_json(folder / "tokenizer_config.json", stated | {"model_max_length": 512})
