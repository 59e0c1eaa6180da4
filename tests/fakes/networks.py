"""Connections that rendered network policies let pass, as an enforcing network plugin decides it
(https://kubernetes.io/docs/concepts/services-networking/network-policies/).

Knows nothing of the policies' purpose.
"""

from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network

from tests.manifests import Resource


@dataclass(frozen=True)
class Pod:
    """One end of a connection; without a namespace it is an address outside all pods, or on a node's own network."""

    name: str
    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    namespace_labels: dict[str, str] = field(default_factory=dict)
    """Labels besides the name label that Kubernetes gives every namespace."""
    address: str = "10.0.0.1"
    ports: dict[str, int] = field(default_factory=dict)
    """Ports by the names that the pod's containers give them."""

    @property
    def all_namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace, **self.namespace_labels}


def connects(policies: list[Resource], source: Pod, destination: Pod, port: int, protocol: str = "TCP") -> bool:
    """Return whether the source's policies let a connection out and the destination's let it in."""
    named = {name for name, number in destination.ports.items() if number == port} | {port}
    return _passes(policies, "Egress", source, destination, named, protocol) and _passes(
        policies, "Ingress", destination, source, named, protocol
    )


def _passes(
    policies: list[Resource], direction: str, own: Pod, peer: Pod, named: set[str | int], protocol: str
) -> bool:
    """Return True if no policy of the direction selects the pod, or if a rule of one that does lets the peer pass."""
    binding = [
        policy["spec"]
        for policy in policies
        if own.namespace == policy["metadata"]["namespace"]
        and direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], own.labels)
    ]
    peers_key = {"Egress": "to", "Ingress": "from"}[direction]
    return not binding or any(
        _names_port(rule, named, protocol) and _names_peer(rule.get(peers_key), own, peer)
        for spec in binding
        for rule in spec.get(direction.lower(), [])
    )


def _names_port(rule: Resource, named: set[str | int], protocol: str) -> bool:
    """`named` has the port's number and the name that the destination gives it."""
    return not rule.get("ports") or any(
        one.get("protocol", "TCP") == protocol and _has_port(one, named) for one in rule["ports"]
    )


def _has_port(rule: Resource, named: set[str | int]) -> bool:
    if "endPort" in rule:
        return any(isinstance(one, int) and rule["port"] <= one <= rule["endPort"] for one in named)
    return "port" not in rule or rule["port"] in named


def _names_peer(peers: list[Resource] | None, own: Pod, peer: Pod) -> bool:
    return not peers or any(_is_peer(one, own, peer) for one in peers)


def _is_peer(rule: Resource, own: Pod, peer: Pod) -> bool:
    if "ipBlock" in rule:
        address, block = ip_address(peer.address), rule["ipBlock"]
        outside = (ip_network(one) for one in block.get("except", []))
        return address in ip_network(block["cidr"]) and not any(address in one for one in outside)
    if "namespaceSelector" in rule:
        in_namespace = bool(peer.namespace) and _selects(rule["namespaceSelector"], peer.all_namespace_labels)
    else:
        in_namespace = peer.namespace == own.namespace
    return in_namespace and _selects(rule.get("podSelector", {}), peer.labels)


def _selects(selector: Resource, labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        _holds(one, labels) for one in selector.get("matchExpressions", [])
    )


def _holds(expression: Resource, labels: dict[str, str]) -> bool:
    key, value = expression["key"], labels.get(expression["key"])
    return {
        "In": lambda: value in expression["values"],
        "NotIn": lambda: value not in expression["values"],
        "Exists": lambda: key in labels,
        "DoesNotExist": lambda: key not in labels,
    }[expression["operator"]]()
