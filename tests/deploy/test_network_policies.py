"""Permitted connections under the rendered network policies, on a network that enforces them. No cluster needed."""

from itertools import product

import pytest

from tests.fakes.networks import Pod, connects
from tests.manifests import OVERLAYS, SETTINGS, Resource, of_kind, resources, workloads

NAMES = [
    (Pod("CoreDNS, kubeadm", "kube-system", {"k8s-app": "kube-dns", "pod-template-hash": "5dd5756b68"}), 53),
    (Pod("CoreDNS, EKS", "kube-system", {"eks.amazonaws.com/component": "coredns", "k8s-app": "kube-dns"}), 53),
    (Pod("NodeLocal DNSCache", "kube-system", {"k8s-app": "node-local-dns"}), 53),
    (Pod("NodeLocal DNSCache by its address", address="169.254.20.10"), 53),
    (Pod("Cloud DNS of GKE", address="169.254.169.254"), 53),
    (Pod("OpenShift's DNS", "openshift-dns", {"dns.operator.openshift.io/daemonset-dns": "default"}), 5353),
]
CLIENT = {"app": "shop", "paceline-client": "true"}
CLIENTS = [
    Pod("a client beside us", "paceline", CLIENT),
    Pod("a client elsewhere", "shop", CLIENT, {"paceline-client": "true"}),
]
PROMETHEUS = Pod("Prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"})
COORDINATOR = {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/component": "coordinator"}
STRANGERS = [
    Pod("a pod of another namespace", "shop", {"app": "shop"}),
    Pod("a pod beside us", "paceline", {"app": "debug"}),
    Pod("a client whose namespace was not let in", "other", CLIENT),
    Pod("a coordinator of another project", "paceline", {"app.kubernetes.io/component": "coordinator"}),
    Pod("our coordinator's twin elsewhere", "other", COORDINATOR),
    Pod("Prometheus elsewhere", "other", PROMETHEUS.labels),
    Pod("an address outside", address="203.0.113.7"),
]

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def policies(overlay: str) -> list[Resource]:
    return list(of_kind(resources(overlay), "NetworkPolicy").values())


def ours(overlay: str) -> dict[str, Pod]:
    return {
        component: Pod(component, "paceline", one.labels) for component, one in workloads(resources(overlay)).items()
    }


def ports(overlay: str, component: str) -> dict[str, int]:
    return workloads(resources(overlay))[component].ports


@pytest.mark.review
@each_overlay
@pytest.mark.parametrize(("component", "protocol"), list(product(SETTINGS, ["UDP", "TCP"])))
def test_every_pod_of_ours_reaches_dns(overlay: str, component: str, protocol: str) -> None:
    """Review D1: the label of all our resources had been put into the policies' peers too."""
    pod = ours(overlay)[component]
    unreached = [to.name for to, port in NAMES if not connects(policies(overlay), pod, to, port, protocol)]
    assert unreached == []


@pytest.mark.review
@each_overlay
def test_clients_reach_the_coordinator_and_nothing_else(overlay: str) -> None:
    """Review D1."""
    reached = {
        (client.name, component, name)
        for client, (component, pod) in product(CLIENTS, ours(overlay).items())
        for name, port in ports(overlay, component).items()
        if connects(policies(overlay), client, pod, port)
    }
    assert reached == {(client.name, "coordinator", "grpc") for client in CLIENTS}


@each_overlay
def test_a_client_beside_us_is_bound_by_no_policy_of_ours(overlay: str) -> None:
    outside = Pod("an address outside", address="203.0.113.7")
    assert connects(policies(overlay), CLIENTS[0], outside, 443)
    assert connects(policies(overlay), PROMETHEUS, CLIENTS[0], 9090)


@each_overlay
def test_no_stranger_reaches_any_of_us(overlay: str) -> None:
    reached = [
        (stranger.name, component, name)
        for stranger, (component, pod) in product(STRANGERS, ours(overlay).items())
        for name, port in ports(overlay, component).items()
        if connects(policies(overlay), stranger, pod, port)
    ]
    assert reached == []


@each_overlay
def test_the_coordinator_reaches_the_models_and_they_reach_nobody(overlay: str) -> None:
    pods = ours(overlay)
    reached = {
        (source, destination, name)
        for source, destination in product(pods, pods)
        if source != destination
        for name, port in ports(overlay, destination).items()
        if connects(policies(overlay), pods[source], pods[destination], port)
    }
    assert reached == {("coordinator", "draft", "grpc"), ("coordinator", "target", "grpc")}


@each_overlay
def test_prometheus_reaches_every_pods_metrics_and_nothing_else(overlay: str) -> None:
    reached = {
        (component, name)
        for component, pod in ours(overlay).items()
        for name, port in ports(overlay, component).items()
        if connects(policies(overlay), PROMETHEUS, pod, port)
    }
    assert reached == {(component, "metrics") for component in SETTINGS}


@each_overlay
def test_only_models_that_are_downloaded_call_outside(overlay: str) -> None:
    outside = Pod("an address outside", address="203.0.113.7")
    callers = {name for name, pod in ours(overlay).items() if connects(policies(overlay), pod, outside, 443)}
    assert callers == ({"draft", "target"} if overlay in ("gpu", "production") else set())
    assert not any(connects(policies(overlay), pod, outside, 80) for pod in ours(overlay).values())
