"""The result of a bench, as values that go to JSON and back. `summary` owns the figures derived from them."""

from dataclasses import dataclass
from statistics import median

from pydantic import TypeAdapter

from paceline.measure.bench.grid import SystemSpec
from paceline.measure.contention import Contention, counting, was_quiet
from paceline.measure.equivalence.agreement import Mismatch
from paceline.measure.rounds import RoundUse
from paceline.types import PassTraffic


@dataclass(frozen=True)
class Run:
    """One timed pass."""

    elapsed_s: float
    output_count: int
    rounds: RoundUse | None
    mismatches: tuple[Mismatch, ...]
    """Outputs that differ from those of the first system of this dtype, whatever the numerics of either."""
    contention: Contention | None = None
    """How others disturbed the machine meanwhile; None if nobody watched."""

    @property
    def tokens_per_s(self) -> float:
        return self.output_count / self.elapsed_s


@dataclass(frozen=True)
class SystemResult:
    spec: SystemSpec
    runs: tuple[Run, ...] = ()
    threads: int | None = None
    """Number of threads that a peer was fastest with; None for our systems, which choose themselves."""

    @property
    def quiet_count(self) -> int:
        """Number of runs that nothing else on the machine disturbed."""
        return sum(map(was_quiet, self.runs))

    @property
    def tokens_per_s(self) -> float:
        """Median of the runs that count; tokens after an output's end do not count."""
        return median(run.tokens_per_s for run in counting(self.runs))

    @property
    def elapsed_s(self) -> float:
        """Seconds of all runs that count."""
        return sum(run.elapsed_s for run in counting(self.runs))

    @property
    def rounds(self) -> RoundUse | None:
        """Sum over the runs that count; None when no run has rounds."""
        known = [run.rounds for run in counting(self.runs) if run.rounds]
        return sum(known, RoundUse()) if known else None

    @property
    def mismatch_count(self) -> int:
        """Most mismatches of any run, quiet or not: a disturbance must not change outputs."""
        return max(len(run.mismatches) for run in self.runs)


@dataclass(frozen=True)
class Floor:
    """Lower bound on the time of decoding in the target's dtype: the bytes of a pass over the machine's bandwidth."""

    dtype: str
    bandwidth_bytes_per_s: float
    target: PassTraffic
    draft: PassTraffic

    def seconds(self, rounds: RoundUse) -> float:
        """Return the least time to read target weights once a round, draft weights once a draft, and cached tokens."""
        drafts = rounds.drafted_count / rounds.verified_row_count if rounds.verified_row_count else 0.0
        read = _bytes(self.target, rounds) + drafts * _bytes(self.draft, rounds)
        return read / self.bandwidth_bytes_per_s


def _bytes(traffic: PassTraffic, rounds: RoundUse) -> int:
    return rounds.round_count * traffic.weight_bytes + rounds.context_token_count * traffic.token_bytes


@dataclass(frozen=True)
class BenchResult:
    target_model: str
    draft_model: str
    device: str
    input_file: str
    prompt_count: int
    prompt_token_count: int
    max_new_tokens: int
    machine: str
    started_at: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    run_count: int
    """Number of timed runs asked for; a system with fewer was interrupted."""
    lanes: int | None = None
    """Lanes of speculation at B > 1, by flag, variable or default; None in results from before all three were known."""
    floors: tuple[Floor, ...] = ()
    systems: tuple[SystemResult, ...] = ()

    @property
    def measured(self) -> list[SystemResult]:
        """Systems with at least one timed run."""
        return [one for one in self.systems if one.runs]

    def find(self, kind: str, like: SystemSpec) -> SystemResult | None:
        """Return the peer to compare with `like`: of the same dtype, and of the same batch size or else of 1."""
        found = [
            one
            for one in self.measured
            if one.spec.kind == kind
            and one.spec.precision.dtype == like.precision.dtype
            and one.spec.batch_size in (like.batch_size, 1)
        ]
        return max(found, key=lambda one: one.spec.batch_size, default=None)

    def own_single(self, like: SystemSpec) -> SystemResult | None:
        """Return the same system of ours at B = 1."""
        return next((one for one in self.measured if one.spec.batch_size == 1 and one.spec.label == like.label), None)

    def floor_s(self, system: SystemResult) -> float | None:
        """Return the least time that memory allows for a system's rounds; None if it is unknown."""
        floor = next((one for one in self.floors if one.dtype == system.spec.precision.dtype), None)
        return None if floor is None or system.rounds is None else floor.seconds(system.rounds)


def bench_result_from_json(text: str) -> BenchResult:
    """Read what `summary.to_json` wrote."""
    return TypeAdapter(BenchResult).validate_json(text)
