"""Stages of what is measured on a GPU: each part is done once, and one that fails keeps no other from being done."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import serving
from benchmarks.gpu.__main__ import STAGES, machine
from benchmarks.gpu.environment import name_of, requirements
from benchmarks.gpu.exactness import agreements
from benchmarks.gpu.kernels import counted
from benchmarks.gpu.plan import ROOT, StagePlan
from benchmarks.gpu.stages import Figures, OtherMachine, Part, PartFailed, Stage
from benchmarks.launches import Launches, count
from tests.fakes.model_services import Clock

MACHINE = {"device": "a machine"}


class Parts:
    """Parts that note when they are done; some fail."""

    def __init__(self, *names: str, failing: Sequence[str] = ()) -> None:
        self.names, self.failing = names, failing
        self.done = list[str]()

    def parts(self) -> list[Part]:
        return [Part(name, lambda name=name: self._do(name)) for name in self.names]  # type: ignore[misc]

    def _do(self, name: str) -> list[Figures]:
        self.done.append(name)
        if name in self.failing:
            raise PartFailed(f"{name} is broken")
        return [{"ms": 1.5, "B": len(self.done)}]


def run(folder: Path, parts: Parts, limit_s: float = 60.0) -> tuple[bool, list[str]]:
    told = list[str]()
    stage = Stage("trial", folder, MACHINE)
    stage.resume()
    return stage.run(parts.parts(), told.append, limit_s), told


def test_a_part_that_failed_is_told_and_done_again_and_the_others_are_done_once(tmp_path: Path) -> None:
    parts = Parts("a", "b", "c", failing=["b"])
    whole, told = run(tmp_path, parts)
    assert not whole and parts.done == ["a", "b", "c"]
    assert "trial, b FAILED: b is broken" in told
    table = (tmp_path / "table.md").read_text()
    assert "| a    | 1.50 |   1 |" in table and "- b failed: b is broken" in table
    parts.failing = ()
    whole, told = run(tmp_path, parts)
    assert whole and parts.done == ["a", "b", "c", "b"]
    assert "trial, a: done before" in told
    known = json.loads((tmp_path / "trial.json").read_text())
    assert known["machine"] == MACHINE
    assert [done["error"] for done in known["parts"].values()] == [None] * 3


def test_no_part_begins_when_the_time_is_over_and_the_next_run_goes_on(tmp_path: Path) -> None:
    clock, parts = Clock(), Parts("a", "b")

    def work() -> Sequence[Figures]:
        clock.advance(10)
        return [{"ms": 1.0}]

    stage = Stage("trial", tmp_path, MACHINE)
    assert not stage.run([Part("a", work), Part("b", work)], lambda words: None, 5, clock)
    assert list(stage.parts) == ["a"]
    assert run(tmp_path, parts)[0] and parts.done == ["b"]


def test_figures_of_another_machine_or_of_a_trial_are_no_figures_of_this_one(tmp_path: Path) -> None:
    """Parts that were tried on a CPU counted as done on the GPU, whose name then stood over their figures."""
    run(tmp_path, Parts("a"))
    kept = (tmp_path / "trial.json").read_text()
    other = Stage("trial", tmp_path, {"device": "a GPU"})
    with pytest.raises(OtherMachine, match="trial.json has figures of a machine, and this is a GPU; .* --again"):
        other.resume()
    assert (tmp_path / "trial.json").read_text() == kept
    Stage("other", tmp_path, {"device": "a GPU"}).resume()


def test_what_is_cut_is_told_beside_the_machine(tmp_path: Path) -> None:
    whole, cut, trial = (
        machine(StagePlan(tmp_path, "cpu", layers, small))
        for layers, small in ((None, False), (4, False), (None, True))
    )
    assert cut == whole | {"layers": "at most 4 layers"}
    assert trial == whole | {"extent": "a trial with next to nothing"}


def test_a_pair_is_made_for_each_number_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair of the first run was measured again, and told with the layers of the second."""
    folders = list[Path]()

    def written(folder: Path, *_: object) -> Path:
        folders.append(folder)
        return folder

    def command(plan: StagePlan, name: str, *words: str) -> None:
        output = Path(words[words.index("--output") + 1])
        output.mkdir(parents=True, exist_ok=True)
        (output / "result.json").write_text('{"summaries": []}')

    monkeypatch.setattr(serving, "written_pair", written)
    monkeypatch.setattr(StagePlan, "command", command)
    for layers in (1, 2, None):
        serving.served(StagePlan(tmp_path, "cpu", layers, small=False), "qwen3-8b/0.6b", 1)
    assert len(set(folders)) == 3


def test_a_command_that_fails_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    plan = StagePlan(tmp_path, "cpu", None, small=True)
    with pytest.raises(PartFailed, match=r"status 3, see .*trial.log; it ends with\nno such thing"):
        plan.command("trial", "-c", "import sys; print('no such thing'); sys.exit(3)")


def test_skipped_tests_are_no_success(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    suite = '<testsuites><testsuite tests="{}" skipped="{}" time="1.5"/></testsuites>'
    report.write_text(suite.format(4, 0))
    assert counted(report) == {"tests": 4, "passed": 4, "seconds": 1.5}
    for tests, skipped in ((4, 4), (0, 0)):
        report.write_text(suite.format(tests, skipped))
        with pytest.raises(PartFailed, match="skipped"):
            counted(report)


def test_a_difference_from_what_must_be_equal_is_told(tmp_path: Path) -> None:
    one = {"system": "plain", "batch_size": 8, "reference": "Hugging Face", "must_hold": True, "mismatches": [{}]}
    file = tmp_path / "equivalence.json"
    assert agreements(file) == []
    file.write_text(json.dumps({"agreements": [one | {"rates": [{"prompt_count": 3}, {"prompt_count": 2}]}]}))
    (found,) = agreements(file)
    assert found["equal"] == "4 of 5" and found["must be equal"] == "NO"


def test_launches_kernels_and_waits_are_told_apart() -> None:
    host = [
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        "cudaGraphLaunch",
        "cudaStreamSynchronize",
        "aten::mm",
        "cudaMalloc",
    ]
    device = ["attend_kernel", "attend_kernel", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]
    events = [(name, False) for name in host] + [(name, True) for name in device]
    assert count(events) == Launches(launches=3, kernels=2, waits=1)


def test_wheels_are_brought_for_all_that_the_stages_import_but_not_for_torch() -> None:
    names = {name_of(one) for one in requirements()}
    assert {"grpcio", "protobuf", "structlog", "transformers", "pytest", "matplotlib", "hatchling"} <= names
    assert not names & {"torch", "triton", "paceline"}
    assert name_of("uvloop>=0.23; sys_platform != 'win32'") == "uvloop"


def test_the_readme_names_every_stage() -> None:
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    assert set(STAGES) == set(re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE))


@pytest.mark.long
def test_a_stage_runs_on_a_cpu(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.gpu", "kernels", str(tmp_path), "--device", "cpu", "--small"]
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT)
    assert "two tests" in (tmp_path / "table.md").read_text()
