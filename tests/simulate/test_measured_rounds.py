"""Parts of rounds foreseen from saved costs, and plans made by them."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import InvalidRequest
from paceline.simulate.measured_rounds import MeasuredRounds
from paceline.simulate.saved_costs import SavedModel, write_costs
from paceline.types import MeasuredCosts
from tests.commands import paceline_here
from tests.simulate.made_up_costs import calls, propose_s, saved_costs, verify_s

BESIDE_S = 0.0015
"""What each call takes beside the service's work."""


def test_parts_of_a_round_are_those_that_were_measured() -> None:
    rounds = MeasuredRounds(saved_costs())
    assert rounds.counts == [2, 5, 8]
    assert rounds.verify_s(4, 5) == pytest.approx(verify_s(4, 20) + BESIDE_S, rel=0.05)
    assert rounds.draft_s(4, 5) == pytest.approx(propose_s(4, 5) + BESIDE_S, rel=0.05)
    assert rounds.draft_s(4, 5, work_factor=2) == pytest.approx(2 * propose_s(4, 5) + BESIDE_S, rel=0.05)
    assert rounds.draft_s(4, 0) == 0
    assert rounds.prompt_s(800, 2) > rounds.prompt_s(400, 2) > 0


def test_costs_of_one_draft_count_say_nothing_of_others() -> None:
    few = MeasuredCosts(tuple(one for one in calls() if one.step_count in (0, 5)))
    with pytest.raises(InvalidRequest, match="--draft-count auto"):
        MeasuredRounds(replace(saved_costs(), costs=few)).check_draft_counts()


@pytest.mark.parametrize("draft", [None, SavedModel("a newer draft", 100, 64)])
def test_costs_without_calls_of_their_draft_are_refused(draft: SavedModel | None) -> None:
    """Drafts would take no time. Looked-up tokens are verified in several counts too."""
    with pytest.raises(InvalidRequest, match="no calls of the draft service"):
        MeasuredRounds(replace(saved_costs(), draft=draft)).check_draft_counts()


def test_a_plan_is_by_measured_costs_where_they_are_given(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", saved_costs())
    asked = ("plan", "--memory", "4GiB", "--conversations", "4", "--costs", str(tmp_path / "costs.json"))
    status, out, _ = paceline_here(*asked)
    assert status == 0
    assert "costs measured before" in out
    status, _, err = paceline_here(*asked, "--heads", "builtin:clover")
    assert status == 1
    assert "leave out one of them" in err


def test_a_plan_takes_drafts_to_be_right_as_often_as_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that were right by a third were planned as if they were by 0.7, so more of them than pay."""
    monkeypatch.setenv("COLUMNS", "160")
    write_costs(tmp_path / "costs.json", saved_costs(right=(30, 9, 3, 1, 1, 1, 1, 1)))

    def told(*flags: str) -> str:
        asked = ("--memory", "4GiB", "--conversations", "4", "--costs", str(tmp_path / "costs.json"))
        status, out, err = paceline_here("plan", *asked, *flags)
        assert status == 0, err
        return out

    assert "accepted by 0.32" in told()
    assert told() == told("--acceptance", str(47 / 146))
    assert told() != told("--acceptance", "0.7")


def test_a_target_alone_costs_what_rounds_without_drafts_cost(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", saved_costs())
    asked = ("plan", "--memory", "4GiB", "--draft-model", "none", "--costs", str(tmp_path / "costs.json"))
    status, out, err = paceline_here(*asked)
    assert status == 0, err
    assert "costs measured before" in out
    alone, pair = (MeasuredRounds(replace(saved_costs(), draft=draft)) for draft in (None, saved_costs().draft))
    assert alone.verify_s(4, 0) == pair.verify_s(4, 0)
    assert alone.prompt_s(400, 2) < pair.prompt_s(400, 2)
    of_five = MeasuredCosts(tuple(one for one in calls() if one.step_count == 5))
    write_costs(tmp_path / "costs.json", replace(saved_costs(), costs=of_five))
    status, _, err = paceline_here(*asked)
    assert status == 1
    assert "--draft-count auto, which tries none too" in err
