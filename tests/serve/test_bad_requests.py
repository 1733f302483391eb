"""The error for a wrong request names the wrong field in the form of the API, and the server continues."""

from __future__ import annotations

import gzip
import json
import re
import socket
import sys
import time
import tracemalloc
import zlib
from typing import Any
from urllib.parse import urlsplit

import pytest

from llamaspec import Pair
from llamaspec.errors import FetchError, LlamaspecError, PromptError, RowsMissingError
from llamaspec.serve import ServeSettings
from llamaspec.serve.bodies import Fields, _checked
from llamaspec.serve.compression import decompressed
from llamaspec.serve.http_errors import RequestError, as_request_error, error_response
from llamaspec.serve.jobs import RequestBuilder
from patience import PATIENCE
from serving import Served, served

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HI = [{"role": "user", "content": "hi"}]
IMAGE = [{"type": "image_url"}]
NOTHING = {"type": "nothing"}
BROKEN = {"type": "json_schema", "json_schema": {"name": "a", "schema": NOTHING}}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, NATIVE = "/v1/responses", "/v1/messages", "/completion"

BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, 400, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages.0.content.0.text"),
    (CHAT, {"messages": [*HI, {"role": "user", "content": IMAGE}]}, 400, "messages.1.content.0.type"),
    (CHAT, {"messages": HI, "temperature": -0.1}, 400, "temperature"),
    (CHAT, {"messages": HI, "repeat_penalty": 1e300}, 400, "repeat_penalty"),
    (CHAT, {"messages": HI, "n": 5}, 400, "n"),
    (CHAT, {"messages": HI, "seed": 1.5}, 400, "seed"),
    (CHAT, {"messages": HI, "stop": [""]}, 400, "stop.0"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    (CHAT, {"messages": HI, "speculative": {"max_draft": 65}}, 400, "speculative.max_draft"),
    (CHAT, {"messages": HI, "logit_bias": {"999999999": 1.0}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    (CHAT, {"messages": HI, "response_format": BROKEN}, 400, "response_format.json_schema.schema"),
    (CHAT, {"messages": HI, "grammar": "root ::= (", "max_tokens": 5}, 400, "grammar"),
    (CHAT, {"messages": HI, "grammar": 'root ::= "a"', "json_schema": {}}, 400, "grammar"),
    (CHAT, {"messages": HI, "tools": TOOLS}, 400, "tools"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, "tools.0.function"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": HI, "prediction": {"type": "content", "content": IMAGE}}, 400,
     "prediction.content.0.type"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": [["a"]]}, 400, "prompt.0.0"),
    (NATIVE, {"prompt": []}, 400, "prompt"),
    (NATIVE, {"prompt": ["one", "two"]}, 400, "prompt"),
    (NATIVE, {"prompt": [1 << 30]}, 400, "prompt"),
    (NATIVE, {"prompt": "a", "n_predict": -3}, 400, "n_predict"),
    (NATIVE, {"prompt": "a", "n": 2}, 400, "n"),
    ("/infill", {"input_prefix": "a"}, 400, "input_suffix"),
    ("/infill", {"input_prefix": "a", "input_suffix": "", "input_extra": [{}]}, 400, "input_extra.0.text"),
    (TEXT, {"prompt": "a", "echo": True}, 400, "echo"),
    (TEXT, {"prompt": "a", "n": 2, "best_of": 3}, 400, "best_of"),
    (RESPONSES, {"input": []}, 400, "input"),
    (RESPONSES, {"input": [*HI, {"type": "function_call_output"}]}, 400, "input.1.call_id"),
    (RESPONSES, {"input": [{"type": "image_generation_call"}]}, 400, "input"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "a"}]}, 400, "input.0.name"),
    (RESPONSES, {"input": "hi", "tools": [{"type": "web_search"}], "tool_choice": "required"}, 400,
     "tool_choice"),
    (RESPONSES, {"input": "hi", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "schema": NOTHING}}}, 400,
     "text.format.schema"),
    (MESSAGES, {"messages": HI}, 400, "max_tokens"),
    (MESSAGES, {"messages": HI, "max_tokens": 5, "thinking": {"type": "sometimes"}}, 400, "thinking.type"),
    (MESSAGES, {"messages": HI, "max_tokens": 5, "tools": [{"name": "a"}]}, 400, "tools"),
    (MESSAGES, {"messages": HI, "max_tokens": 5, "tools": [{"type": "bash", "name": "a"}],
                "tool_choice": {"type": "tool", "name": "a"}}, 400, "tool_choice"),
    (MESSAGES, {"messages": HI, "max_tokens": 5, "tool_choice": {"type": "tool"}}, 400, "tool_choice.name"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 5}, 400,
     "messages.0.content.0.tool_use_id"),
    (MESSAGES, {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text"}]}]}],
        "max_tokens": 5}, 400, "messages.0.content.0.content.0.text"),
    ("/detokenize", {"tokens": [1 << 50]}, 400, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "field"), BAD)
def test_a_wrong_field_is_named(
    server: Served, path: str, body: dict[str, Any], status: int, field: str | None
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()
    if path == MESSAGES:
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
    else:
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["param"] == field
    assert error["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b"\xff", b'{"a": "\\ud800"}', b'{"a": NaN}', b"\x00"]
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_body_that_is_not_a_json_object_is_refused(server: Served, path: str, body: bytes) -> None:
    answer = server.client.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert len(answer.text) < 500


@pytest.mark.parametrize(
    ("method", "path", "status", "told"),
    [
        ("GET", "/v1/nothing", 404, "nothing at this path"),
        ("GET", CHAT, 405, "takes POST"),
        ("PUT", "/api/chat", 405, "takes POST"),
        ("POST", "/api/delete", 405, "takes DELETE"),
    ],
)
def test_other_paths_and_methods(server: Served, method: str, path: str, status: int, told: str) -> None:
    answer = server.client.request(method, path, json={"model": "any", "input": "a"})
    error = answer.json()["error"]
    assert answer.status_code == status
    assert told in (error if path.startswith("/api") else error["message"])
    assert answer.headers.get("allow") == (told.removeprefix("takes ") if status == 405 else None)


def test_too_many_prompts(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, a body of 100 kB kept the server busy for ten seconds."""

    def refuse(given: object) -> Any:
        raise AssertionError("a prompt was tokenized")

    monkeypatch.setattr(server.service.builder, "tokenized", refuse)
    for prompts in (["a"] * 1000, [[5]] * 1000):
        answer = server.post(TEXT, {"prompt": prompts, "n": 64})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_a_body_that_is_too_large(server: Served) -> None:
    """With a Content-Length, or in chunks."""
    limit = ServeSettings().body_bytes
    large = b'"' + b"a " * (limit // 2) + b'"'
    assert server.client.post(TEXT, content=large).status_code == 413
    assert server.client.post(MESSAGES, content=iter([large[:limit], large[limit:]])).status_code == 413
    just = b'{"prompt": "a", "max_tokens": 1}'.ljust(limit)
    assert server.client.post(TEXT, content=just).status_code == 200
    assert server.client.post(TEXT, content=iter([just[:9], just[9:]])).status_code == 200


def test_images_that_are_left_out_do_not_count(server: Served) -> None:
    """Six screenshots in results of tools had status 413, although only marks of them are used."""
    image = "iVBORw0K/+" * 150_000
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    call = {"id": "a", "function": {"name": "look", "arguments": "{}"}}
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [part]},
    ]
    body = {"messages": [*HI, *turn * 6], "max_tokens": 1}
    assert server.post(CHAT, body).status_code == 200
    escaped = json.dumps(body).replace("/", "\\/")  # as PHP writes it
    assert server.client.post(CHAT, content=escaped).status_code == 200
    assert server.post(CHAT, {"messages": [*HI, *turn * 24], "max_tokens": 1}).status_code == 413
    as_text = server.post(CHAT, {"messages": [{"role": "user", "content": image * 6}]})
    assert (as_text.status_code, as_text.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_search_for_images_is_linear() -> None:
    body = (b"a" * 1023 + b" ") * (9 << 10) + b'","' + (b"b" * 1023 + b",") * (9 << 10)
    begin = time.process_time()
    with pytest.raises(RequestError):
        _checked(Fields, body, len(body) - 1)
    assert time.process_time() - begin < 5


def test_a_body_that_is_too_deep(server: Served) -> None:
    deep = b'{"prompt": ' + b"[" * 90_000
    answer = server.client.post(TEXT, content=deep)
    assert (answer.status_code, "nested too deeply" in answer.text) == (400, True)


def test_a_body_that_is_as_deep_as_allowed(talker: Served) -> None:
    """Other libraries parse schemas, tools and template variables, so depth must not break them."""
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(90):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "now", "parameters": deep}}
    for more in ({"json_schema": deep}, {"tools": [tool]}, {"chat_template_kwargs": {"deep": deep}}):
        answer = talker.post(CHAT, {"messages": HI, "max_tokens": 1, **more})
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    ("length", "more", "status"),
    [(99, "", 408), (99_999_999, "", 413), (99_999_999, "Expect: 100-continue\r\n", 413)],
)
def test_a_body_that_never_comes(demo: Pair, length: int, more: str, status: int) -> None:
    """The server does not wait for a body whose Content-Length is too large."""
    seconds = 0.1 if status == 408 else PATIENCE
    with served(demo, body_seconds=seconds) as server:
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port), PATIENCE) as connection:
            head = f"POST {TEXT} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {length}\r\n{more}\r\n"
            connection.sendall(f"{head}{'' if more else '{'}".encode())
            assert connection.recv(1 << 16).startswith(f"HTTP/1.1 {status}".encode())


def test_errors_do_not_repeat_what_was_sent(server: Served) -> None:
    """Of names, only those that a field of the API may have; others may be megabytes long."""
    for secret in ("<script>alert(1)</script>\x1b[2J", "k" * 100_000, "Hidden text", "a-b"):
        for path, body in (
            (CHAT, {"messages": secret}),
            (CHAT, {"messages": [{"role": secret, "content": "a"}]}),
            (CHAT, {secret: 1}),
            (RESPONSES, {"input": "a", "metadata": {secret: 5}}),
            (TEXT, {"prompt": "a", "logit_bias": {secret: "x"}}),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 400
            assert secret not in answer.text
            assert answer.json()["error"]["param"].split(".")[0] in ("messages", *body)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
def test_numbers_that_are_not_finite(talker: Served, number: str) -> None:
    """They become null, as in JavaScript: a response repeats tools, and JSON cannot write them."""
    tool = '{"type": "function", "name": "f", "parameters": {"type": "object", "x": %s, "y": [%s]}}'
    body = f'{{"input": "a", "max_output_tokens": 1, "tools": [{tool % (number, number)}]}}'
    answer = talker.client.post(RESPONSES, content=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tools"][0]["parameters"] == {"type": "object", "x": None, "y": [None]}


def test_a_model_without_a_chat_template(demo: Pair) -> None:
    with served(demo, template=None) as server:
        error = server.post(CHAT, {"messages": HI}).json()["error"]
        assert error["code"] == "no_chat_template"
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_model_that_does_not_fill_in(server: Served) -> None:
    for path, body in (
        (TEXT, {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": ""}),
    ):
        answer = server.post(path, body)
        assert (answer.status_code, "no tokens for filling in" in answer.text) == (400, True)


def test_control_tokens_in_a_message_stay_text(server: Served, demo: Pair) -> None:
    """Otherwise a user could forge a turn. In a prompt to continue, editors write them themselves."""
    vocabulary = demo.target.vocabulary
    bos, end = (vocabulary.text(token).decode() for token in (vocabulary.bos, vocabulary.eos))
    text = f"{bos}a{end}b"
    read, plain = (len(vocabulary.tokenize(text.encode(), parse_special=marks)) for marks in (True, False))
    assert read < plain
    asks: dict[str, tuple[dict[str, Any], str]] = {
        TEXT: ({"prompt": text}, "prompt_tokens"),
        NATIVE: ({"prompt": text}, "tokens_evaluated"),
        "/api/generate": ({"prompt": text, "raw": True, "stream": False}, "prompt_eval_count"),
    }
    for path, (body, count) in asks.items():
        answer = server.post(path, {**body, "max_tokens": 1, "options": {"num_predict": 1}}).json()
        assert answer.get("usage", answer)[count] == read - 1, path  # of two at the beginning, one counts
    said = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    assert server.post(CHAT, said).json()["usage"]["prompt_tokens"] > plain
    for marks in (None, True, False):
        ids = server.post("/tokenize", {"content": text, "parse_special": marks}).json()["tokens"]
        assert (vocabulary.eos in ids) is (marks is not False)
        written = server.post("/detokenize", {"tokens": ids}).json()["content"].strip()
        assert written == ("ab" if marks is not False else text)


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (401, "authentication_error", "authentication_error"),
        (413, "invalid_request_error", "request_too_large"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_each_api_has_its_own_names_for_faults(status: int, openai: str, anthropic: str) -> None:
    fault = RequestError(status, "no", field="x", code="c", retry_after=3)
    answer = error_response(CHAT, fault)
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "3")
    error = {"message": "x: no", "type": openai, "param": "x", "code": "c"}
    assert json.loads(bytes(answer.body)) == {"error": error}
    answer = error_response(MESSAGES, fault)
    assert json.loads(bytes(answer.body)) == {
        "type": "error",
        "error": {"type": anthropic, "message": "x: no"},
    }


def every_kind(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*map(every_kind, kind.__subclasses__()))


def test_faults_of_all_kinds() -> None:
    """Of errors whose messages may name files of the server, clients learn only the kind."""
    assert as_request_error(PromptError("too long")).status == 400
    fetching = as_request_error(FetchError("the hub has no repository a/b"))
    assert (fetching.status, fetching.message) == (500, "the hub has no repository a/b")
    for kind in every_kind(LlamaspecError) - {FetchError, *every_kind(PromptError)}:
        told = as_request_error(kind(3 if kind is RowsMissingError else "no room for /home/me/x.gguf"))
        assert (told.status, "home" in told.message) == (500, False)
    broken = as_request_error(KeyError("a secret"))
    assert (broken.status, broken.message) == (500, "internal error: KeyError")


def deflated(data: bytes) -> bytes:
    """Return deflate without a header, as some clients send it."""
    return zlib.compress(data)[2:-4]


SHORT = b'{"prompt": "a", "max_tokens": 1}'
BOMBS = {"gzip": gzip.compress(bytes(100 << 20), 1), "zstd": zstd.compress(bytes(100 << 20))}
wide = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
COMPRESSED: list[tuple[str, bytes, int, str]] = [
    ("gzip", gzip.compress(SHORT), 200, ""),
    ("GZip", gzip.compress(SHORT.ljust(8 << 20)), 200, ""),
    ("deflate", zlib.compress(SHORT), 200, ""),
    ("deflate", deflated(SHORT), 200, ""),
    ("zstd", zstd.compress(SHORT), 200, ""),
    ("gzip", gzip.compress(SHORT.ljust((8 << 20) + 1)), 413, "larger than"),
    ("gzip", BOMBS["gzip"], 413, "larger than"),
    ("zstd", BOMBS["zstd"], 413, "larger than"),
    ("gzip", gzip.compress(SHORT)[:-1], 400, "cut off"),
    ("zstd", zstd.compress(SHORT)[:-1], 400, "cut off"),
    ("gzip", b"", 400, "cut off"),
    ("zstd", gzip.compress(SHORT), 400, "cannot be unpacked as zstd"),
    ("zstd", wide.compress(SHORT) + wide.flush(), 400, "cannot be unpacked as zstd"),
    ("gzip", gzip.compress(SHORT) * 2, 400, "one frame"),
    ("br", SHORT, 415, "gzip, deflate, zstd or identity"),
    ("gzip, zstd", SHORT, 415, "gzip, deflate, zstd or identity"),
]


@pytest.mark.parametrize(("encoding", "body", "status", "told"), COMPRESSED, ids=range(len(COMPRESSED)))
def test_a_compressed_body(server: Served, encoding: str, body: bytes, status: int, told: str) -> None:
    response = server.client.post(TEXT, content=body, headers={"Content-Encoding": encoding})
    assert response.status_code == status, response.text
    assert told in response.text


@pytest.mark.parametrize("encoding", BOMBS)
def test_a_bomb_is_not_unpacked(encoding: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="larger than 1000000 bytes"):
            decompressed(BOMBS[encoding], encoding, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("broken", [(RequestBuilder, "jobs"), (Pair, "stream")])
def test_a_fault_of_the_server_is_not_the_clients(
    demo: Pair, monkeypatch: pytest.MonkeyPatch, broken: tuple[type, str], streams: bool
) -> None:
    """Once, any ValueError was a 400: it blamed the client, and was not logged."""

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a secret")

    body = {"prompt": "a", "max_tokens": 1, "stream": streams}
    with served(demo) as server:
        with monkeypatch.context() as patch:
            patch.setattr(*broken, fail)
            answer = server.post(TEXT, body)
        assert answer.status_code == 500 or streams
        assert '"message":"internal error: ValueError","type":"server_error"' in answer.text
        (line,) = (line for line in server.log if "internal error" in line)
        assert re.search(r"ValueError in fail, test_bad_requests.py line \d+", line)
        assert "secret" not in line + answer.text
        assert server.post(TEXT, body).status_code == 200
