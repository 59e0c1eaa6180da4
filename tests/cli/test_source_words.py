"""How commands show what drafted: in words and in colours."""

from dataclasses import replace

import pytest

from paceline.cli.connection import missing_sources
from paceline.cli.demo import OWN_STYLE, SOURCE_STYLES, _legend, _styled
from paceline.cli.options import by_source
from paceline.types import DraftingOptions, DraftSource, OutputToken, ReplicaDescription, ReplicaState, SourceUsage
from tests.fakes.scripted_gateway import CLUSTER


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ((), ""),
        ((SourceUsage(DraftSource.DRAFT, "", 5, 3),), ""),
        ((SourceUsage(DraftSource.SUFFIX, "", 5, 3),), " (suffix 3 of 5)"),
        (
            (SourceUsage(DraftSource.DRAFT, "small", 15, 10), SourceUsage(DraftSource.DRAFT, "large", 4, 3)),
            " (draft small 10 of 15, draft large 3 of 4)",
        ),
    ],
)
def test_sources_are_told_apart_where_there_is_more_than_the_draft_service(
    sources: tuple[SourceUsage, ...], words: str
) -> None:
    assert by_source(sources) == words


@pytest.mark.parametrize(
    ("models", "sources", "options", "told"),
    [
        (("large", "large"), "draft,suffix", DraftingOptions(), None),
        (("large", "small"), "draft,suffix", DraftingOptions(draft_model="small"), None),
        (("large", ""), "draft,suffix", DraftingOptions(draft_model="small"), None),
        ((), "draft,suffix", DraftingOptions(draft_model="small"), None),
        (
            ("large", "tiny"),
            "draft,suffix",
            DraftingOptions(draft_model="small"),
            "the coordinator has no draft model small (but large and tiny), so drafts come from suffix: "
            "the output is the same",
        ),
        (
            ("large",),
            "draft",
            DraftingOptions(draft_model="small"),
            "the coordinator has no draft model small (but large), so nothing drafts for this: the output is the same",
        ),
        (
            (),
            "suffix",
            DraftingOptions(draft_model="small"),
            "the coordinator has no draft, so drafts come from suffix: the output is the same",
        ),
        (
            ("large",),
            "draft,suffix",
            DraftingOptions(forbidden_sources=(DraftSource.DRAFT,), draft_model="small"),
            None,
        ),
    ],
    ids=["none named", "there", "not known yet", "none known", "others", "one other", "no service", "forbidden"],
)
def test_a_draft_model_that_no_draft_service_has_is_told(
    models: tuple[str, ...], sources: str, options: DraftingOptions, told: str | None
) -> None:
    """Such a request was decoded plainly without a word."""
    cluster = replace(
        CLUSTER,
        drafts=tuple(ReplicaDescription("x:1", ReplicaState.UP, 0, model_id=model) for model in models),
        sources=tuple(map(DraftSource, sources.split(","))),
    )
    assert missing_sources(options, cluster, has_prediction=False) == told


def test_each_source_has_a_colour_of_its_own_that_the_legend_shows() -> None:
    known = set(DraftSource) - {DraftSource.UNSPECIFIED}
    styles = {str(_styled(OutputToken(5, "x", True, None, one)).style) for one in known}
    own = str(_styled(OutputToken(5, "x", False)).style)
    assert (len(styles), own in styles) == (len(known), False)
    assert {str(span.style) for span in _legend().spans} == styles | {own}
    assert own == OWN_STYLE


def test_an_accepted_token_of_an_older_coordinator_is_shown_as_drafted() -> None:
    unknown = OutputToken(5, "x", True, None, DraftSource.UNSPECIFIED)
    assert _styled(unknown).style == SOURCE_STYLES[DraftSource.DRAFT][1]
