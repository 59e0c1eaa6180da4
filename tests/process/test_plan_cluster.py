"""Settings of the services that a command starts: flags over variables, variables over defaults."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from paceline.cli import up
from paceline.cli.app import app
from paceline.errors import AddressInUse, StartupError
from paceline.observe.metrics import metrics_served
from paceline.process import cluster_plan
from paceline.process.cluster_plan import ClusterOptions, plan_cluster
from paceline.process.launcher import Addresses, running_cluster
from paceline.process.service import server_options
from paceline.process.variables import check_variables
from paceline.wire import running_server
from paceline.wire.ports import Listening, check_ports_free
from target_service.config import TargetSettings

pytestmark = pytest.mark.review


def test_a_variable_holds_where_no_flag_is_given_and_a_flag_wins_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """review G5"""
    monkeypatch.setenv("PACELINE_TARGET_KV_MEMORY", "64MiB")
    monkeypatch.setenv("PACELINE_COORDINATOR_BATCH_SIZE", "3")
    plan = plan_cluster(ClusterOptions())
    assert plan.draft
    assert (plan.target.settings.kv_memory, plan.draft.settings.kv_memory) == ("64MiB", "2GiB")
    assert plan.coordinator.settings.batch_size == 3
    plan = plan_cluster(ClusterOptions(kv_memory="96MiB", batch_size=5))
    assert plan.draft
    assert (plan.target.settings.kv_memory, plan.draft.settings.kv_memory) == ("96MiB", "96MiB")
    assert plan.coordinator.settings.batch_size == 5


def test_what_the_plan_would_choose_gives_way_to_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """review G5"""
    plain = plan_cluster(ClusterOptions())
    assert plain.target.settings.log_level == "warning"
    monkeypatch.setenv("PACELINE_TARGET_LOG_LEVEL", "debug")
    monkeypatch.setenv("PACELINE_TARGET_THREADS", "7")
    monkeypatch.setenv("PACELINE_COORDINATOR_POLICY", "exspec")
    plan = plan_cluster(ClusterOptions())
    assert (plan.target.settings.log_level, plan.target.settings.threads) == ("debug", 7)
    assert plan.draft
    assert plan.draft.settings.threads == cluster_plan.divided_threads(1)[0]
    assert plan.coordinator.settings.policy == "exspec"


@pytest.mark.parametrize(("lanes", "beside_draft"), [(1, 8), (2, 6)])
def test_a_target_may_use_every_core_but_leaves_some_to_the_draft_of_another_lane(
    lanes: int, beside_draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_plan, "CORES", 8)
    target = plan_cluster(ClusterOptions(lanes=lanes)).target.settings
    assert (target.threads, target.threads_beside_draft) == (8, beside_draft)


def test_asked_for_threads_of_the_target_hold_beside_the_draft_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_cluster(ClusterOptions(lanes=2, target_threads=2)).target.settings.threads_beside_draft is None
    monkeypatch.setenv("PACELINE_TARGET_THREADS", "7")
    target = plan_cluster(ClusterOptions(lanes=2)).target.settings
    assert (target.threads, target.threads_beside_draft) == (7, None)


def test_without_a_draft_service_the_target_has_every_core_and_the_coordinator_misses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_plan, "CORES", 8)
    plan = plan_cluster(ClusterOptions(draft_model="none", lanes=2, draft_port=7701))
    assert plan.draft is None
    assert (plan.coordinator.settings.draft, plan.coordinator.settings.draft_addresses) == ("none", [])
    assert (plan.target.settings.threads, plan.target.settings.threads_beside_draft) == (8, 8)
    assert [one.flag for one in plan.listens if one.flag != "--metrics-port"] == ["--coordinator-port", "--target-port"]


def test_recent_outputs_of_others_are_shared_only_where_that_is_asked_for() -> None:
    assert not plan_cluster(ClusterOptions()).coordinator.settings.shared_suffixes
    assert plan_cluster(ClusterOptions(shared_suffixes=True)).coordinator.settings.shared_suffixes


@pytest.mark.parametrize("has_flag", [False, True])
def test_heads_come_from_the_flag_or_else_the_variable(has_flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ClusterOptions] = []

    async def start(options: ClusterOptions) -> None:
        asked.append(options)

    monkeypatch.setattr(up, "_up", start)
    monkeypatch.setenv("PACELINE_TARGET_HEADS", "trained")
    result = CliRunner().invoke(app, ["up", *(("--heads", "builtin:clover") if has_flag else ())])
    assert result.exit_code == 0, result.output
    assert plan_cluster(asked[0]).target.settings.heads == ("builtin:clover" if has_flag else "trained")


def test_services_of_a_command_take_free_ports_whatever_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TARGET_PORT", "7702")
    assert plan_cluster(ClusterOptions()).target.settings.port == 0


def test_up_hears_the_variables_of_its_ports_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """review G5"""
    asked: list[ClusterOptions] = []

    async def start(options: ClusterOptions) -> None:
        asked.append(options)

    monkeypatch.setattr(up, "_up", start)
    monkeypatch.setenv("PACELINE_COORDINATOR_PORT", "8800")
    monkeypatch.setenv("PACELINE_TARGET_METRICS_PORT", "8812")
    monkeypatch.setenv("PACELINE_TARGET_MODEL", "builtin:draft")
    result = CliRunner().invoke(app, ["up", "--draft-port", "8801"])
    assert result.exit_code == 0, result.output
    plan = plan_cluster(asked[0], up.PORTS)
    assert plan.draft
    ports = [one.settings.port for one in (plan.coordinator, plan.draft, plan.target)]
    assert ports == [8800, 8801, 7702]
    assert [one.settings.metrics_port for one in (plan.coordinator, plan.draft, plan.target)] == [7710, 7711, 8812]
    assert plan.target.settings.model == "builtin:draft"


@pytest.mark.parametrize("target", ["0.0.0.0:7702", "127.0.0.1:1"])
def test_up_serves_where_it_cannot_ask_its_target(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that listens everywhere, or needs TLS, ended the whole cluster for a line about its numerics."""

    @asynccontextmanager
    async def running(*_: Any) -> AsyncIterator[Addresses]:
        yield Addresses("127.0.0.1:7700", "127.0.0.1:7701", target, ())

    async def termination() -> None:
        """Return at once."""

    monkeypatch.setattr(up, "running_cluster", running)
    monkeypatch.setattr(up, "termination", termination)
    result = CliRunner().invoke(app, ["up"])
    assert result.exit_code == 0, result.exception
    assert f"target       {target}" in result.stdout
    assert "numerics" not in result.stdout
    assert result.stdout.endswith("stopped\n")


def test_up_tells_that_there_is_no_draft_service(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ClusterOptions] = []

    @asynccontextmanager
    async def running(options: ClusterOptions, *_: Any) -> AsyncIterator[Addresses]:
        asked.append(options)
        yield Addresses("127.0.0.1:7700", None, "127.0.0.1:1", ())

    async def termination() -> None:
        """Return at once."""

    monkeypatch.setattr(up, "running_cluster", running)
    monkeypatch.setattr(up, "termination", termination)
    result = CliRunner().invoke(app, ["up", "--draft-model", "none", "--shared-suffixes"])
    assert "draft        none\n" in result.stdout
    assert [(one.draft_model, one.shared_suffixes) for one in asked] == [("none", True)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ClusterOptions(draft_count="99"), "coordinator: --draft-count '99'"),
        (ClusterOptions(policy="eqspec", lanes=2), "--policy eqspec runs one group at a time"),
        (ClusterOptions(kv_memory="lots"), "draft_service: --kv-memory 'lots'"),
        (ClusterOptions(target_port=70000), "target_service: --port '70000'"),
    ],
)
async def test_wrong_settings_are_refused_before_any_service_starts(
    options: ClusterOptions, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """review G9"""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", _never)
    with pytest.raises(StartupError, match=words):
        async with running_cluster(options):
            pass


async def test_a_port_that_is_taken_or_asked_for_twice_is_refused_before_any_service_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """review G9"""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", _never)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"cannot listen on 127.0.0.1:{port}.*another --coordinator-port"):
            async with running_cluster(ClusterOptions(coordinator_port=port)):
                pass
        with pytest.raises(AddressInUse, match="choose another --health-port"):
            check_ports_free(TargetSettings(health_port=port).listens)
    # Free again: the check held nothing.
    check_ports_free([Listening("--port", "127.0.0.1", port)])
    with pytest.raises(AddressInUse, match="another --target-port"):
        async with running_cluster(replace(ClusterOptions(), draft_port=port, target_port=port)):
            pass


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("bind", PermissionError(errno.EACCES, "Permission denied"), "here:80: Permission denied; .*--port"),
        ("socket", OSError(errno.EAFNOSUPPORT, "Address family not supported"), "here:80: Address family not sup"),
        ("getaddrinfo", socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "here:80: Name or service"),
    ],
)
def test_what_keeps_a_service_from_listening_is_told_in_the_systems_words(
    call: str, error: OSError, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every failure was reported as a port in use, or without a remedy."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 0, 0, "", ("127.0.0.1", 0))])
    monkeypatch.setattr(socket.socket if call == "bind" else socket, call, fail)
    with pytest.raises(StartupError, match=f"cannot listen on {words}") as raised:
        check_ports_free([Listening("--port", "here", 80)])
    assert not isinstance(raised.value, AddressInUse)


@pytest.mark.parametrize("port", [0, 7707])
async def test_a_host_of_another_machine_is_named_by_server_and_metrics_alike(port: int) -> None:
    words = f"cannot listen on 192.0.2.1:{port}: Cannot assign requested address; choose a host of this machine"
    with pytest.raises(StartupError, match=words):
        async with running_server("192.0.2.1", port, [], lambda server: None, grace_s=0):
            pass
    with pytest.raises(StartupError, match=words), metrics_served(CollectorRegistry(), "192.0.2.1", port):
        pass


@pytest.mark.parametrize("port", [0, 7707])
@pytest.mark.parametrize("host", ["192.0.2.1", "foo..test", "a" * 64])
def test_a_host_that_nobody_can_listen_on_is_named_before_a_model_loads(host: str, port: int) -> None:
    """With any free port it showed once the model was loaded, and one without a form in DNS was a traceback."""
    with pytest.raises(StartupError, match=f"cannot listen on {host}:{port}: .*choose a host of this machine"):
        check_ports_free(TargetSettings(host=host, port=port).listens)


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("PACELINE_TARGET_KV_MEMROY", "there is no such setting; did you mean PACELINE_TARGET_KV_MEMORY"),
        ("PACELINE_COORDINATOR_XYZZY", "there is no such setting; --help lists"),
        ("PACELINE_TARGTE_MODEL", "no service reads it.*did you mean PACELINE_TARGET_MODEL"),
        (
            "PACELINE_KV_MEMORY",
            "names begin with PACELINE_COORDINATOR_, .*, PACELINE_TARGET_, PACELINE_GATEWAY_$",
        ),
    ],
)
def test_a_misspelled_variable_is_named_with_what_was_meant(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """review G9"""
    monkeypatch.setenv(name, "1")
    with pytest.raises(StartupError, match=f"{name} is set.*{words}"):
        plan_cluster(ClusterOptions())


def test_a_command_that_starts_no_services_refuses_variables_of_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """review G9"""
    monkeypatch.setenv("PACELINE_TARGTE_MODEL", "builtin:target")
    result = CliRunner().invoke(app, ["generate", "hello", "--address", "127.0.0.1:1"])
    assert isinstance(result.exception, StartupError)
    assert "PACELINE_TARGTE_MODEL" in result.exception.message


def test_a_misspelled_variable_hides_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TARGTE_MODEL", "builtin:target")
    result = CliRunner().invoke(app, ["generate", "--help"])
    assert result.exit_code == 0, result.exception
    assert "--max-new-tokens" in result.stdout


def test_what_kubernetes_tells_of_its_services_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PACELINE_GATEWAY_PORT": "tcp://10.0.0.1:80",
        "PACELINE_TARGET_SERVICE_HOST": "10.0.0.1",
        "PACELINE_TARGET_SERVICE_PORT_GRPC": "7702",
        "PACELINE_TARGET_PORT_7702_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    plan_cluster(ClusterOptions())
    check_variables()


def test_the_variables_of_one_service_do_not_trouble_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_COORDINATOR_WINDOW", "5")
    assert plan_cluster(ClusterOptions()).coordinator.settings.window == 5
    server_options(TargetSettings())
