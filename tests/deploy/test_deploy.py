"""The Kubernetes manifests match the code: ports, flags, names, probes, grace periods. No cluster needed."""

import re

import pytest
import yaml

import paceline
from coordinator.config import CoordinatorSettings
from paceline.process.settings import ModelServiceSettings, ServiceSettings
from tests.manifests import KUBERNETES, OVERLAYS, SETTINGS, Workload, of_kind, resources, workloads

OTHER_VARIABLES = {"HF_HOME"}
"""Variables that other programs read."""

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
each_workload = pytest.mark.parametrize(
    ("overlay", "component"), [(overlay, component) for overlay in OVERLAYS for component in SETTINGS]
)


def workload(overlay: str, component: str) -> Workload:
    return workloads(resources(overlay))[component]


def startup_s(one: Workload) -> int:
    """Return the longest start in seconds that a pod's probe allows."""
    probe = one.container["startupProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def settings(one: Workload, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """Return the settings that the service would read from the container's variables."""
    with monkeypatch.context() as patched:
        for name, value in one.environment.items():
            patched.setenv(name, value)
        return SETTINGS[one.component]()


@each_workload
def test_every_variable_is_a_setting(overlay: str, component: str) -> None:
    kind = SETTINGS[component]
    known = {f"{kind.model_config['env_prefix']}{name}".upper() for name in kind.model_fields}
    assert set(workload(overlay, component).environment) - OTHER_VARIABLES <= known


@each_workload
def test_ports_are_those_the_service_opens(overlay: str, component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = workload(overlay, component)
    told = settings(one, monkeypatch)
    assert one.ports == {"grpc": told.port, "metrics": told.metrics_port, "health": told.health_port}
    assert (told.host, told.metrics_host) == ("0.0.0.0", "0.0.0.0")
    service = of_kind(resources(overlay), "Service")[f"paceline-{component}"]["spec"]
    (port,) = service["ports"]
    assert (port["port"], port["targetPort"]) == (told.port, "grpc")
    assert service["selector"].items() <= one.labels.items()


@each_workload
def test_probes_ask_the_health_port(overlay: str, component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = workload(overlay, component)
    told = settings(one, monkeypatch)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        # No service name: the overall health, which survives a renamed service.
        assert one.container[probe]["grpc"] == {"port": told.health_port}


@each_overlay
def test_the_coordinator_waits_for_targets_as_long_as_they_may_take(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = workloads(resources(overlay))
    told, target = settings(found["coordinator"], monkeypatch), found["target"]
    assert isinstance(told, CoordinatorSettings)
    assert startup_s(found["coordinator"]) > told.startup_timeout_s >= startup_s(target)
    # With one target, requests wait while it drains and loads from its disk, which is faster than a first start.
    assert told.target_wait_s >= 2 * target.pod["terminationGracePeriodSeconds"]


@each_workload
def test_a_pod_is_not_killed_while_it_drains(overlay: str, component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = workload(overlay, component)
    before_stop = one.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    told = settings(one, monkeypatch)
    assert one.pod["terminationGracePeriodSeconds"] >= before_stop + told.shutdown_grace_s + 10


@each_workload
def test_images_are_those_of_the_dockerfile(overlay: str, component: str) -> None:
    name, _, version = workload(overlay, component).container["image"].partition(":")
    targets = re.findall(r"^FROM \S+ AS (\S+)", (KUBERNETES.parent / "Dockerfile").read_text(), re.MULTILINE)
    assert name == f"paceline-{component}" and component in targets
    assert version.removesuffix("-cuda") == paceline.__version__


@each_overlay
def test_the_coordinator_calls_the_services_of_its_namespace_and_asks_no_more_than_they_allow(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = workloads(resources(overlay))
    coordinator = settings(found["coordinator"], monkeypatch)
    assert isinstance(coordinator, CoordinatorSettings)
    services = of_kind(resources(overlay), "Service")
    for component, address in (("draft", coordinator.draft), ("target", coordinator.target)):
        host, _, port = address.partition(":")
        assert services[host]["spec"]["clusterIP"] == "None"
        told = settings(found[component], monkeypatch)
        assert isinstance(told, ModelServiceSettings)
        assert int(port) == told.port and told.max_rows >= coordinator.batch_size


@each_workload
def test_pods_keep_to_the_restricted_profile(overlay: str, component: str) -> None:
    pod, container = workload(overlay, component).pod, workload(overlay, component).container
    # Kubernetes would otherwise set PACELINE_COORDINATOR_PORT to a URL.
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] >= 10000
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@each_workload
def test_selectors_find_the_pods(overlay: str, component: str) -> None:
    found, one = resources(overlay), workload(overlay, component)
    budget = of_kind(found, "PodDisruptionBudget")[f"paceline-{component}"]["spec"]
    (spread,) = one.pod["topologySpreadConstraints"]
    for selector in (one.spec["selector"], budget["selector"], spread["labelSelector"]):
        assert selector["matchLabels"].items() <= one.labels.items()
        assert selector["matchLabels"]["app.kubernetes.io/component"] == component
    assert of_kind(found, "ServiceAccount")[one.pod["serviceAccountName"]]["automountServiceAccountToken"] is False


@each_workload
def test_every_mounted_volume_is_there_and_every_file_told_is_in_one(overlay: str, component: str) -> None:
    one = workload(overlay, component)
    claims = {claim["metadata"]["name"] for claim in one.spec.get("volumeClaimTemplates", [])}
    volumes = claims | {volume["name"] for volume in one.pod.get("volumes", [])}
    mounts = one.container.get("volumeMounts", [])
    assert {mount["name"] for mount in mounts} == volumes
    files = [value for value in one.environment.values() if value.startswith("/")]
    assert all(any(file.startswith(mount["mountPath"]) for mount in mounts) for file in files)


@each_workload
def test_threads_are_the_cpus_of_the_pod(overlay: str, component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = workload(overlay, component)
    told = settings(one, monkeypatch)
    if isinstance(told, ModelServiceSettings) and told.device == "cpu":
        assert str(told.threads) == one.container["resources"]["limits"]["cpu"]
    else:
        assert "nvidia.com/gpu" in one.container["resources"]["limits"] or component == "coordinator"


@pytest.mark.parametrize("overlay", ["tls", "production"])
def test_certificates_bear_the_names_that_are_called_and_let_in(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resources(overlay)
    names = {
        one["spec"]["secretName"]: set(one["spec"].get("dnsNames", []))
        for one in of_kind(found, "Certificate").values()
    }
    secrets = {
        component: {volume["secret"]["secretName"] for volume in one.pod["volumes"] if "secret" in volume}
        for component, one in workloads(found).items()
    }
    for component in ("draft", "target"):
        told = settings(workloads(found)[component], monkeypatch)
        assert f"paceline-{component}" in names[f"paceline-{component}-tls"]
        assert told.allowed_names <= names["paceline-coordinator-tls"]
        assert told.allowed_names and not told.plaintext
        assert secrets[component] == {f"paceline-{component}-tls"}
    assert secrets["coordinator"] == {"paceline-coordinator-tls", "paceline-tokens"}


def test_the_pod_monitor_finds_every_pod_and_its_port() -> None:
    found = resources("production")
    (monitor,) = of_kind(found, "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for one in workloads(found).values():
        assert monitor["spec"]["selector"]["matchLabels"].items() <= one.labels.items()
        assert endpoint["port"] in one.ports


@pytest.mark.parametrize("component", SETTINGS)
def test_every_variable_of_the_compose_file_is_a_setting_and_its_grace_is_enough(component: str) -> None:
    service = yaml.safe_load((KUBERNETES.parent / "compose.yaml").read_text())["services"][component]
    prefix = str(SETTINGS[component].model_config["env_prefix"])
    told = {name.removeprefix(prefix).lower(): value for name, value in service["environment"].items()}
    assert set(told) <= set(SETTINGS[component].model_fields)
    assert int(service["stop_grace_period"].removesuffix("s")) > told["shutdown_grace_s"]


FILES = [
    *(file for pattern in ("*.yaml", "*.env") for file in KUBERNETES.rglob(pattern)),
    *(KUBERNETES.parent / name for name in ("Dockerfile", "README.md", "compose.yaml", "observability/README.md")),
]
OTHER_FLAGS = {"--write", "--quick", "--requests", "--no-speculation", "--build"}
"""Flags in prose that belong to scripts, compose and `paceline`, and to no service."""


def test_every_flag_that_prose_names_is_a_services() -> None:
    known = {f"--{name.replace('_', '-')}" for kind in SETTINGS.values() for name in kind.model_fields}
    named = set()
    for file in FILES:
        text = file.read_text()
        # In Markdown only code within sentences counts; blocks are other programs' commands.
        said = re.findall(r"`(--[a-z-]+)", text) if file.suffix == ".md" else re.findall(r"#.*?(--[a-z-]+)", text)
        named |= set(said)
    assert {"--shutdown-grace-s", "--kv-memory"} <= named
    assert named - OTHER_FLAGS <= known


def test_the_readme_names_every_alert_and_its_section() -> None:
    rules = (KUBERNETES.parent / "observability/prometheus/rules.yml").read_text()
    alerts = re.findall(r"alert: (\w+)", rules)
    named = re.findall(r"\[\w+\]\(observability/README\.md#(\w+)\)", (KUBERNETES.parent / "README.md").read_text())
    assert alerts and sorted(named) == sorted(alert.lower() for alert in alerts)
