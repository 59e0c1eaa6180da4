"""Compiles the engine's kernels and the coordinator's index of suffixes when the package is built or installed.

Without a compiler the package gives the same tokens, more slowly: passes on a CPU, and drafts that no model makes are
missing. Nothing is asked of those who install it.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (Path("paceline/engine/native/kernels.cpp"), Path("coordinator/drafting/native/suffixes.cpp"))
# No -ffast-math: a number that is none must stay one.
OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared", "-Wno-psabi")
# GCC makes about the same code of one file by parts then, with make on all cores: the kernels take a minute on one.
BY_PARTS = "-flto=auto"


def library_of(source: Path) -> Path:
    return source.with_name(f"lib{source.stem}.so")


class CompiledHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is `standard` or `editable`; both leave each library beside its source."""
        for source in SOURCES:
            try:
                reason = self._compile(Path(self.root, source))
            except OSError as error:
                reason = str(error)
            if reason:
                self.app.display_warning(f"{library_of(source).name} is left out: {reason}")
                continue
            self._add(library_of(source), build_data)

    def _add(self, library: Path, build_data: dict[str, Any]) -> None:
        build_data["artifacts"].append(str(library))
        # It asks nothing of Python, and something of the machine.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def _compile(self, source: Path) -> str:
        """Return why there is no library; empty when there is one."""
        library = library_of(source)
        library.unlink(missing_ok=True)
        command = shlex.split(os.environ.get("CXX") or "c++")
        if shutil.which(command[0]) is None:
            return f"there is no C++ compiler {command[0]!r}"
        headers = sorted(source.parent.glob("*.h"))
        checksum = zlib.crc32(b"".join(one.read_bytes() for one in (source, *headers)))
        command += [*OPTIONS, f"-DPACELINE_SOURCE={checksum}u", str(source), "-o", str(library)]
        # Another compiler may lack the linker for parts.
        for ways in ([BY_PARTS], []):
            made = subprocess.run([*command, *ways], capture_output=True, text=True)
            if not made.returncode:
                return ""
        library.unlink(missing_ok=True)
        return made.stderr or "the compiler failed"
