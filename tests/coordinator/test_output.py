"""Text pieces and stop conditions, one token at a time."""

from coordinator.requests.output import Output, StopRules
from paceline.detokenizer import TokenDecoder
from paceline.types import DraftSource, FinishReason
from tests.fakes.tokenizers import BYTE_COUNT, byte_tokenizer

TOKENIZER = byte_tokenizer()
END = BYTE_COUNT
DECODER = TokenDecoder(TOKENIZER)


def output(**rules: object) -> Output:
    values: dict[str, object] = {"max_new_tokens": 100, "end_token_ids": frozenset({END})}
    return Output(StopRules(**values | rules), DECODER)  # type: ignore[arg-type]


def test_tokens_after_the_end_token_are_dropped() -> None:
    grown = output()
    tokens = grown.extend([*TOKENIZER.encode("ab").ids, END, 5, 6], accepted_count=4)
    assert [token.token_id for token in tokens] == [*TOKENIZER.encode("ab").ids, END]
    assert grown.finish_reason is FinishReason.END_TOKEN
    assert [token.text for token in tokens] == ["a", "b", ""]


def test_accepted_tokens_are_marked() -> None:
    tokens = output().extend(TOKENIZER.encode("abc").ids, accepted_count=2)
    assert [token.accepted for token in tokens] == [True, True, False]


def test_a_run_reads_like_the_tokens_one_by_one() -> None:
    token_ids = TOKENIZER.encode("abc").ids
    run, single = output().extend(token_ids, 2, source=DraftSource.DRAFT), output()
    alone = [single.extend([one], int(place < 2), source=DraftSource.DRAFT)[0] for place, one in enumerate(token_ids)]
    assert [*run] == alone == [run[0], *run[1:]] and len(run) == 3
    assert [one.source for one in run] == [DraftSource.DRAFT, DraftSource.DRAFT, None]


def test_a_round_gives_its_tokens_the_texts_that_they_have_one_by_one() -> None:
    single, rounds, token_ids = output(), output(), TOKENIZER.encode("aé😀b").ids
    expected = [single.extend([one], 0)[0].text for one in token_ids]
    tokens = [token for start in (0, 3, 6) for token in rounds.extend(token_ids[start : start + 3], 0)]
    assert [(one.token_id, one.text) for one in tokens] == list(zip(token_ids, expected, strict=True))
    assert rounds.count == single.count == len(token_ids)


def test_the_limit_ends_the_output_and_flushes_a_broken_character() -> None:
    grown = output(max_new_tokens=2)
    tokens = grown.extend([*TOKENIZER.encode("a").ids, TOKENIZER.encode("é").ids[0], 5], accepted_count=0)
    assert [token.text for token in tokens] == ["a", "\ufffd"]
    assert grown.finish_reason is FinishReason.LENGTH


def test_text_that_may_begin_a_stop_string_is_held_until_it_is_known_not_to() -> None:
    grown = output(stop_strings=("abc",))
    texts = [grown.extend([one], 0)[0].text for one in TOKENIZER.encode("xabab").ids]
    assert texts == ["x", "", "", "ab", ""]
    assert grown.extend(TOKENIZER.encode("c").ids, 0)[0].text == ""
    assert grown.finish_reason is FinishReason.STOP_STRING


def test_an_output_that_ends_otherwise_shows_what_was_held() -> None:
    grown = output(stop_strings=("abc",))
    tokens = grown.extend([*TOKENIZER.encode("ab").ids, END], accepted_count=0)
    assert "".join(token.text for token in tokens) == "ab"


def test_a_stop_token_is_part_of_the_output() -> None:
    stop = TOKENIZER.encode("b").ids[0]
    grown = output(stop_token_ids=frozenset({stop}))
    assert len(grown.extend(TOKENIZER.encode("abc").ids, accepted_count=0)) == 2
    assert grown.finish_reason is FinishReason.STOP_TOKEN
