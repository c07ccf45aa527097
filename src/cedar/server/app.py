"""Puts the server together: `build_app` is the only place where its parts meet."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from anyio import CapacityLimiter
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from cedar.inputs.chat import ChatProtocol
from cedar.server import chat, completions, health, models, tokens
from cedar.server.describe import describe
from cedar.server.door import Door, Visit, visited
from cedar.server.errors import ApiError, error_response
from cedar.server.fetch import Fetcher
from cedar.server.frame import ErrorAnswers, RequestFrame, request_id
from cedar.server.guard import Limits, LimitsMiddleware
from cedar.server.keys import KeyRing
from cedar.server.metrics import Metrics
from cedar.server.page_routes import PageInfo, add_page
from cedar.server.pictures import PictureLimits, load
from cedar.server.protocols import EngineLike
from cedar.server.service import Service
from cedar.server.settings import ServerSettings

__all__ = ["build_app", "service_of"]

Endpoint = Callable[[Request], Awaitable[Response]]

_GENERATING = frozenset(
    {*chat.PATHS.values(), completions.PATH, chat.COUNT_PATH, "/tokenize", "/detokenize"}
)
# Requests whose pictures are opened at a time; more where they also wait for other hosts.
_DECODING, _FETCHING = 2, 4
_PAGE_DATA = frozenset({"/page/state", "/page/markdown"})
_JSON_PATHS = _GENERATING | {"/page/markdown"}


def build_app(engine: EngineLike, settings: ServerSettings, keys: KeyRing | None = None) -> FastAPI:
    """The server as an ASGI application. It neither starts nor closes the engine.

    keys: who may use it; None is anybody.
    """
    service = Service(
        engine=engine,
        settings=settings,
        protocol=ChatProtocol(
            engine.tokenizer,
            models=settings.models,
            default_thinking=settings.thinking,
            accepts_images=engine.info.accepts_images,
            max_prompt_bytes=engine.info.room * engine.info.longest_token,
        ),
        metrics=Metrics(engine, settings.model),
        door=Door(engine, settings),
        pictures=_pictures(settings),
        decoding=CapacityLimiter(_FETCHING if settings.image_hosts else _DECODING),
    )
    app = FastAPI(
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.add_exception_handler(HTTPException, _refused)
    _add_routes(app, service)
    document = describe(service, keys=keys is not None)
    app.openapi = lambda: document  # type: ignore[method-assign]
    if settings.page:
        add_page(app, _page_info(service))
    # The last that is added comes first.
    app.add_middleware(
        LimitsMiddleware,
        json_paths=_JSON_PATHS,
        limits=Limits(body_bytes=settings.max_body, hosts=settings.hosts),
        admit=partial(_admit, service, keys),
    )
    app.add_middleware(ErrorAnswers, retry_after=settings.retry_after)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Cedar-Ignored", "Retry-After"],
        )
    paths = {getattr(route, "path", "") for route in app.routes}
    plain = {path for path in paths if "{" not in path}
    app.add_middleware(RequestFrame, metrics=service.metrics, paths=plain)
    return app


def service_of(app: FastAPI) -> Service:
    """The parts of a built server."""
    service: Service = app.state.service
    return service


def _add_routes(app: FastAPI, service: Service) -> None:
    def enter(request: Request) -> Visit:
        key = request.scope["state"].get("key")
        return service.door.enter(request_id(request.scope), key)

    guarded = partial(visited, enter)
    for api, path in chat.PATHS.items():
        _add(app, path, "POST", guarded(chat.chat(service, api)))
    count = guarded(chat.count_tokens(service))
    _add(app, chat.COUNT_PATH, "POST", count)
    _add(app, completions.PATH, "POST", guarded(completions.completions(service)))
    _add(app, "/tokenize", "POST", guarded(tokens.tokenize(service)))
    _add(app, "/detokenize", "POST", guarded(tokens.detokenize(service)))
    _add(app, "/tokenizer_info", "GET", tokens.tokenizer_info(service))
    _add(app, "/v1/models", "GET", models.list_models(service))
    _add(app, "/v1/models/{model:path}", "GET", models.one_model(service))
    _add(app, "/health", "GET", health.health(service))
    _add(app, "/ready", "GET", health.ready(service))
    _add(app, "/metrics", "GET", health.metrics(service))


def _admit(service: Service, keys: KeyRing | None, scope: Scope) -> None:
    """Refuses before a body is read: without a key where one is needed, or if the door is shut."""
    path = scope["path"]
    if keys is not None and not _is_open(path):
        scope["state"]["key"] = keys.check(scope["headers"])
    if scope["method"] == "POST" and path in _GENERATING:
        service.door.check()


def _is_open(path: str) -> bool:
    """Whether no key is asked for: watching over the server, and the files of the page."""
    if path.startswith("/page/"):
        return path not in _PAGE_DATA
    return path in ("/", "/health", "/ready", "/metrics", "/openapi.json")


def _page_info(service: Service) -> PageInfo:
    info, settings = service.engine.info, service.settings
    return PageInfo(
        model=settings.model,
        images=info.accepts_images,
        thinking=True,
        default_thinking=settings.thinking,
        cache_bytes_per_token=info.bytes_per_token,
        full_cache_bytes_per_token=info.full_bytes_per_token,
        full_cache_heads=info.heads,
        pool_tokens=info.pool_tokens,
        window_tokens=info.window_tokens,
        max_images=settings.max_images,
    )


def _add(app: FastAPI, path: str, method: str, endpoint: Endpoint) -> None:
    # Those who watch over a server may ask without wanting a body.
    methods = [method, "HEAD"] if path in ("/health", "/ready") else [method]
    app.add_api_route(path, endpoint, methods=methods, response_model=None)


async def _refused(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the form of the API they look like."""
    assert isinstance(error, HTTPException)
    texts = {404: "There is nothing at this path.", 405: "This path does not take that method."}
    message = texts.get(error.status_code, str(error.detail))
    return error_response(
        request.url.path,
        ApiError(error.status_code, message, headers=error.headers),
    )


def _pictures(settings: ServerSettings) -> Callable[..., Any]:
    limits = PictureLimits(count=settings.max_images)
    fetcher = Fetcher(settings.image_hosts) if settings.image_hosts else None
    return lambda refs: load(refs, limits, fetcher)
