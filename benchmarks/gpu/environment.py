"""The environment of `scripts/gpu` on a machine without a network; it needs nothing but Python and pip.

    python -m benchmarks.gpu.environment bring WHEELS             where there is a network
    python -m benchmarks.gpu.environment make FOLDER WHEELS       on the machine with the GPU

torch, Triton and CUDA are the machine's own. All else that the machine lacks comes from the folder of wheels.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

PYTHON = "3.12"
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)), "manylinux2014_x86_64")
"""Those of Ubuntu 24.04, whose glibc is 2.39; pip takes each name by itself, and not what an older one allows."""
GIVEN = ("torch", "triton", "paceline")
"""What is never brought."""
BUILDING = ("hatchling", "editables")
TESTING = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
"""What the tests of kernels need of the development packages."""
ROOT = Path(__file__).parents[2]


def requirements() -> list[str]:
    """Return what the stages need beside what is given, by pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    tests = [one for one in extras["dev"] if name_of(one) in TESTING]
    wanted = [*project["dependencies"], *extras["engine"], *extras["bench"], *tests]
    return [*(one.split("#")[0].strip() for one in wanted if name_of(one) not in GIVEN), *BUILDING]


def name_of(requirement: str) -> str:
    """Return the name that a requirement such as `grpcio>=1.85.1` begins with."""
    end = next((place for place, sign in enumerate(requirement) if not (sign.isalnum() or sign in "-_.")), None)
    return requirement[:end]


def bring(wheels: Path) -> None:
    """Download the wheels for a machine with this Python and an x86-64 processor."""
    platforms = [word for one in PLATFORMS for word in ("--platform", one)]
    words = ["download", "--only-binary", ":all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    pip(*words, "--dest", str(wheels), *requirements())


def make(folder: Path, wheels: Path) -> None:
    """Make a virtual environment that sees this Python's packages, and install what they lack."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    seen = [path for path in sys.path if path.endswith("-packages")]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "machine.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    python, offline = str(folder / "bin" / "python"), ("--no-index", "--find-links", str(wheels.resolve()))
    pip("--python", python, "install", *offline, *requirements())
    pip("--python", python, "install", *offline, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def pip(*words: str) -> None:
    # The kernels for a CPU take minutes to compile, and no stage runs them.
    environment = os.environ | {"HATCH_BUILD_NO_HOOKS": "true"}
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words], check=True, env=environment)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bring", wheels]:
            bring(Path(wheels))
        case ["make", folder, wheels]:
            make(Path(folder), Path(wheels))
        case _:
            sys.exit(__doc__)
