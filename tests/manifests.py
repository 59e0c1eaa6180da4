"""The rendered manifests of deploy/kubernetes, and the settings of a pod's container."""

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from coordinator.config import CoordinatorSettings
from draft_service.config import DraftSettings
from paceline.gateway.config import GatewaySettings
from paceline.process.settings import ProcessSettings
from target_service.config import TargetSettings

KUBERNETES = Path(__file__).parent.parent / "deploy" / "kubernetes"
OVERLAYS = sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir())
SETTINGS: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "coordinator": CoordinatorSettings,
    "draft": DraftSettings,
    "target": TargetSettings,
}
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
Resource = dict[str, Any]


def colour(overlay: str) -> str:
    """Return which of the two colours of a change of model an overlay is."""
    return "green" if overlay == "green" or overlay.endswith("-green") else "blue"


@dataclass(frozen=True)
class Workload:
    """A Deployment, a StatefulSet or the first pods of a LeaderWorkerSet, with one container."""

    component: str
    """gateway, coordinator, draft or target"""
    spec: Resource
    environment: dict[str, str]

    @property
    def pod(self) -> Resource:
        pod: Resource = self.spec["template"]["spec"]
        return pod

    @property
    def container(self) -> Resource:
        (container,) = self.pod["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.spec["template"]["metadata"]["labels"]
        return labels

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def startup_s(one: Workload) -> int:
    """Return the longest start in seconds that a pod's probe allows."""
    probe = one.container["startupProbe"]
    return int(probe.get("initialDelaySeconds", 0) + probe["periodSeconds"] * probe["failureThreshold"])


@cache
def resources(overlay: str) -> list[Resource]:
    return list(yaml.load_all((KUBERNETES / "rendered" / f"{overlay}.yaml").read_text(), yaml.CSafeLoader))


def kustomization(component: str) -> Any:
    """Return the kustomization of a component, as it is written."""
    return yaml.safe_load((KUBERNETES / "components" / component / "kustomization.yaml").read_text())


def of_kind(found: list[Resource], kind: str) -> dict[str, Resource]:
    return {one["metadata"]["name"]: one for one in found if one["kind"] == kind}


def workloads(found: list[Resource]) -> dict[str, Workload]:
    config_maps = of_kind(found, "ConfigMap")
    return {
        made.component: made
        for kind in ("Deployment", "StatefulSet", "LeaderWorkerSet")
        for one in of_kind(found, kind).values()
        for made in [_workload(_leaders(one["spec"]) if kind == "LeaderWorkerSet" else one["spec"], config_maps)]
    }


def workload(overlay: str, component: str) -> Workload:
    return workloads(resources(overlay))[component]


GPU_OVERLAYS = [name for name in OVERLAYS if "cuda" in str(resources(name))]


def _leaders(spec: Resource) -> Resource:
    """Return the first pods of groups as a StatefulSet would have them; the set gives them a label."""
    template = deepcopy(spec["leaderWorkerTemplate"]["leaderTemplate"])
    labels = template["metadata"]["labels"]
    selector = {"matchLabels": dict(labels)}
    labels[WORKER_INDEX] = "0"
    return {"replicas": spec.get("replicas", 1), "selector": selector, "template": template}


def _workload(spec: Resource, config_maps: dict[str, Resource]) -> Workload:
    (container,) = spec["template"]["spec"]["containers"]
    return Workload(container["name"], spec, _environment(container, config_maps))


def _environment(container: Resource, config_maps: dict[str, Resource]) -> dict[str, str]:
    environment = {
        name: value
        for source in container["envFrom"]
        for name, value in config_maps[source["configMapRef"]["name"]]["data"].items()
    }
    for one in container.get("env", []):
        environment[one["name"]] = one["value"] if "value" in one else _limit(container, one["valueFrom"])
    return environment


def _limit(container: Resource, source: Resource) -> str:
    """Return a limit of the container, in whole units, as Kubernetes fills it in."""
    kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
    return str(ceil(float(container["resources"][kind][resource])))
