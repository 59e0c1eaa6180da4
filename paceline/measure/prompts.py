"""The prompts of a measurement: chosen lines of a file, as the same token ids for every system."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidRequest, TokenizerNotFound
from paceline.extras import named_extras
from paceline.process.variables import NO_DRAFT
from paceline.prompt_file import InputLine, read_lines
from paceline.text import TextCodec, check_same_tokenizer, fingerprint
from paceline.types import Text, UserMessage

NO_CATEGORY = "all"


@dataclass(frozen=True)
class MeasuredPrompt:
    id: str
    category: str
    token_ids: tuple[int, ...]
    text: str = ""
    prediction: str | None = None
    """The output that is expected; None: none is."""


def select_lines(path: Path, categories: Sequence[str] = (), count: int | None = None) -> list[InputLine]:
    """Read the lines of some categories, evenly thinned out to `count`. Raise InvalidRequest.

    Any wrong line is an error, because a measurement over the other lines would pass for one over the whole file.
    """
    lines = read_lines(path)
    if wrong := [line.error for line in lines if line.error]:
        raise InvalidRequest(f"--input {path}: {wrong[0]}; {len(wrong)} of {len(lines)} lines are wrong", field="input")
    known = sorted({line.category for line in lines if line.category})
    if unknown := [name for name in categories if name not in known]:
        raise InvalidRequest(
            f"--category {unknown[0]!r} is not in {path}, which has {', '.join(known) or 'no categories'}",
            field="category",
        )
    return thin_out([line for line in lines if not categories or line.category in categories], count)


def thin_out(lines: Sequence[InputLine], count: int | None) -> list[InputLine]:
    """Return `count` lines at even distances, so that every part of the file has its share."""
    if count is None or count >= len(lines):
        return list(lines)
    return [lines[place * len(lines) // count] for place in range(count)]


def read_text_codec(target_model: str, draft_model: str) -> TextCodec:
    """Read the target's tokenizer and check that the draft's is equal, if there is a draft.

    Raise a StartupError, or TokenizerNotFound.
    """
    # The import is slow, and some installations lack it.
    with named_extras():
        from paceline.engine.model.checkpoint import find_checkpoint, read_tokenizer

    models = [model for model in (draft_model, target_model) if model != NO_DRAFT]
    found = [(model, read_tokenizer(find_checkpoint(model))) for model in models]
    codecs = [(model, TextCodec(files)) for model, files in found if files]
    if len(codecs) < len(found):
        lacking = next(model for model, files in found if files is None)
        raise TokenizerNotFound(f"model {lacking!r} has no tokenizer, and prompts are text; give a pair that has one")
    *drafts, (target, target_codec) = codecs
    for draft, codec in drafts:
        check_same_tokenizer(draft, fingerprint(codec.tokenizer), target, fingerprint(target_codec.tokenizer))
    return target_codec


def is_whole(text: str) -> bool:
    """Return whether a text has a form in UTF-8: half a surrogate pair has none."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


def encode_lines(
    lines: Sequence[InputLine], codec: TextCodec, *, chat: bool, max_prompt_tokens: int | None = None
) -> list[MeasuredPrompt]:
    """Tokenize in the chat template or as plain text, and cut prompts to `max_prompt_tokens`."""
    prompts = []
    for line in lines:
        assert line.prompt is not None
        if not is_whole(line.prompt):
            raise InvalidRequest(
                f"--input: prompt {line.id} has half a surrogate pair, which is no character; remove it", field="input"
            )
        token_ids = codec.encode(UserMessage(line.prompt) if chat else Text(line.prompt))[:max_prompt_tokens]
        if not token_ids:
            raise InvalidRequest(f"prompt {line.id} has no tokens; remove it from the file", field="input")
        category = line.category or NO_CATEGORY
        prompts.append(MeasuredPrompt(str(line.id), category, tuple(token_ids), line.prompt, line.prediction))
    return prompts
