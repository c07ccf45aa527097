"""For those who watch over the server: is it alive, does it take requests, what has it done."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cedar.server.errors import ApiError
from cedar.server.metrics import CONTENT_TYPE
from cedar.server.service import Service

__all__ = ["health", "metrics", "ready"]

Endpoint = Callable[[Request], Awaitable[Response]]


def health(service: Service) -> Endpoint:
    """200 as long as the engine works, else 503: restart the server."""

    async def endpoint(request: Request) -> Response:
        if not service.engine.alive:
            raise ApiError(503, "The engine has stopped.", code="engine_stopped")
        return JSONResponse({"status": "ok"})

    return endpoint


def ready(service: Service) -> Endpoint:
    """200 while new requests are taken, else 503: send them elsewhere."""

    async def endpoint(request: Request) -> Response:
        service.door.check()
        return JSONResponse({"status": "ready", "requests": service.door.inside})

    return endpoint


def metrics(service: Service) -> Endpoint:
    """What Prometheus scrapes."""

    async def endpoint(request: Request) -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return endpoint
