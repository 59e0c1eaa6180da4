"""Flags, environment variables, and errors for wrong ones."""

import pytest

from coordinator.config import CoordinatorSettings
from coordinator.security import models_security
from draft_service.config import DraftSettings
from paceline.errors import StartupError
from paceline.process.service import server_options
from paceline.process.settings import ServiceSettings, parse_settings
from target_service.config import TargetSettings


def test_flags_win_over_the_environment_and_both_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TARGET_KV_MEMORY", "512MiB")
    monkeypatch.setenv("PACELINE_TARGET_THREADS", "3")
    settings = parse_settings(TargetSettings, "target_service", ["--threads", "2", "--dtype", "bfloat16"])
    assert (settings.kv_memory, settings.threads, settings.dtype) == ("512MiB", 2, "bfloat16")
    assert settings.model == "builtin:target"


def test_each_service_has_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DRAFT_PORT", "7001")
    assert parse_settings(DraftSettings, "draft_service", []).port == 7001
    assert parse_settings(TargetSettings, "target_service", []).port == 0


PAIR = ["--draft", "x:1", "--target", "x:2"]
TLS = ["--tls-certificate", "c", "--tls-key", "k"]


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (TargetSettings, ["--tls-key", "k"], "--tls-certificate and --tls-key go together"),
        (TargetSettings, ["--tls-client-ca", "ca"], "--tls-client-ca needs TLS"),
        (CoordinatorSettings, [*PAIR, "--tls-allowed-names", "a"], "give --tls-client-ca too"),
        (CoordinatorSettings, [*PAIR, *TLS, "--tls-client-ca", "ca", "--tls-allowed-names", " , "], "holds no name"),
        (DraftSettings, ["--describe", "false"], "name it in --tls-allowed-names"),
        (DraftSettings, [*TLS, "--tls-client-ca", "ca", "--describe", "false"], "name it in --tls-allowed-names"),
    ],
)
def test_security_settings_that_do_not_go_together_are_refused(
    kind: type[ServiceSettings], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(kind, "service", arguments)
    assert words in capsys.readouterr().err


def test_allowed_names_are_separated_by_commas() -> None:
    flags = [*TLS, "--tls-client-ca", "ca", "--tls-allowed-names", "coordinator.test, spiffe://test/gateway"]
    assert parse_settings(TargetSettings, "t", flags).allowed_names == {"coordinator.test", "spiffe://test/gateway"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost"])
def test_plaintext_needs_no_asking_on_loopback(host: str) -> None:
    options = server_options(TargetSettings(host=host))
    assert options.certificates is None
    open_security = CoordinatorSettings(draft=f"{host}:1", target="dns:///localhost:2")
    for address in (open_security.draft, open_security.target):
        models_security(open_security).check(address)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "target", "localhost.example.test"])
def test_plaintext_beyond_loopback_needs_asking(host: str) -> None:
    with pytest.raises(StartupError, match="give --tls-certificate and --tls-key, or --plaintext true"):
        server_options(TargetSettings(host=host))
    server_options(TargetSettings(host=host, plaintext=True))
    settings = CoordinatorSettings(draft=f"{host}:1", target="localhost:2")
    with pytest.raises(StartupError, match="--models-ca"):
        models_security(settings).check(settings.draft)
    models_security(settings.model_copy(update={"plaintext": True})).check(settings.draft)


@pytest.mark.parametrize(
    ("arguments", "variables", "line"),
    [
        (["--batch-size", "0"], {}, "--batch-size '0': give 1 or more"),
        (["--lanes=17"], {"PACELINE_COORDINATOR_LANES": "18"}, "--lanes '17': give 16 or less"),
        ([], {"PACELINE_COORDINATOR_LANES": "18"}, "PACELINE_COORDINATOR_LANES '18': give 16 or less"),
        (["--draft-count", "many"], {}, "--draft-count 'many': give a whole number, or give 'auto'"),
        (["--policy", "fifo"], {}, "--policy 'fifo': give 'continuous', 'eqspec' or 'exspec'"),
        (["--plaintext", "maybe"], {}, "--plaintext 'maybe': give true or false"),
        (["--call-timeout-s", "0"], {}, "--call-timeout-s '0': give more than 0"),
        (["--call-timeout-s", "inf"], {}, "--call-timeout-s 'inf': give a number"),
        (["--max-message-bytes", "8MiB"], {}, "--max-message-bytes '8MiB': give a whole number"),
        # gRPC keeps it in 32 bits; a larger number ended the service with a traceback.
        (["--max-message-bytes", "99999999999"], {}, "--max-message-bytes '99999999999': give 2147483647 or less"),
        (["--draft", "{x}"], {}, "--draft '{x}': '{x}' is no HOST:PORT; give one, or several separated by commas"),
    ],
)
def test_an_error_names_what_was_given_its_value_and_a_remedy(
    arguments: list[str],
    variables: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        parse_settings(CoordinatorSettings, "coordinator", [*PAIR, *arguments])
    assert capsys.readouterr().err == f"coordinator: {line}\n"


def test_a_setting_that_is_needed_is_named_as_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(CoordinatorSettings, "coordinator", ["--draft", "x:1"])
    assert capsys.readouterr().err == ("coordinator: --target is needed; give it, or set PACELINE_COORDINATOR_TARGET\n")


@pytest.mark.parametrize(
    ("kind", "arguments", "flag"),
    [
        (TargetSettings, ["--port", "70000"], "--port '70000'"),
        (TargetSettings, ["--dtype", "int8"], "--dtype 'int8'"),
        (TargetSettings, ["--kv-memory", "lots"], "--kv-memory 'lots'"),
        (TargetSettings, ["--memory", "60%"], "--memory '60%': give bytes such as 16GiB"),
        (TargetSettings, ["--memory", "1,5GiB"], "--memory '1,5GiB': give bytes such as 16GiB"),
        (TargetSettings, ["--kv-memory", "16GiB/2"], "--kv-memory '16GiB/2': give bytes such as 512MiB"),
        (TargetSettings, ["--max-message-bytes", "65536"], "--max-message-bytes '65536': give 131072 or more"),
        (
            DraftSettings,
            ["--memory", "2GiB", "--kv-memory", "1GiB"],
            "--memory 2GiB and --kv-memory 1GiB are both given",
        ),
        (DraftSettings, ["--threads", "0"], "--threads '0'"),
        (CoordinatorSettings, ["--draft", "x:1"], "--target"),
        (CoordinatorSettings, ["--draft", "x:1", "--target", "x:2", "--batch-size", "0"], "--batch-size '0'"),
        (CoordinatorSettings, ["--draft", "x:1", "--target", "x:2", "--draft-count", "-1"], "--draft-count '-1'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(
    kind: type[ServiceSettings], arguments: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_settings(kind, "service", arguments)
    assert exit_.value.code == 2
    assert f"service: {flag}" in capsys.readouterr().err


def test_an_unknown_flag_is_told_without_a_usage_of_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """The error stood below thirty lines."""
    with pytest.raises(SystemExit):
        parse_settings(TargetSettings, "target_service", ["--batch-size", "8"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.endswith("target_service [--SETTING VALUE ...]")
    assert error.endswith("unrecognized arguments: --batch-size 8")


def test_help_says_that_settings_are_variables_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(TargetSettings, "target_service", ["--help"])
    assert "--log-level is PACELINE_TARGET_LOG_LEVEL" in " ".join(capsys.readouterr().out.split())
