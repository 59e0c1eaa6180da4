"""Sources without a model: outputs are the target's own whatever they say, and what pays is used."""

import random
from collections.abc import Callable

import pytest

from coordinator.door.drafting_options import LONGEST_NAME, useful_options
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.guess import Guess, Guesser
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, TokenIds, Usage
from tests.coordinators import Dispatched, dispatching
from tests.fakes.dispatches import EXPECTED, LENGTH, PROMPTS
from tests.fakes.model_services import END_TOKEN_ID, VOCABULARY_SIZE, FakeDrafter, FakeVerifier, continuation


class Saying:
    """A source that says whatever `say` returns for the text so far and the most tokens that are wanted."""

    def __init__(self, say: Callable[[TokenList, int], list[int]]) -> None:
        self._say = say

    def read(self, context: TokenList) -> None:
        pass

    def guess(self, context: TokenList, most: int) -> Guess | None:
        token_ids = tuple(self._say(context, most))
        return Guess(token_ids, 9, (1.0,) * len(token_ids)) if token_ids else None

    def ended(self, context: TokenList) -> None:
        pass


RANDOM = random.Random(0)
HOSTILE: dict[str, Callable[[TokenList, int], list[int]]] = {
    "random tokens": lambda context, most: [RANDOM.randrange(VOCABULARY_SIZE) for _ in range(most)],
    "the last token again and again": lambda context, most: [context[len(context) - 1]] * most,
    "tokens that no model has": lambda context, most: [VOCABULARY_SIZE, -1, 2**40][: most or 1],
    "far more than was asked for": lambda context, most: continuation(context[:], 200),
    "the end at once": lambda context, most: [END_TOKEN_ID] * most,
    "nothing": lambda context, most: [],
}


async def finished(
    running: Dispatched, guesser: Guesser | None = None, drafting: DraftingOptions | None = None
) -> tuple[list[list[int]], list[Usage]]:
    """Return outputs and usages; `guesser` takes the place of the suffix index."""
    requests = [
        running.admission.admit(GenerationRequest(TokenIds(prompt), LENGTH, drafting=drafting or DraftingOptions()))
        for prompt in PROMPTS
    ]
    outputs, usages = [], []
    for request in requests:
        if guesser:
            request.generations[0].guessers = {DraftSource.SUFFIX: guesser}
        running.dispatcher.submit(request)
    for request in requests:
        pieces = [piece async for piece in request.stream.pieces()]
        assert pieces[-1].finish
        outputs.append([token.token_id for piece in pieces for token in piece.tokens])
        usages.append(pieces[-1].finish.usage)
    return outputs, usages


@pytest.mark.parametrize("draft_count", [4, "auto"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_whatever_a_source_says_the_output_is_the_target_s_own(name: str, draft_count: int | str) -> None:
    async with dispatching([FakeDrafter(0.6)], [FakeVerifier()], draft_count=draft_count) as running:
        for drafting in (None, DraftingOptions((DraftSource.SUFFIX, DraftSource.DRAFT), in_order=True)):
            outputs, _ = await finished(running, Saying(HOSTILE[name]), drafting)
            assert outputs == EXPECTED


async def test_a_source_that_is_always_right_is_used_and_one_that_never_is_soon_not() -> None:
    right = Saying(lambda context, most: continuation(context[:], most))
    wrong = Saying(HOSTILE["the end at once"])
    for guesser, is_used in ((right, True), (wrong, False)):
        async with dispatching([FakeDrafter(0.5)], [FakeVerifier()], draft_count=4) as running:
            await finished(running, guesser)
            await finished(running, guesser)
            _, usages = await finished(running, guesser)
        by_suffix = sum(
            one.drafted_count for usage in usages for one in usage.sources if one.source is DraftSource.SUFFIX
        )
        drafted = sum(usage.drafted_count for usage in usages)
        assert by_suffix == drafted if is_used else by_suffix < 0.2 * drafted


async def test_without_a_draft_service_what_is_at_hand_drafts() -> None:
    right = Saying(lambda context, most: continuation(context[:], most))
    async with dispatching([], [FakeVerifier()], draft_count=4) as running:
        outputs, usages = await finished(running, right)
    assert outputs == EXPECTED
    assert sum(usage.accepted_count for usage in usages) > 100


def test_what_a_request_keeps_of_its_options_is_short_and_says_the_same() -> None:
    """They are kept as long as it waits, and a message may name a source a million times."""
    asked = DraftingOptions(
        sources=(DraftSource.SUFFIX, DraftSource.DRAFT) * 1000,
        in_order=True,
        forbidden_sources=(DraftSource.PREDICTION,) * 1000,
        draft_model="m" * 10**6,
    )
    kept = useful_options(asked)
    assert kept.sources == (DraftSource.SUFFIX, DraftSource.DRAFT)
    assert [kept.allows(one) for one in DraftSource] == [asked.allows(one) for one in DraftSource]
    assert kept.puts_first(DraftSource.SUFFIX, DraftSource.DRAFT)
    assert LONGEST_NAME < len(kept.draft_model) < 2 * LONGEST_NAME
    named = DraftingOptions(draft_model="m" * LONGEST_NAME)
    assert useful_options(named) == named
