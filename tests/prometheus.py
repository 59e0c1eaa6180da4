"""The real Prometheus and its promtool, as Debian packages them."""

import asyncio
import json
import shutil
import urllib.parse
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.ports import port_for_later
from tests.tools import missing


def prometheus_tool(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; without it skip the test, or fail it if `REQUIRE_TOOLS` is set."""
    found = shutil.which(name)
    if found is None:
        missing(f"{name} is not installed; scripts/prometheus installs the Debian package")
    return found


async def promtool(*arguments: str, stdin: bytes | None = None, folder: Path | None = None) -> tuple[int, str]:
    """Run promtool; return its status and output."""
    process = await asyncio.create_subprocess_exec(
        prometheus_tool("promtool"), *arguments, stdin=PIPE, stdout=PIPE, stderr=STDOUT, cwd=folder
    )
    said, _ = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, said.decode()


@dataclass(frozen=True)
class Prometheus:
    """Answers queries about the time `at`, in seconds since 1970, or about now."""

    url: str
    at: str | None = None

    async def get(self, path: str, **parameters: str) -> Any:
        """Return `data` of an answer of the HTTP API; raise ValueError with the reason of a refusal."""

        def fetch() -> Any:
            query = urllib.parse.urlencode(parameters)
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}") as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                raise ValueError(error.read().decode()) from None

        return (await asyncio.to_thread(fetch))["data"]

    async def query(self, expression: str) -> list[Any]:
        """Return the series of an instant query."""
        time = {} if self.at is None else {"time": self.at}
        data = await self.get("query", query=expression, **time)
        return list(data["result"])

    async def now(self) -> "Prometheus":
        """Return this Prometheus as it stands now: what it fails to scrape later changes none of its answers."""
        _, seconds = (await self.get("query", query="time()"))["result"]
        return replace(self, at=seconds)


@asynccontextmanager
async def running_prometheus(folder: Path, targets: Sequence[str], rules: Path) -> AsyncIterator[Prometheus]:
    """Run a Prometheus that scrapes `targets` every half second, once all of them are up; its data go to `folder`."""
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "paceline", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.json").write_text(json.dumps(config))
    # Prometheus cannot report its port, so it gets a chosen one.
    address = f"127.0.0.1:{port_for_later()}"
    process = await asyncio.create_subprocess_exec(
        prometheus_tool("prometheus"),
        f"--config.file={folder / 'prometheus.json'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    prometheus = Prometheus(f"http://{address}")
    try:
        while not await _all_up(prometheus, len(targets)):
            assert process.returncode is None, f"prometheus ended with status {process.returncode}"
            await asyncio.sleep(0.1)
        yield prometheus
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _all_up(prometheus: Prometheus, count: int) -> bool:
    try:
        return len(await prometheus.query("up == 1")) == count
    except (OSError, ValueError):
        return False
