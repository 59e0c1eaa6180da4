"""What a request says its outputs must look like: checked before a round sees it. Knows nothing of masks."""

from collections.abc import Collection, Iterable

from coordinator.door.served import Served
from paceline.errors import InvalidRequest
from paceline.types import GenerationRequest, ReceivedOutput


def check_response_format(
    request: GenerationRequest, served: Served, ends: Collection[int], received: Iterable[ReceivedOutput]
) -> None:
    """Raise InvalidRequest for a format that cannot be followed. `ends` are the tokens that end an output."""
    form = request.response_format
    if form is None:
        return
    if served.grammars is None:
        raise _refusal("is set, and the models have no tokenizer; leave it out")
    if request.ignore_end_tokens:
        raise _refusal("and ignore_end_tokens are both set, but an output ends where its format does; leave one out")
    if not ends:
        raise _refusal("is set, and the model has no end token to end an output with; give one in stop_token_ids")
    served.grammars.check(form)
    for one in received:
        has_end = bool(one.token_ids) and one.token_ids[-1] in ends
        token_ids = one.token_ids[:-1] if has_end else one.token_ids
        if not one.ended and not served.grammars.begin(form).move(token_ids):
            raise InvalidRequest(
                f"received_outputs has an output {one.completion_index} that response_format does not allow; give the "
                "request it came from",
                field="received_outputs",
            )


def _refusal(words: str) -> InvalidRequest:
    return InvalidRequest(f"response_format {words}", field="response_format")
