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
        with pytest.raises(PeerFailed, match="cannot be true: 0 accepted, token 7, 2 cached tokens, drafts .* of 1"):
            check_verdicts([row], verdicts, VOCABULARY_SIZE)
