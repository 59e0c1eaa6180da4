"""The page of settings equals the code, and the other pages name only settings that are there."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import huggingface_hub.constants
import opentelemetry.environment_variables
import opentelemetry.sdk.environment_variables
import pytest
import typer

from coordinator.config import CoordinatorSettings
from draft_service.config import DraftSettings
from paceline.cli.app import app
from paceline.cli.options import ClusterFlags
from paceline.gateway.config import GatewaySettings
from paceline.process.cluster_plan import ClusterOptions, _asked
from paceline.process.variables import SERVICES
from target_service.config import TargetSettings
from tests.house.listing import PAGES, ROOT, tracked

PAGE = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
SETTINGS = (CoordinatorSettings, DraftSettings, TargetSettings, GatewaySettings)
SERVING: dict[str, type[Any]] = {
    "paceline gateway": GatewaySettings,
    **dict.fromkeys(("-m coordinator", "paceline-coordinator"), CoordinatorSettings),
    **dict.fromkeys(("-m draft_service", "paceline-draft"), DraftSettings),
    **dict.fromkeys(("-m target_service", "paceline-target"), TargetSettings),
}
"""Settings of services, by the ends of the commands that start them."""
PRODUCT = ("paceline", "coordinator", "draft_service", "target_service", "hatch_build.py")
PREFIXED = re.compile(r"(OTEL|HF|GRPC|OMP|CUDA|TORCH|PYTORCH|PACELINE)(_[A-Z0-9]+)+")
"""A variable's name wherever it stands: it may be read by a function that is given the name."""


def _named_by(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions with which a node asks for a variable."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ"), slice=name):
            yield name
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ")), args=[name, *_]):
            yield name
        case ast.Call(func=ast.Attribute(attr="getenv"), args=[name, *_]):
            yield name
        case ast.Compare(left=name, comparators=[ast.Attribute(attr="environ")]):
            yield name
        case ast.keyword(arg="envvar", value=name):
            yield name
        case ast.Constant(value=str(text)) if PREFIXED.fullmatch(text):
            yield node


def variables_read(code: str) -> set[str]:
    names = {name for node in ast.walk(ast.parse(code)) for name in _named_by(node)}
    return {one.value for one in names if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def names_of(kind: type[Any]) -> set[str]:
    return {f"{kind.model_config['env_prefix']}{name.upper()}" for name in kind.model_fields}


def test_the_page_is_what_its_script_writes() -> None:
    assert runpy.run_path(str(ROOT / "scripts/settings"))["page"]() == PAGE, "run .venv/bin/python scripts/settings"


def test_every_variable_that_the_code_reads_is_on_the_page() -> None:
    found = {name for path in tracked(*PRODUCT) if path.suffix == ".py" for name in variables_read(path.read_text())}
    assert {"OTEL_TRACES_EXPORTER", "PACELINE_TARGET_MODEL", "CXX"} <= found
    assert not [name for name in sorted(found) if f"`{name}`" not in PAGE]


@pytest.mark.parametrize(
    "code",
    [
        "os.environ['A']",
        "os.environ.get('A', '')",
        "environ.environ.pop('A')",
        "os.getenv('A')",
        "'A' in os.environ",
        "Option(envvar='A')",
    ],
)
def test_a_variable_is_found_however_the_code_asks_for_it(code: str) -> None:
    assert variables_read(code) == {"A"}


def test_every_variable_of_every_service_has_its_row() -> None:
    rows = {line.split(" | ")[1].strip("`") for line in PAGE.splitlines() if line.startswith("| `--") and "_" in line}
    assert set.union(*map(names_of, SETTINGS)) <= rows


def test_every_setting_of_a_service_has_a_unit_and_a_meaning() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if "| `PACELINE_" in line]
    assert {len(row) for row in rows} == {5}
    assert not [flag for flag, *_, value, _ in rows if value.startswith("number")]


def test_variables_of_other_programs_are_known_to_them() -> None:
    telemetry = {*dir(opentelemetry.environment_variables), *dir(opentelemetry.sdk.environment_variables)}
    hub = Path(huggingface_hub.constants.__file__).parent
    of_hub = "".join(path.read_text(encoding="utf-8") for path in (hub / "constants.py", hub / "utils/_auth.py"))
    named = re.findall(r"^\| `((?:OTEL|HF)_\w+)` ", PAGE, re.MULTILINE)
    assert len(named) > 10
    assert not [name for name in named if name not in telemetry and f'"{name}"' not in of_hub]


def told_by(flag: str) -> list[Any]:
    """Return the settings of the services that a flag of `paceline up` is passed on to."""
    given: dict[str, Any] = {flag: "given"}
    options = ClusterOptions(**given)
    return [kind for role, kind in zip(SERVICES, SETTINGS, strict=True) if flag in _asked(role, options)]


def test_defaults_in_the_help_of_commands_are_those_of_the_services() -> None:
    hints = get_type_hints(ClusterFlags, include_extras=True)
    said = {name: hint.__metadata__[0].help.partition("Unset: ")[2] for name, hint in hints.items()}
    for name, words in said.items():
        for field in (kind.model_fields[name] for kind in told_by(name) if name in kind.model_fields):
            default = field.default if field.default is not None else 2  # --lanes: unset means 2, or 1
            assert re.match(rf"{default}\b", words, re.IGNORECASE), f"--{name} is {default}, and help says {words!r}"


@pytest.mark.parametrize("path", [*PAGES, *tracked("deploy/*.y*ml", "deploy/*.env")], ids=lambda path: path.name)
def test_pages_and_manifests_name_no_variable_that_is_not_there(path: Path) -> None:
    named = set(
        re.findall(r"PACELINE_(?:COORDINATOR|DRAFT|TARGET|GATEWAY)(?:_[A-Z0-9]+)+\b", path.read_text(encoding="utf-8"))
    )
    links = {name for name in named if name.endswith(("_SERVICE_HOST", "_SERVICE_PORT"))}
    assert named - links <= set.union(*map(names_of, SETTINGS))


def test_variables_of_other_programs_that_manifests_set_are_on_the_page() -> None:
    texts = [path.read_text(encoding="utf-8") for path in tracked("deploy/*.y*ml", "deploy/*.env")]
    named = {name for text in texts for name in re.findall(r"\b(?:HF|OTEL)_[A-Z_]+\b", text)}
    assert "HF_HUB_OFFLINE" in named
    assert not [name for name in sorted(named) if f"`{name}`" not in PAGE]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_name_no_flag_that_is_not_there(path: Path) -> None:
    """Flags of services and commands stand on the page; those of scripts and measurements in their own code."""
    flag = re.compile(r"`(--[a-z][a-z-]*[a-z])")
    code = (one.read_text(encoding="utf-8") for one in tracked("scripts", "benchmarks/*.py", "training/*.py"))
    own = {word for text in code for word in re.findall(r"--[\w-]+|\w+", text)}
    named = set(flag.findall(path.read_text(encoding="utf-8"))) - set(flag.findall(PAGE))
    assert not [name for name in sorted(named) if not {name, name[2:].replace("-", "_")} & own and name != "--help"]


def flags_of(command: str) -> set[str]:
    """Return the flags of a command of ours, which may start a service; none of another program's."""
    service = next((kind for name, kind in SERVING.items() if command.endswith(name)), None)
    if service:
        return {f"--{name.replace('_', '-')}" for name in service.model_fields}
    found: Any = typer.main.get_command(app)
    for word in command.split()[1:]:
        found = getattr(found, "commands", {}).get(word)
    return {flag for one in found.params for flag in (*one.opts, *one.secondary_opts)} if found else set()


def commands_of(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of ours that a page shows, and the flags that each is given there."""
    called = r"paceline (?:laws )?[a-z][a-z-]+|paceline-(?:coordinator|draft|target)|python -m \w+"
    for command, given in re.findall(rf"({called})((?: [^\n`;&|#]*)?)", page.replace("\\\n", " ")):
        yield command, re.findall(r"(?<= )--[a-z][a-z-]*[a-z]", given)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_that_a_page_shows_take_the_flags_that_they_are_given(path: Path) -> None:
    shown = [(name, flags, flags_of(name)) for name, flags in commands_of(path.read_text(encoding="utf-8"))]
    wrong = [(name, flag) for name, flags, known in shown if known for flag in flags if flag not in known]
    assert not [one for one in wrong if one[1] not in ("--help", "--version")]


def test_commands_with_flags_are_found_on_pages() -> None:
    page = "`paceline up --http 8000`\npaceline laws fit a \\\n  --depth 3 # --not\npython -m coordinator --draft a\n"
    found = dict(commands_of(page))
    assert found == {"paceline up": ["--http"], "paceline laws fit": ["--depth"], "python -m coordinator": ["--draft"]}
    assert all(set(flags) <= flags_of(name) for name, flags in found.items())
    assert not flags_of("paceline rollout")
