"""The cluster to simulate, and what is sent to it."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from paceline.errors import InvalidRequest, StartupError
from paceline.measure.load.arrivals import poisson_arrivals
from paceline.simulate.saved_costs import SavedCosts
from paceline.types import GenerationRequest, TokenIds


@dataclass(frozen=True)
class SimulatedCluster:
    batch_size: int
    lane_count: int | None
    """None: as many as the coordinator chooses by itself."""
    draft_count: int | Literal["auto"]
    coordinator_count: int = 1
    target_count: int = 1
    draft_service_count: int = 1
    """0: there is no draft service."""
    client_round_trip_s: float = 0.0
    """Between clients and coordinators, beside nothing measured; the other two are beside what was measured."""
    draft_round_trip_s: float = 0.0
    target_round_trip_s: float = 0.0
    target_stage_count: int = 1
    """Devices that each hold as many of a target's layers. A call passes them one after the other."""
    apart: bool = False
    """Whether services have machines of their own: then rounds in flight at once do not slow each other down."""

    @classmethod
    def measured(cls, saved: SavedCosts) -> "SimulatedCluster":
        """Return a cluster with the settings that costs were measured with, and one of each service."""
        draft_count: int | Literal["auto"] = "auto" if saved.draft_count is None else saved.draft_count
        # A coordinator tells of two lanes also where it was left to choose, as most are.
        lane_count = None if saved.lane_count == 2 else saved.lane_count
        return cls(saved.batch_size, lane_count, draft_count, draft_service_count=1 if saved.draft else 0)


@dataclass(frozen=True)
class PlannedRequest:
    prompt_count: int
    output_count: int
    at_s: float = 0.0
    """Seconds of its arrival; meaningless where a number of clients ask one request after the other."""

    def request(self, number: int) -> GenerationRequest:
        """Return it as it is sent. Its first token is its number: nothing else of a simulated prompt matters."""
        return GenerationRequest(TokenIds((number, *[0] * (self.prompt_count - 1))), self.output_count, seed=number)


LONGEST = 10_000_000
"""Most tokens of a prompt or an output: a simulated request holds them."""


@dataclass(frozen=True)
class Lengths:
    """Lengths that are drawn evenly."""

    least: int
    most: int

    @classmethod
    def of(cls, text: str) -> "Lengths":
        """Read `128` or `64:256`. Raise InvalidRequest."""
        if not re.fullmatch(r"\d{1,9}(:\d{1,9})?", text, re.ASCII):  # Python reads no number of thousands of digits
            raise InvalidRequest(f"{text!r} is no length; give tokens as 128, or a range of them as 64:256")
        least, _, most = text.partition(":")
        found = cls(int(least), int(most or least))
        if not 1 <= found.least <= found.most <= LONGEST:
            raise InvalidRequest(
                f"{text!r} is no range of lengths; give at least 1, at most {LONGEST}, and the smaller number first"
            )
        return found

    def draw(self, rng: Random) -> int:
        return rng.randint(self.least, self.most)


def first_requests(prompts: Lengths, outputs: Lengths, seed: int, count: int) -> list[PlannedRequest]:
    rng = Random(seed)
    return [PlannedRequest(prompts.draw(rng), outputs.draw(rng)) for _ in range(count)]


def poisson_requests(
    rate_per_s: float, prompts: Lengths, outputs: Lengths, seed: int, count: int
) -> list[PlannedRequest]:
    times = poisson_arrivals(rate_per_s, seed, count=count)
    requests = first_requests(prompts, outputs, seed, count)
    return [replace(one, at_s=at_s) for at_s, one in zip(times, requests, strict=True)]


def read_trace(path: Path) -> list[PlannedRequest]:
    """Read JSON lines with `arrival_s`, `prompt_tokens` and `max_tokens`. Raise StartupError."""
    try:
        # `splitlines` would also split at U+2028 and its like, which JSON strings may hold unescaped.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise StartupError(f"{path} cannot be read: {reason}; name a file of JSON lines") from error
    found = [_planned(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise StartupError(f"{path} has no requests; give JSON lines with {', '.join(_FIELDS)}")
    return sorted(found, key=lambda one: one.at_s)


LONGEST_S = 1e7
"""Seconds that a simulation may take, 116 days: a clock that shows many more loses its smallest steps."""
_FIELDS = ("arrival_s", "prompt_tokens", "max_tokens")


def _planned(place: str, line: str) -> PlannedRequest:
    try:
        values: dict[str, Any] = json.loads(line)
        at_s, prompt_count, output_count = (values[name] for name in _FIELDS)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StartupError(f"{place} is no request; give a JSON object with {', '.join(_FIELDS)}") from error
    if not (type(at_s) in (int, float) and 0 <= at_s <= LONGEST_S):
        raise StartupError(f"{place}: arrival_s is {at_s!r}; give seconds since the start, up to {LONGEST_S:.0f}")
    for name, count in (("prompt_tokens", prompt_count), ("max_tokens", output_count)):
        if not (type(count) is int and 1 <= count <= LONGEST):
            raise StartupError(f"{place}: {name} is {count!r}; give a whole number from 1 to {LONGEST}")
    return PlannedRequest(prompt_count, output_count, float(at_s))
