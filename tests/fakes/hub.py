"""A hub of models on this machine: the few calls with which huggingface_hub finds and fetches a repository's files."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

_INFO = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)/revision/(?P<revision>[^?]+)")
_TREE = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)/tree/(?P<revision>[^?]+)")
_FILE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class FakeHub:
    """Repositories by name. A repository's folders stand for its commits."""

    commits: Mapping[str, Mapping[str, Path]]
    refs: Mapping[str, str]
    """Commits of branches and tags, in every repository."""
    private: Mapping[str, str] = field(default_factory=dict)
    """Tokens that a repository wants."""
    url: str = ""
    fetched: list[str] = field(default_factory=list)
    """Paths of the files that were sent."""

    def answer(self, path: str, token: str, *, with_content: bool) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content."""
        found = next((match for pattern in (_INFO, _TREE, _FILE) if (match := pattern.match(path))), None)
        if not found:
            return 404, {}, b""
        repository, revision = found["repository"], found["revision"]
        if repository not in self.commits or self.private.get(repository, token) != token:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        commit = self.refs.get(revision, revision)
        if commit not in self.commits[repository]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        folder = self.commits[repository][commit]
        if found.re is _INFO:
            return 200, {}, _json({"id": repository, "sha": commit, "siblings": []})
        if found.re is _TREE:
            return 200, {}, _json([_listed(file) for file in sorted(folder.iterdir())])
        content = (folder / found["file"]).read_bytes()
        if with_content:
            self.fetched.append(found["file"])
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"'}, content


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _listed(file: Path) -> dict[str, Any]:
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _oid(file.read_bytes())}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve the hub at `hub.url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            token = self.headers.get("authorization", "").removeprefix("Bearer ")
            status, headers, content = hub.answer(self.path, token, with_content=self.command == "GET")
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
