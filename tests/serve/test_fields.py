"""docs/server.md describes the server: compares its tables with the code and with answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest

from llamaspec import Sampling
from llamaspec.engine.completion import StopReason
from llamaspec.serve import openai_responses
from llamaspec.serve.app import ENDPOINTS
from llamaspec.serve.bodies import Fields, SamplingFields
from llamaspec.serve.ollama import OllamaOptions
from llamaspec.serve.openai_chat import CompletionBody
from serving import CONTEXT, Served

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 8}
ASKED: dict[str, dict[str, Any]] = {  # in the order of the table's columns
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "def f(x):", "max_tokens": 8},
    "/v1/responses": {"input": "def f(x):", "max_output_tokens": 8},
    "/v1/messages": HI,
}
MODELS = {endpoint.path: endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None}
NEVER_THERE = {
    "user": 7,
    "store": 5,
    "service_tier": [1],
    "cache_prompt": "no",
    "n_predict": {},
    "id_slot": 1.5,
}
NULLS_BELOW = {"speculative": dict.fromkeys(("enabled", "max_draft", "rule", "ngram", "spans", "rounds"))}


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading, without its header."""
    text = PAGE.split(f"\n{heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]]


def names(cell: str) -> list[str]:
    """Return the names in a cell of a table; of a path of fields, the first."""
    return [name.partition(".")[0] for name in re.findall(r"`([\w./{}…]+)`", cell)]


def all_fields(of: type[Fields]) -> Iterator[tuple[str, Any]]:
    for kind in of.__subclasses__():
        yield from ((f"{kind.__name__}.{name}", field) for name, field in kind.model_fields.items())
        yield from all_fields(kind)


def answered(path: str, answer: dict[str, Any]) -> str:
    """Return the text of an answer."""
    if path == "/v1/responses":
        return str(answer["output"][-1]["content"][0]["text"])
    if path == "/v1/messages":
        return str(answer["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_every_endpoint_is_documented() -> None:
    told = {
        path for row in table("## Endpoints") for path in re.findall(r"`(?:GET |POST )?(/[\w/-]*)", row[0])
    }
    served = {re.sub(r"{[\w:]+}", "NAME", endpoint.path) for endpoint in ENDPOINTS} | {"/"}
    assert told == served


@pytest.mark.parametrize(("column", "path"), list(enumerate(ASKED, start=1)))
def test_every_field_is_documented(column: int, path: str) -> None:
    fields = {field.alias or name for name, field in MODELS[path].model_fields.items()}
    told: set[str] = set()
    for row in table("## Fields"):
        first, cell, about = row[0].partition(" > ")[0], row[column], row[-1]
        own = fields & {*names(first), *names(cell), *names(about)}
        if cell == "–":
            assert not fields & set(names(first)), f"{path} has {first}"
        elif cell not in ("ignored", "always"):
            assert own, f"{path} has nothing of: {first}"
        told |= own
    assert fields - told <= {"model", "metadata"}


def test_null_is_the_same_as_a_missing_field() -> None:
    optional = [(name, field) for name, field in all_fields(Fields) if not field.is_required()]
    assert [name for name, field in optional if NoneType not in get_args(field.annotation)] == []


@pytest.mark.parametrize("path", ASKED)
def test_nulls_and_unknown_fields_change_nothing(server: Served, path: str) -> None:
    body = {**ASKED[path], "seed": 3}
    usual = server.post(path, body).json()
    nulls = {name: None for name, field in MODELS[path].model_fields.items() if not field.is_required()}
    for more in (NEVER_THERE, {**nulls, **NULLS_BELOW}):
        answer = server.post(path, {**more, **body})
        assert answer.status_code == 200, answer.text
        assert answered(path, answer.json()) == answered(path, usual)


def test_without_a_limit_the_answer_fills_the_context(server: Served) -> None:
    """-1, as clients of llama-server and LM Studio send it; and more than fits."""
    prompt = [7] * (CONTEXT - 9)
    for n in (None, -1, 10**6):
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": n, "temperature": 0}).json()
        assert answer["usage"]["total_tokens"] == CONTEXT
        assert answer["choices"][0]["finish_reason"] == "length"
    body = {**HI, "max_completion_tokens": -1, "max_tokens": 1, "grammar": 'root ::= "a long answer"'}
    answer = server.post("/v1/chat/completions", body).json()
    assert answered("/v1/chat/completions", answer) == "a long answer"


@pytest.mark.parametrize("path", [*ASKED, "/completion"])
def test_a_limit_of_zero_only_processes_the_prompt(server: Served, path: str) -> None:
    """As in llama-server's API and Anthropic's, so that the next request finds it."""
    prompt = "def f(x):" + path.replace("/", " ") * 4
    said = {"messages": [{"role": "user", "content": prompt}]}
    body = (said if "messages" in ALL_ASKED[path] else {"input": prompt, "prompt": prompt}) | {"seed": 1}
    none, some = ({**body, "max_tokens": n, "max_output_tokens": n} for n in (0, 2))
    answer = server.post(path, none)
    assert answer.status_code == 200, answer.text
    timings = answer.json()["timings"]
    assert (timings["predicted_n"], timings["cache_n"] + timings["prompt_n"] > 9) == (0, True)
    if path in ASKED:
        assert answered(path, answer.json()) == ""
    assert re.search(r'"(length|max_tokens|max_output_tokens|limit)"', answer.text)
    assert '"predicted_n":0' in server.post(path, {**none, "stream": True}).text
    again = server.post(path, some).json()["timings"]
    assert (again["prompt_n"], again["predicted_n"]) == (1, 2)


def test_whole_numbers_with_a_point() -> None:
    """Some clients have only one type of numbers."""
    given = {"seed": 1.0, "top_k": 40.0, "max_tokens": 8.0, "repeat_last_n": -1.0, "n": 1.0}
    body = CompletionBody.model_validate_json(json.dumps({"prompt": "a", **given}))
    assert {name: getattr(body, name) for name in given} == given
    assert all(type(getattr(body, name)) is int for name in given)
    options = OllamaOptions.model_validate_json('{"num_predict": 42.0, "temperature": 1}')
    assert (options.num_predict, options.temperature) == (42, 1.0)


def test_the_window_of_the_penalties() -> None:
    def sampling(**fields: Any) -> Sampling:
        return CompletionBody(prompt="a", presence_penalty=1.0, **fields).sampling()

    assert sampling().penalty_window is None  # OpenAI's
    assert sampling(repeat_penalty=1.2).penalty_window == 64
    assert sampling(repeat_last_n=5).penalty_window == 5
    assert sampling(repeat_last_n=-1).penalty_window == (1 << 31) - 1
    off = sampling(repeat_last_n=0, repeat_penalty=1.2, frequency_penalty=0.5)
    assert not off.penalises
    assert SamplingFields(repeat_last_n=0).sampling() == Sampling(penalty_window=off.penalty_window)


def test_rounds_and_timings_are_documented(server: Served) -> None:
    body = {**HI, "n": 2, "speculative": {"rounds": True}}
    answer = server.post("/v1/chat/completions", body).json()
    row = next(row for row in table("### `speculative`") if row[0] == "`rounds`")
    assert set(re.findall(r'"(\w+)"', row[1])) == answer["rounds"][0].keys()
    listed = PAGE.split("`timings` is in")[1].split("Streams are")[0]
    rates = {"prompt_per_token_ms", "prompt_per_second", "predicted_per_token_ms", "predicted_per_second"}
    assert answer["timings"].keys() - rates <= set(re.findall(r"`(\w+)`", listed))
    assert answer["timings"]["predicted_n"] == 8  # of one choice


def test_every_metric_is_documented(server: Served) -> None:
    told: set[str] = set()
    for row in table("## Metrics"):
        whole = re.findall(r"`(\w+)(?:{\w+})?`", row[0])
        told |= {*whole, *(f"spec_decode_num_{rest}" for rest in re.findall(r"`…_(\w+)`", row[0]))}
    there = set(re.findall(r"^# TYPE llamaspec:(\w+)", server.client.get("/metrics").text, re.MULTILINE))
    assert told == there
    reasons = next(row for row in table("## Metrics") if "request_success_total" in row[0])[1]
    assert all(reason.value in reasons for reason in StopReason)


def test_text_from_clients_is_not_cached() -> None:
    """Once, pydantic cached up to 16,384 short strings, and the server's memory grew for an hour."""
    first, second = (CompletionBody.model_validate_json('{"prompt": "def f(x):"}') for _ in range(2))
    assert first.prompt == second.prompt
    assert first.prompt is not second.prompt


ALL_ASKED = ASKED | {
    "/completion": {"prompt": "def f(x):", "n_predict": 4},
    "/api/chat": {**HI, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "def f(x):", "options": {"num_predict": 4}},
}


@pytest.mark.parametrize("path", ALL_ASKED)
def test_a_body_is_read_once(server: Served, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The tools of a long session were read twice by `/v1/responses`."""
    counted: Counter[str] = Counter()

    def count(place: Any, name: str) -> None:
        read = getattr(place, name)

        def noted(*given: Any, **more: Any) -> Any:
            counted[name] += 1
            return read(*given, **more)

        monkeypatch.setattr(place, name, noted)

    asks = OllamaOptions if path.startswith("/api") else MODELS[path]
    count(asks, "answer_options")
    if is_chat := hasattr(MODELS[path], "chat_request"):
        count(MODELS[path], "chat_request")
    if is_responses := path == "/v1/responses":
        count(openai_responses, "without_namespaces")
    answer = server.post(path, {**ALL_ASKED[path], "seed": 1, "stream": False})
    assert answer.status_code == 200, answer.text
    names = ["answer_options", *["chat_request"] * is_chat, *["without_namespaces"] * is_responses]
    assert counted == dict.fromkeys(names, 1)
