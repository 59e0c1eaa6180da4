"""Metrics that the components `hpa` and `keda` scale by: they exist, agree, and count the right things."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.manifests import (
    KUBERNETES,
    OVERLAYS,
    Resource,
    kustomization,
    of_kind,
    resources,
    startup_s,
    workload,
    workloads,
)
from tests.prometheus import promtool
from tests.scrapes import COLOUR, selectors, unknown_selectors

NAMESPACE = "paceline"


def autoscalers(overlay: str) -> dict[str, Resource]:
    return of_kind(resources(overlay), "HorizontalPodAutoscaler")


def adapter_queries() -> dict[str, str]:
    """Return the adapter's queries by the name of the metric that they make."""
    rules = yaml.safe_load((KUBERNETES / "components/hpa/adapter-rules.yaml").read_text())["rules"]["external"]
    return {rule["name"]["as"]: rule["metricsQuery"] for rule in rules}


def scaled_objects(overlay: str = "air-gapped") -> dict[str, Resource]:
    return of_kind(resources(overlay), "ScaledObject")


def keda_triggers(name: str, suffix: str = "") -> list[tuple[str, str]]:
    """Return queries and their thresholds; `suffix` is that of green overlays and names."""
    told = [trigger["metadata"] for trigger in scaled_objects(f"air-gapped{suffix}")[name + suffix]["spec"]["triggers"]]
    return [(one["query"], one["threshold"]) for one in told]


def hpa_triggers(name: str, suffix: str = "") -> list[tuple[str, str]]:
    """As `keda_triggers`, with matchers filled in as by the adapter."""
    found = []
    for one in (metric["external"] for metric in autoscalers(f"production{suffix}")[name + suffix]["spec"]["metrics"]):
        labels = {"namespace": NAMESPACE, **one["metric"].get("selector", {}).get("matchLabels", {})}
        matchers = ", ".join(f'{label}="{value}"' for label, value in labels.items())
        query = adapter_queries()[one["metric"]["name"]].replace("<<.LabelMatchers>>", matchers)
        found.append((query, one["target"]["averageValue"]))
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_autoscalers_name_workloads_that_exist_and_leave_their_replicas_alone(overlay: str) -> None:
    for name, one in {**autoscalers(overlay), **scaled_objects(overlay)}.items():
        reference = one["spec"]["scaleTargetRef"]
        assert name == reference["name"]
        # Otherwise each apply would undo the autoscaler's change.
        assert "replicas" not in of_kind(resources(overlay), reference["kind"])[name]["spec"]


def test_autoscalers_of_a_target_over_several_nodes_name_its_set() -> None:
    """They named the StatefulSet that the component takes away."""
    (ranks,) = of_kind(resources("several-nodes"), "LeaderWorkerSet").values()
    assert "replicas" not in ranks["spec"]  # each `kubectl apply` would set back what an autoscaler chose
    named = {"apiVersion": ranks["apiVersion"], "kind": ranks["kind"], "name": ranks["metadata"]["name"]}
    scaled = {"kind": "HorizontalPodAutoscaler|ScaledObject", "name": "paceline-target"}
    (patch,) = [one["patch"] for one in kustomization("several-nodes")["patches"] if one.get("target") == scaled]
    assert yaml.safe_load(patch) == [{"op": "replace", "path": "/spec/scaleTargetRef", "value": named}]
    # Of the colour green both have another name.
    names = yaml.safe_load((KUBERNETES / "components/leader-worker-set/name-reference.yaml").read_text())
    (renamed,) = [one["fieldSpecs"] for one in names["nameReference"] if one["kind"] == ranks["kind"]]
    assert renamed == [{"kind": kind, "path": "spec/scaleTargetRef/name"} for kind in scaled["kind"].split("|")]


@pytest.mark.review
@pytest.mark.parametrize("overlay", ["air-gapped", "production"])
@pytest.mark.parametrize("component", ["draft", "target"])
def test_no_model_pod_is_added_before_the_last_one_had_time_to_load(overlay: str, component: str) -> None:
    """Review D4: one more every 120 s, when each downloaded for up to an hour."""
    one, name = workload(overlay, component), f"paceline-{component}"
    found = {
        **autoscalers(overlay),
        **{
            name: keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
            for name, keda in scaled_objects(overlay).items()
        },
    }[name]
    (policy,) = found.get("spec", found)["behavior"]["scaleUp"]["policies"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)
    assert 1800 >= policy["periodSeconds"] >= startup_s(one)  # Kubernetes allows no longer period
    # The weights are where all pods are, so the startup probe has the whole time to load.
    assert "volumeClaimTemplates" not in one.spec
    (claim,) = of_kind(resources(overlay), "PersistentVolumeClaim").values()
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize(
    ("overlay", "scaler"), [("production", "HorizontalPodAutoscaler"), ("air-gapped", "ScaledObject")]
)
def test_a_large_target_has_an_hour_to_load_where_an_autoscaler_gives_15_minutes(overlay: str, scaler: str) -> None:
    patches = {one["target"]["kind"]: yaml.safe_load(one["patch"]) for one in kustomization("large-target")["patches"]}
    changed = {}
    for kind in ("StatefulSet", scaler):
        (operation,), found = patches[kind], of_kind(resources(overlay), kind)["paceline-target"]
        *path, last = operation["path"].split("/")[1:]
        for name in path:
            found = found[int(name) if isinstance(found, list) else name]
        changed[last] = (found[last], operation["value"])
    assert changed == {"failureThreshold": (90, 360), "periodSeconds": (900, 1800)}
    assert workload(overlay, "target").container["startupProbe"]["periodSeconds"] == 10


@pytest.mark.review
def test_nothing_scales_where_a_new_pod_downloads_first() -> None:
    """Review D4."""
    scaling = {overlay for overlay in OVERLAYS if autoscalers(overlay) or scaled_objects(overlay)}
    assert scaling == {"air-gapped", "air-gapped-green", "production", "production-green"}


@pytest.mark.review
@pytest.mark.parametrize("component", ["draft", "target"])
def test_a_replica_that_comes_back_finds_its_disk(component: str) -> None:
    """Review D4: disks went with their replicas."""
    kept = workloads(resources("gpu"))[component].spec["persistentVolumeClaimRetentionPolicy"]
    assert kept == {"whenScaled": "Retain", "whenDeleted": "Retain"}


def test_scaling_asks_for_metrics_of_the_reference() -> None:
    queries = [query for name in scaled_objects() for query, _ in (*keda_triggers(name), *hpa_triggers(name))]
    assert queries
    for query in queries:
        assert selectors(query) and not unknown_selectors(query), query


@pytest.mark.parametrize("name", sorted(scaled_objects()))
def test_both_components_ask_the_same_and_scale_alike(name: str) -> None:
    scaled, hpa = scaled_objects()[name]["spec"], autoscalers("production")[name]["spec"]
    for suffix in ("", "-green"):
        assert keda_triggers(name, suffix) == hpa_triggers(name, suffix)
    assert scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    assert scaled["scaleTargetRef"] == hpa["scaleTargetRef"]


@pytest.mark.parametrize("overlay", ["air-gapped", "air-gapped-green"])
def test_pods_stay_where_there_are_no_series_to_scale_by(overlay: str) -> None:
    """KEDA took none for no load: where Prometheus could not scrape, targets at work were taken away."""
    triggers = [one for scaled in scaled_objects(overlay).values() for one in scaled["spec"]["triggers"]]
    assert triggers
    assert all(one["metadata"]["ignoreNullValues"] == "false" for one in triggers)


def test_half_a_batch_of_the_overlay_that_is_scaled_may_wait_for_each_target() -> None:
    told = workloads(resources("production"))["coordinator"].environment
    assert int(waiting_trigger()[1]) == int(told["PACELINE_COORDINATOR_BATCH_SIZE"]) // 2


def waiting_trigger(suffix: str = "") -> tuple[str, str]:
    (found,) = [one for one in hpa_triggers("paceline-target", suffix) if "paceline_sequences_waiting" in one[0]]
    return found


@pytest.mark.parametrize(("up", "counted"), [((1, 2), 30 + 12), ((0, 1), 12), ((0, 0), 0)], ids=["both", "one", "none"])
async def test_what_waits_counts_where_a_target_is_up(up: tuple[int, int], counted: int, tmp_path: Path) -> None:
    """Sequences waiting for the only target to come back had triggered another target."""

    elsewhere = coordinator_series("a", 500, 1, namespace="other")
    series = [*coordinator_series("a", 30, up[0]), *coordinator_series("b", 12, up[1]), *elsewhere]
    await check_queries(series, {waiting_trigger()[0]: counted}, tmp_path)


async def test_each_colour_scales_by_its_own_load(tmp_path: Path) -> None:
    """Queries asked for the namespace alone, so a colour that nobody called grew with the other one's queue."""
    (monitor,) = of_kind(resources("production"), "PodMonitor").values()
    assert [re.sub(r"\W", "_", one) for one in monitor["spec"]["podTargetLabels"]] == [COLOUR]
    series = [*coordinator_series("a", 30, 1), *coordinator_series("b", 7, 1, colour="green")]
    expected = {waiting_trigger()[0]: 30, waiting_trigger("-green")[0]: 7}
    kv_percents = {("target", "blue"): 20, ("target", "green"): 40, ("draft", "blue"): 60, ("draft", "green"): 80}
    for (component, colour), percent in kv_percents.items():
        own = f'namespace="{NAMESPACE}", pod="{component}-{colour}", component="{component}", {COLOUR}="{colour}"'
        sizes = {f"paceline_kv_used_bytes{{{own}}}": percent, f"paceline_kv_capacity_bytes{{{own}}}": 100}
        series += [{"series": name, "values": str(size)} for name, size in sizes.items()]
        triggers = hpa_triggers(f"paceline-{component}", "-green" if colour == "green" else "")
        expected[triggers[-1][0]] = percent
    assert len(expected) == 6
    await check_queries(series, expected, tmp_path)


def coordinator_series(
    instance: str, waiting: int, up: int, *, colour: str = "blue", namespace: str = NAMESPACE
) -> list[dict[str, str]]:
    """Return what a coordinator tells of its queue and of its replicas."""
    own = f'namespace="{namespace}", instance="{instance}", {COLOUR}="{colour}"'
    values = {
        f"paceline_sequences_waiting{{{own}}}": waiting,
        f'paceline_replicas{{{own}, component="target", state="up"}}': up,
        f'paceline_replicas{{{own}, component="target", state="down"}}': 2 - up,
        f'paceline_replicas{{{own}, component="draft", state="up"}}': 1,
    }
    return [{"series": name, "values": str(value)} for name, value in values.items()]


async def check_queries(series: list[dict[str, str]], expected: dict[str, int], folder: Path) -> None:
    """Check that queries of these series have the expected values."""
    tested = [
        {"expr": query, "eval_time": "0", "exp_samples": [{"labels": "{}", "value": value}]}
        for query, value in expected.items()
    ]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": tested}
    (folder / "case.json").write_text(json.dumps({"tests": [case]}))
    status, said = await promtool("test", "rules", "case.json", folder=folder)
    assert status == 0, said
