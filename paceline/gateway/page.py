"""The page at `/`: the files of a folder, read once, which fetch nothing from anywhere else."""

import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from paceline.gateway.errors import HttpError

FOLDER = Path(__file__).parent / "page"
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Page:
    def __init__(self) -> None:
        self._files = {path.name: path.read_bytes() for path in FOLDER.glob("*") if path.is_file()}

    async def answer(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            raise HttpError(404, "the page has no such file")
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(self._files[name], headers=HEADERS, media_type=media_type)
