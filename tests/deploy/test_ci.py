"""What `.ci/run` and `scripts/check-deploy` run, and when they fail. Stand-ins take the places of their tools."""

import os
import re
import select
import subprocess
from pathlib import Path

import pytest

from tests.manifests import KUBERNETES

ROOT = KUBERNETES.parents[1]
CI = (ROOT / ".ci/run").read_text()
CHECK_DEPLOY = (ROOT / "scripts/check-deploy").read_text()
(KUSTOMIZE,) = re.findall(r"^kustomize_version=(\S+)", CHECK_DEPLOY, re.MULTILINE)
TOOLS = {name.partition("==")[0]: name for name in re.findall(r"\$\(environment (\S+)\)", CHECK_DEPLOY)}
RENDERED = 'cat "rendered/$(basename "$2").yaml"'


def stand_in(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def check_deploy(
    folder: Path, kustomize: str = RENDERED, checkov: str = "", flags: tuple[str, ...] = (), root: Path = ROOT
) -> tuple[int, str]:
    """Run the script of `root` where there is no kubectl; return its status, and the programs that it called."""
    called, tools = folder / "called", folder / "tools"
    stand_in(folder / "bin/kubectl", "exit 1")
    stand_in(tools / f"kustomize-{KUSTOMIZE}/usr/bin/kustomize", kustomize)
    for name, pinned in TOOLS.items():
        stand_in(tools / pinned / "installed", "")
        for program in ("python", name):
            stand_in(tools / pinned / "bin" / program, f'echo "${{0##*/}} $*" >> {called}')
    stand_in(tools / TOOLS["checkov"] / "bin/checkov", f'echo "checkov $*" >> {called}\n{checkov}')
    environment = {**os.environ, "CHECK_DEPLOY_TOOLS": str(tools), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    done = subprocess.run([root / "scripts/check-deploy", *flags], env=environment, capture_output=True, check=False)
    return done.returncode, called.read_text() if called.exists() else ""


@pytest.mark.review
def test_checkov_runs_where_there_is_no_kubectl(tmp_path: Path) -> None:
    """Review D11: checkov never ran."""
    status, called = check_deploy(tmp_path)
    assert status == 0
    assert re.search(r"^checkov --config-file checkov\.yaml --file rendered/\S+", called, re.MULTILINE)


@pytest.mark.review
def test_checkovs_findings_end_the_check(tmp_path: Path) -> None:
    """Review D11."""
    status, called = check_deploy(tmp_path, checkov="exit 1")
    assert status == 1 and "checkov" in called


@pytest.mark.review
def test_stale_renderings_end_the_check(tmp_path: Path) -> None:
    """Review D11: without kubectl they passed."""
    status, _ = check_deploy(tmp_path, kustomize=f"{RENDERED}; echo changed: true")
    assert status == 1


def test_an_overlay_that_is_gone_leaves_no_rendering_once_all_are_written(tmp_path: Path) -> None:
    """Its rendering stayed and ended every check, which said to write all again."""
    root = tmp_path / "root"
    stand_in(root / "scripts/check-deploy", CHECK_DEPLOY.partition("\n")[2])
    (root / "deploy/kubernetes/overlays/cpu").mkdir(parents=True)
    rendered = root / "deploy/kubernetes/rendered"
    rendered.mkdir()
    (rendered / "gone.yaml").write_text("kind: Gone\n")
    status, _ = check_deploy(tmp_path, "echo kind: New", flags=("--write",), root=root)
    assert status == 0
    assert {one.name: one.read_text() for one in rendered.iterdir()} == {"cpu.yaml": "kind: New\n"}


def ci(folder: Path, check: str, check_deploy: str, open_file: int | None = None) -> tuple[int, str]:
    """Run CI's script with stand-ins for all scripts that it calls; return its status and what was said."""
    said = {"check": check, "check-deploy": check_deploy}
    for name in re.findall(r"^(?:setsid |nice )?scripts/(\S+)", CI, re.MULTILINE):
        stand_in(folder / "scripts" / name, said.get(name, f"echo {name} ran"))
    stand_in(folder / ".ci/run", CI)
    (folder / "tmp").mkdir()
    done = subprocess.run(
        [folder / ".ci/run"],
        env={**os.environ, "TMPDIR": str(folder / "tmp")},
        pass_fds=() if open_file is None else (open_file,),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not list((folder / "tmp").iterdir())
    return done.returncode, done.stdout


@pytest.mark.review
def test_ci_checks_the_manifests_without_a_flag_that_would_leave_something_out(tmp_path: Path) -> None:
    """Review D11: CI ran a shorter check."""
    status, said = ci(tmp_path, check="echo check ran", check_deploy='echo "with $# flags"')
    assert status == 0
    assert {"check ran", "with 0 flags", "test ran"} <= set(said.splitlines())


def test_a_finding_in_the_manifests_ends_ci_and_is_told(tmp_path: Path) -> None:
    status, said = ci(tmp_path, check="echo check ran", check_deploy="echo finding; exit 4")
    assert status == 4
    assert "finding" in said and "test ran" not in said


def test_when_the_checks_fail_the_check_of_the_manifests_ends_too_and_tells_what_it_found(tmp_path: Path) -> None:
    """It went on by itself, what it had found was lost, and its file stayed."""
    os.mkfifo(tmp_path / "started")
    ours, theirs = os.pipe()
    status, said = ci(
        tmp_path,
        check="read started < started; exit 3",
        check_deploy="sleep 600 & echo finding; echo > started; wait",
        open_file=theirs,
    )
    os.close(theirs)
    assert status == 3
    assert "finding" in said and "test ran" not in said
    # The pipe ends when no process has it open any more.
    assert select.select([ours], [], [], 60)[0] and os.read(ours, 1) == b""
    os.close(ours)
