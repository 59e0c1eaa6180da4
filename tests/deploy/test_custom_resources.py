"""What `deploy/kubernetes/schemas` refuse in custom resources, by the tools that `scripts/check-deploy` installs."""

import os
import re
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests import KUBERNETES, OVERLAYS, Resource, of_kind, resources
from tests.tools import missing

SCHEMAS = KUBERNETES / "schemas"
KINDS = sorted(path.stem for path in SCHEMAS.glob("*.json"))
MAPS = {"labels", "matchLabels", "annotations", "limits", "requests"}
"""Fields that hold names of anyone's choice."""


def refused(found: list[Resource], folder: Path) -> list[str]:
    """Return the lines that the check prints for resources that it refuses."""
    text = (KUBERNETES.parents[1] / "scripts/check-deploy").read_text()
    (name,) = re.findall(r"environment (kubernetes-validate==\S+)\)", text)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    tools = Path(os.environ.get("CHECK_DEPLOY_TOOLS") or Path(cache, "paceline/check-deploy"))
    if not (tools / name / "installed").exists():
        missing(f"{name} is not installed; scripts/check-deploy installs it")
    path = folder / "resources.yaml"
    path.write_text(yaml.safe_dump_all(found))
    command = [tools / name / "bin/python", SCHEMAS / "check.py", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"{len(found)} custom resources checked" in done.stdout, done.stderr
    lines = done.stderr.splitlines()
    assert done.returncode == (1 if lines else 0)
    return lines


def example(kind: str) -> Resource:
    """Return the largest resource of a kind in the overlays."""
    found = [one for overlay in OVERLAYS for one in of_kind(resources(overlay), kind).values()]
    return max(found, key=lambda one: len(str(one)))


def with_unknown_fields(found: Any, path: str, changed: list[str]) -> Any:
    """Return a resource with a field more in every object, and note the objects' paths."""
    if isinstance(found, list):
        return [with_unknown_fields(one, f"{path}[{index}]", changed) for index, one in enumerate(found)]
    if not isinstance(found, dict) or path.rpartition(".")[2] in MAPS:
        return found
    changed.append(path)
    return {name: with_unknown_fields(one, f"{path}.{name}", changed) for name, one in found.items()} | {"odd": "field"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_object_of_a_custom_resource_refuses_a_field_that_it_does_not_have(kind: str, tmp_path: Path) -> None:
    """The top, metadata, KEDA's behavior and metadata of triggers, and the pods of a LeaderWorkerSet took any."""
    changed: list[str] = []
    lines = refused([with_unknown_fields(example(kind), "$", changed)], tmp_path)
    told = [line.split(": ")[2] for line in lines if "'odd'" in line]
    assert sorted({*told}) == sorted(changed)


def test_a_template_of_a_leader_worker_set_has_a_pod(tmp_path: Path) -> None:
    """As the set's component has it before the target's pod is put in."""
    without, wrong = deepcopy(example("LeaderWorkerSet")), deepcopy(example("LeaderWorkerSet"))
    without["spec"]["leaderWorkerTemplate"]["leaderTemplate"] = {"metadata": {}}
    wrong["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["image"] = 7
    no_pod, no_text = refused([without, wrong], tmp_path)
    assert no_pod.endswith("leaderTemplate: 'spec' is a required property")
    assert "workerTemplate.spec.containers[0].image: 7" in no_text


def test_our_own_custom_resources_pass(tmp_path: Path) -> None:
    assert not refused([one for overlay in OVERLAYS for one in resources(overlay) if one["kind"] in KINDS], tmp_path)
