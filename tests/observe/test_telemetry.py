"""Log lines: their form, the span they name, and texts that they must not contain."""

import json
import logging
import sys
import threading
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider

from paceline.observe.logs import LogFormat, active_span, configure_logs, forward_library_logs
from tests.commands import python_code


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def fail(prompt: str) -> None:
    try:
        raise ValueError(f"a prompt of {len(prompt)} characters")
    except ValueError as error:
        structlog.get_logger().error("unexpected", exc_info=error)


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_shows_no_local_variables_for_they_hold_prompts(
    log_format: LogFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs(log_format, "info", "coordinator")
    fail("a private " + "matter")
    written = capsys.readouterr().err
    assert "ValueError: a prompt of 16 characters" in written
    assert "private matter" not in written


def test_a_line_written_in_a_span_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json", "info", "coordinator")
    log = structlog.get_logger()
    log.info("before")
    with TracerProvider().get_tracer("test").start_as_current_span("one"):
        span = active_span()
        log.info("inside")
        log.info("its own", trace_id="other")
    before, inside, own = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert span is not None
    assert "trace_id" not in before
    assert (inside["trace_id"], inside["span_id"]) == (span.trace_id, span.span_id)
    assert own["trace_id"] == "other"
    assert before["service"] == "coordinator"


def test_a_line_of_any_thread_names_its_service(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a model's thread, such as `the device is lost`, named none."""
    configure_logs("json", "info", "target_service")
    thread = threading.Thread(target=lambda: structlog.get_logger().error("the device is lost"))
    thread.start()
    thread.join()
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["event"], line["service"]) == ("the device is lost", "target_service")


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    """Yield a library's logger; forwarding's changes to the process are undone afterwards."""
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    before = root.handlers, root.level
    yield logging.getLogger("library")
    root.handlers, root.level = before
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks


def test_a_librarys_wrong_log_call_is_no_error_of_the_request_it_happens_in(
    library: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs("json", "info", "coordinator")
    forward_library_logs()
    library.error("%d tokens", "a private matter")
    library.error("one %s, two %s", "a private matter")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["event"], line["reason"]) for line in lines] == [
        ("error", "a line that cannot be written", "TypeError")
    ] * 2
    assert all("test_telemetry.py:" in line["where"] and "private" not in json.dumps(line) for line in lines)


@pytest.mark.parametrize(("number", "level"), [(31, "warning"), (35, "warning"), (45, "error"), (99, "critical")])
def test_a_librarys_own_level_is_the_one_it_reaches(
    library: logging.Logger, capsys: pytest.CaptureFixture[str], number: int, level: str
) -> None:
    configure_logs("json", "info", "coordinator")
    forward_library_logs()
    library.log(number, "notable")
    (line,) = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (line["level"], line["event"]) == (level, "notable")


def test_without_opentelemetry_no_span_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("one"):
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        assert active_span() is None


TROUBLE = """
import asyncio, logging, threading, warnings
from paceline.process.service import run_service
from paceline.process.settings import parse_settings
from target_service.config import TargetSettings
from paceline.errors import StartupError

async def serve():
    warnings.warn("a library's warning")
    logging.getLogger("library").error("a library's line")
    failing = threading.Thread(target=lambda: 1 / 0)
    failing.start()
    failing.join()
    raise {error}

run_service("target_service", parse_settings(TargetSettings, "target_service", ["--log-format", "json"]), serve())
"""


@pytest.mark.review
@pytest.mark.parametrize(
    ("error", "event"), [("StartupError('no start')", "no start"), ("ValueError('x')", "unexpected error")]
)
def test_every_line_of_a_json_log_is_json_whoever_wrote_it(error: str, event: str) -> None:
    """review G10"""
    status, _, err = python_code(TROUBLE.format(error=error))
    assert status == 1
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line["level"] for line in lines] == ["info", "warning", "error", "critical", "critical"]
    assert lines.pop(0)["event"] == "starting"
    assert "a library's warning" in lines[0]["event"]
    assert lines[1]["event"] == "a library's line"
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert lines[3]["event"] == event
