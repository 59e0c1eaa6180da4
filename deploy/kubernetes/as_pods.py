"""Make pods for `podman play kube` of a rendered overlay: `as_pods.py rendered/cpu.yaml > pods.yaml`.

What podman lacks is taken away (StatefulSets, services, network policies, and port lists on the host's network; it drops
gRPC probes itself); images, settings, security contexts, limits and volumes stay as they are. All pods share the host's network, and
names of services lead to it.
"""

import sys
from pathlib import Path
from typing import Any

import yaml


def main(path: str) -> None:
    found = list(yaml.safe_load_all(Path(path).read_text()))
    services = [one["metadata"]["name"] for one in found if one["kind"] == "Service"]
    maps = [one for one in found if one["kind"] == "ConfigMap"]
    pods = [as_pod(one, services) for one in found if one["kind"] in ("Deployment", "StatefulSet")]
    yaml.safe_dump_all([*maps, *pods], sys.stdout, sort_keys=False)


def as_pod(workload: dict[str, Any], services: list[str]) -> dict[str, Any]:
    """One pod of a Deployment or StatefulSet."""
    template = workload["spec"]["template"]
    name = workload["metadata"]["name"]
    containers = [
        {key: value for key, value in one.items() if key != "ports"} for one in template["spec"]["containers"]
    ]
    spec = template["spec"] | {
        "containers": containers,
        "hostNetwork": True,
        "hostAliases": [{"ip": "127.0.0.1", "hostnames": services}],
        "restartPolicy": "Always",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": spec,
    }


if __name__ == "__main__":
    main(sys.argv[1])
