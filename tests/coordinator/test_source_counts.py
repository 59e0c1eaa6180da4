"""Draft tokens count for the source that proposed them."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.round import RoundLimits, run_round
from paceline.types import DraftSource, OutputPiece, SourceUsage, added_up
from tests.coordinators import MODEL, asking, collect
from tests.fakes.model_services import CHUNK_TOKENS, VOCABULARY_SIZE, FakeDrafter, FakeVerifier
from tests.generations import generation_of

END = 3
SOURCES = st.tuples(st.sampled_from(DraftSource), st.sampled_from(["", "small", "large"]))
ROUNDS = st.lists(
    st.tuples(st.none() | SOURCES, st.integers(0, 4), st.integers(0, 4), st.sampled_from([5, END])), max_size=12
)


@given(st.integers(1, 30), ROUNDS)
def test_counts_of_sources_add_up_to_those_of_the_output_and_every_accepted_token_names_its_own(
    max_new_tokens: int, rounds: list[tuple[tuple[DraftSource, str] | None, int, int, int]]
) -> None:
    """Also in the round that ends the output, whose drafts past the end count for nobody."""
    generation = generation_of(max_new_tokens=max_new_tokens, end_token_ids=frozenset({END}))
    pieces: list[OutputPiece] = []
    generation.request.stream.put = pieces.append  # type: ignore[method-assign, assignment]
    for source, accepted_count, wrong_count, token_id in rounds:
        if generation.ended:
            break
        counts = (accepted_count, accepted_count + wrong_count) if source else (0, 0)
        generation.commit(
            [token_id] * (counts[0] + 1),
            accepted_count=counts[0],
            drafted_count=counts[1],
            source=source[0] if source and counts[1] else None,
            draft_model=source[1] if source else "",
        )
        shown = [token.source for token in pieces[-1].tokens if token.accepted]
        assert shown == [source[0]] * len(shown) if source else not shown
        assert all(token.source is None for token in pieces[-1].tokens if not token.accepted)
    usage = generation.usage
    assert sum(one.drafted_count for one in usage.sources) == usage.drafted_count
    assert sum(one.accepted_count for one in usage.sources) == usage.accepted_count
    assert added_up(usage.sources) == usage.sources
    assert all(one.drafted_count for one in usage.sources)


async def test_a_round_tells_that_the_draft_service_drafted_and_of_a_row_without_drafts_that_nothing_did() -> None:
    limits = RoundLimits(vocabulary_size=VOCABULARY_SIZE, prefill_chunk_tokens=CHUNK_TOKENS)
    generation, drafter, verifier = generation_of(), FakeDrafter(1.0), FakeVerifier()
    drafted = await run_round(asking([generation], [3]), {MODEL: drafter}, verifier, limits)
    plain = await run_round(asking([generation], [0]), {MODEL: drafter}, verifier, limits)
    assert [row.source for row in (*drafted.rows, *plain.rows)] == [DraftSource.DRAFT, None]
    assert (drafted.sources, plain.sources) == ((SourceUsage(DraftSource.DRAFT, MODEL, 3, 3),), ())
    assert generation.usage.sources == (SourceUsage(DraftSource.DRAFT, MODEL, 3, 3),)
    while not generation.ended:
        await run_round(asking([generation], [0]), {MODEL: drafter}, verifier, limits)
    _, last = await collect(generation.request)
    assert last.finish
    assert last.finish.usage.sources == generation.usage.sources
