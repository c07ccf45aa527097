"""``/v1/models``: what is served, in one form that OpenAI's and Anthropic's clients both read."""

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cedar.server.errors import ApiError
from cedar.server.service import Service

__all__ = ["list_models", "one_model"]

Endpoint = Callable[[Request], Awaitable[Response]]


def list_models(service: Service) -> Endpoint:
    """All served names."""
    entries = _entries(service)

    async def endpoint(request: Request) -> Response:
        names = list(entries)
        content = {
            "object": "list",
            "data": list(entries.values()),
            "has_more": False,
            "first_id": names[0],
            "last_id": names[-1],
        }
        return JSONResponse(content)

    return endpoint


def one_model(service: Service) -> Endpoint:
    """One of them, or 404."""
    entries = _entries(service)

    async def endpoint(request: Request) -> Response:
        name = request.path_params["model"]
        if name not in entries:
            raise ApiError(
                404,
                f"The model {name[:100]!r} is not served; there is {', '.join(entries)}.",
                param="model",
                code="model_not_found",
            )
        return JSONResponse(entries[name])

    return endpoint


def _entries(service: Service) -> dict[str, dict[str, Any]]:
    now = int(time.time())
    info = service.engine.info
    return {
        name: {
            "id": name,
            "object": "model",
            "type": "model",
            "created": now,
            "created_at": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "owned_by": "cedar",
            "display_name": name,
            "lifecycle": "active",
            "max_input_tokens": info.room,
            "max_tokens": info.room,
            "max_model_len": info.room,
            "accepts_images": info.accepts_images,
        }
        for name in service.settings.models
    }
