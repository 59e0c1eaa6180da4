"""Connections that rendered network policies let pass, as an enforcing network plugin decides it
(https://kubernetes.io/docs/concepts/services-networking/network-policies/).

Knows nothing of the policies' purpose.
"""

from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network

from tests.manifests import Resource


@dataclass(frozen=True)
class Pod:
    """One end of a connection; without a namespace it is an address outside all pods."""

    name: str
    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    namespace_labels: dict[str, str] = field(default_factory=dict)
    """Labels besides the name label that Kubernetes gives every namespace."""
    address: str = "10.0.0.1"

    @property
    def all_namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace, **self.namespace_labels}


def connects(policies: list[Resource], source: Pod, destination: Pod, port: int, protocol: str = "TCP") -> bool:
    """Return whether the source's policies let a connection out and the destination's let it in."""
    return _passes(policies, "Egress", source, destination, port, protocol) and _passes(
        policies, "Ingress", destination, source, port, protocol
    )


def _passes(policies: list[Resource], direction: str, own: Pod, peer: Pod, port: int, protocol: str) -> bool:
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
        _names_port(rule, port, protocol) and _names_peer(rule.get(peers_key), own, peer)
        for spec in binding
        for rule in spec.get(direction.lower(), [])
    )


def _names_port(rule: Resource, port: int, protocol: str) -> bool:
    return "ports" not in rule or any(
        one.get("protocol", "TCP") == protocol and one["port"] <= port <= one.get("endPort", one["port"])
        for one in rule["ports"]
    )


def _names_peer(peers: list[Resource] | None, own: Pod, peer: Pod) -> bool:
    return not peers or any(_is_peer(one, own, peer) for one in peers)


def _is_peer(rule: Resource, own: Pod, peer: Pod) -> bool:
    if "ipBlock" in rule:
        return ip_address(peer.address) in ip_network(rule["ipBlock"]["cidr"])
    if "namespaceSelector" in rule:
        in_namespace = bool(peer.namespace) and _selects(rule["namespaceSelector"], peer.all_namespace_labels)
    else:
        in_namespace = peer.namespace == own.namespace
    return in_namespace and _selects(rule.get("podSelector", {}), peer.labels)


def _selects(selector: Resource, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in expressions), "no other operator is evaluated here"
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )
