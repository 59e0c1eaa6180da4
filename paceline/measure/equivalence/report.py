"""Text of an equivalence result: the table of agreements, agreement by category, the mismatches."""

from collections.abc import Iterator, Sequence
from textwrap import shorten

from paceline.measure.equivalence.agreement import MatchRates
from paceline.measure.equivalence.equivalence import Agreement, EquivalenceResult
from paceline.measure.tables import markdown_table
from paceline.text import TextCodec

SHOWN_MISMATCHES = 20
SHOWN_CHARACTERS = 200
"""Most characters shown of a prompt; the result file has all of it."""


def equivalence_table(result: EquivalenceResult) -> str:
    """Return a table of one line for each agreement; E and P are the paper's exact and partial match."""
    header = ("outputs of", "B", "beside", "equal", "P", "strings: E", "P", "must be equal")
    return markdown_table(header, [_row(one) for one in result.agreements])


def _row(agreement: Agreement) -> list[str]:
    rates = agreement.overall
    return [
        f"{agreement.precision} {agreement.system}, {agreement.policy_and_sources}",
        str(agreement.batch_size),
        agreement.reference,
        f"{rates.exact_count} of {rates.prompt_count}",
        f"{rates.partial:.1%}",
        f"{rates.string_exact_count / rates.prompt_count:.1%}",
        f"{rates.string_partial:.1%}",
        ("NO" if agreement.failed else "yes") if agreement.must_hold else "",
    ]


def category_table(agreements: Sequence[Agreement]) -> str:
    """Return equal outputs by category, one column for each incomplete agreement; empty when all are complete."""
    partial = [one for one in agreements if one.mismatches]
    if not partial:
        return ""
    header = [
        "category",
        *(f"{one.precision} {one.system} {one.policy_and_sources} {one.batch_size}" for one in partial),
    ]
    by_category = zip(*(one.rates for one in partial), strict=True)
    return markdown_table(header, [[rates[0].category, *map(_share, rates)] for rates in by_category])


def _share(rates: MatchRates) -> str:
    return f"{rates.exact_count}/{rates.prompt_count} P {rates.partial:.1%}"


def mismatch_lines(agreement: Agreement, codec: TextCodec) -> Iterator[str]:
    """Yield a line for each of the first mismatches; the result file has all of them."""
    name = (
        f"{agreement.precision} {agreement.policy_and_sources} B = {agreement.batch_size} beside {agreement.reference}"
    )
    for one in agreement.mismatches[:SHOWN_MISMATCHES]:
        gap = "" if one.logit_gap is None else f", logit gap {one.logit_gap:.3g}"
        yield (
            f"{name}: prompt {one.prompt_id} ({one.category}), token {one.position}: "
            f"{_token(one.token_id, codec)} for {_token(one.expected_token_id, codec)}{gap}; "
            f"{shorten(one.prompt, SHOWN_CHARACTERS, placeholder=' ...')!r}"
        )
    if len(agreement.mismatches) > SHOWN_MISMATCHES:
        yield f"{name}: {len(agreement.mismatches) - SHOWN_MISMATCHES} more"


def _token(token_id: int | None, codec: TextCodec) -> str:
    if token_id is None:
        return "the end"
    return f"{token_id} {codec.tokenizer.decode([token_id], skip_special_tokens=False)!r}"
