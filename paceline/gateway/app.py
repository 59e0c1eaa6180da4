"""The paths of the gateway."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from paceline.gateway.access import LIVENESS_PATH, BearerTokens
from paceline.gateway.apis import APIS
from paceline.gateway.endpoint import Endpoint, Gateway
from paceline.gateway.errors import HANDLERS, shutting_down, unserved
from paceline.gateway.leaving import EndsConnections
from paceline.gateway.page import Page
from paceline.gateway.request_ids import RequestIds
from paceline.gateway.unread import ReadsAway
from paceline.request_ids import REQUEST_ID
from paceline.security.tokens import KnownTokens
from paceline.types import ClusterDescription

WELL = {"status": "ok"}


def make_app(
    gateway: Gateway, registry: CollectorRegistry, page: Page, tokens: KnownTokens | None, cors_origins: Sequence[str]
) -> ASGIApp:
    """Make the app. `tokens` are those that callers must show one of; None: none."""
    paths = _Paths(gateway, registry)
    routes = [
        *(Route(api.path, Endpoint(api, gateway), methods=["POST"]) for api in APIS),
        Route("/v1/models", paths.models),
        Route("/v1/models/{name:path}", paths.model),
        Route("/health", paths.health),
        Route(LIVENESS_PATH, paths.life),
        Route("/metrics", paths.metrics),
        Route("/cluster", paths.cluster),
        Route("/", page.answer),
        Route("/page/{name}", page.answer),
    ]
    middleware = [Middleware(ReadsAway), Middleware(EndsConnections, running=gateway.running)]
    if cors_origins:
        allowed: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        allowed["expose_headers"] = ["retry-after", REQUEST_ID]  # else no page can read them
        middleware.append(Middleware(CORSMiddleware, allow_origins=cors_origins, **allowed))
    if tokens:
        middleware.append(Middleware(BearerTokens, tokens=tokens))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # few clients send a body again where a redirection leads
    return RequestIds(app)  # around all, for errors that nobody expected are answered outside of what is in the app


class _Paths:
    """The paths that make no output."""

    def __init__(self, gateway: Gateway, registry: CollectorRegistry) -> None:
        self._gateway = gateway
        self._registry = registry

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._told(one) for one in self._gateway.model.names]})

    async def model(self, request: Request) -> Response:
        return _json(self._told(self._gateway.model.shown(request.path_params["name"])))

    async def health(self, _: Request) -> Response:
        if self._gateway.running.is_draining:
            raise shutting_down()
        if not self._gateway.model.is_served:
            raise unserved()
        return _json(WELL)

    async def life(self, _: Request) -> Response:
        return _json(WELL)

    async def metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

    async def cluster(self, _: Request) -> Response:
        return described(await self._gateway.generator.describe_once())

    def _told(self, name: str) -> dict[str, Any]:
        own = {"id": name, "object": "model", "created": 0, "owned_by": "paceline"}
        return own | {"max_model_len": self._gateway.model.max_length}  # vLLM's name


def described(cluster: ClusterDescription) -> Response:
    """Return what coordinators say of a cluster, in the names of their own types."""
    return _json(asdict(cluster))


def _json(value: Any) -> Response:
    return Response(json.dumps(value, default=_word), media_type="application/json")


def _word(value: object) -> object:
    assert isinstance(value, Enum)
    return value.value
