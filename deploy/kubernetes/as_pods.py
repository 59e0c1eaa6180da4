"""Make pods for `podman play kube` of a rendered overlay: `as_pods.py rendered/cpu.yaml [OFFSET] > pods.yaml`.

What podman lacks is taken away: StatefulSets, services, network policies, and port lists on the host's network (it
drops gRPC probes itself). Images, settings, security contexts, limits and volumes stay as they are. All pods share the
host's network, so the names of services become 127.0.0.1, and OFFSET is added to every port: for a second overlay.
"""

import sys
from pathlib import Path
from typing import Any

import yaml


def main(path: str, offset: str = "0") -> None:
    found = list(yaml.safe_load_all(Path(path).read_text()))
    services = [one["metadata"]["name"] for one in found if one["kind"] == "Service"]
    maps = [here(one, services, int(offset)) for one in found if one["kind"] == "ConfigMap"]
    pods = [as_pod(one) for one in found if one["kind"] in ("Deployment", "StatefulSet")]
    yaml.safe_dump_all([*maps, *pods], sys.stdout, sort_keys=False)


def here(config_map: dict[str, Any], services: list[str], offset: int) -> dict[str, Any]:
    """The same settings, with services looked for on this machine, and other ports."""

    def moved(key: str, value: str) -> str:
        host, _, port = value.rpartition(":")
        if host in services:
            return f"127.0.0.1:{int(port) + offset}"
        return str(int(value) + offset) if key.endswith("_PORT") else value

    return config_map | {"data": {key: moved(key, value) for key, value in config_map["data"].items()}}


def as_pod(workload: dict[str, Any]) -> dict[str, Any]:
    """One pod of a Deployment or StatefulSet."""
    template = workload["spec"]["template"]
    name = workload["metadata"]["name"]
    containers = [
        {key: value for key, value in one.items() if key != "ports"} for one in template["spec"]["containers"]
    ]
    spec = template["spec"] | {
        "containers": containers,
        "hostNetwork": True,
        "restartPolicy": "Always",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": spec,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
