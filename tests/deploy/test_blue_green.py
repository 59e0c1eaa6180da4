"""Two colours of a cluster in one namespace: neither touches the other, and green uses what blue has."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.manifests import KUBERNETES, OVERLAYS, Resource, kustomization, of_kind, resources, workload, workloads

BESIDE_BLUE = [("cpu", "green"), ("production", "production-green"), ("air-gapped", "air-gapped-green")]
"""A blue overlay, and the same one as green."""


def test_green_shares_blues_certificates_which_bear_its_names() -> None:
    names = {
        one["spec"]["secretName"]: one["spec"].get("dnsNames", [])
        for one in of_kind(resources("tls"), "Certificate").values()
    }
    green = workload("green", "coordinator").environment
    for component in ("draft", "target"):
        host, _, _ = green[f"PACELINE_COORDINATOR_{component.upper()}"].partition(":")
        assert host == f"paceline-{component}-green" and host in names[f"paceline-{component}-tls"]


SELECTORS: dict[str, Callable[[Resource], dict[str, str]]] = {
    "Service": lambda spec: spec["selector"],
    "Deployment": lambda spec: spec["selector"]["matchLabels"],
    "StatefulSet": lambda spec: spec["selector"]["matchLabels"],
    "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
}


def selectors(overlay: str) -> list[dict[str, str]]:
    return [SELECTORS[one["kind"]](one["spec"]) for one in resources(overlay) if one["kind"] in SELECTORS]


@pytest.mark.parametrize(("selecting", "of"), [*BESIDE_BLUE, *((green, blue) for blue, green in BESIDE_BLUE)])
def test_one_colour_finds_its_own_pods_and_none_of_the_other(selecting: str, of: str) -> None:
    pods = {overlay: [one.labels for one in workloads(resources(overlay)).values()] for overlay in (selecting, of)}
    for selector in selectors(selecting):
        assert any(selector.items() <= labels.items() for labels in pods[selecting])
        assert not any(selector.items() <= labels.items() for labels in pods[of])


@pytest.mark.parametrize(("blue", "green"), BESIDE_BLUE)
def test_applying_one_colour_changes_nothing_of_the_other_and_removing_green_leaves_the_namespace(
    blue: str, green: str
) -> None:
    def identities(overlay: str) -> set[tuple[str, str]]:
        return {(one["kind"], one["metadata"]["name"]) for one in resources(overlay)}

    assert not identities(green) & identities(blue)
    assert all(
        name.removeprefix("paceline-").split("-")[-1] == "green" or kind == "ConfigMap"
        for kind, name in identities(green)
    )


@pytest.mark.parametrize(("blue", "green"), BESIDE_BLUE)
def test_green_reads_blues_weights_and_secrets(blue: str, green: str) -> None:
    """Green had an empty volume of its own: it downloaded everything again and, without a way out, never started."""
    found = workloads(resources(green))
    assert not of_kind(resources(green), "PersistentVolumeClaim")
    claims = set(of_kind(resources(blue), "PersistentVolumeClaim"))
    assert claims == (set() if blue == "cpu" else {"paceline-models"})
    for component in ("draft", "target"):
        volumes = found[component].pod["volumes"]
        mounted = {one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one}
        assert mounted == claims
        assert [one["secret"] for one in volumes if "secret" in one] == [
            one["secret"] for one in workload(blue, component).pod["volumes"] if "secret" in one
        ]


def test_once_clients_are_moved_blue_keeps_its_names_and_runs_nothing() -> None:
    moved, http = resources("moved"), resources("http")
    coordinator = workload("green", "coordinator")
    assert of_kind(moved, "Service")["paceline-coordinator"]["spec"]["selector"].items() <= coordinator.labels.items()
    assert {one["metadata"]["name"] for one in moved} == {one["metadata"]["name"] for one in http}
    assert all((one.spec["replicas"] == 0) is (name != "gateway") for name, one in workloads(moved).items())


COLOUR = "app.kubernetes.io/instance"


def places_of_colour(found: Any, path: str = "") -> Iterator[str]:
    """Yield the places of labels and selectors that bear a colour, as kustomize writes them."""
    if isinstance(found, list):
        for one in found:
            yield from places_of_colour(one, f"{path}[]")
    elif isinstance(found, dict):
        if COLOUR in found:
            yield path
        for name, one in found.items():
            yield from places_of_colour(one, f"{path}/{name}" if path else name)


def test_pods_of_a_target_over_several_nodes_become_green_too() -> None:
    """They kept blue's label: green's target service found none, and blue's found them, with another model."""
    (blue,) = of_kind(resources("several-nodes"), "LeaderWorkerSet").values()
    (labels,) = kustomization("green")["labels"]
    coloured = {one["path"] for one in labels["fields"] if one["kind"] == blue["kind"]}
    assert coloured == set(places_of_colour(blue))
    assert len(coloured) == 4


def test_green_runs_a_target_over_several_nodes_by_its_own_account() -> None:
    (blue,) = of_kind(resources("several-nodes"), "LeaderWorkerSet").values()
    names = yaml.safe_load((KUBERNETES / "components/leader-worker-set/name-reference.yaml").read_text())
    renamed = {
        one["path"] for rule in names["nameReference"] if rule["kind"] == "ServiceAccount" for one in rule["fieldSpecs"]
    }
    templates = [name for name, one in blue["spec"]["leaderWorkerTemplate"].items() if name.endswith("Template")]
    assert renamed == {f"spec/leaderWorkerTemplate/{name}/spec/serviceAccountName" for name in templates}


def test_a_colour_that_stops_stops_every_kind_of_workload() -> None:
    """A target over several nodes ran on."""
    templates = {"template", "leaderWorkerTemplate"}
    found = [one for overlay in OVERLAYS for one in resources(overlay)]
    kinds = {one["kind"] for one in found if templates & one.get("spec", {}).keys()}
    stopped, *_ = kustomization("stopped")["patches"]
    assert kinds == {"Deployment", "StatefulSet", "LeaderWorkerSet"}
    assert all(re.fullmatch(stopped["target"]["kind"], kind) for kind in kinds)
