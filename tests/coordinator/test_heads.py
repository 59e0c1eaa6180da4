"""Drafts of the target's own heads: what a verdict brings is used in the next round, if it can be true."""

import pytest

from coordinator.replicas.plausibility import check_verdicts
from paceline.errors import PeerFailed
from paceline.types import Verdict, Verdicts, VerifyRow
from tests.checkpoints import VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("token_ids", "is_true"),
    [((), True), ((5,), True), ((5, 5), False), ((-1,), False), ((VOCABULARY_SIZE,), False)],
    ids=["none", "as many as asked", "more than asked", "negative", "beyond the vocabulary"],
)
def test_heads_may_draft_tokens_of_the_vocabulary_up_to_what_was_asked(
    token_ids: tuple[int, ...], is_true: bool
) -> None:
    row = VerifyRow("a", 0, (1, 2), (), propose_count=1)
    verdicts = Verdicts([Verdict(0, 7, 2, draft_token_ids=token_ids)])
    if is_true:
        check_verdicts([row], verdicts, VOCABULARY_SIZE)
    else:
        words = f"cannot be true: 0 of 0 accepted, 2 cached tokens, {len(token_ids)} drafts of 1"
        with pytest.raises(PeerFailed, match=words):
            check_verdicts([row], verdicts, VOCABULARY_SIZE)


def test_an_answer_that_cannot_be_true_is_told_without_its_tokens() -> None:
    """They are an output's, and the error is logged."""
    verdict = Verdict(0, 4141, 9, draft_token_ids=(4242, 4343))
    with pytest.raises(PeerFailed) as refusal:
        check_verdicts([VerifyRow("a", 0, (1, 2), (), propose_count=2)], Verdicts([verdict]), 5000)
    assert not [token for token in ("4141", "4242", "4343") if token in refusal.value.message]
