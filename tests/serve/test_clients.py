"""Real clients against the real server: each gets the model's own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from click.testing import CliRunner

from llamaspec import Pair
from patience import PATIENCE
from serving import Served, answered, said

N, SEED = 24, 11
MESSAGES: Any = [{"role": "user", "content": "def f(x):"}]


@pytest.fixture
def client(server: Served) -> Any:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    ) as client:
        yield client


@pytest.fixture
def claude(server: Served) -> Any:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def expected(alone: Pair) -> str:
    return answered(alone, "def f(x):", SEED, N)


@pytest.mark.parametrize("as_parts", [False, True])
def test_openai_prediction(client: Any, expected: str, as_parts: bool) -> None:
    content = [{"type": "text", "text": expected}] if as_parts else expected
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, seed=SEED, max_completion_tokens=N,
        prediction={"type": "content", "content": content},
    )  # fmt: skip
    assert answer.choices[0].message.content == expected
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0


def test_openai_completions(client: Any, alone: Pair) -> None:
    answer = client.completions.create(model="any", prompt="import os", seed=SEED, max_tokens=N, n=2)
    texts = [said(alone, "import os", seed, N) for seed in (SEED, SEED + 1)]
    assert [choice.text for choice in answer.choices] == texts


def test_openai_responses(client: Any, expected: str) -> None:
    asked = {"max_output_tokens": N, "extra_body": {"seed": SEED}}
    answer = client.responses.create(model="any", input=MESSAGES, **asked)
    assert (answer.status, answer.output_text) == ("incomplete", expected)


def test_anthropic(claude: Any, expected: str) -> None:
    answer = claude.messages.create(model="any", max_tokens=N, messages=MESSAGES, extra_body={"seed": SEED})
    assert answer.content[0].text == expected
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == N
    n = claude.messages.count_tokens(model="any", messages=MESSAGES).input_tokens
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == n


def test_anthropic_names_the_stop_sequence(claude: Any, expected: str) -> None:
    stop = expected[3:5]
    answer = claude.messages.create(
        model="any",
        max_tokens=N,
        messages=MESSAGES,
        stop_sequences=["never", stop],
        extra_body={"seed": SEED},
    )
    assert answer.content[0].text == expected[: expected.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


def test_the_clients_understand_errors(client: Any, claude: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="any", messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        claude.messages.create(model="any", max_tokens=N, messages=MESSAGES, extra_body={"top_k": "many"})


def test_llm(server: Served, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """simonw's `llm`, configured as docs/server.md says: a stream, and a whole answer with a schema."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    model = {"model_id": "llamaspec", "model_name": "any", "api_base": f"{server.url}/v1"}
    listed = json.dumps([{**model, "supports_schema": True}])  # JSON is YAML
    (tmp_path / "extra-openai-models.yaml").write_text(listed)

    def ask(*arguments: str) -> str:
        from llm.cli import cli  # takes seconds

        usual = ["-m", "llamaspec", "--no-log", "-o", "seed", str(SEED)]
        done = CliRunner().invoke(cli, [*usual, *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert ask("def f(x):", "-o", "max_tokens", str(N)) == f"{expected}\n"
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
    }
    answer = json.loads(ask("Which one?", "--no-stream", "--schema", json.dumps(schema)))
    assert answer["n"] in (1, 2)
    assert isinstance(answer["ok"], bool)
