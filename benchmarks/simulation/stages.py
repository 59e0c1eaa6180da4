"""Batched speculation over a pipeline of stages, in simulated time, in the form of SpecMemo's table (arXiv 2506.01986).

Costs are made up: a pass takes as long as its weights take to be read, or its arithmetic where that is longer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.simulation.run import simulate
from paceline.measure.tables import markdown_table
from paceline.simulate.cluster import PlannedRequest, SimulatedCluster
from paceline.simulate.saved_costs import SavedCosts, SavedModel
from paceline.types import AcceptanceCounts, CallCosts, DraftSource, MeasuredCosts

BATCH_SIZES = (1, 2, 4, 8, 10)
PAPER = (5.7, 14.5, 28.8, 41.6, 46.0)
"""Tokens/s of SpecMemo at these batch sizes: Llama-2-70B-Chat over eight AMD MI250, Medusa's heads."""
STAGE_COUNTS = (1, 8)
LANE_COUNTS = (2, 4, 8)
FULL_BATCH_SIZES = (10, 32, 64)
"""Those by which lanes are compared: rows cost little while reading weights is what takes time, and much beyond."""
BANDWIDTH_BYTES_S, OPERATIONS_S = 1.6e12, 180e12
"""Of half an MI250, as it is sold; one device works at a time on a pass, so these are the pipeline's too."""
TARGET_PARAMETERS, DRAFT_PARAMETERS, PARAMETER_BYTES = 70e9, 1.1e9, 2
DRAFT_COUNT = 5
ACCEPTANCE = 0.7
CALLS = 20
HOP_S = 0.0005
"""Of a call on the wire, and as much again of the coordinator's own."""
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 64, 128


@dataclass(frozen=True)
class StagesFigure:
    stage_count: int
    lane_count: int
    batch_size: int
    plain_tokens_per_s: float
    tokens_per_s: float
    """With drafts."""


def figures() -> list[StagesFigure]:
    """Return those in the paper's form, of two lanes."""
    return [_figure(stages, 2, batch_size) for stages in STAGE_COUNTS for batch_size in BATCH_SIZES]


def lane_figures() -> list[StagesFigure]:
    return [_figure(max(STAGE_COUNTS), lanes, batch_size) for batch_size in FULL_BATCH_SIZES for lanes in LANE_COUNTS]


def lane_table_of(found: Sequence[StagesFigure]) -> str:
    """Return the table of more groups in flight, which fill more of the stages."""
    rows = [
        (
            *(str(one.stage_count), str(one.batch_size), str(one.lane_count)),
            *(f"{one.plain_tokens_per_s:.0f}", f"{one.tokens_per_s:.0f}"),
        )
        for one in found
    ]
    return markdown_table(("stages", "B", "lanes", "plain", "drafts"), rows)


def table_of(found: Sequence[StagesFigure]) -> str:
    """Return the table: speeds, and their ratios to plain decoding and to speculation at the smallest batch."""
    header = ("stages", "B", "plain", "drafts", "x plain", "x drafts at B = 1", "the paper's")
    first = {one.stage_count: one.tokens_per_s for one in found if one.batch_size == 1}
    rows = [
        (
            *(str(one.stage_count), str(one.batch_size), f"{one.plain_tokens_per_s:.1f}", f"{one.tokens_per_s:.1f}"),
            *(f"{one.tokens_per_s / one.plain_tokens_per_s:.2f}", f"{one.tokens_per_s / first[one.stage_count]:.1f}"),
            f"{PAPER[BATCH_SIZES.index(one.batch_size)] / PAPER[0]:.1f}",
        )
        for one in found
    ]
    return markdown_table(header, rows)


def _figure(stage_count: int, lane_count: int, batch_size: int) -> StagesFigure:
    plain, drafted = (_tokens_per_s(stage_count, lane_count, batch_size, count) for count in (0, DRAFT_COUNT))
    return StagesFigure(stage_count, lane_count, batch_size, plain, drafted)


def _tokens_per_s(stage_count: int, lane_count: int, batch_size: int, draft_count: int) -> float:
    """Let as many clients as the batch has rows ask in turn, in as many groups as there are lanes or rows."""
    lane_count = min(lane_count, batch_size)
    cluster = SimulatedCluster(
        -(-batch_size // lane_count),
        lane_count,
        draft_count,
        draft_service_count=1 if draft_count else 0,
        target_stage_count=stage_count,
        apart=True,
    )
    requests = [PlannedRequest(PROMPT_TOKENS, OUTPUT_TOKENS)] * (REQUESTS * batch_size)
    return simulate(_costs(), cluster, requests, client_count=batch_size).summary.tokens_per_s


def _costs() -> SavedCosts:
    right = tuple(round(1000 * ACCEPTANCE**place) for place in range(1, DRAFT_COUNT + 1))
    acceptance = AcceptanceCounts(DraftSource.DRAFT, "draft", (1000, *right[:-1]), right, 0.05)
    costs = MeasuredCosts(tuple(_calls()), (acceptance,))
    return SavedCosts(SavedModel("target", 327_680, 512), SavedModel("draft", 22_528, 512), 8, 2, DRAFT_COUNT, costs)


def _calls() -> Iterator[CallCosts]:
    for rows in range(1, max(FULL_BATCH_SIZES) + 1):
        for drafts in (0, DRAFT_COUNT):
            yield _call("", rows, drafts, _pass_s(TARGET_PARAMETERS, rows * (1 + drafts)))
        yield _call("draft", rows, DRAFT_COUNT, DRAFT_COUNT * _pass_s(DRAFT_PARAMETERS, rows))
        yield _call("", rows, 0, _pass_s(TARGET_PARAMETERS, rows + rows * PROMPT_TOKENS), rows * PROMPT_TOKENS)


def _pass_s(parameters: float, token_count: int) -> float:
    return max(PARAMETER_BYTES * parameters / BANDWIDTH_BYTES_S, 2 * parameters * token_count / OPERATIONS_S)


def _call(model: str, rows: int, steps: int, seconds: float, prompt_count: int = 0) -> CallCosts:
    counts = (CALLS, CALLS * rows * steps, CALLS * prompt_count)
    return CallCosts(model, 1, rows, steps, *counts, CALLS * seconds, CALLS * seconds**2, CALLS * HOP_S, CALLS * HOP_S)
