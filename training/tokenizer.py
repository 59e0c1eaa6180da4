"""The pair's tokenizer: byte-level BPE, digits one by one, four special tokens, a chat template.

It is byte-level so that any text round-trips, and has single digits so that arithmetic is regular for a small model.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from paceline.errors import InvalidRequest

PAD, END, USER, ASSISTANT = SPECIAL_TOKENS = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|' + message.role + '|>' + message.content }}"
    "{%- if message.role == 'assistant' %}{{- '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Learn merges from `texts`; ids 0 to 3 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint. Raise InvalidRequest for none, or one without our special tokens."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers has no kind of its own
        raise InvalidRequest(
            f"{folder} has no tokenizer.json that can be read ({error}); name a checkpoint of `training target`"
        ) from error
    if missing := [one for one in SPECIAL_TOKENS if tokenizer.token_to_id(one) is None]:
        raise InvalidRequest(
            f"the tokenizer in {folder} has no {', '.join(missing)}; name a checkpoint of `training target`"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the files that Hugging Face's `AutoTokenizer` reads."""
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
