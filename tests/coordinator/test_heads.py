"""Drafts of the target's own heads: what a verdict brings is used in the next round, if it can be true."""

import pytest

from coordinator.replicas.plausibility import check_verdicts
from paceline.errors import PeerFailed
from paceline.types import Verdict, Verdicts, VerifyRow
from tests.checkpoints import VOCABULARY_SIZE


@pytest.mark.parametrize("count", [0, 1, 2])
def test_heads_may_draft_up_to_what_was_asked(count: int) -> None:
    row = VerifyRow("a", 0, (1, 2), (), propose_count=1)
    verdicts = Verdicts([Verdict(0, 7, 2, draft_token_ids=(5,) * count)])
    if count <= row.propose_count:
        check_verdicts([row], verdicts, VOCABULARY_SIZE)
    else:
        with pytest.raises(PeerFailed, match="cannot be true: 0 accepted, token 7, 2 cached tokens, 2 drafts"):
            check_verdicts([row], verdicts, VOCABULARY_SIZE)
