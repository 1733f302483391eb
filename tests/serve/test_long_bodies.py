"""The largest bodies of every endpoint: they are refused soon, or leave the event loop to others."""

from __future__ import annotations

import json
import threading
from time import thread_time
from typing import Any

import pytest

from llamaspec import Pair
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.app import ENDPOINTS
from patience import until
from serving import Served, served

SIZE = 8 << 20  # the limit of a body
MINIMUM = {
    "prompt": "a", "input": "a", "input_prefix": "a", "input_suffix": "b", "content": "a", "tokens": [1],
    "max_tokens": 1, "num_predict": 1, "messages": [{"role": "user", "content": "a"}], "stream": False,
}  # fmt: skip


def many(item: str) -> str:
    """Return a JSON list of as many items as a body may have."""
    return "[" + ",".join([item] * ((SIZE - 2000) // (len(item) + 1))) + "]"


def many_keys(n: int = 500_000) -> str:
    return "{" + ",".join(f'"{i}":1' for i in range(n)) + "}"


def many_tools() -> str:
    """Return tools that have as many values as a tool may, as the chat API nests them and as others do."""
    schemas = ({"enum": [1] * 49_000}, {"properties": {str(i): 1 for i in range(49_000)}})
    fields = ({"name": f"f{i}", "parameters": schemas[i % 2]} for i in range(8))
    return json.dumps([{**each, "function": each} for each in fields])


LONG = {
    "tools": (many_tools(),),
    "json_schema": (many_keys(), f'{{"enum":{many("1")}}}', '{"a":' * 90 + many_keys() + "}" * 90),
    "format": (many_keys(), f'{{"enum":{many("1")}}}'),
    "options": (f'{{"logit_bias":{many("[15,1]")}}}', f'{{"stop":{many(chr(34) * 2)}}}'),
    "logit_bias": (many("[15,1]"), many("[]"), many_keys()),
    "chat_template_kwargs": (many_keys(), f'{{"a":[{many("1")}]}}'),
    "prompt": (many('"a"'), many("[1]"), many("{}"), many("1")),
    "tokens": (many("{}"), many("1")),
    "messages": (many("{}"), many('{"role":"user","content":"a"}')),
    "input": (many("{}"),),
    "metadata": (many_keys(),),
    "response_fields": (many('""'),),
    "content": (json.dumps("a b " * 500_000),),
}
FIRST = {
    field: each.path
    for each in reversed(ENDPOINTS)
    if each.body is not None
    for field in each.body.model_fields
}  # endpoint that gets the bodies for a field; others get one in `make test-fresh`


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", [each for each in ENDPOINTS if each.body], ids=lambda each: each.path)
def test_the_event_loop_serves_others_beside_the_largest_bodies(
    demo: Pair, endpoint: Any, is_fresh: bool
) -> None:
    """Once, a body of biases held all others for seconds. In processor time: the machine may be busy."""
    with served(demo) as server:
        for field in LONG.keys() & endpoint.body.model_fields.keys():
            is_first = FIRST[field] == endpoint.path
            for value in LONG[field][: None if is_first else int(is_fresh)]:
                before = _seconds(server)
                rest = json.dumps({**MINIMUM, "with_pieces": True, field: None})
                body = rest.replace(f'"{field}": null', f'"{field}": {value}')
                answer = server.client.post(endpoint.path, content=body.encode())
                assert answer.status_code in (200, 400, 413), answer.text[:200]
                assert _seconds(server) - before < 0.5, (field, value[:20])


def _seconds(server: Served) -> float:
    """Return the processor seconds of the event loop so far."""
    found: list[float] = []
    server.in_loop(lambda: found.append(thread_time()))
    until(lambda: found)
    return found[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one", "logit_bias": {"two": 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}]}),
        ("/v1/responses", {"input": "one"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "one"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "one"}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "one"}], "stream": False}),
        ("/api/generate", {"prompt": "one", "stream": False}),
        ("/api/generate", {"prompt": "one", "stream": False, "raw": True}),
        ("/completion", {"prompt": "one"}),
        ("/tokenize", {"content": "one"}),
    ],
)
def test_text_is_tokenized_outside_of_the_event_loop(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    seen = set[int]()
    tokenize = LlamaVocabulary.tokenize

    def noted(*arguments: Any, **more: Any) -> Any:
        seen.add(threading.get_ident())
        return tokenize(*arguments, **more)

    monkeypatch.setattr(LlamaVocabulary, "tokenize", noted)
    loop: list[int] = []
    server.in_loop(lambda: loop.append(threading.get_ident()))
    server.post(path, {"max_tokens": 1, "options": {"num_predict": 1}, **body})
    until(lambda: loop)
    assert seen
    assert loop[0] not in seen


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {str(i): 1 for i in range(1001)}),
        ("logit_bias", [[i, 1] for i in range(1001)]),
        ("chat_template_kwargs", {"a": [[1] * 600, [1] * 600]}),
        ("json_schema", {"enum": [1] * 50_000}),
    ],
)
def test_long_fields_are_refused(server: Served, field: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, field: value}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[{" * 60_000, 200),
        ('\\"[{' * 60_000, 200),
        (",[]" * 100_001, 400),
        ('"' + '\\"' * 60_000 + "[{" * 60_000, 400),
    ],
)
def test_only_lists_and_objects_outside_of_strings_count(server: Served, text: str, status: int) -> None:
    content = json.dumps({"content": text}) if status == 200 else f'{{"content": "a", "more": [1{text}]}}'
    assert server.client.post("/tokenize", content=content.encode()).status_code == status


def test_text_to_tokens_and_back_in_parts(server: Served) -> None:
    """Answers are written in parts, and a part may end within a character."""
    text = 'naïve \U0001f600 "x"\n' * 900
    tokens = server.post("/tokenize", {"content": text}).json()["tokens"]
    assert len(tokens) > 3000
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"content": text}
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [each["id"] for each in pieces] == tokens
    for content in ("", "a"):
        tokens = server.post("/tokenize", {"content": content}).json()["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}).json() == {"content": content}
