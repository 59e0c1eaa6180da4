"""Conversion of a tokenizer in sentencepiece form (tokenizer.model) into tokenizer.json, and a check that both agree.

It owns where transformers' own conversion differs from sentencepiece. A conversion that still differs is refused.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer, LlamaTokenizer

from paceline.engine.model.checkpoint import Checkpoint, read_tokenizer
from paceline.errors import ModelNotUsable

_SPACE = "▁"
"""What sentencepiece writes for a space."""
_CONFIG = "tokenizer_config.json"
_SAMPLES = (
    "",
    " ",
    "\n",
    "  two spaces before,  between and after  ",
    "\tTabs,\n\nempty lines\r\nand 1,234,567.89 numbers",
    "naïve façade Ångström e\u0301 ﬁ Ⅳ ½ ²",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी ไทย",
    "🙂👩‍👩‍👧 ∑∫√ → \u00a0\u200b\u3000\ufeff",
    "def f(x):\n    return {'a': x ** 2}  # 100 %",
    "a▁b",
)
_JOINED_PIECES = 16


def convert_tokenizer(checkpoint: Checkpoint, output: Path) -> int:
    """Write the tokenizer's files, and return on how many texts they were compared with sentencepiece.

    Raise ModelNotUsable when tokenizer.model cannot be read, or tokenizer.json would tokenize otherwise.
    """
    try:
        original = SentencePieceProcessor(model_file=str(checkpoint.folder / "tokenizer.model"))
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the libraries raise many kinds
        raise ModelNotUsable(f"model {checkpoint.model!r}: tokenizer.model cannot be converted: {error}") from error
    stated = checkpoint.folder / _CONFIG
    config = json.loads(stated.read_text(encoding="utf-8")) if stated.is_file() else {}
    # Files of before 2023-07 do not state it, and mean the form of then.
    legacy = config.get("legacy") is not False
    if legacy and isinstance(tokenizer, LlamaTokenizer):
        _begin_every_text_with_a_space(tokenizer.backend_tokenizer)
    (output / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    # transformers would rebuild the tokenizer of the class that was stated, and leave out parts of tokenizer.json.
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (output / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return _compare(checkpoint, output, original, leading_spaces=legacy)


def _begin_every_text_with_a_space(tokenizer: Tokenizer) -> None:
    """Put a space before each text, as sentencepiece does; transformers 5 leaves it out where there is one already."""
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])


def _compare(checkpoint: Checkpoint, output: Path, original: SentencePieceProcessor, *, leading_spaces: bool) -> int:
    files = read_tokenizer(replace(checkpoint, folder=output))  # as the services read it
    assert files
    converted = Tokenizer.from_str(files.tokenizer_json)
    texts = [text if leading_spaces else text.lstrip(" ") for text in _texts(original, converted)]
    ours = converted.encode_batch(texts, add_special_tokens=False)
    for text, one, wanted in zip(texts, ours, original.encode(texts), strict=True):
        if one.ids != wanted:
            raise ModelNotUsable(
                f"model {checkpoint.model!r}: tokenizer.model makes {wanted[:9]} of {text[:40]!r}, and "
                f"converted it would make {one.ids[:9]}; put a tokenizer.json beside it that you trust"
            )
    return len(texts)


def _texts(original: SentencePieceProcessor, converted: Tokenizer) -> list[str]:
    """Return samples, every ordinary piece of the vocabulary, and the pieces in random order, several to a text."""
    added = {one.content for one in converted.get_added_tokens_decoder().values()}
    kinds = (original.is_control, original.is_unknown, original.is_unused, original.is_byte)
    ids = [one for one in range(original.vocab_size()) if not any(kind(one) for kind in kinds)]
    pieces = [piece.replace(_SPACE, " ") for piece in map(original.id_to_piece, ids) if piece not in added]
    shuffled = random.Random(0).sample(pieces, len(pieces))
    joined = ["".join(shuffled[at : at + _JOINED_PIECES]) for at in range(0, len(shuffled), _JOINED_PIECES)]
    return [*_SAMPLES, *pieces, *joined]
