"""Permitted connections under the rendered network policies, on a network that enforces them. No cluster needed."""

from dataclasses import replace
from ipaddress import ip_network
from itertools import product
from typing import Any

import pytest
import yaml

from tests.deploy.connections import (
    CLIENTS,
    COLLECTOR,
    HTTP_CLIENTS,
    NAMES,
    NAMES_AT_THE_SERVICE,
    OPENSHIFT_NAMES,
    OUTSIDE,
    OUTSIDE_6,
    PORTS,
    PROMETHEUS,
    Connection,
    open_connections,
    ours,
    page,
)
from tests.fakes.networks import Pod, connects
from tests.manifests import KUBERNETES, OVERLAYS, Resource, of_kind, resources

DOWNLOADING = {"gpu", "node-weights", "production", "production-green", "several-gpus", "several-nodes"}
TRACING = {"production", "production-green"}
CACHING_NAMES = {"node-weights"}
OVER_NODES = {"several-nodes"}


def expected(overlay: str) -> set[Connection]:
    """Return all that may pass, by source and destination."""
    dns = {(pod.name, f"{protocol} 53") for pod in NAMES for protocol in ("TCP", "UDP")}
    dns |= {(OPENSHIFT_NAMES.name, "TCP 5353"), (OPENSHIFT_NAMES.name, "UDP 5353")}
    if overlay in CACHING_NAMES:
        dns |= {(NAMES_AT_THE_SERVICE.name, "TCP 53"), (NAMES_AT_THE_SERVICE.name, "UDP 53")}
    traces = {(COLLECTOR.name, "TCP 4317"), (COLLECTOR.name, "TCP 4318")} if overlay in TRACING else set()
    hub = {(OUTSIDE.name, "TCP 443"), (OUTSIDE_6.name, "TCP 443")} if overlay in DOWNLOADING else set()
    ranks = {Connection("target", "target", f"TCP {port}") for port in PORTS if port >= 1024 and overlay in OVER_NODES}
    http = {
        *(Connection(client.name, "gateway", "TCP 8000") for client in HTTP_CLIENTS),
        Connection("gateway", "coordinator", "TCP 7700"),
        Connection(PROMETHEUS.name, "gateway", "TCP 7713"),
    }
    return {
        *(http if "gateway" in ours(overlay) else ()),
        *(Connection(client.name, "coordinator", "TCP 7700") for client in CLIENTS),
        Connection("coordinator", "draft", "TCP 7701"),
        Connection("coordinator", "target", "TCP 7702"),
        Connection(PROMETHEUS.name, "coordinator", "TCP 7710"),
        Connection(PROMETHEUS.name, "draft", "TCP 7711"),
        Connection(PROMETHEUS.name, "target", "TCP 7712"),
        *(Connection(one, *other) for one, other in product(ours(overlay), dns | traces)),
        *(Connection(one, *other) for one, other in product(("draft", "target"), hub)),
        *ranks,
    }


@pytest.mark.review
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_these_connections_pass_and_no_others(overlay: str) -> None:
    """Review D1: the label of all our resources had been put into the policies' peers too, as into DNS."""
    assert open_connections(overlay) == expected(overlay)


def test_the_page_of_connections_is_what_the_policies_say() -> None:
    written = (KUBERNETES.parent / "connections.md").read_text()
    assert written == page(), "run `python -m tests.deploy.connections > deploy/connections.md`"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_who_is_not_of_us_is_bound_by_no_policy_of_ours(overlay: str) -> None:
    policies = list(of_kind(resources(overlay), "NetworkPolicy").values())
    assert connects(policies, CLIENTS[0], OUTSIDE, 443)
    assert connects(policies, PROMETHEUS, CLIENTS[0], 9090)


def test_policies_of_the_second_colour_open_nothing_new_beside_the_first() -> None:
    both = [*resources("cpu"), *resources("green")]
    policies = list(of_kind(both, "NetworkPolicy").values())
    assert len(policies) == 2 * len(of_kind(resources("cpu"), "NetworkPolicy"))
    for (name, blue), (other, green) in product(ours("cpu").items(), ours("green").items()):
        passing = {port for port in green.ports.values() if connects(policies, blue, green, port)}
        assert passing == {
            int(one.port.removeprefix("TCP "))
            for one in expected("cpu")
            if (one.source, one.destination) == (name, other)
        }


@pytest.mark.review
def test_the_address_of_the_clusters_dns_is_let_through_by_one_component_and_no_other_policy() -> None:
    """Review D1: names were still refused where NodeLocal DNSCache answers at the address of the service kube-dns."""
    policies = of_kind(resources("node-weights"), "NetworkPolicy")
    pod = ours("node-weights")["coordinator"]
    assert connects(list(policies.values()), pod, NAMES_AT_THE_SERVICE, 53, "UDP")
    del policies["paceline-node-local-dns"]
    assert not connects(list(policies.values()), pod, NAMES_AT_THE_SERVICE, 53, "UDP")


def test_the_address_of_the_clusters_dns_is_nothing_that_a_cluster_takes_until_it_is_set() -> None:
    text = (KUBERNETES / "components/node-local-dns/network-policy.yaml").read_text()
    (rule,) = yaml.safe_load(text)["spec"]["egress"]
    with pytest.raises(ValueError, match="CLUSTER_DNS_IP"):
        ip_network(rule["to"][0]["ipBlock"]["cidr"])


def policy(**rules: Any) -> Resource:
    return {
        "metadata": {"namespace": "here"},
        "spec": {"podSelector": {}, "policyTypes": [name.capitalize() for name in rules], **rules},
    }


HERE, ELSEWHERE = Pod("here", "here", {"a": "1"}, ports={"web": 80}), Pod("elsewhere", "there", {"a": "1"})


@pytest.mark.parametrize(
    ("rule", "passes"),
    [
        ({}, True),
        ({"from": [{"podSelector": {}}]}, False),
        ({"from": [{"namespaceSelector": {}}]}, True),
        ({"from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "there"}}}]}, True),
        ({"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"a": "2"}}}]}, False),
        ({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}, True),
        ({"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.1/32"]}}]}, False),
        ({"ports": [{"port": 80}]}, True),
        ({"ports": [{"port": 80, "protocol": "UDP"}]}, False),
        ({"ports": [{"port": 79, "endPort": 81}]}, True),
        ({"ports": [{"port": "web"}]}, True),
        ({"ports": [{"port": "other"}]}, False),
        ({"from": [{"podSelector": {}}], "ports": [{"port": 80}]}, False),
    ],
)
def test_a_rule_lets_in_what_kubernetes_says(rule: Resource, passes: bool) -> None:
    assert connects([policy(ingress=[rule])], ELSEWHERE, HERE, 80) is passes


@pytest.mark.parametrize(
    ("operator", "values", "passes"),
    [("In", ["1"], True), ("NotIn", ["1"], False), ("NotIn", ["2"], True), ("Exists", [], True)]
    + [("DoesNotExist", [], False)],
)
def test_an_expression_selects_what_kubernetes_says(operator: str, values: list[str], passes: bool) -> None:
    selector = {"matchExpressions": [{"key": "a", "operator": operator, "values": values}]}
    rule = {"from": [{"namespaceSelector": {}, "podSelector": selector}]}
    assert connects([policy(ingress=[rule])], ELSEWHERE, HERE, 80) is passes


def test_a_selected_pod_is_closed_in_the_directions_of_its_policy_and_rules_add_up() -> None:
    closed, opened = policy(ingress=[]), policy(ingress=[{"ports": [{"port": 80}]}])
    assert not connects([closed], ELSEWHERE, HERE, 80)
    assert connects([closed], HERE, ELSEWHERE, 80)
    assert not connects([policy(egress=[])], HERE, ELSEWHERE, 80)
    assert connects([closed, opened], ELSEWHERE, HERE, 80)
    assert not connects([closed, opened], ELSEWHERE, HERE, 81)
    assert connects([closed], ELSEWHERE, replace(HERE, namespace="there"), 80)
