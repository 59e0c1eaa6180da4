"""A request's cap on drafts holds for every source: in what the target verifies, and in what is asked for."""

from collections.abc import Sequence

import pytest

from paceline.errors import PacelineError
from paceline.types import DraftingOptions, DraftSource, TokenIds, VerifyOutcome, VerifyRow
from tests.coordinators import dispatching
from tests.fakes.dispatches import output, submit, whole
from tests.fakes.model_services import FakeDrafter, WithHeads

PROMPT = (5, 6, 7)
LENGTH = 40
CAPS = (None, None, 2, 1, 0)
"""Those of requests in turn. The second shows what comes without a cap: shared suffixes know the first's output."""


class Watched(WithHeads):
    """Notes every row that it verifies, those of further rounds too."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[VerifyRow] = []

    def _verify(self, row: VerifyRow) -> VerifyOutcome | PacelineError:
        self.rows.append(row)
        return super()._verify(row)


def most_drafts(rows: Sequence[VerifyRow]) -> int:
    return max(max(len(row.draft_token_ids), row.propose_count) for row in rows)


@pytest.mark.parametrize("draft_count", [5, "auto"])
@pytest.mark.parametrize("source", [one for one in DraftSource if one is not DraftSource.UNSPECIFIED])
async def test_no_row_has_more_drafts_than_its_client_allows(source: DraftSource, draft_count: int | str) -> None:
    drafter, verifier, found = FakeDrafter(1.0), Watched(), {}
    async with dispatching([drafter], [verifier], draft_count=draft_count, shared_suffixes=True) as running:
        for cap in CAPS:
            for noted in (verifier.rows, verifier.calls, drafter.calls):
                noted.clear()
            request = submit(
                running,
                PROMPT,
                LENGTH,
                max_draft_count=cap,
                drafting=DraftingOptions((source,)),
                predicted_output=TokenIds(tuple(whole(PROMPT, LENGTH))),
            )
            assert await output(request) == whole(PROMPT, LENGTH)
            asked = [row.draft_count for call in drafter.calls for row in call]
            assert bool(asked) is (source is DraftSource.DRAFT and cap != 0)
            has_further_rounds = len(verifier.rows) > len(verifier.calls)
            assert has_further_rounds is (source is DraftSource.HEADS and cap != 0)
            found[cap] = max(most_drafts(verifier.rows), *asked, 0)
    assert found.pop(None) > 2
    assert found == {2: 2, 1: 1, 0: 0}
