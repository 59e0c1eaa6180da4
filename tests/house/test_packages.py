"""What an index gets: packages lack no file, and ask for all that they import."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.listing import ROOT, SERVICES, sources, tracked

PACKAGES = ("paceline", *SERVICES)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT_EXTRAS = ("coordinator", "paceline/gateway", "paceline/wire", "paceline/observe", "paceline/security")
PARTS_OF_OTHERS = {"pydantic_core", "triton"}
"""Modules that come with pydantic, and with torch where it runs on GPUs."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source package, and from that the wheel without compiled libraries."""
    folder = tmp_path_factory.mktemp("dist")
    _build("sdist", ROOT, folder)
    # Not by `tarfile`, whose older versions know no filter and whose newer ones warn without it.
    subprocess.run(["tar", "-xf", next(folder.glob("*.tar.gz")), "-C", folder], check=True)
    _build("wheel", folder / next(folder.glob("*.tar.gz")).name.removesuffix(".tar.gz"), folder)
    return folder


def _build(target: str, source: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    environment = os.environ | {"HATCH_BUILD_NO_HOOKS": "true"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_wheel_that_is_built_from_the_source_package_has_every_file_of_the_packages(dist: Path) -> None:
    with ZipFile(next(dist.glob("*-none-any.whl"))) as wheel:
        names = wheel.namelist()
    assert {str(path.relative_to(ROOT)) for path in tracked(*PACKAGES)} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == set(PACKAGES)


@pytest.mark.parametrize(
    ("packages", "extras"), [(WITHOUT_EXTRAS, ()), (PACKAGES, ("engine", "bench", "convert", "llama-cpp"))], ids=str
)
def test_every_distribution_that_the_packages_import_is_asked_for(
    packages: tuple[str, ...], extras: tuple[str, ...]
) -> None:
    """Of several distributions of one name, such as `google`, any is enough."""
    asked = _names(PROJECT["dependencies"])
    for extra in extras:
        asked |= _names(PROJECT["optional-dependencies"][extra])
    owners = packages_distributions()
    imported = {name.split(".")[0] for _, names in sources(*packages) for name in names}
    missing = {
        name: owners[name]
        for name in imported & owners.keys() - PARTS_OF_OTHERS
        if not asked & {canonicalize_name(one) for one in owners[name]}
    }
    assert missing == {}


def _names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(one).name) for one in requirements}
