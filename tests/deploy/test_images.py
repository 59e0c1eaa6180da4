"""What the images are made of: pinned packages that pyproject.toml allows, and our code in the last layer."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.manifests import KUBERNETES

DEPLOY = KUBERNETES.parent
PROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
NEEDS = {
    "coordinator": PROJECT["project"]["dependencies"],
    "engine": PROJECT["project"]["optional-dependencies"]["engine"],
    "build": PROJECT["build-system"]["requires"],
}
MODEL_SERVICES = ["draft", "target"]
OTHERS = ["coordinator", "gateway"]


def pins(name: str) -> dict[str, str]:
    """Return the versions of a lock's packages."""
    text = (DEPLOY / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def stages() -> dict[str, str]:
    """Return the Dockerfile's stages by name, each with the instruction that begins it."""
    found = re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {one.split()[3]: one for one in found}


def built_on(stage: str) -> list[str]:
    """Return a stage and those whose layers it has, the lowest last."""
    base = stages()[stage].split()[1]
    return [stage, *(built_on(base) if base in stages() else [])]


def made_of(stage: str) -> set[str]:
    """Return all stages that are built for one: those that it is built on, and those that it takes files from."""
    text = stages()[stage]
    named = {text.split()[1], *re.findall(r"from=([\w-]+)", text)} & set(stages())
    return {stage, *(one for name in named for one in made_of(name))}


@pytest.mark.review
@pytest.mark.parametrize("name", NEEDS)
def test_the_pinned_versions_are_those_that_the_project_allows(name: str) -> None:
    """Review D7: only torch was pinned."""
    pinned = pins("coordinator") | pins("torch") | pins(name)
    for need in map(Requirement, NEEDS[name]):
        assert need.specifier.contains(pinned[need.name.replace("_", "-")]), f"{need}: run scripts/lock"


@pytest.mark.parametrize("name", NEEDS)
def test_every_pin_has_a_hash(name: str) -> None:
    pinned = (DEPLOY / "requirements" / f"{name}.txt").read_text()
    assert len(re.findall(r"^\S+==\S+ \\\n +--hash=sha256:", pinned, re.MULTILINE)) == len(pins(name)) > 0


def test_no_package_is_pinned_twice_and_the_coordinator_gets_none_of_the_engines() -> None:
    coordinator, engine = pins("coordinator"), pins("engine")
    assert not set(coordinator) & set(engine)
    assert not {"torch", "transformers", "safetensors"} & set(coordinator)
    assert set(pins("torch")) == {"torch"} and "torch" not in engine


@pytest.mark.review
@pytest.mark.parametrize("name", [*OTHERS, *MODEL_SERVICES])
def test_every_image_has_what_is_compiled_and_not_what_compiled_it(name: str) -> None:
    """Review D7: g++ in the coordinator's build, which had nothing to compile then."""
    assert [one for one in made_of(name) if "g++" in stages()[one]]
    assert not [one for one in built_on(name) if "g++" in stages()[one]]


@pytest.mark.parametrize("name", MODEL_SERVICES)
def test_an_image_whose_torch_brings_triton_has_what_triton_compiles_with(name: str) -> None:
    """Triton found no compiler, so no model service of the overlay gpu would have started."""
    steps = re.findall(r"^RUN .*", "".join(stages()[one] for one in reversed(built_on(name))), re.MULTILINE)
    (torch,) = (place for place, step in enumerate(steps) if "torch.txt" in step)
    (compiler,) = (
        place for place, step in enumerate(steps) if {"gcc", "libc6-dev", "libpython3-dev"} <= {*step.split()}
    )
    assert torch < compiler and 'find_spec("triton")' in steps[compiler]


@pytest.mark.review
@pytest.mark.parametrize("name", [*OTHERS, *MODEL_SERVICES])
def test_our_code_is_in_the_last_layer_alone(name: str) -> None:
    """Review D7: torch, CUDA and code were in one layer."""
    layers = re.findall(
        r"^(?:RUN|COPY|ADD) .*", "".join(stages()[one] for one in reversed(built_on(name))), re.MULTILINE
    )
    *below, last = layers
    assert "/mnt/wheel/*.whl" in last and "--no-deps" in last
    assert not [one for one in below if "whl" in one or re.search("source=paceline(?!/builtin/)", one)]
    assert not [one for one in below if "pip" in one and "-r /mnt/" not in one]


def test_files_of_the_images_are_for_any_user() -> None:
    """OpenShift gives each namespace users of its own."""
    assert set(re.findall(r"^USER (.*)", DOCKERFILE, re.MULTILINE)) == {"10001:10001"}  # numbers, which need no name
    assert not re.search(r"chown|chmod|umask|useradd|adduser", DOCKERFILE)
    assert "HOME=/tmp" in DOCKERFILE


def test_the_build_fetches_no_frontend_and_no_package_that_is_not_pinned() -> None:
    assert "syntax=" not in DOCKERFILE
    for one in re.findall(r"pip (?:--python \S+ )?(?:install|wheel) (.*)", DOCKERFILE):
        assert "--require-hashes" in one or "--no-deps --no-index" in one or "-r /mnt/torch.txt" in one
