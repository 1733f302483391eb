"""What goes wrong with a request, and its two forms: OpenAI's and Anthropic's.

A message never contains what the client sent, but names the field. tests/serve/test_bad_requests.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from llamaspec.chat.template import NoTemplateError
from llamaspec.errors import LlamaspecError, PromptError

# status -> (OpenAI's type, Anthropic's type)
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}
_SIMPLE_KINDS = frozenset({"str", "int", "float", "bool"})


class RequestError(Exception):
    """A request cannot be answered.

    Parameters
    ----------
    status : int
        Of HTTP.
    message : str
        One line for a person.
    field : str, optional
        The field of the request that is at fault.
    code : str, optional
        OpenAI's code.
    retry_after : int, optional
        Seconds after which it may go better.
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
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.retry_after = retry_after


def not_supported(field: str, what: str = "not supported yet") -> RequestError:
    """A field that this server knows and cannot obey."""
    return RequestError(400, f"{field}: {what}", field=field, code="unsupported_parameter")


def fault_of(error: Exception) -> RequestError:
    """Whatever went wrong, as a fault; a bug shows its kind and nothing else."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, NoTemplateError):
        return RequestError(400, "this model has no chat template; use /v1/completions, or start the server "
                            "with --chat-template", code="no_chat_template")  # fmt: skip
    if isinstance(error, (PromptError, ValueError)):
        return RequestError(400, str(error))
    if isinstance(error, LlamaspecError):
        return RequestError(500, str(error))
    return RequestError(500, f"internal error: {type(error).__name__}")


def openai_error(fault: RequestError) -> dict[str, Any]:
    """OpenAI's form."""
    kind = _TYPES.get(fault.status, _TYPES[500])[0]
    return {"error": {"message": fault.message, "type": kind, "param": fault.field, "code": fault.code}}


def anthropic_error(fault: RequestError) -> dict[str, Any]:
    """Anthropic's form."""
    kind = _TYPES.get(fault.status, _TYPES[500])[1]
    return {"type": "error", "error": {"type": kind, "message": fault.message}}


def fault_response(path: str, error: Exception) -> JSONResponse:
    """The answer to a request that cannot be answered, in the form of the API at a path."""
    fault = fault_of(error)
    form = anthropic_error if path.startswith("/v1/messages") else openai_error
    headers = {"Retry-After": str(fault.retry_after)} if fault.retry_after is not None else None
    return JSONResponse(form(fault), fault.status, headers)


def _invalid(error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return RequestError(400, f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    # Of the alternatives that a field may be, the one that fits furthest is what was meant.
    same = [other for other in errors if other["loc"][:1] == first["loc"][:1]]
    nearest = max(same, key=lambda other: len(_place(other["loc"])))
    field = ".".join(_place(nearest["loc"])) or None
    message = nearest["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{field}: {message}" if field else message, field=field)


def _place(parts: Sequence[int | str]) -> list[str]:
    """Where a fault is, without the alternatives that pydantic has tried."""
    return [str(part) for part in parts if not (isinstance(part, str) and _is_kind(part))]


def _is_kind(part: str) -> bool:
    return part in _SIMPLE_KINDS or "[" in part or "-" in part or part[:1].isupper()
