"""`python -m benchmarks.distance`, complete, with its services in this process and little work."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.distance import __main__ as command
from benchmarks.distance import measuring
from benchmarks.distance import report as report_of_distance
from benchmarks.distance.__main__ import main
from benchmarks.distance.report import plot, report
from benchmarks.distance.result import Case, Comparison, DistanceResult, FarService, Run
from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.errors import InvalidRequest
from paceline.measure.contention import Contention
from paceline.measure.rounds import RoundUse
from paceline.process.instruments import instruments
from paceline.process.service_process import Endpoint
from paceline.process.settings import read_settings
from paceline.process.variables import NO_HEADS
from tests.clusters import cluster_here
from tests.fakes.proxy import running_proxy
from tests.fakes.watches import FakeWatch

ROUNDS = RoundUse(round_count=10, verified_row_count=20, accepted_count=30, verify_s=0.4)


@asynccontextmanager
async def coordinator_here(module: str, flags: Sequence[str]) -> AsyncIterator[Endpoint]:
    """As `running_service` of a coordinator, but without a process."""
    settings = read_settings(CoordinatorSettings, module, flags)
    with instruments(module, settings) as watched:
        async with running_coordinator(settings, watched) as server:
            yield Endpoint(server.address, tuple(filter(None, [watched.metrics_url])))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("delays_ms", "heads"), [((5,), NO_HEADS), ((0, 5), "builtin:eagle")])
def test_outputs_are_the_targets_at_every_distance_with_prepared_rounds_and_without(
    delays_ms: tuple[int, ...],
    heads: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(measuring, "running_cluster", cluster_here)
    monkeypatch.setattr(measuring, "running_service", coordinator_here)
    monkeypatch.setattr(command, "MachineWatch", FakeWatch)
    with pytest.raises(typer.Exit) as end:
        words = ",".join(map(str, delays_ms))
        sizes: dict[str, Any] = {"batch_sizes": "1,2", "prompt_count": 3, "max_new_tokens": 12, "runs": 1}
        main(output=tmp_path, delays_ms=words, heads=heads, **sizes)
    assert end.value.exit_code == 0
    assert sorted(os.listdir(tmp_path)) == ["distance.png", "result.json", "table.md"]
    result = json.loads((tmp_path / "result.json").read_text())
    cases = [tuple(one["case"].values()) for one in result["comparisons"]]
    at_1 = list(product(("draft", "target"), delays_ms, (1,), (0, 1)))
    at_2 = list(product(("draft", "target"), delays_ms, (2,), (0,)))
    assert cases == at_1 + at_2
    assert all(one["is_equal"] for one in result["summaries"])
    assert [one["prompt_count"] for one in result["comparisons"]] == [1] * len(at_1) + [3] * len(at_2)
    assert not any(run["prepared_row_count"] for one in result["comparisons"] for run in one["without"])
    rows = (tmp_path / "table.md").read_text().splitlines()[-len(cases) :]
    assert [row.split("|")[13].strip() for row in rows] == ["1 of 1"] * len(at_1) + ["3 of 3"] * len(at_2)
    assert capsys.readouterr().out.count(" 3 of 3 ") == len(at_2)


def run(tokens_per_s: int, equal_count: int = 4, others_share: float = 0.0) -> Run:
    return Run(1.0, tokens_per_s, ROUNDS, 5, equal_count, Contention(others_share, 1.0))


def compared(without: Sequence[Run], prepared: Sequence[Run]) -> DistanceResult:
    comparison = Comparison(Case("draft", 20.0, 1, 0.0), 4, tuple(without), tuple(prepared))
    return DistanceResult("target", "draft", NO_HEADS, "demo", 64, 3, "machine", "now", {}, (comparison,))


def test_a_row_has_medians_of_quiet_runs_and_means_over_their_rows() -> None:
    spoiled = run(9, others_share=0.5)
    found = compared([run(50), run(40), spoiled], [run(100), spoiled, spoiled])
    cells = [cell.strip() for cell in report(found).splitlines()[-1].strip("|").split("|")]
    assert cells == [
        *("draft", "20", "1", "0", "45", "100", "2.00", "40.0", "40.0"),
        *("25%", "1.50", "1.50", "4 of 4", "3 of 6"),
    ]


def test_no_figure_lies_outside_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first series set the scale of the second."""
    drawn: list[Any] = []
    monkeypatch.setattr(report_of_distance, "save_figure", lambda figure, path: drawn.append(figure))
    rates: dict[FarService, int] = {"draft": 50, "target": 90}
    comparisons = tuple(
        Comparison(Case(far, 20.0, 8, 0.0), 4, (run(rate),), (run(rate),)) for far, rate in rates.items()
    )
    plot(replace(compared([run(1)], [run(1)]), comparisons=comparisons), tmp_path / "distance.png")
    for axes, rate in zip(drawn[0].axes, rates.values(), strict=True):
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > rate


def test_one_output_that_differs_in_any_run_shows_even_if_that_run_was_spoiled() -> None:
    found = compared([run(50), run(50)], [run(50), run(50, equal_count=3, others_share=0.5)])
    assert not found.is_equal
    assert "3 of 4" in report(found)


@pytest.mark.parametrize("delays_ms", ["-1", "1001", "5,far", "nan"])
def test_a_distance_that_cannot_be_is_refused_before_anything_starts(delays_ms: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="give numbers from 0 to 1000"):
        main(output=tmp_path, delays_ms=delays_ms)


async def test_bytes_through_a_far_proxy_keep_their_order_and_take_at_least_their_time() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(3):
            writer.write(content)
        writer.close()

    now_s = asyncio.get_running_loop().time
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with running_proxy(f"127.0.0.1:{port}", delay_s=0.01) as proxy:
            host, _, near_port = proxy.address.partition(":")
            reader, writer = await asyncio.open_connection(host, int(near_port))
            began_s, sent = now_s(), [b"%03d" % number for number in range(200)]
            for content in sent:
                writer.write(content)
                await asyncio.sleep(0)
            assert await reader.readexactly(600) == b"".join(sent)
            assert now_s() - began_s >= 2 * 0.01
            writer.close()
