"""The result of a bench, as values that go to JSON and back. `summary` owns the figures derived from them."""

from dataclasses import dataclass, field, replace
from statistics import median

from pydantic import TypeAdapter

from paceline.measure.bench.grid import SystemSpec
from paceline.measure.contention import Contention, counting, was_quiet
from paceline.measure.equivalence.agreement import Mismatch
from paceline.measure.rounds import RoundUse, RowUse
from paceline.types import DraftSource, PassTraffic


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
    categories: dict[str, RowUse] = field(default_factory=dict)
    """Use of the rounds by the prompts of each category; empty for systems that do not report rounds."""

    @property
    def tokens_per_s(self) -> float:
        return self.output_count / self.elapsed_s


@dataclass(frozen=True)
class PromptPass:
    """One timed pass that ended every output at its first token, so that its time went to the prompts."""

    elapsed_s: float
    contention: Contention | None = None


@dataclass(frozen=True)
class SystemResult:
    spec: SystemSpec
    runs: tuple[Run, ...] = ()
    prompt_passes: tuple[PromptPass, ...] = ()
    """Passes between the runs; empty for peers, and where outputs have one token at most."""
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

    def rows_of(self, category: str) -> RowUse | None:
        """Return the use of rounds by a category's prompts, over the runs that count; None when no run tells it."""
        known = [run.categories[category] for run in counting(self.runs) if category in run.categories]
        return sum(known, RowUse()) if known else None

    def decoding_tokens_per_s(self, prompt_count: int) -> float | None:
        """Return the speed with the prompts' time taken out; None where that time is unknown.

        It is the tokens after each output's first over the time that a run takes longer than a pass that ends there;
        both are medians of what counts.
        """
        if not self.prompt_passes:
            return None
        runs, passes = counting(self.runs), counting(self.prompt_passes)
        decoding_s = median(run.elapsed_s for run in runs) - median(one.elapsed_s for one in passes)
        token_count = median(run.output_count for run in runs) - prompt_count
        return token_count / decoding_s if decoding_s > 0 else None

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
        """Return the least time to read target weights once a round, draft weights once a draft, and cached tokens.

        Other sources than draft services read no weights.
        """
        drafted_count = rounds.drafted_by(DraftSource.DRAFT)
        drafts = drafted_count / rounds.verified_row_count if rounds.verified_row_count else 0.0
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
    """Results of all prompts together."""
    categories: dict[str, int] = field(default_factory=dict)
    """Number of prompts by category, in the order of the file."""
    by_category: dict[str, tuple[SystemResult, ...]] = field(default_factory=dict)
    """Results of each category's prompts by themselves; empty unless asked for."""

    def of_category(self, category: str) -> "BenchResult":
        """Return what was measured with a category's prompts by themselves."""
        systems = self.by_category.get(category, ())
        return replace(self, prompt_count=self.categories[category], systems=systems, by_category={})

    @property
    def measured(self) -> list[SystemResult]:
        """Systems with at least one timed run."""
        return [one for one in self.systems if one.runs]

    def find(self, kind: str, like: SystemSpec) -> SystemResult | None:
        """Return the system of a kind to compare with `like`: of its dtype, and of its batch size or else of 1.

        Of several with other numerics the one with those of `like` is preferred.
        """
        found = [
            one
            for one in self.measured
            if one.spec.kind == kind
            and one.spec.precision.dtype == like.precision.dtype
            and one.spec.batch_size in (like.batch_size, 1)
        ]
        return max(found, key=lambda one: (one.spec.batch_size, one.spec.precision == like.precision), default=None)

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
