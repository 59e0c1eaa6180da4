"""The contents of deploy/observability work: rules, queries, and references between files."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.client import Client
from paceline.errors import InvalidRequest
from paceline.process.launcher import ClusterOptions, running_cluster
from paceline.types import GenerationRequest, UserMessage
from tests.prometheus import Prometheus, promtool, running_prometheus

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
RULES = FOLDER / "prometheus" / "rules.yml"
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "paceline.json").read_text(encoding="utf-8"))
EMPTY_WHEN_HEALTHY = {"Calls that failed"}
"""Panels that stay empty while nothing fails."""


def load(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in load("prometheus/rules.yml")["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def panel_queries() -> Iterator[tuple[str, str]]:
    """Yield titles of panels and their queries, with variables filled in as by Grafana."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "1m").replace("$coordinator", ".*")
            assert "$" not in query, f"{panel['title']} uses a variable that the test does not know: {query}"
            yield panel["title"], query


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


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Prometheus]:
    """Run a Prometheus that has scraped the three services before, during and after some requests."""
    async with running_cluster(ClusterOptions(metrics_port=0)) as addresses, Client(addresses.coordinator) as client:
        targets = [url.removeprefix("http://").removesuffix("/metrics") for url in addresses.metrics_urls]
        async with running_prometheus(tmp_path, targets, RULES) as prometheus:
            shared = "A farmer has 7 cows and every cow gives 9 litres of milk a day. How much is it in a week?"
            # A rate needs two scrapes, and the second must have seen work.
            while not all(
                [
                    await prometheus.query("sum(rate(paceline_completions_total[1m])) > 0"),
                    await prometheus.query("count(rate(paceline_pass_rows_count[1m]) > 0) == 2"),
                    await prometheus.query("rate(paceline_accepted_tokens_per_position_total[1m])"),
                    await prometheus.query("paceline:draft_acceptance:ratio_rate5m"),
                    await prometheus.query("paceline:request_errors:ratio_rate5m"),
                ]
            ):
                await client.complete(GenerationRequest(UserMessage(shared), max_new_tokens=30))
                with pytest.raises(InvalidRequest):
                    await client.complete(GenerationRequest(UserMessage(shared), max_new_tokens=-1))
            yield prometheus


@pytest.mark.slow
async def test_every_query_of_the_dashboard_and_the_rules_works_on_a_real_prometheus(watched: Prometheus) -> None:
    for title, query in panel_queries():
        found = await watched.query(query)
        assert bool(found) == (title not in EMPTY_WHEN_HEALTHY), f"{title}: {query} gave {found}"
    for rule in rules():
        found = await watched.query(rule["expr"])
        assert bool(found) == ("record" in rule), f"{rule} gave {found}"
        # An alert may be silent because it names a metric that does not exist.
        for selector in re.findall(r"paceline[\w:]*(?:\{[^}]*\})?", rule["expr"]):
            assert await watched.query(selector), f"{rule} names {selector}, which no service has"
    label_query = DASHBOARD["templating"]["list"][1]["query"]["query"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", label_query).groups()  # type: ignore[union-attr]
    assert len(await watched.get(f"label/{label}/values", **{"match[]": metric})) == 1
