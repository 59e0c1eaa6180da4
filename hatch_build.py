"""Compiles the engine's kernels when the package is built or installed, where there is a compiler.

Without one the package works the same, on a CPU more slowly; nothing is asked of those who install it.
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

SOURCE = Path("paceline/engine/native/kernels.cpp")
LIBRARY = SOURCE.with_name("libkernels.so")
# No -ffast-math: a number that is none must stay one.
OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared", "-Wno-psabi")


class KernelsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is `standard` or `editable`; both leave the library beside its source."""
        try:
            reason = self._compile(Path(self.root))
        except OSError as error:
            reason = str(error)
        if reason:
            self.app.display_warning(f"the engine's kernels are left out: {reason}")
            return
        build_data["artifacts"].append(str(LIBRARY))
        # It asks nothing of Python, and something of the machine.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def _compile(self, root: Path) -> str:
        """Return why there is no library; empty when there is one."""
        source, library = root / SOURCE, root / LIBRARY
        library.unlink(missing_ok=True)
        command = shlex.split(os.environ.get("CXX") or "c++")
        if shutil.which(command[0]) is None:
            return f"there is no C++ compiler {command[0]!r}"
        headers = sorted(source.parent.glob("*.h"))
        checksum = zlib.crc32(b"".join(one.read_bytes() for one in (source, *headers)))
        command += [*OPTIONS, f"-DPACELINE_SOURCE={checksum}u", str(source), "-o", str(library)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            library.unlink(missing_ok=True)
        return made.stderr or "the compiler failed" if made.returncode else ""
