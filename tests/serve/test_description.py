"""schemathesis, with an OpenAPI document made of the body models: valid and invalid requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from pydantic.json_schema import models_json_schema
from schemathesis import GenerationMode

from llamaspec import FixedLength, ModelOptions, open_pair
from llamaspec.chat.template import ChatTemplate
from llamaspec.serve import ServeSettings
from llamaspec.serve.app import ENDPOINTS, make_app, serving
from llamaspec.serve.served_model import open_source
from serve_soak import TEMPLATE

NAMED = "/v1/models/{name:path}"  # generated names do not exist
N_TOKENS = 96  # of the context, so that answers are short
N_EXAMPLES = 5  # per operation and mode


def openapi() -> dict[str, Any]:
    bodies = [(endpoint.body, "validation") for endpoint in ENDPOINTS if endpoint.body is not None]
    references, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        path, body = endpoint.path, endpoint.body
        operation: dict[str, Any] = {"responses": {"default": {"description": "The answer."}}}
        if path == NAMED:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [name]
        if body is not None:
            content = {"application/json": {"schema": references[body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        method = endpoint.method or ("GET" if body is None else "POST")
        paths[path.replace(":path", "")] = {method.lower(): operation}
    about = {"openapi": "3.1.0", "info": {"title": "llamaspec", "version": "1"}, "paths": paths}
    return {**about, "components": {"schemas": schemas.get("$defs", {})}}


@pytest.fixture(scope="module")
def described(demo_files: tuple[Path, Path]) -> Iterator[Any]:
    """The document, with the application itself instead of a socket."""
    options = ModelOptions(n_ctx=N_TOKENS, n_cells=4 * N_TOKENS, threads=1)
    with open_pair(*demo_files, target_options=options, draft_options=options) as pair:
        template = ChatTemplate.of(pair.target, TEMPLATE)
        config = ServeSettings(allowed_hosts=("testserver",), request_timeout=None)
        with serving(open_source(pair, FixedLength(2), template), config, lambda _: None) as models:
            schema: Any = schemathesis.openapi.from_dict(openapi())
            schema.app = make_app(models)
            yield schema


CASES = [
    *((endpoint.path, GenerationMode.POSITIVE) for endpoint in ENDPOINTS),
    *((endpoint.path, GenerationMode.NEGATIVE) for endpoint in ENDPOINTS if endpoint.body is not None),
]


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_no_request_breaks_the_server(described: Any, path: str, mode: GenerationMode) -> None:
    """No request has status 5xx, and every error has a message."""
    (operation,) = described[path.replace(":path", "")].values()
    statuses: set[int] = set()

    @settings(
        max_examples=N_EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call()
        statuses.add(response.status_code)
        assert response.status_code < 500, response.text
        if response.status_code >= 400 and response.headers["content-type"] == "application/json":
            assert response.json()["error"]["message"]

    check()
    if mode is GenerationMode.NEGATIVE:
        assert max(statuses) >= 400
    elif not operation.body and path != NAMED:
        assert statuses == {200}
