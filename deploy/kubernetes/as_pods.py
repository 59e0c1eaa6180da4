"""Make pods for `podman play kube` of a rendered overlay: `as_pods.py rendered/cpu.yaml [OFFSET] > pods.yaml`.

What podman lacks is taken away: StatefulSets, services, network policies, and port lists on the host's network (it
drops gRPC probes itself). Images, settings, security contexts, limits and volumes stay as they are. All pods share the
host's network. So each replica has ports of its own, names of services become the addresses of their replicas, and
OFFSET is added to every port: for a second overlay.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

REPLICA_PORT_STEP = 50
"""The second replica's ports are the first one's and this."""
Resource = dict[str, Any]


def main(path: str, offset: str = "0") -> None:
    yaml.safe_dump_all(pods(list(yaml.safe_load_all(Path(path).read_text())), int(offset)), sys.stdout, sort_keys=False)


def pods(found: list[Resource], offset: int) -> Iterator[Resource]:
    """Yield each pod of the Deployments and StatefulSets, after its settings."""
    settings = {one["metadata"]["name"]: one["data"] for one in found if one["kind"] == "ConfigMap"}
    workloads = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] in ("Deployment", "StatefulSet")}
    # By the name of a service, which is that of the workload that it leads to.
    offsets = {
        name: [offset + REPLICA_PORT_STEP * replica for replica in range(spec.get("replicas", 1))]
        for name, spec in workloads.items()
    }
    for name, spec in workloads.items():
        for replica, own_offset in enumerate(offsets[name]):
            yield from pod(spec["template"], f"{name}-{replica}", settings, own_offset, offsets)


def pod(
    template: Resource, name: str, settings: dict[str, dict[str, str]], offset: int, offsets: dict[str, list[int]]
) -> Iterator[Resource]:
    """Yield a ConfigMap with a pod's settings, and the pod."""
    (container,) = template["spec"]["containers"]
    told = [settings[source["configMapRef"]["name"]] for source in container["envFrom"]]
    data = {key: here(key, value, offset, offsets) for one in told for key, value in one.items()}
    yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
    container = {key: value for key, value in container.items() if key != "ports"}
    container["envFrom"] = [{"configMapRef": {"name": name}}]
    spec = template["spec"] | {"containers": [container], "hostNetwork": True, "restartPolicy": "Always"}
    metadata = {"name": name, "labels": template["metadata"]["labels"]}
    yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def here(key: str, value: str, offset: int, offsets: dict[str, list[int]]) -> str:
    """Return a setting as it is on this machine: its own port moved, a service's address that of its replicas."""
    if key.endswith("_PORT"):
        return str(int(value) + offset)
    found = re.fullmatch(r"([a-z-]+):(\d+)", value)
    if found is None or found[1] not in offsets:
        return value
    return ",".join(f"127.0.0.1:{int(found[2]) + one}" for one in offsets[found[1]])


if __name__ == "__main__":
    main(*sys.argv[1:])
