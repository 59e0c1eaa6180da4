"""The contents of deploy/observability work: rules, queries, and references between files."""

import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.up import PORTS
from paceline.client import Client
from paceline.errors import InvalidRequest
from paceline.process.cluster_plan import ClusterOptions, plan_cluster
from paceline.types import GenerationRequest, UserMessage
from tests.manifests import of_kind, resources
from tests.prometheus import Prometheus, promtool, running_prometheus
from tests.scrapes import documented_labels, selectors, unknown_selectors
from tests.services import running_services, running_trio

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
RULES = FOLDER / "prometheus" / "rules.yml"
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "paceline.json").read_text(encoding="utf-8"))
NEEDS_TLS = "Time until a certificate ends"
"""The panel that stays empty without TLS."""
MAY_BE_EMPTY = "Calls that failed"
"""The panel that is empty unless a busy machine lets a call fail."""
SPEED_ALERTS = {"PacelineFirstTokenSlow", "PacelineTokensSlow"}
"""Alerts that a busy machine may set off."""
WITH_TLS = "paceline_certificate_not_after_seconds"
"""The metric that a cluster without TLS has no series of."""
VARIABLES = {"$__rate_interval": "1m", "$coordinator": ".*", "$namespace": ".*", "$model": ".*"}


def load(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in load("prometheus/rules.yml")["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def quiet_alerts() -> list[dict[str, Any]]:
    """Return the alerts that a cluster at work does not set off, however slow its machine is."""
    return [alert for alert in alerts() if alert["alert"] not in SPEED_ALERTS]


def panel_queries() -> Iterator[tuple[str, str]]:
    """Yield titles of panels and their queries, with variables filled in as by Grafana."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], filled_in(target["expr"])


def filled_in(query: str) -> str:
    for name, stands_for in VARIABLES.items():
        query = query.replace(name, stands_for)
    assert "$" not in query, f"a variable that the test does not know: {query}"
    return query


def choices() -> Iterator[tuple[str, str, str]]:
    """Yield the dashboard's variables with the selector and the label that their choices come from."""
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", filled_in(one["query"]["query"]))
            assert found, one
            yield one["name"], found[1], found[2]


async def test_the_rules_pass_promtools_checks_and_their_own_tests() -> None:
    for arguments in (
        ("check", "rules", "rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules_test.yml"),
    ):
        status, said = await promtool(*arguments, folder=RULES.parent)
        assert status == 0, said
        assert "FAILED" not in said


def test_every_alert_is_tested_firing_and_silent() -> None:
    outcomes: dict[str, set[bool]] = {}
    for case in load("prometheus/rules_test.yml")["tests"]:
        for one in case["alert_rule_test"]:
            outcomes.setdefault(one["alertname"], set()).add(bool(one["exp_alerts"]))
    assert outcomes == {alert["alert"]: {True, False} for alert in alerts()}


def test_every_alert_has_a_severity_and_a_section_that_says_what_to_do() -> None:
    headings = re.findall(r"^### (\w+)$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(alert["alert"] for alert in alerts())
    for alert in alerts():
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["runbook"] == f"deploy/observability/README.md#{alert['alert'].lower()}"
        assert {"summary", "description"} <= alert["annotations"].keys()


def test_the_runbook_names_panels_by_their_titles() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8").partition("## Alerts")[2]
    named = set(re.findall(r"\*([A-Z][^*\n]+)\*", page)) - {"Refused"}  # the state of a replica
    assert len(named) > 10
    assert named <= {panel["title"] for panel in DASHBOARD["panels"]}


def test_queries_name_metrics_and_labels_of_the_reference() -> None:
    queries = [query for _, query in panel_queries()] + [rule["expr"] for rule in rules()]
    for query in [*queries, *(selector for _, selector, _ in choices())]:
        assert selectors(query) or "paceline:" in query
        assert not unknown_selectors(query), query


@pytest.mark.review
def test_every_sum_of_the_rules_is_one_for_each_namespace_and_model() -> None:
    """Review D8: rules summed over namespaces, so one cluster's trouble hid in another's health."""
    sums = [one for rule in rules() for one in re.findall(r"\bsum\b( by \([^)]*\))?", rule["expr"])]
    assert sums and set(sums) <= {" by (namespace, model)", " by (namespace, model, le)", " by (namespace)"}
    of_gateways = [rule["expr"] for rule in rules() if "sum by (namespace) " in rule["expr"]]
    named = [metric for query in of_gateways for metric, _ in selectors(query)]
    assert set(named) == {"paceline_gateway_requests_total"}, "a gateway knows no model; others do"


@pytest.mark.review
def test_no_label_is_one_that_a_service_monitor_sets() -> None:
    """Review D9: `service` became `exported_service` where a ServiceMonitor found the pods, and no rule fired."""
    ours = {label for labels in documented_labels().values() for label in labels}
    assert ours.isdisjoint({"job", "instance", "namespace", "pod", "container", "endpoint", "service", "node"})


def test_the_dashboard_can_show_one_namespace_alone() -> None:
    for title, query in panel_queries():
        for metric, labels in selectors(query):
            assert "namespace" in labels, f"{title}: {metric}"


@pytest.mark.review
def test_the_operators_rules_are_the_same_rules() -> None:
    """Review D9: there was no PrometheusRule."""
    made = subprocess.run([ROOT / "scripts/rules"], capture_output=True, text=True, check=True).stdout
    assert (FOLDER / "prometheus/prometheus-rule.yaml").read_text(encoding="utf-8") == made, "run scripts/rules"
    assert yaml.safe_load(made)["spec"] == load("prometheus/rules.yml")


@pytest.mark.review
def test_a_cluster_for_real_use_gets_alerts_dashboard_and_scrapes_where_the_operator_looks() -> None:
    """Review D9: the PodMonitor lacked the usual `release` label; there was no dashboard ConfigMap."""
    found = resources("production")
    rule, monitor = of_kind(found, "PrometheusRule")["paceline"], of_kind(found, "PodMonitor")["paceline"]
    assert rule["spec"] == load("prometheus/rules.yml")
    assert rule["metadata"]["labels"]["release"] == monitor["metadata"]["labels"]["release"]
    dashboard = of_kind(found, "ConfigMap")["paceline-dashboard"]
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert json.loads(dashboard["data"]["paceline.json"]) == DASHBOARD


def test_panels_have_titles_descriptions_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and (panel["type"] == "row" or panel["description"]) for panel in panels)


def test_the_compose_file_mounts_what_exists_and_the_parts_know_each_other() -> None:
    compose = load("compose.yaml")
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.partition(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in compose["volumes"]
    sources = {one["uid"]: one for one in load("grafana/provisioning/datasources/datasources.yaml")["datasources"]}
    exemplars = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert [one["datasourceUid"] for one in exemplars] == ["tempo"]
    tempo = load("tempo.yaml")
    received = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert load("otel-collector.yaml")["exporters"]["otlp"]["endpoint"] == received
    assert sources["tempo"]["url"].endswith(f":{tempo['server']['http_listen_port']}")


@pytest.mark.parametrize("processes", [1, 6])
def test_prometheus_scrapes_all_that_is_started_here(processes: int) -> None:
    """Neither gateways nor further coordinator processes were scraped."""
    asked = ClusterOptions(gateway_port=8000, coordinator_processes=processes)
    plan = plan_cluster(asked, PORTS)
    assert plan.draft and plan.gateway
    started = [plan.coordinator.settings.metrics_port + index for index in range(processes)]
    started += [plan.draft.settings.metrics_port, plan.target.settings.metrics_port, plan.gateway.settings.port]
    (job,) = load("prometheus/prometheus.yml")["scrape_configs"]
    (scraped,) = job["static_configs"]
    assert {f"127.0.0.1:{port}" for port in started} <= {*scraped["targets"]}


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Prometheus]:
    """Run a Prometheus that has scraped the services and a gateway before, during and after some requests."""
    metrics = ("--metrics-port", "0")
    with ExitStack() as stack:
        trio = stack.enter_context(running_trio(metrics, metrics, metrics))
        (gateway,) = stack.enter_context(
            running_services(["paceline.gateway", "--coordinator", trio.coordinator.address])
        )
        urls = [url for one in trio.all for url in one.metrics_urls]
        scraped = [url.removeprefix("http://").removesuffix("/metrics") for url in urls] + [gateway.address]
        async with (
            Client(trio.coordinator.address) as client,
            running_prometheus(tmp_path, scraped, RULES) as prometheus,
        ):
            shared = "A farmer has 7 cows and every cow gives 9 litres of milk a day. How much is it in a week?"
            # A scrape that a busy machine is too slow for leaves no series behind, so all questions are about one time.
            while not await has_seen_all(seen := await prometheus.now()):
                await client.complete(GenerationRequest(UserMessage(shared), max_new_tokens=30))
                with pytest.raises(InvalidRequest):
                    await client.complete(GenerationRequest(UserMessage(shared), max_new_tokens=-1))
            yield seen


async def has_seen_all(prometheus: Prometheus) -> bool:
    """Whether all services were scraped last, twice at least with work in between, as a rate needs, and are well."""
    conditions = (
        "count(up == 1) == 4",
        "sum(rate(paceline_completions_total[1m])) > 0",
        "count(rate(paceline_pass_rows_count[1m]) > 0) == 2",
        "rate(paceline_accepted_tokens_per_position_total[1m])",
        "paceline:draft_acceptance:ratio_rate5m",
        "paceline:request_errors:ratio_rate5m",
    )
    seen = all([await prometheus.query(condition) for condition in conditions])
    return seen and not [alert for alert in quiet_alerts() if await prometheus.query(alert["expr"])]


@pytest.mark.slow
async def test_every_query_of_the_dashboard_and_the_rules_works_on_a_real_prometheus(watched: Prometheus) -> None:
    for title, query in panel_queries():
        found = await watched.query(query)
        assert title == MAY_BE_EMPTY or bool(found) == (title != NEEDS_TLS), f"{title}: {query} gave {found}"
    for rule in rules():
        if rule.get("alert") not in SPEED_ALERTS:
            found = await watched.query(rule["expr"])
            assert bool(found) == ("record" in rule), f"{rule} gave {found}"
        # An alert may be silent because it names a metric that does not exist.
        for selector in set(re.findall(r"paceline[\w:]*(?:\{[^}]*\})?", rule["expr"])) - {WITH_TLS}:
            assert await watched.query(selector), f"{rule} names {selector}, which no service has"
    values = {
        name: await watched.get(f"label/{label}/values", **{"match[]": selector}) for name, selector, label in choices()
    }
    # Without Kubernetes there is no namespace to choose, and all means none.
    assert {name: len(found) for name, found in values.items()} == {"namespace": 0, "model": 1, "coordinator": 1}
