"""The application: which path is answered by whom, inside the guards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llamaspec.serve import status
from llamaspec.serve.chat import ChatRequest, chat_completions
from llamaspec.serve.completions import CompletionRequest, completions
from llamaspec.serve.faults import RequestError, fault_response
from llamaspec.serve.logs import RequestLog, Write
from llamaspec.serve.messages import CountRequest, MessagesRequest, count_tokens, messages
from llamaspec.serve.openapi import Endpoint, Handler, description
from llamaspec.serve.responses import responses
from llamaspec.serve.responses_request import ResponsesRequest
from llamaspec.serve.security import PAGE_FILES, Guard
from llamaspec.serve.service import CLIENT_LEFT, Service

ENDPOINTS = (
    Endpoint("/v1/chat/completions", chat_completions, ChatRequest, streams=True),
    Endpoint("/v1/completions", completions, CompletionRequest, streams=True),
    Endpoint("/v1/responses", responses, ResponsesRequest, streams=True),
    Endpoint("/v1/messages", messages, MessagesRequest, streams=True),
    Endpoint("/v1/messages/count_tokens", count_tokens, CountRequest),
    Endpoint("/v1/models", status.models),
    Endpoint("/v1/models/{name}", status.model),
    Endpoint("/tokenize", status.tokenize, status.TokenizeRequest),
    Endpoint("/detokenize", status.detokenize, status.DetokenizeRequest),
    Endpoint("/health", status.health),
    Endpoint("/v1/health", status.health),
    Endpoint("/metrics", status.metrics, media_type="text/plain"),
    Endpoint("/props", status.props),
    Endpoint("/slots", status.slots),
)
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def make_app(service: Service, write: Write) -> ASGIApp:
    """The ASGI application of a service; `write` takes the lines of the log."""
    settings = service.settings
    routes = [
        Route(endpoint.path, answering(endpoint.handler), methods=[endpoint.method]) for endpoint in ENDPOINTS
    ]
    about = description(ENDPOINTS, version("llamaspec"))
    routes += [
        Route("/openapi.json", lambda _: JSONResponse(about)),
        *(Route(path, page_file(name)) for path, name in PAGE_FILES.items()),
    ]
    guards = [
        Middleware(RequestLog, write=write, log_format=settings.log_format),
        Middleware(Guard, settings=settings),
    ]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        guards.insert(1, cors)
    app = Starlette(routes=routes, middleware=guards, exception_handlers={HTTPException: _no_route})
    app.state.service = service
    return app


def page_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that answers with one of the page's files."""
    content = (files("llamaspec") / "serve" / "page" / name).read_bytes()
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]

    async def answer(_: Request) -> Response:
        return Response(content, headers=_PAGE_HEADERS, media_type=media_type)

    return answer


def answering(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """A handler whose failures are answers, too."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        except Exception as error:  # noqa: BLE001  # the client is told; the process goes on
            return fault_response(request.url.path, error)

    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: "there is nothing at this path; see /openapi.json",
        405: "this path wants another method",
    }
    fault = RequestError(error.status_code, messages.get(error.status_code, "this cannot be answered"))
    response = fault_response(request.url.path, fault)
    response.headers.update(error.headers or {})
    return response
