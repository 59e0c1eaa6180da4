"""Masks of response formats: the same at every place however it is come by, and all that changes of a choice."""

import random
from collections.abc import Sequence

import pytest
import torch

from paceline.engine.masks import Masks
from paceline.engine.sampling import Choosing, choose, processed, ranked
from paceline.errors import InvalidRequest, NoChoice
from paceline.types import GREEDY, ChoiceRule, ResponseFormat, SamplingParameters, TokenizerFiles
from tests.fakes.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
SIZE = 320
END, STOP = 256, 300
PROMPT = (9, 10, 11)
WORD = ResponseFormat(regex="(ab|ba){1,2}c?")
A, B, C = TOKENIZER.encode("abc", add_special_tokens=False).ids


def masks() -> Masks:
    return Masks(TokenizerFiles(TOKENIZER.to_str()))


def rule(form: ResponseFormat = WORD, sampling: SamplingParameters = GREEDY.sampling) -> ChoiceRule:
    return ChoiceRule(sampling, 5, len(PROMPT), (END, STOP), form)


def ids(allowed: torch.Tensor) -> list[set[int]]:
    return [set(row.nonzero()[:, 0].tolist()) for row in allowed]


def test_no_row_waits_for_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    made = masks()
    monkeypatch.setattr("paceline.grammars.LLTokenizer", lambda *_, **__: pytest.fail("the vocabulary is read"))
    made.check(WORD)
    assert made.allowed("s", rule(), PROMPT, (), SIZE).any()


def test_the_end_is_allowed_exactly_where_the_output_is_whole() -> None:
    found = masks().allowed("s", rule(), PROMPT, (A, B, A, B, C), SIZE)
    ends = {END, STOP}
    assert ids(found) == [{A, B}, {B}, {A, B, C, *ends}, {B}, {C, *ends}, ends]


def test_places_behind_a_wrong_token_are_not_masked_and_places_behind_a_wrong_output_allow_nothing() -> None:
    found = masks().allowed("s", rule(), PROMPT, (A, A, B), SIZE)
    assert ids(found)[:2] == [{A, B}, {B}]
    assert found[2:].all()
    assert not masks().allowed("s", rule(), (*PROMPT, C), (A,), SIZE).any()


def test_places_behind_a_token_after_which_the_grammar_is_too_complex_allow_nothing() -> None:
    """The token may be right, so what comes there may be used."""
    complex_there = ResponseFormat(grammar="start: " + "x " * 10000 + "\nx: /.*/")
    found = masks().allowed("s", rule(complex_there), PROMPT, (A, B), SIZE)
    assert found[0].any()
    assert not found[1:].any()


def test_places_behind_right_tokens_are_masked_where_masks_came_to_the_grammars_limits() -> None:
    """The first mask wore the matcher out: it refused the right token, so nothing masked what was chosen behind it."""
    wearing = rule(ResponseFormat(regex="(a?){200}a{200}"))
    assert ids(masks().allowed("s", wearing, PROMPT, (A, A), SIZE)) == [{A}, {A}, {A}]


def test_behind_a_token_that_a_mask_allows_and_the_format_does_not_take_nothing_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain decoding chooses it too, and has no token then. Behind a draft, what came next had no mask."""

    class Wrong:
        """Allows two tokens of which it takes none."""

        error, is_whole = "", False

        def begin(self, form: ResponseFormat) -> "Wrong":
            return self

        def move(self, output: Sequence[int]) -> bool:
            return not output

        def allowed(self) -> bytearray:
            return bytearray([0b110])

    monkeypatch.setattr("paceline.engine.masks.Grammars", lambda tokenizer: Wrong())
    assert ids(masks().allowed("s", rule(), PROMPT, (1, 5), 8)) == [{1, 2}, set(), set()]
    assert ids(masks().allowed("s", rule(), PROMPT, (3, 5), 8)) == [{1, 2}, {*range(8)}, {*range(8)}]
    assert ids(masks().allowed("s", rule(), (*PROMPT, 1), (), 8)) == [set()]


@pytest.mark.parametrize("size", [100, 256, 300, 1000])
def test_a_mask_has_the_size_of_the_logits_and_allows_no_id_without_text(size: int) -> None:
    (found,) = ids(masks().allowed("s", rule(ResponseFormat(regex="(?s:.*)")), PROMPT, (), size))
    (whole,) = ids(masks().allowed("s", rule(ResponseFormat(regex="(?s:.*)")), PROMPT, (), SIZE))
    assert found == {one for one in whole if one < size}
    assert not found & set(range(257, size)) - {STOP}


def test_a_mask_does_not_depend_on_the_sequence_and_on_what_it_was_asked_for_before() -> None:
    shared, rng = masks(), random.Random(2)
    places: list[tuple[Sequence[int], Sequence[int]]] = [
        ((*PROMPT, *output[:cut]), output[cut:])
        for output in [(A, B, B, A, C), (B, A, A, B), (A, C), (A, B, END, A), ()]
        for cut in range(len(output) + 1)
    ]
    fresh = [masks().allowed("s", rule(), prefix, following, SIZE) for prefix, following in places]
    for _ in range(100):
        index = rng.randrange(len(places))
        if rng.random() < 0.2:
            shared.forget("1")
        form = rng.choice([WORD, ResponseFormat(regex="[ab]*")])
        found = shared.allowed(str(rng.randrange(3)), rule(form), *places[index], SIZE)
        if form is WORD:
            assert torch.equal(found, fresh[index])


@pytest.mark.parametrize("sampling", [SamplingParameters(), SamplingParameters(1.0), SamplingParameters(0.8, 3, 0.9)])
def test_a_choice_is_the_best_of_the_tokens_that_are_allowed(sampling: SamplingParameters) -> None:
    logits = torch.randn(4, SIZE)
    allowed = masks().allowed("s", rule(), PROMPT, (A, B, A), SIZE)
    one = Choosing(logits, rule(sampling=sampling), PROMPT, (A, B, A), allowed)
    by_hand = ChoiceRule(sampling, 5, len(PROMPT))
    expected = choose([Choosing(logits.where(allowed, float("-inf")), by_hand, PROMPT, (A, B, A))])
    plain = Choosing(torch.randn(2, SIZE), ChoiceRule(), PROMPT, (A,))
    assert choose([plain, one])[1:] == expected
    best = ranked([plain, one], 4)[1]
    assert [place[0].token_id for place in best] == expected[0]
    assert all(allowed[row, token.token_id] for row, place in enumerate(best) for token in place)


def test_neither_bias_nor_penalties_bring_back_a_token_that_is_not_allowed() -> None:
    sampling = SamplingParameters(logit_bias=((C, 1000.0),), repetition_penalty=0.01, presence_penalty=-100.0)
    allowed = masks().allowed("s", rule(), PROMPT, (), SIZE)
    logits = processed(Choosing(torch.randn(1, SIZE), rule(sampling=sampling), (C, C, C), (), allowed))
    assert ids(logits > float("-inf")) == [{A, B}]


def test_where_nothing_is_left_the_error_says_why() -> None:
    early = rule(sampling=SamplingParameters(min_new_tokens=3))
    allowed = masks().allowed("s", early, PROMPT, (A, B), SIZE)
    choices = choose([Choosing(torch.randn(3, SIZE), early, PROMPT, (A, B), allowed)])[0]
    assert choices[2] in (A, B, C)
    only = rule(ResponseFormat(regex="ab"), SamplingParameters(min_new_tokens=3))
    allowed = masks().allowed("s", only, PROMPT, (A, B), SIZE)
    refused = choose([Choosing(torch.randn(3, SIZE), only, PROMPT, (A, B), allowed)])[0][2]
    assert isinstance(refused, InvalidRequest)
    assert refused.message.startswith("min_new_tokens is 3, but at position 5 response_format allows only tokens that")
    wrong = masks().allowed("s", rule(), (*PROMPT, C), (), SIZE)
    refused = choose([Choosing(torch.randn(1, SIZE), rule(), (*PROMPT, C), (), wrong)])[0][0]
    assert isinstance(refused, InvalidRequest)
    assert refused.message.startswith("response_format leaves no token at position 4")
    broken = torch.full((1, SIZE), float("nan"))
    allowed = masks().allowed("s", rule(), PROMPT, (), SIZE)
    assert isinstance(choose([Choosing(broken, rule(), PROMPT, (), allowed)])[0][0], NoChoice)


def test_a_model_without_a_tokenizer_refuses_formats() -> None:
    with pytest.raises(InvalidRequest, match="the model has no tokenizer"):
        Masks(None).check(WORD)
