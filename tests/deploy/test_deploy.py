"""The Kubernetes manifests match the code: ports, flags, names, probes, grace periods. No cluster needed."""

import re

import pytest
import yaml

import paceline
from coordinator.config import CoordinatorSettings
from coordinator.replicas.replica import CHECK_TIMEOUT_S
from coordinator.replicas.replicas import RESOLVE_INTERVAL_S
from paceline.gateway.access import LIVENESS_PATH, OPEN_PATHS
from paceline.gateway.config import GatewaySettings
from paceline.observe.spans.protocols import otlp_protocol
from paceline.process.settings import ModelServiceSettings, ProcessSettings, ServiceSettings
from paceline.wire.server import LIVENESS_NAME
from tests.manifests import (
    GPU_OVERLAYS,
    KUBERNETES,
    OVERLAYS,
    SETTINGS,
    WORKER_INDEX,
    Resource,
    Workload,
    colour,
    of_kind,
    resources,
    startup_s,
    workload,
    workloads,
)

OTHER_VARIABLES = {
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_TOKEN_PATH",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "RANK",
    "WORLD_SIZE",
}
"""Variables that other programs read."""
NAME_TTL_S = 30
"""Seconds for which the cluster's name servers may repeat an answer: CoreDNS of kubeadm, and NodeLocal DNSCache."""
ON_OPENSHIFT = "openshift"
SLOW_VOLUME_BYTES_S = 20e6
"""What a network's volume gives at least while several pods read it."""
WEIGHTS_BYTES = {"Qwen/Qwen3-0.6B": 1.5e9, "Qwen/Qwen3-8B": 16.4e9, "Qwen/Qwen3-32B": 65.5e9}
"""Of the models that overlays name, in bfloat16."""


each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
WORKLOADS = [(overlay, component) for overlay in OVERLAYS for component in workloads(resources(overlay))]
each_workload = pytest.mark.parametrize(("overlay", "component"), WORKLOADS)
each_model_service = pytest.mark.parametrize(
    ("overlay", "component"), [one for one in WORKLOADS if one[1] in ("draft", "target")]
)
with_gateway = pytest.mark.parametrize("overlay", [one for one in OVERLAYS if "gateway" in workloads(resources(one))])


def named(overlay: str, component: str) -> str:
    return f"paceline-{component}{'-green' if colour(overlay) == 'green' else ''}"


def settings(one: Workload, monkeypatch: pytest.MonkeyPatch) -> ProcessSettings:
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
    own = "grpc" if isinstance(told, ServiceSettings) else "http"
    health = {"health": told.health_port} if isinstance(told, ServiceSettings) else {}
    assert one.ports == {own: told.port, "metrics": told.metrics_port, **health}
    assert (told.host, told.metrics_host) == ("0.0.0.0", "0.0.0.0")
    service = of_kind(resources(overlay), "Service")[named(overlay, component)]["spec"]
    (port,) = service["ports"]
    assert (port["port"], port["targetPort"]) == (told.port, own)
    if (overlay, component) != ("moved", "coordinator"):
        assert service["selector"].items() <= one.labels.items()


@each_workload
def test_probes_ask_the_health_port(overlay: str, component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = workload(overlay, component)
    told = settings(one, monkeypatch)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if isinstance(told, ServiceSettings):
            # Not a service's name: it survives a renamed service. Nor is one restarted for what it waits for.
            asked_name = {"service": LIVENESS_NAME} if probe == "livenessProbe" else {}
            assert one.container[probe]["grpc"] == {"port": told.health_port, **asked_name}
        else:
            asked = one.container[probe]["httpGet"]
            assert asked["port"] == "http" and asked["path"] in OPEN_PATHS


@with_gateway
def test_coordinators_make_the_gateway_ready_and_their_absence_restarts_it_never(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = workload(overlay, "gateway")
    told = settings(one, monkeypatch)
    assert isinstance(told, GatewaySettings)
    asked = {probe: one.container[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert [one["path"] for one in asked.values()] == [LIVENESS_PATH, "/health", LIVENESS_PATH]
    assert {one.get("scheme", "HTTP") for one in asked.values()} == {"HTTPS" if told.tls_certificate else "HTTP"}


@with_gateway
def test_the_gateway_calls_the_service_that_clients_call_as_it_wants_to_be_called_and_asks_for_tokens(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = workloads(resources(overlay))
    told, coordinator = settings(found["gateway"], monkeypatch), settings(found["coordinator"], monkeypatch)
    assert isinstance(told, GatewaySettings) and isinstance(coordinator, CoordinatorSettings)
    assert told.coordinator == f"paceline-coordinator:{coordinator.port}"
    assert (told.coordinator_ca is None, told.tls_certificate is None) == (coordinator.tls_certificate is None,) * 2
    assert (told.coordinator_token_file is None) is (coordinator.token_file is None)
    assert told.plaintext is coordinator.plaintext
    secrets = {one["name"]: one["secret"]["secretName"] for one in found["gateway"].pod["volumes"]}
    assert told.token_file and secrets[told.token_file.parent.name] == "paceline-gateway-tokens"
    if told.coordinator_token_file:
        assert secrets[told.coordinator_token_file.parent.name] == "paceline-tokens"
        assert secrets["tls"] == "paceline-gateway-tls"


def test_the_gateway_is_of_no_colour_and_stays_when_one_stops() -> None:
    labels = workload("production", "gateway").labels
    assert "app.kubernetes.io/instance" not in labels
    assert "gateway" not in str(resources("production-green"))
    assert workload("moved", "gateway").spec == workload("http", "gateway").spec


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


@each_overlay
def test_in_an_update_coordinators_find_a_model_pod_before_the_next_one_goes(overlay: str) -> None:
    """With two targets the second went as soon as the first was back, and coordinators hear of that 30 s later."""
    for name, one in of_kind(resources(overlay), "StatefulSet").items():
        assert one["spec"]["minReadySeconds"] >= NAME_TTL_S + RESOLVE_INTERVAL_S + CHECK_TIMEOUT_S, name


@each_model_service
def test_a_pod_that_coordinators_take_for_up_is_ready(overlay: str, component: str) -> None:
    """The probe waited for one second and coordinators for three, which lose a pod that is not ready by its name."""
    assert workload(overlay, component).container["readinessProbe"]["timeoutSeconds"] >= CHECK_TIMEOUT_S


@pytest.mark.review
@each_overlay
def test_a_rollout_is_given_up_only_after_the_longest_start(overlay: str) -> None:
    """Review D2: a rollout failed after 600 s, and the coordinator may take 3,700 s to start."""
    longest_s = startup_s(workload(overlay, "coordinator"))
    for deployment in of_kind(resources(overlay), "Deployment").values():
        # Besides its start, a pod is placed on a node and its image pulled. A gateway is ready when a coordinator is.
        assert deployment["spec"]["progressDeadlineSeconds"] >= longest_s + 240


def test_the_documented_rollout_on_gpus_waits_for_the_longest_start() -> None:
    told = re.findall(r"rollout status .* --timeout (\d+)m", (KUBERNETES.parent / "README.md").read_text())
    assert told and all(int(minutes) * 60 > startup_s(workload("gpu", "coordinator")) for minutes in told)


@each_workload
def test_a_pod_is_not_killed_while_it_drains(overlay: str, component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = workload(overlay, component)
    before_stop = one.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    told = settings(one, monkeypatch)
    assert one.pod["terminationGracePeriodSeconds"] >= before_stop + told.shutdown_grace_s + 10


@with_gateway
def test_a_gateway_that_goes_ends_the_answers_that_it_has(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of more than a minute was cut off in each update, and no client of HTTP can take that up."""
    told = settings(workload(overlay, "gateway"), monkeypatch)
    assert isinstance(told, GatewaySettings)
    assert told.shutdown_grace_s >= told.request_timeout_s


@each_overlay
def test_a_node_can_be_drained_while_none_of_its_pods_is_ready(overlay: str) -> None:
    """Without a target no coordinator is ready, so each budget was overdrawn, and a drain of its node never ended."""
    budgets = of_kind(resources(overlay), "PodDisruptionBudget")
    assert budgets
    for name, budget in budgets.items():
        assert budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow", name


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
        assert int(port) == told.port and told.max_rows >= coordinator.lane_count * coordinator.batch_size


@each_workload
def test_pods_keep_to_the_restricted_profile(overlay: str, component: str) -> None:
    pod, container = workload(overlay, component).pod, workload(overlay, component).container
    # Kubernetes would otherwise set PACELINE_COORDINATOR_PORT to a URL.
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert overlay == ON_OPENSHIFT or pod["securityContext"]["runAsUser"] >= 10000
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@each_workload
def test_selectors_find_the_pods(overlay: str, component: str) -> None:
    found, one = resources(overlay), workload(overlay, component)
    budget = of_kind(found, "PodDisruptionBudget")[named(overlay, component)]["spec"]
    (spread,) = one.pod["topologySpreadConstraints"]
    for selector in (one.spec["selector"], budget["selector"], spread["labelSelector"]):
        assert selector["matchLabels"].items() <= one.labels.items()
        assert selector["matchLabels"]["app.kubernetes.io/component"] == component
        instance = selector["matchLabels"].get("app.kubernetes.io/instance")
        assert instance == (None if component == "gateway" else colour(overlay))
    assert of_kind(found, "ServiceAccount")[one.pod["serviceAccountName"]]["automountServiceAccountToken"] is False


@each_workload
def test_every_mounted_volume_is_there_and_every_file_told_is_in_one(overlay: str, component: str) -> None:
    one = workload(overlay, component)
    claims = {claim["metadata"]["name"] for claim in one.spec.get("volumeClaimTemplates", [])}
    volumes = claims | {volume["name"] for volume in one.pod.get("volumes", [])}
    mounts = one.container.get("volumeMounts", [])
    before = [mount for container in one.pod.get("initContainers", []) for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in (*mounts, *before)} == volumes
    files = [value for value in one.environment.values() if value.startswith("/")]
    assert all(any(file.startswith(mount["mountPath"]) for mount in mounts) for file in files)


@pytest.mark.review
@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_model_pods_may_share_a_node_and_the_draft_is_near_a_target(overlay: str) -> None:
    """Review D3: a node of its own was required for each, so a node with eight GPUs ran one pod."""
    target = workload(overlay, "target")
    kinds = {"draft": {"podAffinity"}, "target": {"podAntiAffinity"}}
    for component, kind in kinds.items():
        affinity = workload(overlay, component).pod["affinity"]
        assert set(affinity) == kind
        assert all(set(rules) == {"preferredDuringSchedulingIgnoredDuringExecution"} for rules in affinity.values())
    near = workload(overlay, "draft").pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    terms = [one["podAffinityTerm"] for one in sorted(near, key=lambda one: -one["weight"])]
    assert [term["topologyKey"] for term in terms] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    assert all(term["labelSelector"]["matchLabels"].items() <= target.labels.items() for term in terms)
    # Green's draft would otherwise be placed near blue's target.
    assert all(term["labelSelector"]["matchLabels"]["app.kubernetes.io/instance"] == colour(overlay) for term in terms)


def test_the_runtime_of_the_gpus_may_be_named() -> None:
    named = {overlay: workload(overlay, "target").pod.get("runtimeClassName") for overlay in OVERLAYS}
    assert named == dict.fromkeys(OVERLAYS) | {"node-weights": "nvidia"}


@pytest.mark.review
@each_model_service
def test_threads_are_the_cpus_of_the_pod(overlay: str, component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Review D7: torch counted the CPUs of the node, whatever the pod's quota."""
    one = workload(overlay, component)
    told = settings(one, monkeypatch)
    assert isinstance(told, ModelServiceSettings)
    assert str(told.threads) == one.container["resources"]["limits"]["cpu"]
    assert (told.device == "cuda") is ("nvidia.com/gpu" in one.container["resources"]["limits"])


@pytest.mark.parametrize("component", ["draft", "target"])
@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_memory_holds_the_weights_while_they_load(
    overlay: str, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target over two nodes had that of a quarter: its start went over them on the volume again and again."""
    one = workload(overlay, component)
    told = settings(one, monkeypatch)
    assert isinstance(told, ModelServiceSettings)
    limit = one.container["resources"]["limits"]["memory"]
    assert limit.endswith("Gi") and int(limit.removesuffix("Gi")) << 30 > WEIGHTS_BYTES[told.model]


@pytest.mark.parametrize("component", ["draft", "target"])
@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_a_pod_is_not_killed_while_its_weights_load_from_a_slow_volume(
    overlay: str, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """66 GB had 15 minutes: from a volume of less than 73 MB/s the target was killed again and again."""
    one = workload(overlay, component)
    told = settings(one, monkeypatch)
    assert isinstance(told, ModelServiceSettings)
    assert startup_s(one) * SLOW_VOLUME_BYTES_S >= WEIGHTS_BYTES[told.model]


def test_a_target_over_several_gpus_of_a_node_has_a_process_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    one = workload("several-gpus", "target")
    told = settings(one, monkeypatch)
    assert isinstance(told, ModelServiceSettings)
    assert str(told.grid.rank_count) == one.container["resources"]["limits"]["nvidia.com/gpu"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in one.container["volumeMounts"]


def test_a_target_over_several_nodes_has_a_pod_for_each_process_and_the_first_alone_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = resources("several-nodes")
    (group,) = of_kind(found, "LeaderWorkerSet").values()
    parts = group["spec"]["leaderWorkerTemplate"]
    first, other = (parts[kind]["spec"]["containers"][0] for kind in ("leaderTemplate", "workerTemplate"))
    told = settings(workload("several-nodes", "target"), monkeypatch)
    assert isinstance(told, ModelServiceSettings)
    assert told.grid.rank_count == parts["size"]
    assert parts["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert "paceline-target" not in of_kind(found, "StatefulSet")
    # A set's own service, through which its pods meet, has its name; ours must not be taken for it.
    assert group["metadata"]["name"] not in of_kind(found, "Service")
    assert of_kind(found, "Service")["paceline-target"]["spec"]["selector"][WORKER_INDEX] == "0"
    only_first = {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    assert {name for name in first if first[name] != other.get(name)} == only_first
    places = {one["name"]: one.get("value") for one in first["env"]}
    assert (places["RANK"], places["WORLD_SIZE"]) == ("$(LWS_WORKER_INDEX)", "$(LWS_GROUP_SIZE)")
    assert places["MASTER_ADDR"] == "$(LWS_LEADER_ADDRESS)"


@pytest.mark.parametrize("overlay", ["tls", "production"])
def test_certificates_bear_the_names_that_are_called_and_let_in(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resources(overlay)
    names = {
        one["spec"]["secretName"]: set(one["spec"].get("dnsNames", []))
        for one in of_kind(found, "Certificate").values()
    }
    secrets = {
        component: {volume["secret"]["secretName"] for volume in one.pod["volumes"] if "secret" in volume}
        - {"paceline-hugging-face"}
        for component, one in workloads(found).items()
    }
    for component in ("draft", "target"):
        told = settings(workloads(found)[component], monkeypatch)
        assert isinstance(told, ModelServiceSettings)
        assert f"paceline-{component}" in names[f"paceline-{component}-tls"]
        assert told.allowed_names <= names["paceline-coordinator-tls"]
        assert told.allowed_names and not told.plaintext
        assert secrets[component] == {f"paceline-{component}-tls"}
    assert secrets["coordinator"] == {"paceline-coordinator-tls", "paceline-tokens"}
    assert secrets["gateway"] == {"paceline-gateway-tls", "paceline-gateway-tokens", "paceline-tokens"}
    assert {"paceline-gateway", "paceline-gateway.paceline", "localhost"} <= names["paceline-gateway-tls"]


@pytest.mark.review
@pytest.mark.parametrize("overlay", ["tls", "production"])
def test_the_coordinators_certificate_bears_every_name_that_clients_use(overlay: str) -> None:
    """Review D5: neither README's name for clients in the cluster nor localhost was in it."""
    names = set(of_kind(resources(overlay), "Certificate")["paceline-coordinator"]["spec"]["dnsNames"])
    name = "paceline-coordinator"
    said = {name, f"{name}.paceline", f"{name}.paceline.svc", f"{name}.paceline.svc.cluster.local", "localhost"}
    assert said | {f"{name}-green", f"{name}-green.paceline"} == names
    for document in ("deploy/README.md", "docs/secure.md"):
        assert "paceline-coordinator.paceline:7700" in (KUBERNETES.parents[1] / document).read_text()


@each_workload
def test_spans_are_sent_where_a_policy_lets_them_pass(overlay: str, component: str) -> None:
    """The component `traces` named the collector and left tracing off."""
    environment = workload(overlay, component).environment
    if any(name.startswith("paceline-traces") for name in of_kind(resources(overlay), "NetworkPolicy")):
        assert otlp_protocol(environment) == "grpc"
        assert environment["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
        assert 0 < float(environment["OTEL_TRACES_SAMPLER_ARG"]) < 1
    else:
        assert otlp_protocol(environment) is None


def test_the_pod_monitor_finds_every_pod_and_its_port() -> None:
    found = resources("production")
    (monitor,) = of_kind(found, "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for one in workloads(found).values():
        assert monitor["spec"]["selector"]["matchLabels"].items() <= one.labels.items()
        assert endpoint["port"] in one.ports


def test_on_openshift_pods_leave_user_and_groups_to_the_cluster() -> None:
    """Its profile refuses those that are not of the namespace's own range, and no pod was made."""
    given = {"runAsUser", "runAsGroup", "fsGroup"}
    found = workloads(resources(ON_OPENSHIFT))
    assert set(found) == set(SETTINGS)
    for component, one in found.items():
        elsewhere = workload("http", component).pod
        own = {name: value for name, value in elsewhere["securityContext"].items() if name not in given}
        assert one.pod == elsewhere | {"securityContext": own}
        assert not [container for container in one.pod["containers"] if given & set(container["securityContext"])]


COMPOSE: dict[str, Resource] = yaml.safe_load((KUBERNETES.parent / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("component", COMPOSE)
def test_every_variable_of_the_compose_file_is_a_setting_and_its_grace_is_enough(component: str) -> None:
    service = COMPOSE[component]
    prefix = str(SETTINGS[component].model_config["env_prefix"])
    told = {name.removeprefix(prefix).lower(): value for name, value in service["environment"].items()}
    assert set(told) <= set(SETTINGS[component].model_fields)
    assert int(service["stop_grace_period"].removesuffix("s")) > told["shutdown_grace_s"]
