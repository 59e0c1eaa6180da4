"""Tokenization of prompts, with or without a chat template.

Works from `TokenizerFiles`, so it needs neither torch nor a checkpoint. Knows nothing of models, nor of what is in a
conversation.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property

from jinja2 import TemplateError
from tokenizers import Tokenizer

from paceline.chat_template import ChatTemplate, Conversation
from paceline.errors import IncompatiblePair, InvalidRequest, ModelNotUsable
from paceline.special_tokens import Hiding, SpecialTokens
from paceline.types import Prompt, Text, TokenIds, TokenizerFiles

MAX_SHRINKAGE = 4
"""Most characters that normalization composes into one. A tokenizer that drops spaces, or one that maps an unknown word
to a single token, may shrink a text more. A text of little else counts as too long although it might fit."""
_TAIL_TOKENS = 8
"""Tokens of a prompt that decide how a text after it is split: words and their spaces are shorter."""


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of the token-to-id table without added tokens: those for roles, tools and ends.

    Only ids pass between draft and target. So two tokenizers that give every id the same text can work as a pair, even
    if they split prompts differently. Families add tokens from one version to the next, and a draft may be of another
    version than its target: an added token that only one of them knows costs drafts, and no output.
    """
    added = tokenizer.get_added_tokens_decoder()
    known = tokenizer.get_vocab(with_added_tokens=False).items()
    table = sorted(((text, one) for text, one in known if one not in added), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def check_same_tokenizer(draft: str, draft_fingerprint: str, target: str, target_fingerprint: str) -> None:
    """Raise IncompatiblePair unless every token id, but those of added tokens, means the same text to both models."""
    if draft_fingerprint != target_fingerprint:
        raise IncompatiblePair(
            f"draft {draft!r} and target {target!r} have different tokenizers "
            f"({draft_fingerprint[:12] or 'none'} and {target_fingerprint[:12] or 'none'}): the draft's token ids "
            "would mean other text to the target; choose a draft of the target's family"
        )


class TextCodec:
    """A tokenizer with its chat template."""

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            self.tokenizer = Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ModelNotUsable(f"the tokenizer cannot be read: {error}") from error
        # A checkpoint may carry its training limits; prompts are checked for length, never cut.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._special = SpecialTokens(self.tokenizer)
        try:
            template_tokens = json.loads(files.special_tokens_json)
            templates = files.chat_template, files.tool_template
            made = [ChatTemplate(one, template_tokens) if one else None for one in templates]
            self._template, self._tool_template = made
        except (ValueError, TemplateError) as error:
            raise ModelNotUsable(f"the chat template cannot be read: {error}") from error

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def token_count(self) -> int:
        """Number of ids that texts may have, gaps included: the largest one and those before it."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def most_characters(self, token_count: int) -> int:
        """Return the characters of the longest text that can fit into so many tokens."""
        return MAX_SHRINKAGE * self._longest_token_characters * token_count

    @cached_property
    def _longest_token_characters(self) -> int:
        """The length of the longest token in characters of normalized text."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=0)

    def encode(self, prompt: Prompt, time_s: float | None = None) -> list[int]:
        """Turn a prompt of any form into token ids; a chat template may write `time_s` into it, or else the time now.

        Special tokens come from the template, or from plain text without one. Nothing in a conversation becomes one.
        """
        if isinstance(prompt, TokenIds):
            return list(prompt.values)
        if isinstance(prompt, Text):
            return self._encode(prompt.value, add_special_tokens=True)
        return self._encode_conversation(Conversation.of(prompt, time_s))

    def encode_continuation(self, text: str, prompt: Sequence[int]) -> list[int]:
        """Turn a text that is to follow a prompt into the token ids that a model would write it with.

        What a tokenizer puts before a text, such as a first token or a space, is left out, and a space of the text's
        own stays: the end of the prompt stands before it. Where a tokenizer would join the end of the prompt and the
        beginning of the text into one token, the text is read alone. Nothing in it becomes a special token.
        """
        before = self.tokenizer.decode(list(prompt[-_TAIL_TOKENS:]), skip_special_tokens=True)
        own, joined = self._encode_output(before), self._encode_output(before + text)
        return joined[len(own) :] if joined[: len(own)] == own else self._encode_output(text)

    def _encode_output(self, text: str) -> list[int]:
        if self._special.are_spelled(text):
            return self._special.plain.encode(text)
        return self._encode(text, add_special_tokens=False)

    def _encode_conversation(self, conversation: Conversation) -> list[int]:
        template = self._tool_template if conversation.tools and self._tool_template else self._template
        if template is None:
            raise InvalidRequest(
                f"{conversation.field} is set, but the target model has no chat template; send text instead",
                field=conversation.field,
            )
        has_parts = any(self._special.may_be_part(*one) for one in conversation.strings())
        if not has_parts and not self._special.are_spelled("\n".join(one for one, _ in conversation.strings())):
            return self._encode(template.render(conversation), add_special_tokens=False)
        hiding = Hiding(self._special)
        rendered = template.render(conversation, hiding.spelled)
        if has_parts:
            rendered, hiding = self._without_parts(template, conversation, rendered, hiding)
        if not hiding.are_shown(rendered):
            raise InvalidRequest(
                f"{conversation.field}: the chat template rewrites words that spell special tokens; leave these out",
                field=conversation.field,
            )
        return hiding.encode(rendered)

    def _without_parts(
        self, template: ChatTemplate, conversation: Conversation, rendered: str, hiding: Hiding
    ) -> tuple[str, Hiding]:
        """Render a conversation once more with what could become a special token beside other text hidden too.

        A template may compare such a string with words of its own. Then the text is another one, and the first
        rendering stands if the special tokens are the same. Raise InvalidRequest if they are not.
        """
        parting = Hiding(self._special)
        parted = template.render(conversation, parting.parts)
        if parting.shown(parted) == hiding.shown(rendered):
            return parted, parting
        if self._special.ids_in(parted) == self._special.ids_in(rendered):
            return rendered, hiding
        raise InvalidRequest(
            f"{conversation.field}: the chat template would make a special token of what it, a tool or an argument "
            "spells in part; give it another name",
            field=conversation.field,
        )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A megabyte takes seconds, and `encode_batch` lets other threads run meanwhile, unlike `encode`.
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
