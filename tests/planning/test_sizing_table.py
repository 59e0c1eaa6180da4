"""The table of sizes in deploy/README.md is what the plan says."""

from pathlib import Path

from paceline.measure.tables import markdown_table
from paceline.planning.search import Candidate, Setting, Workload, floor_costs, weighed
from paceline.planning.speed import MACHINES
from tests.planning.pairs import LARGE_ON_CUDA

PAGE = Path(__file__).parents[2] / "deploy/README.md"
PLANS = ((20, 512), (40, 1000), (64, 1000), (64, 2048), (200, 2048))
GPUS_GB = (24, 48, 80, 141)


def gpu_for(size_bytes: int) -> str:
    return next((f"{size} GB" for size in GPUS_GB if size_bytes <= size * 10**9), "none")


def shown(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def planned(conversation_count: int, token_count: int) -> Candidate:
    workload = Workload(conversation_count, token_count, token_count // 2, 0.7)
    costs = floor_costs(LARGE_ON_CUDA, MACHINES["cuda"])[0]
    return weighed(LARGE_ON_CUDA, workload, costs, Setting(5, conversation_count, 256))


def test_the_table_of_sizes_is_what_the_plan_says() -> None:
    rows = []
    for conversations, tokens in PLANS:
        one = planned(conversations, tokens)
        assert one.draft
        sizes = one.target.total, one.draft.total, one.total_bytes
        cells = (f"{shown(size)}, {gpu_for(size)}" for size in sizes)
        rows.append([f"{conversations} of {tokens:,}", shown(one.target.kv), *cells])
    table = markdown_table(
        ["conversations, tokens", "target's cache", "target, GPU", "draft, GPU", "both on one"], rows
    )
    assert table in PAGE.read_text(encoding="utf-8"), table
