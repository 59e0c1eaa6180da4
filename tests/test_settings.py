"""Flags, environment variables and what wrong ones get."""

import pytest

from coordinator.config import CoordinatorSettings
from draft_service.config import DraftSettings
from paceline.settings import ServiceSettings, parse_settings
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


@pytest.mark.parametrize(
    ("kind", "arguments", "flag"),
    [
        (TargetSettings, ["--port", "70000"], "--port '70000'"),
        (TargetSettings, ["--dtype", "int8"], "--dtype 'int8'"),
        (TargetSettings, ["--kv-memory", "lots"], "--kv-memory 'lots'"),
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
