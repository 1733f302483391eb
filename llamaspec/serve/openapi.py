"""The description of the server that it publishes itself, made from the models that check requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.serve.fields import Fields

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path, what it takes and who answers."""

    path: str
    handler: Handler
    body: type[Fields] | None = None  # None: a GET
    streams: bool = False
    media_type: str = "application/json"

    @property
    def method(self) -> str:
        """Of HTTP."""
        return "GET" if self.body is None else "POST"


def description(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    references, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        schema = references[endpoint.body, "validation"] if endpoint.body is not None else None
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llamaspec", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}}},
    "required": ["error"],
}


def _operation(endpoint: Endpoint, schema: Any) -> dict[str, Any]:
    kinds = [endpoint.media_type, *(["text/event-stream"] if endpoint.streams else [])]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": (endpoint.handler.__doc__ or "").strip().rstrip("."),
        "responses": {
            "200": {"description": "The answer.", "content": {kind: {} for kind in kinds}},
            "default": {"description": "What is wrong.", "content": error},
        },
    }
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
