"""The hash of a row's prefix: coordinator and model services agree, in time that does not grow with the prefix."""

import struct
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafter import Drafter
from paceline.codec.rounds import propose_rows_from_pb, propose_rows_to_pb, verify_rows_from_pb, verify_rows_to_pb
from paceline.engine.loading import load_model
from paceline.engine.options import EngineOptions
from paceline.engine.runner import Runner
from paceline.errors import PacelineError, PrefixNotCached
from paceline.prefix_hash import PrefixHash
from paceline.types import Layout, ProposeRow, Verdict, VerifyOutcome, VerifyRow
from target_service.verifier import Verifier
from tests.conftest import PairOfCheckpoints

pytestmark = pytest.mark.review
MINE, OTHERS = (20, 21, 22, 23, 24), (20, 21, 30, 23, 24)


def expected(token_ids: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(token_ids)}i", *token_ids))


class CountingList(list[int]):
    """A list that counts the tokens read from it."""

    read_count = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        found = super().__getitem__(place)
        self.read_count += len(found)
        return found


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), max_size=20))
def test_a_running_hash_is_that_of_the_tokens_however_they_were_cut_and_grown(steps: list[tuple[int, int]]) -> None:
    running, token_ids = PrefixHash(), list(range(1000))
    for number, (cut, length) in enumerate(steps):
        del token_ids[cut:]
        running.cut(cut)
        token_ids += [number] * (length - len(token_ids))
        assert running.of(token_ids, length) == expected(token_ids[:length])


def test_a_hash_reads_what_is_new_and_after_a_cut_little_more() -> None:
    running, token_ids = PrefixHash(), CountingList(range(100_000))
    running.of(token_ids, 99_000)
    token_ids.read_count = 0
    for length in range(99_001, 99_100):
        running.of(token_ids, length)
    assert token_ids.read_count == 99
    running.of(token_ids, 50_000)
    assert token_ids.read_count < 99 + 1024


@pytest.fixture(params=["paged", "dense"])
def runner(request: pytest.FixtureRequest, pairs: dict[str, PairOfCheckpoints]) -> Runner:
    layout: Layout = request.param
    options = EngineOptions(kv_memory="1MiB", layout=layout, numerics="fast")
    return Runner(load_model(str(pairs["Llama"].target)), options)


def verified(verifier: Verifier, row: VerifyRow) -> VerifyOutcome | PacelineError:
    (outcome,) = verifier.verify([row])
    return outcome


def test_a_target_takes_no_row_that_relies_on_other_tokens_than_it_holds(runner: Runner) -> None:
    """review C1: the length was equal, and without the hash the answer followed other tokens."""
    verifier = Verifier(runner)
    right = verified(verifier, VerifyRow("right", 0, (*MINE, 25), ()))
    verified(verifier, VerifyRow("a", 0, OTHERS, ()))
    row = VerifyRow("a", 5, (25,), (), None, base_hash=expected(MINE))
    refused = verified(verifier, row)
    assert isinstance(refused, PrefixNotCached) and "base_hash" in str(refused)
    assert runner.cache.token_ids("a") == list(OTHERS)
    assert verified(verifier, VerifyRow("a", 0, (*MINE, 25), (), base_hash=0)) == right
    assert isinstance(right, Verdict)
    following = VerifyRow("a", 6, (right.next_token_id,), (), None, base_hash=expected((*MINE, 25)))
    assert isinstance(verified(verifier, following), Verdict)


def test_a_row_that_says_no_hash_may_change_what_later_ones_rely_on(runner: Runner) -> None:
    verifier = Verifier(runner)
    verified(verifier, VerifyRow("a", 0, MINE, ()))
    verified(verifier, VerifyRow("a", 5, (25,), (), None, base_hash=expected(MINE)))
    verified(verifier, VerifyRow("a", 2, (30, 31, 32, 33), (), None))
    now = (20, 21, 30, 31, 32, 33)
    assert isinstance(
        verified(verifier, VerifyRow("a", 6, (9,), (), None, base_hash=expected((*MINE, 25)))), PrefixNotCached
    )
    assert isinstance(verified(verifier, VerifyRow("a", 6, (9,), (), None, base_hash=expected(now))), Verdict)


def test_a_draft_takes_no_row_that_relies_on_other_tokens_than_it_holds(runner: Runner) -> None:
    drafter = Drafter(runner)
    drafter.propose([ProposeRow("a", 0, OTHERS, 1)])
    (refused,) = drafter.propose([ProposeRow("a", 5, (25,), 2, None, base_hash=expected(MINE))])
    assert isinstance(refused, PrefixNotCached)


@pytest.mark.parametrize("base_hash", [None, 0, 2**32 - 1])
def test_the_hash_crosses_the_wire_where_there_is_one(base_hash: int | None) -> None:
    verify = [VerifyRow("a", 5, (25,), (), None, base_hash=base_hash)]
    assert verify_rows_from_pb(verify_rows_to_pb(verify)) == verify
    propose = [ProposeRow("a", 5, (25,), 2, None, base_hash=base_hash)]
    assert propose_rows_from_pb(propose_rows_to_pb(propose)) == propose
