"""What a simulation found."""

from dataclasses import dataclass

from paceline.measure.load.load import SentRequest
from paceline.measure.load.summary import LoadSummary


@dataclass(frozen=True)
class ServiceUse:
    name: str
    call_count: int
    busy_share: float
    """Share of the time in which it worked."""
    queued_s: float
    """Mean seconds that a call waited for others."""
    peak_tokens: int
    """Most tokens that its cache held at once."""
    peak_bytes: int


@dataclass(frozen=True)
class SimulationResult:
    summary: LoadSummary
    services: tuple[ServiceUse, ...]
    round_count: int
    mean_group_size: float
    requests: tuple[SentRequest, ...]
