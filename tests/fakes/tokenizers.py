"""Small tokenizers, one for each kind of decoder."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BYTE_COUNT = 256


def byte_tokenizer() -> Tokenizer:
    """Return one token a byte and a special one: every id sequence is possible, including broken UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


WORDS = ("▁", "▁a", "b", "##c", ".", "d</w>", "e</w>", "\ufffd", "é", "▁▁", "<0xZZ>", "n't")


def word_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    """Return words, then all bytes as `<0x00>` to `<0xFF>`, then one added token, then a special one."""
    spelled = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(BYTE_COUNT))]
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(spelled)}, [], byte_fallback=True))
    if decoder:
        tokenizer.decoder = decoder
    tokenizer.add_tokens(["added é"])
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def other_name(name: str) -> str:
    """Return another name for a special token such as `<|user|>`."""
    return f"[!{name[2:-2]}!]"


def llama_decoder(*more: decoders.Decoder) -> decoders.Decoder:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    return decoders.Sequence(parts)


DECODERS: dict[str, decoders.Decoder | None] = {
    "llama": llama_decoder(decoders.Strip(" ", 1, 0)),
    "gemma": llama_decoder(),
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder(suffix="</w>"),
    "none": None,
}
