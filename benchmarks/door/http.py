"""The door as a process, and a client of it that reads streams and times them. Knows nothing of gRPC."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from paceline.process.service_process import running_service

MOST_CONNECTIONS = 512
DATA = "data: "
LAST = "[DONE]"


@dataclass
class Answer:
    """One output, as it was read."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    tool_calls: list[Mapping[str, Any]] = field(default_factory=list)
    first_token_s: float | None = None
    """Seconds until the first token had been read; None for answers that were not streamed."""


class HttpClient:
    """Sends completions, each with its token ids, and raises for every status but 200."""

    def __init__(self, address: str, http: httpx2.AsyncClient) -> None:
        self.address = address
        self._url = f"http://{address}"
        self._http = http

    async def is_well(self) -> bool:
        return (await self._http.get(f"{self._url}/health")).status_code == httpx2.codes.OK

    async def complete(self, body: Mapping[str, Any], path: str = "/v1/completions") -> Answer:
        """Return the answer at its end."""
        response = await self._http.post(self._url + path, json=_asking(body))
        _check(response, response.text)
        choice = response.json()["choices"][0]
        answer = Answer()
        _add(answer, choice, choice.get("message", choice))
        return answer

    async def stream(self, body: Mapping[str, Any], path: str = "/v1/completions") -> Answer:
        """Read the answer piece by piece."""
        answer, began = Answer(), time.perf_counter()
        asking = _asking(body) | {"stream": True}
        async with self._http.stream("POST", self._url + path, json=asking) as response:
            if response.status_code != httpx2.codes.OK:
                await response.aread()
                _check(response, response.text)
            async for line in response.aiter_lines():
                if not line.startswith(DATA) or line == DATA + LAST:
                    continue
                chunk = json.loads(line.removeprefix(DATA))
                if "error" in chunk:
                    raise RuntimeError(f"the stream ended with {chunk['error']}")
                for choice in chunk["choices"]:
                    _add(answer, choice, choice.get("delta", choice))
                if answer.first_token_s is None and answer.token_ids:
                    answer.first_token_s = time.perf_counter() - began
        return answer


def _asking(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "return_token_ids": True}


def _check(response: httpx2.Response, text: str) -> None:
    if response.status_code != httpx2.codes.OK:
        raise RuntimeError(f"the door answered {response.status_code}: {text}")


def _add(answer: Answer, choice: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    answer.token_ids += choice.get("token_ids") or ()
    answer.text += said.get("text") or said.get("content") or ""
    answer.tool_calls += said.get("tool_calls") or ()
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


@asynccontextmanager
async def running_door(coordinators: str, *flags: str) -> AsyncIterator[HttpClient]:
    """Run a gateway; yield a client of it, with as many connections as it has streams."""
    own = ["--coordinator", coordinators, "--port", "0", "--log-level", "error", *flags]
    limits = httpx2.Limits(max_connections=MOST_CONNECTIONS, max_keepalive_connections=MOST_CONNECTIONS)
    async with (
        running_service("paceline.gateway", own) as door,
        httpx2.AsyncClient(limits=limits, timeout=15) as http,
    ):
        yield HttpClient(door.address, http)
