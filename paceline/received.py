"""What a client received of a request, from which the request for the rest is made. It knows nothing of calls."""

from collections import defaultdict
from dataclasses import replace

from paceline.types import GenerationAccepted, GenerationRequest, OutputPiece, ReceivedOutput


class Received:
    """The received part of a request's outputs, from which the request for the rest is made."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._token_ids = defaultdict(
            list, {one.completion_index: [*one.token_ids] for one in request.received_outputs}
        )
        self._ended = {one.completion_index for one in request.received_outputs if one.ended}
        self._as_begun = request
        """The request with all that its coordinator decided of it."""
        self._has_prompt = False

    def accept(self, accepted: GenerationAccepted) -> None:
        """Note what was decided of the tokens that follow, such as their model. Of earlier tokens it is the same."""
        known = self._as_begun if self.is_begun else self._request
        self._as_begun = replace(
            known,
            model_digest=accepted.model_digest or known.model_digest,
            prompt_time_s=accepted.prompt_time_s or known.prompt_time_s,
            max_new_tokens=accepted.max_new_tokens or known.max_new_tokens,
        )

    def add(self, piece: OutputPiece) -> None:
        self._token_ids[piece.completion_index] += [token.token_id for token in piece.tokens]
        self._has_prompt = self._has_prompt or bool(piece.prompt_tokens)
        if piece.finish:
            self._ended.add(piece.completion_index)

    @property
    def is_whole(self) -> bool:
        return self._ended >= set(range(self._request.completion_count or 1))  # 0 means 1 on the wire

    @property
    def is_bound(self) -> bool:
        """True when only one model will do, because it produced tokens already or the caller named it."""
        return bool(self._request.model_digest) or self.is_begun

    @property
    def is_begun(self) -> bool:
        """True when tokens were received."""
        return bool(self._has_prompt or self._ended or any(self._token_ids.values()))

    def rest(self) -> GenerationRequest:
        """Return the request for the missing tokens."""
        begun = sorted(index for index, token_ids in self._token_ids.items() if token_ids and index not in self._ended)
        outputs = [ReceivedOutput(index, tuple(self._token_ids[index])) for index in begun]
        outputs += [ReceivedOutput(index, ended=True) for index in sorted(self._ended)]
        # While nothing is received, any model that the request allows will do, and any limit.
        request = self._as_begun if outputs or self._has_prompt else self._request
        return replace(
            request,
            received_outputs=tuple(outputs),
            echo_prompt=request.echo_prompt and not self._has_prompt,
        )
