"""Ollama's API, with its own Python package and with raw requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from llamaspec import Pair
from llamaspec.chat.messages import ToolCall
from llamaspec.serve.ollama import OllamaChatBody, OllamaOptions
from patience import PATIENCE
from serve_soak import SCHEMA
from serving import Served, answered

N, SEED = 24, 11
MESSAGES: Any = [{"role": "user", "content": "def f(x):"}]
OPTIONS: Any = {"num_predict": N, "seed": SEED}
FIND: Any = {
    "type": "function",
    "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA},
}


@pytest.fixture
def client(server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def expected(alone: Pair) -> str:
    return answered(alone, "def f(x):", SEED, N)


def test_chat(client: ollama.Client, expected: str) -> None:
    answer = client.chat(model="any", messages=MESSAGES, options=OPTIONS)
    assert answer.message.content == expected
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", N)
    assert all((answer.prompt_eval_count, answer.total_duration, answer.eval_duration))


def test_chat_as_a_stream(client: ollama.Client, expected: str) -> None:
    *parts, last = client.chat(model="any", messages=MESSAGES, options=OPTIONS, stream=True)
    assert "".join(part.message.content or "" for part in parts) == expected
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", N)


def test_generate_uses_the_chat_template_unless_raw(
    client: ollama.Client, server: Served, expected: str
) -> None:
    answer = client.generate(model="any", prompt="def f(x):", options=OPTIONS)
    assert answer.response == expected
    raw = client.generate(model="any", prompt="def f(x):", raw=True, options=OPTIONS)
    body = {"prompt": "def f(x):", "max_tokens": N, "seed": SEED}
    assert raw.response == server.post("/v1/completions", body).json()["choices"][0]["text"] != expected


def test_the_system_field_is_a_message(server: Served) -> None:
    body = {"prompt": "def f(x):", "system": "Be brief.", "options": OPTIONS, "stream": False}
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    chat = {"messages": messages, "options": OPTIONS, "stream": False}
    generated, said = server.post("/api/generate", body).json(), server.post("/api/chat", chat).json()
    assert generated["response"] == said["message"]["content"]
    assert generated["prompt_eval_count"] == said["prompt_eval_count"]


def test_a_format_is_kept(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    options = {"num_predict": 200, "seed": 1}
    answer = client.chat(model="any", messages=MESSAGES, format=schema, options=options)
    assert json.loads(answer.message.content or "") == {"a": "b"}
    generated = client.generate(model="any", prompt="x", raw=True, format=schema, options=options)
    assert json.loads(generated.response or "") == {"a": "b"}


def test_calls_of_a_conversation() -> None:
    call = {"function": {"name": "find", "arguments": {"size": 1}}}
    said = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_name": "find", "content": "3"}
    body = OllamaChatBody.model_validate({"messages": [*MESSAGES, said, result], "tools": [FIND]})
    request = body.chat_request()
    assert list(request.tool_use.offered) == [FIND]
    _, answer, found = request.messages
    assert (answer.reasoning, answer.tool_calls) == ("Hm.", (ToolCall("", "find", '{"size": 1}'),))
    assert (found.name, found.text) == ("find", "3")


def test_the_description_of_the_model(client: ollama.Client, server: Served) -> None:
    (model,) = client.list().models
    assert model.model == f"{server.service.model_name}:latest"
    assert model.details is not None
    assert model.digest
    assert model.details.format == "gguf"
    about = client.show(model.model or "")
    lengths = [value for key, value in (about.modelinfo or {}).items() if key.endswith(".context_length")]
    assert lengths == [server.service.pair.target.context_size]
    info = about.modelinfo or {}
    assert info["general.parameter_count"] > 0
    assert {"embedding_length", "block_count"} <= {key.rpartition(".")[2] for key in info}
    assert info["general.basename"]  # the name that VS Code shows
    assert (info["general.architecture"], about.details and about.details.family) == ("llama", "llama")
    assert about.details is not None
    assert (about.details.parameter_size, about.details.quantization_level) == ("8.52M", "Q8_0")
    assert about.capabilities == ["completion"]
    assert {"license", "modelfile", "parameters", "template"} <= about.model_dump(by_alias=True).keys()
    assert [each.model for each in client.ps().models] == [model.model]
    assert server.client.get("/api/version").json()["version"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("/api/chat", {"messages": MESSAGES, "options": {"temperature": -1}}, "temperature"),
        ("/api/generate", {"prompt": "word " * 3000}, "exceeds the available context size"),
    ],
)
def test_an_error_is_one_string(server: Served, path: str, body: dict[str, Any], told: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert told in answer.json()["error"]


def test_a_switch_in_words_is_the_switch() -> None:
    reasoning = [OllamaChatBody(think=think).reasoning for think in ("false", False, "true", True)]
    assert reasoning[0] == reasoning[1] == ({"enable_thinking": False}, 0)
    assert reasoning[2] == reasoning[3] != reasoning[0]


def test_any_negative_limit_is_the_context() -> None:
    assert OllamaOptions(num_predict=-7).answer_options().limit == -7
