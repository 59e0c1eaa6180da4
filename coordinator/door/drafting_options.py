"""What a request says about its drafts: checked, and the output that it expects as token ids.

Knows nothing of how drafts are made. Nothing here can change an output, so more than can be used is cut, not refused.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from coordinator.door.served import Served
from coordinator.requests.committed_tokens import packed
from paceline.checks import check_token_ids
from paceline.errors import InvalidRequest
from paceline.types import DraftingOptions, DraftSource, Prediction, TokenIds

LONGEST_NAME = 4096
"""Characters of the longest path on Linux; no name of a model is longer."""


def check_drafting(options: DraftingOptions) -> None:
    """Raise InvalidRequest when the options contradict each other."""
    both = set(options.sources).intersection(options.forbidden_sources)
    # Several sources that are unknown here are one in this set; nothing says that the same one is in both lists.
    for source in both - {DraftSource.UNSPECIFIED}:
        raise InvalidRequest(
            f"{source.value} is in both drafting.sources and drafting.forbidden_sources; leave it out of one",
            field="drafting.forbidden_sources",
        )
    if options.in_order and not options.sources:
        raise InvalidRequest(
            "drafting.in_order is set and drafting.sources is empty; name the sources in their order, or leave it out",
            field="drafting.in_order",
        )


def useful_options(options: DraftingOptions) -> DraftingOptions:
    """Return options that say the same and are short: a request keeps them as long as it waits and lasts."""
    return replace(
        options,
        sources=tuple(dict.fromkeys(options.sources)),
        forbidden_sources=tuple(dict.fromkeys(options.forbidden_sources)),
        draft_model=options.draft_model[: LONGEST_NAME + 1],
    )


def predicted_token_ids(
    prediction: Prediction | None, served: Served, prompt: Sequence[int], max_new_tokens: int
) -> "array[int]":
    """Return the expected output's token ids, at most `max_new_tokens`; none without a prediction.

    Raise InvalidRequest for ids outside the vocabulary, and for a text that no output could hold.
    """
    if prediction is None:
        return packed(())
    if isinstance(prediction, TokenIds):
        check_token_ids(prediction.values, served.target.vocabulary_size, "predicted_output.token_ids")
        return packed(prediction.values[:max_new_tokens])
    if served.text is None:
        raise InvalidRequest(
            "the models have no tokenizer; send the expected output as token ids", field="predicted_output"
        )
    most = served.text.most_characters(served.target.longest_sequence)
    if len(prediction.value) > most:
        raise InvalidRequest(
            f"predicted_output has {len(prediction.value)} characters; give {most} at most: no more can fit into the "
            f"{served.target.longest_sequence} tokens that are taken here",
            field="predicted_output",
        )
    # Cut before it is tokenized, for that takes long, and what no output can reach is of no use.
    usable = prediction.value[: served.text.most_characters(max_new_tokens)]
    return packed(served.text.encode_continuation(usable, prompt)[:max_new_tokens])
