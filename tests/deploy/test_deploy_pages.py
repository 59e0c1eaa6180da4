"""What the pages and comments about deployment name is there."""

import re

from tests.manifests import KUBERNETES, SETTINGS

FILES = [
    *(file for pattern in ("*.yaml", "*.env") for file in KUBERNETES.rglob(pattern)),
    *(KUBERNETES.parent / name for name in ("Dockerfile", "README.md", "compose.yaml", "observability/README.md")),
]
OTHER_FLAGS = {"--write", "--requests", "--no-speculation", "--build", "--secret", "--authority"}
"""Flags in prose that belong to scripts, docker, compose and `paceline`, and to no service."""


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
