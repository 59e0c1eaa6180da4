"""What a request took: OpenAI's usage, and ours under `paceline`."""

from collections import Counter
from collections.abc import Iterable

from paceline.gateway.bodies import Json
from paceline.types import (
    DraftSource,
    GenerationAccepted,
    GenerationFinish,
    HopTime,
    OutputPiece,
    OutputToken,
    RoundSummary,
    Usage,
    added_up,
)


class Account:
    """Counts over all prompts and outputs of a request."""

    def __init__(self, output_count: int) -> None:
        """`output_count` is that of all prompts together."""
        self._output_count = output_count
        self._accepted: dict[int, GenerationAccepted] = {}
        self._finishes: dict[tuple[int, int], GenerationFinish] = {}
        self.token_count = 0
        """Tokens of output so far."""

    def accept(self, prompt_index: int, accepted: GenerationAccepted) -> None:
        self._accepted[prompt_index] = accepted

    def add(self, prompt_index: int, piece: OutputPiece) -> None:
        self.token_count += len(piece.tokens)
        if piece.finish:
            self._finishes[prompt_index, piece.completion_index] = piece.finish

    @property
    def is_accepted(self) -> bool:
        """Whether a coordinator has queued a prompt, be it one of several."""
        return bool(self._accepted)

    @property
    def is_whole(self) -> bool:
        return len(self._finishes) == self._output_count

    @property
    def model_id(self) -> str:
        """Name of the model that answers; empty until a coordinator told it."""
        return next((one.model_id for one in self._accepted.values() if one.model_id), "")

    @property
    def request_id(self) -> str:
        """Name of the request in the coordinator's log: that of the first prompt."""
        return self._accepted[0].request_id if 0 in self._accepted else ""

    @property
    def prompt_token_count(self) -> int:
        # A copy, for a thread may ask while another prompt is accepted.
        return sum(one.prompt_count for one in list(self._accepted.values()))

    def usage(self) -> Json:
        """Return OpenAI's usage. A prompt counts once, however many outputs it has."""
        cached: Counter[int] = Counter()
        for (prompt_index, _), finish in self._finishes.items():
            cached[prompt_index] = max(cached[prompt_index], finish.usage.cached_prompt_count)
        predicted = [one for usage in self._usages for one in usage.sources if one.source is DraftSource.PREDICTION]
        accepted_count = sum(one.accepted_count for one in predicted)
        return {
            "prompt_tokens": self.prompt_token_count,
            "completion_tokens": self.token_count,
            "total_tokens": self.prompt_token_count + self.token_count,
            "prompt_tokens_details": {"cached_tokens": cached.total()},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted_count,
                "rejected_prediction_tokens": sum(one.drafted_count for one in predicted) - accepted_count,
            },
        }

    def told(self, trace_id: str | None) -> Json:
        """Return what we tell of a request at its end."""
        first = self._accepted.get(0)
        usages = list(self._usages)
        sources = added_up(one for usage in usages for one in usage.sources)
        return {
            "request_id": self.request_id,
            "trace_id": trace_id,
            "seed": first.seed if first else None,
            "model_digest": first.model_digest if first else "",
            "rounds": sum(one.round_count for one in usages),
            "drafted": sum(one.drafted_count for one in usages),
            "accepted": sum(one.accepted_count for one in usages),
            "accepted_by_position": _sums([one.accepted_counts_by_position for one in usages]),
            "queued_s": max((one.queued_s for one in usages), default=0.0),
            "sources": [
                {
                    "source": one.source.value,
                    "model": one.model,
                    "drafted": one.drafted_count,
                    "accepted": one.accepted_count,
                }
                for one in sources
            ],
        }

    @property
    def _usages(self) -> Iterable[Usage]:
        return (one.usage for one in self._finishes.values())


def _sums(lists: list[tuple[int, ...]]) -> list[int]:
    sums = [0] * max(map(len, lists), default=0)
    for one in lists:
        for place, count in enumerate(one):
            sums[place] += count
    return sums


def told_of_piece(piece: OutputPiece) -> Json:
    """Return what a chunk tells of its tokens, and of their round where the coordinator told it."""
    told: Json = {"tokens": [_told_of_token(one) for one in piece.tokens]}
    if piece.round:
        told["round"] = _told_of_round(piece.round)
    return told


def _told_of_token(token: OutputToken) -> Json:
    source = token.source.value if token.source else None
    return {"id": token.token_id, "text": token.text, "source": source, "accepted": token.accepted}


def _told_of_round(summary: RoundSummary) -> Json:
    return {
        "group_size": summary.group_size,
        "drafted": summary.drafted_count,
        "accepted": summary.accepted_count,
        "source": summary.source.value if summary.source else None,
        "propose": _told_of_hop(summary.propose) if summary.propose else None,
        "verify": _told_of_hop(summary.verify),
        "round_s": summary.round_s,
        "waited_s": summary.waited_s,
    }


def _told_of_hop(hop: HopTime) -> Json:
    return {"wire_s": hop.wire_s, "queued_s": hop.queued_s, "executed_s": hop.executed_s}
