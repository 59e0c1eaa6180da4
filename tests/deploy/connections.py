"""The pods and addresses that meet Paceline's network policies, and who of them may call whom.

`python -m tests.deploy.connections > deploy/connections.md` writes the page of it. A test compares the two.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from typing import NamedTuple, TypeVar

from tests.fakes.networks import Pod, connects
from tests.manifests import OVERLAYS, SETTINGS, of_kind, resources, workloads

NAMES = (
    Pod("CoreDNS of kubeadm", "kube-system", {"k8s-app": "kube-dns", "pod-template-hash": "5dd5756b68"}),
    Pod("CoreDNS of EKS", "kube-system", {"eks.amazonaws.com/component": "coredns", "k8s-app": "kube-dns"}),
    Pod("NodeLocal DNSCache", address="169.254.20.10"),
    Pod("NodeLocal DNSCache as Cilium's redirect", "kube-system", {"k8s-app": "node-local-dns"}),
    Pod("Cloud DNS of GKE", address="169.254.169.254"),
)
# With kube-proxy in iptables mode the cache has the service's address, and no address is translated on the way.
NAMES_AT_THE_SERVICE = Pod("NodeLocal DNSCache at the service's address", address="10.96.0.10")
OPENSHIFT_NAMES = Pod("OpenShift's DNS", "openshift-dns", {"dns.operator.openshift.io/daemonset-dns": "default"})
CLIENT = {"app": "shop", "paceline-client": "true"}
INGRESS = {"app.kubernetes.io/name": "ingress-nginx", "app.kubernetes.io/component": "controller"}
CLIENTS = (
    Pod("a client in the namespace", "paceline", CLIENT),
    Pod("a client in a namespace with the label", "shop", CLIENT, {"paceline-client": "true"}),
    Pod("an ingress with both labels", "ingress", {**INGRESS, "paceline-client": "true"}, {"paceline-client": "true"}),
)
HTTP_CLIENT = {"app": "shop", "paceline-http-client": "true"}
HTTP_CLIENTS = (
    Pod("an HTTP client in the namespace", "paceline", HTTP_CLIENT),
    Pod("an HTTP client in a namespace with its label", "shop", HTTP_CLIENT, {"paceline-http-client": "true"}),
    Pod(
        "an ingress with both HTTP labels",
        "ingress",
        {**INGRESS, "paceline-http-client": "true"},
        {"paceline-http-client": "true"},
    ),
)
PROMETHEUS = Pod("Prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"})
COLLECTOR = Pod("the OpenTelemetry collector", "observability", {"app.kubernetes.io/name": "opentelemetry-collector"})
OUTSIDE = Pod("addresses outside, such as the model hub", address="203.0.113.7")
OUTSIDE_6 = Pod("addresses outside, IPv6", address="2001:db8::7")
STRANGERS = (
    Pod("an ingress without the labels", "ingress-nginx", INGRESS),
    Pod("a pod of another namespace", "shop", {"app": "shop"}, {"paceline-client": "true"}),
    Pod("a pod beside us", "paceline", {"app": "debug"}),
    Pod("a client whose namespace was not let in", "other", CLIENT),
    Pod("an HTTP client whose namespace was not let in", "other", HTTP_CLIENT),
    Pod("a coordinator of another project", "paceline", {"app.kubernetes.io/component": "coordinator"}),
    Pod(
        "our coordinator's twin elsewhere",
        "other",
        {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/component": "coordinator"},
    ),
    Pod("Prometheus elsewhere", "other", PROMETHEUS.labels),
    Pod("a cluster's DNS in a wrong namespace", "other", NAMES[0].labels),
    Pod("another pod of kube-system", "kube-system", {"k8s-app": "metrics-server"}),
    Pod("another pod of openshift-dns", "openshift-dns", {"app": "node-resolver"}),
    Pod("a machine of the private network", address="192.168.1.7"),
    Pod("another link-local address", address="169.254.1.1"),
)
OTHERS = (
    *NAMES,
    NAMES_AT_THE_SERVICE,
    OPENSHIFT_NAMES,
    *CLIENTS,
    *HTTP_CLIENTS,
    PROMETHEUS,
    COLLECTOR,
    OUTSIDE,
    OUTSIDE_6,
    *STRANGERS,
)
PORTS = (22, 53, 80, 443, 3000, 4317, 4318, 5353, 6443, 8000, 8080, 9090, 10250, *range(7698, 7725))
"""What is tried on every pair: ours and their neighbours, and what the others listen at."""


class Connection(NamedTuple):
    source: str
    destination: str
    port: str
    """Protocol and number"""


def ours(overlay: str) -> dict[str, Pod]:
    return {
        component: Pod(component, "paceline", one.labels, ports=one.ports)
        for component, one in workloads(resources(overlay)).items()
    }


@cache
def open_connections(overlay: str) -> frozenset[Connection]:
    """Return what the overlay's policies let pass, of all pairs with one of us in it, on all ports, both ways."""
    policies = list(of_kind(resources(overlay), "NetworkPolicy").values())
    pods = tuple(ours(overlay).values())
    # A pod of ours meets the other replicas of its own kind too.
    pairs = [(a, b) for a in (*pods, *OTHERS) for b in (*pods, *OTHERS) if a in pods or b in pods]
    return frozenset(
        Connection(source.name, destination.name, f"{protocol} {port}")
        for source, destination in pairs
        for protocol in ("TCP", "UDP")
        for port in PORTS
        if connects(policies, source, destination, port, protocol)
    )


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def _grouped(
    found: Iterable[T], key: Callable[[T], K], value: Callable[[T], str]
) -> Iterator[tuple[K, tuple[str, ...]]]:
    """Yield each key with the values of all that have it, in the order of their first appearance."""
    groups: defaultdict[K, dict[str, None]] = defaultdict(dict)
    for one in found:
        groups[key(one)][value(one)] = None
    return ((own, tuple(values)) for own, values in groups.items())


def rows() -> list[tuple[str, str, str, str]]:
    """Return from, to, ports and overlays, with what is alike in one row."""
    where = {overlay: open_connections(overlay) for overlay in OVERLAYS}
    every = sorted(frozenset().union(*where.values()), key=_place)
    told = ((one, tuple(overlay for overlay in OVERLAYS if one in where[overlay])) for one in every)
    by_ends = _grouped(told, lambda one: (one[0].source, one[0].destination, one[1]), lambda one: one[0].port)
    by_source = _grouped(by_ends, lambda one: (one[0][0], one[0][2], one[1]), lambda one: one[0][1])
    by_rest = _grouped(by_source, lambda one: (one[1], one[0][1], one[0][2]), lambda one: one[0][0])
    return [
        ("; ".join(sources), "; ".join(destinations), _ports(ports), _overlays(overlays))
        for (destinations, overlays, ports), sources in by_rest
    ]


def _place(one: Connection) -> tuple[int, int, str, int]:
    protocol, _, port = one.port.partition(" ")
    names = [pod.name for pod in (*CLIENTS, *HTTP_CLIENTS, PROMETHEUS)] + list(SETTINGS) + [pod.name for pod in OTHERS]
    return names.index(one.source), names.index(one.destination), protocol, int(port)


def _ports(ports: tuple[str, ...]) -> str:
    unprivileged = {f"TCP {port}" for port in PORTS if port >= 1024}
    return "TCP from 1024 on" if set(ports) == unprivileged else ", ".join(ports)


def _overlays(overlays: tuple[str, ...]) -> str:
    return "all" if list(overlays) == OVERLAYS else ", ".join(overlays)


def page() -> str:
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows())
    strangers = "".join(f"- {pod.name}\n" for pod in STRANGERS)
    return f"""# Who may call whom

Made from the rendered manifests by `python -m tests.deploy.connections > deploy/connections.md`, and compared with
them by a test. Every pair of pods tries {len(PORTS)} ports over TCP and UDP, and the policies decide as on a network
that enforces them. Probes come from the node, which no policy binds.

| from | to | ports | overlays |
|---|---|---|---|
{lines}

All else is refused, from us and to us. These were tried and found nothing open:

{strangers}"""


if __name__ == "__main__":
    sys.stdout.write(page())
