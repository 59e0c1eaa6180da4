"""Draft models may be swapped for years: what counts them by name stays small, and no count falls or moves."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.counted_models import REST_S
from coordinator.rounds.round_report import DraftCall, RoundReport, RowReport
from coordinator.rounds.sources import MOST_MODELS
from coordinator.rounds.statistics import OTHER, Statistics
from paceline.types import DraftSource, HopTime

Counts = Mapping[tuple[DraftSource, str], int]


def report_of(model: str) -> RoundReport:
    """A round for which a draft service drafted four tokens, and the suffixes three."""
    rows = [RowReport(4, 1, 2, DraftSource.DRAFT, model), RowReport(3, 0, 1, DraftSource.SUFFIX)]
    calls = {model: DraftCall(1, 4, 4, 0)}
    hop = HopTime(0.001, 0.0, 0.002)
    return RoundReport(rows, 1.0, hop, hop, None, None, draft_calls=calls, draft_times={model: hop})


class Counted:
    """Statistics that are told of rounds at times of a test's own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.statistics = Statistics(lambda: self.now_s)

    def drafts(self, model: str) -> None:
        self.statistics.count_report(report_of(model))
        self.statistics.costs.add(report_of(model), 1, 1.0)

    @property
    def counts(self) -> Counts:
        return {(one.source, one.model): one.drafted_count for one in self.statistics.snapshot().sources}

    @property
    def names(self) -> list[str]:
        return [model for source, model in self.counts if source is DraftSource.DRAFT]

    @property
    def costed(self) -> tuple[set[str], set[str]]:
        """Return the draft models that costs are known of, and those that acceptances are."""
        costs = self.statistics.costs.snapshot()
        calls = {one.draft_model for one in costs.calls} - {""}
        return calls, {one.draft_model for one in costs.acceptances} - {""}


def test_of_very_many_draft_models_a_few_are_counted_by_name_and_the_rest_together() -> None:
    """A draft service that renames its model all the time made a series of each name, for ever."""
    counted = Counted()
    models = [str(number) for number in range(3 * MOST_MODELS)]
    for model in models:
        counted.drafts(model)
    assert counted.names == [*models[:MOST_MODELS], OTHER]
    assert counted.counts[DraftSource.DRAFT, OTHER] == 4 * 2 * MOST_MODELS
    assert sum(counted.counts.values()) == counted.statistics.snapshot().drafted_count == 7 * len(models)
    assert counted.costed == ({*models[:MOST_MODELS]}, {*models[:MOST_MODELS]})


def test_a_model_of_today_takes_the_place_of_the_one_that_drafted_longest_ago() -> None:
    counted = Counted()
    for number in range(MOST_MODELS):
        counted.drafts(str(number))
    counted.now_s = REST_S - 1
    counted.drafts("0")
    counted.drafts("new")
    assert counted.names[-1] == OTHER
    counted.now_s = REST_S
    for model in ("new", "0"):
        counted.drafts(model)
    assert {"new", "0"} <= {*counted.names} and "1" not in counted.names
    assert counted.counts[DraftSource.DRAFT, "new"] == counted.counts[DraftSource.DRAFT, OTHER] == 4
    assert counted.costed[0] == counted.costed[1] == {*counted.names} - {OTHER}


ROUNDS = st.lists(
    st.tuples(st.integers(0, 2 * MOST_MODELS), st.sampled_from([0.0, 1.0, REST_S / 4, REST_S])), max_size=90
)
"""Numbers of models, and the seconds before each drafts."""


@given(ROUNDS)
def test_what_all_series_grow_by_is_what_was_drafted_and_none_falls(rounds: list[tuple[int, float]]) -> None:
    """So sums of rates are right, whatever models come and go. A series that ended begins at 0 again."""
    counted, before = Counted(), dict[tuple[DraftSource, str], int]()
    for number, passed_s in rounds:
        counted.now_s += passed_s
        counted.drafts(str(number))
        now = counted.counts
        grown = [count - before.get(name, 0) for name, count in now.items()]
        assert min(grown) >= 0 and sum(grown) == 7
        assert len(counted.names) <= MOST_MODELS + 1
        before = dict(now)
