"""Two colours of a cluster in one namespace: neither touches the other, and green uses what blue has."""

from collections.abc import Callable

import pytest

from tests.manifests import Resource, of_kind, resources, workload, workloads

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
