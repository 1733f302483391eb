"""schemathesis, over the description that the server publishes: right requests and wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from llamaspec import FixedLength, ModelOptions, open_pair
from llamaspec.chat.template import ChatTemplate
from llamaspec.serve.server import serving
from llamaspec.serve.settings import ServeSettings
from serve_soak import TEMPLATE

N_TOKENS = 96  # answers are short
N_EXAMPLES = 12  # of each operation

schema = schemathesis.pytest.from_fixture("described")


@pytest.fixture(scope="module")
def described(demo_files: tuple[Path, Path]) -> Iterator[Any]:
    options = ModelOptions(n_ctx=N_TOKENS, n_cells=4 * N_TOKENS, threads=1)
    with open_pair(*demo_files, target_options=options, draft_options=options) as pair:
        template = ChatTemplate.of(pair.target, TEMPLATE)
        config = ServeSettings(host="0.0.0.0", no_auth=True, request_timeout=None)  # no socket is opened
        with serving(pair, FixedLength(2), template, config, lambda _: None) as (app, _):
            loaded = schemathesis.openapi.from_asgi("/openapi.json", app, config=SchemathesisConfig())
            loaded.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
            yield loaded


@schema.parametrize()
@settings(
    max_examples=N_EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_breaks_the_server(case: Any) -> None:
    """Never a fault of the server, and what is wrong is named in the form that the description has."""
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.json()["error"]["message"]
    case.validate_response(response, checks=[schemathesis.checks.not_a_server_error])
