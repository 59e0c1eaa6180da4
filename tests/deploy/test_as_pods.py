"""The pods that podman gets of both colours find each other on one machine."""

import runpy
from collections import Counter
from typing import Any

from tests.manifests import KUBERNETES, resources

pods = runpy.run_path(str(KUBERNETES / "as_pods.py"))["pods"]


COLOURS = (("cpu", 0, ""), ("green", 100, "-green"))
"""Overlay, offset of its ports, and how its names end."""


def made(overlay: str, offset: int) -> dict[str, dict[str, str]]:
    """Return the settings of each pod by its name."""
    found: list[dict[str, Any]] = list(pods(resources(overlay), offset))
    settings = {one["metadata"]["name"]: one["data"] for one in found if one["kind"] == "ConfigMap"}
    for one in found:
        if one["kind"] == "Pod":
            (container,) = one["spec"]["containers"]
            assert container["envFrom"] == [{"configMapRef": {"name": one["metadata"]["name"]}}]
            assert one["spec"]["hostNetwork"] and "ports" not in container
            assert container["securityContext"]["readOnlyRootFilesystem"]
    return settings


def ports(settings: dict[str, str]) -> list[str]:
    return [value for key, value in settings.items() if key.endswith("_PORT")]


def test_every_replica_has_ports_of_its_own_beside_a_second_cluster_too() -> None:
    both = [settings for overlay, offset, _ in COLOURS for settings in made(overlay, offset).values()]
    assert len(both) == 2 * (2 + 1 + 1)  # coordinators, draft, target
    assert max(Counter(port for settings in both for port in ports(settings)).values()) == 1


def test_coordinators_call_the_models_of_their_own_cluster() -> None:
    for overlay, offset, ending in COLOURS:
        found = made(overlay, offset)
        for name in (f"paceline-coordinator{ending}-0", f"paceline-coordinator{ending}-1"):
            for component in ("DRAFT", "TARGET"):
                port = found[f"paceline-{component.lower()}{ending}-0"][f"PACELINE_{component}_PORT"]
                assert found[name][f"PACELINE_COORDINATOR_{component}"] == f"127.0.0.1:{port}"


def test_a_service_with_several_pods_becomes_all_their_addresses() -> None:
    found = [dict(one) for one in resources("cpu")]
    for one in found:
        if one["kind"] == "StatefulSet":
            one["spec"] = one["spec"] | {"replicas": 2}
    (settings, *_) = (one for one in pods(found, 0) if one["kind"] == "ConfigMap")
    assert settings["data"]["PACELINE_COORDINATOR_TARGET"] == "127.0.0.1:7702,127.0.0.1:7752"
