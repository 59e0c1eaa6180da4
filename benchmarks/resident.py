"""Resident memory of a process, as Linux counts it."""

from pathlib import Path


class Resident:
    def __init__(self, process_id: int) -> None:
        self._folder = Path(f"/proc/{process_id}")

    def begin(self) -> int:
        """Return what is resident now, from which the peak is counted from now on."""
        (self._folder / "clear_refs").write_text("5")
        return self._read("VmRSS")

    def peak(self) -> int:
        """Return the most bytes since `begin`, or since the process started."""
        return self._read("VmHWM")

    def parts(self) -> dict[str, int]:
        return {name: self._read(name) for name in ("RssAnon", "RssFile")}

    def _read(self, name: str) -> int:
        """Raise OSError where the process is gone."""
        lines = (self._folder / "status").read_text().splitlines()
        found = next((line for line in lines if line.startswith(f"{name}:")), None)
        if found is None:
            raise ProcessLookupError(f"the process of {self._folder} has ended")  # and has no memory any more
        return 1024 * int(found.split()[1])
