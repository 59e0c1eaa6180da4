"""Prompts in, fingerprints, and chat templates that come from strangers."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline.errors import InvalidRequest, ModelNotUsable
from paceline.text import TextCodec, fingerprint
from paceline.types import Text, TokenIds, TokenizerFiles, UserMessage

WORDS = {"[UNK]": 0, "hello": 1, "world": 2, "user:": 3}


def word_tokenizer(words: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def codec(template: str = "", special_tokens_json: str = "{}") -> TextCodec:
    return TextCodec(TokenizerFiles(word_tokenizer(WORDS).to_str(), template, special_tokens_json))


def test_each_form_of_a_prompt_becomes_token_ids() -> None:
    text = codec("{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}")
    assert text.encode(Text("hello world")) == [1, 2]
    assert text.encode(UserMessage("hello")) == [3, 1]
    assert text.encode(TokenIds((2, 2))) == [2, 2]


def test_a_template_sees_special_tokens_and_the_generation_prompt() -> None:
    template = "{{ bos_token }} {{ messages[0]['content'] }}{% if add_generation_prompt %} world{% endif %}"
    assert codec(template, '{"bos_token": "user:"}').encode(UserMessage("hello")) == [3, 1, 2]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("", "no chat template"),
        ("{{ raise_exception('only system messages') }}", "only system messages"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses this message"),
        ("{{ messages.append(1) }}", "refuses this message"),
    ],
)
def test_a_template_that_is_missing_refuses_or_breaks_out_is_the_requests_error(template: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        codec(template).encode(UserMessage("hello"))
    assert refusal.value.field == "user_message"


def test_fingerprints_tell_token_tables_apart_and_nothing_else() -> None:
    other_split = word_tokenizer(WORDS)
    other_split.pre_tokenizer = pre_tokenizers.Whitespace()
    assert fingerprint(word_tokenizer(WORDS)) == fingerprint(other_split)
    assert fingerprint(word_tokenizer(WORDS)) != fingerprint(word_tokenizer({**WORDS, "world": 4}))
    with_special = word_tokenizer(WORDS)
    with_special.add_special_tokens(["<end>"])
    assert fingerprint(word_tokenizer(WORDS)) != fingerprint(with_special)


def test_a_prompt_is_never_cut_by_limits_stored_with_the_tokenizer() -> None:
    tokenizer = word_tokenizer(WORDS)
    tokenizer.enable_truncation(max_length=1)
    assert TextCodec(TokenizerFiles(tokenizer.to_str())).encode(Text("hello world")) == [1, 2]


def test_a_tokenizer_that_is_none_is_refused() -> None:
    with pytest.raises(ModelNotUsable, match="cannot be read"):
        TextCodec(TokenizerFiles("{}"))
