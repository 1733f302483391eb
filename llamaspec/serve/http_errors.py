"""Errors of requests, in the form of each API.

Messages never repeat text from the client, and never name files of the server, as its log does.
tests/serve/test_bad_requests.py, tests/serve/test_overflow.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from llamaspec.errors import (
    ClosedError,
    EvaluationError,
    FetchError,
    LlamaspecError,
    MemoryFullError,
    ModelFileError,
    PromptError,
    ScoresError,
)

_TYPES = {  # HTTP status -> error type; invalid_request_error for all others
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_OPENAI_TYPES = _TYPES | {500: "server_error", 503: "server_error"}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


# What clients are told of errors whose messages may name files of the server; the first kind that fits holds.
_TOLD = {
    ScoresError: "the model's scores are not numbers: its file is damaged",
    MemoryFullError: "the server has too little memory",
    EvaluationError: "the model could not be evaluated",
    ClosedError: "the model was closed",
    ModelFileError: "a model's file cannot be used",
    LlamaspecError: "the model cannot be used",
}
LOG_SAYS = "the server's log says why"
_SHORTER = "reduce the length of the messages, or start the server with a larger --ctx-per-request"
UNSUPPORTED = "unsupported_parameter"  # code of errors about fields that this server does not support


class RequestError(Exception):
    """A request cannot be answered. If a field is wrong, the message begins with its name.

    `status` is HTTP's and `code` OpenAI's; `retry_after` is in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.message = message if field is None else f"{field}: {message}"
        super().__init__(self.message)
        self.status, self.field, self.code, self.retry_after = status, field, code, retry_after
        self.details: Mapping[str, int] = {}  # additional fields of OpenAI's error object
        self.anthropic_message = self.message


class ContextOverflowError(RequestError):
    """A prompt leaves no room in the context. Agents that recognize the error shorten their history.

    The message has OpenAI's phrase and llama-server's. `is_estimate`: the prompt was not tokenized.
    """

    def __init__(
        self,
        n_tokens: int,
        context_size: int,
        field: str,
        *,
        is_estimate: bool = False,
        remedy: str = _SHORTER,
    ) -> None:
        counted = " (estimated)" if is_estimate else ""
        super().__init__(
            400,
            f"this model's maximum context length is {context_size} tokens; the request ({n_tokens} tokens) "
            f"exceeds the available context size ({context_size} tokens){counted}; {remedy}",
            field=field,
            code="context_length_exceeded",
        )
        self.details = {"n_prompt_tokens": n_tokens, "n_ctx": context_size}
        # Clients search for this phrase. The maximum leaves room for one generated token.
        self.anthropic_message = f"prompt is too long: {n_tokens} tokens > {context_size - 1} maximum"


def bad_field(field: str, message: str) -> RequestError:
    """Return the error for a field with a wrong value."""
    return RequestError(400, message, field=field)


def not_supported(field: str, message: str = "not supported yet") -> RequestError:
    """Return the error for a field, or a value of it, that this server does not support."""
    return RequestError(400, message, field=field, code=UNSUPPORTED)


def as_request_error(error: Exception) -> RequestError:
    """Return the error for the client that stands for any exception.

    Only errors of the request or its prompt have status 400. Other errors show only what kind they are of.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, PromptError | FetchError):
        return RequestError(400 if isinstance(error, PromptError) else 500, str(error))
    for kind, told in _TOLD.items():
        if isinstance(error, kind):
            return RequestError(500, f"{told}; {LOG_SAYS}")
    return RequestError(500, f"internal error: {type(error).__name__}")


def openai_error(exception: Exception) -> dict[str, Any]:
    """Return an exception as OpenAI's error object."""
    error = as_request_error(exception)
    kind = _OPENAI_TYPES.get(error.status, "invalid_request_error")
    named = {"message": error.message, "type": kind, "param": error.field, "code": error.code}
    return {"error": {**named, **error.details}}


def anthropic_error(exception: Exception) -> dict[str, Any]:
    """Return an exception as Anthropic's error object."""
    error = as_request_error(exception)
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.anthropic_message}}


def ollama_error(exception: Exception) -> dict[str, Any]:
    """Return an exception as Ollama's error object."""
    return {"error": as_request_error(exception).message}


_FORMS = (("/v1/messages", anthropic_error), ("/api/", ollama_error))  # OpenAI's for all other paths


def error_response(path: str, exception: Exception) -> JSONResponse:
    """Return the response to a failed request, in the form of the API at this path."""
    error = as_request_error(exception)
    form = next((form for prefix, form in _FORMS if path.startswith(prefix)), openai_error)
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else None
    return JSONResponse(form(error), error.status, headers)


_FIELD = re.compile(r"[a-z_][a-z0-9_]{0,39}|[0-9]{1,10}")  # of a request; pydantic's types have other names


def invalid(error: ValidationError) -> RequestError:
    """Return the error for a body that fails its checks."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        if "recursion limit" in first["msg"]:
            return RequestError(400, "the body is nested too deeply")
        return RequestError(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    # Of the alternatives of a union, the client probably meant the one whose error is the deepest.
    paths = [
        ([str(part) for part in each["loc"] if _is_field(str(part))], each)
        for each in errors
        if each["loc"][:1] == first["loc"][:1]
    ]
    path, worst = max(paths, key=lambda found: len(found[0]))
    code = UNSUPPORTED if worst["type"] == UNSUPPORTED else None
    message = worst["msg"].removeprefix("Value error, ")
    return RequestError(400, message, field=".".join(path) or None, code=code)


def _is_field(part: str) -> bool:
    """Whether a part of a path may be shown: it is no type of a union, and no longer text from the client."""
    return part not in ("str", "int", "float", "bool") and _FIELD.fullmatch(part) is not None
