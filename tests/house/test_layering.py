"""Import rules that pyproject.toml cannot express; `scripts/check` holds the others."""

import tomllib

import pytest

from tests.commands import python_code
from tests.house.listing import ROOT, SERVICES, sources

HEAVY = {"torch", "transformers", "safetensors"}
SPAN_MAKERS = {f"paceline/observe/spans/{name}.py" for name in ("provider", "sampler", "file_exporter")}
OTLP = {"paceline/observe/report/receiver.py"}


def test_the_opentelemetry_sdk_and_its_wire_format_stay_where_spans_leave_and_arrive() -> None:
    users = {
        package: {path for path, names in sources("paceline", *SERVICES) if any(package in name for name in names)}
        for package in ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
    }
    assert users["opentelemetry.sdk"] | users["opentelemetry.exporter"] <= SPAN_MAKERS
    assert users["opentelemetry.proto"] <= OTLP


def test_a_service_without_tracing_loads_no_opentelemetry_sdk() -> None:
    status, _, err = python_code("import sys, coordinator.__main__; sys.exit('opentelemetry.sdk' in sys.modules)")
    assert status == 0, err


def test_the_coordinator_and_the_command_line_start_without_torch() -> None:
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in sorted(HEAVY))
    status, _, err = python_code(
        f"import sys; {blocked}; import coordinator.__main__, paceline.client, paceline.cli.app"
    )
    assert status == 0, err


@pytest.mark.review
def test_nothing_private_of_opentelemetry_is_used_and_its_versions_are_capped() -> None:
    """review E3"""
    private = {
        path: name
        for path, names in sources("paceline", *SERVICES)
        for name in names
        if name.startswith("opentelemetry") and any(part.startswith("_") for part in name.split("."))
    }
    assert not private
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = [one for one in project["dependencies"] if one.startswith("opentelemetry")]
    assert ours
    assert [one for one in ours if "<" not in one] == []
