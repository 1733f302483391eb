"""Log-probabilities and biases: the numbers of the Python API, in the form of each HTTP API."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from llamaspec import FixedLength, Pair, Sampling
from llamaspec.engine.detokenizer import Piece
from serving import Served

N, SEED = 20, 4
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "# user: def f(x):\n# assistant:"
HI = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": N, "seed": SEED}


@pytest.fixture(scope="module")
def pieces(alone: Pair) -> list[Piece]:
    """The answer, with the two most probable tokens at each position."""
    return list(alone.stream(PROMPT, seed=SEED, max_tokens=N, logprobs=2, policy=FixedLength(0)))


def check(told: list[dict[str, Any]], text: str, pieces: list[Piece], pair: Pair) -> None:
    """Check that the tokens make the text, and that their numbers are those of plain decoding."""
    assert b"".join(bytes(token["bytes"]) for token in told) == text.encode()
    assert len(told) == len(pieces)
    for token, piece in zip(told, pieces, strict=True):
        assert piece.logprobs is not None
        assert token["token"] == pair.target.vocabulary.piece(piece.token).decode()
        assert token["logprob"] == pytest.approx(piece.logprobs.logprob, abs=1e-5)
        tops = [top["logprob"] for top in token["top_logprobs"]]
        assert tops == pytest.approx([logprob for _, logprob in piece.logprobs.top], abs=1e-5)


def test_chat(server: Served, alone: Pair, pieces: list[Piece]) -> None:
    body = {**HI, "logprobs": True, "top_logprobs": 2}
    choice = server.post(CHAT, body).json()["choices"][0]
    check(choice["logprobs"]["content"], choice["message"]["content"], pieces, alone)
    chunks = [data["choices"][0] for _, data in server.events(CHAT, body)[:-1]]
    told = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
    assert list(chain(*told)) == choice["logprobs"]["content"]
    assert server.post(CHAT, HI).json()["choices"][0]["logprobs"] is None
    for chunk in chunks:  # each chunk has the tokens of its own text
        tokens = chunk["logprobs"]["content"] if chunk["logprobs"] else []
        assert "".join(token["token"] for token in tokens) == chunk["delta"].get("content", "")


def test_completions(server: Served, alone: Pair, pieces: list[Piece]) -> None:
    body = {"prompt": PROMPT, "max_tokens": N, "seed": SEED, "logprobs": 2}
    choice = server.post(TEXT, body).json()["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)
    numbers = [piece.logprobs.logprob for piece in pieces if piece.logprobs]
    assert told["token_logprobs"] == pytest.approx(numbers, abs=1e-5)
    assert all(len(top) == 2 for top in told["top_logprobs"])
    events = [data["choices"][0]["logprobs"] for _, data in server.events(TEXT, body)[:-1]]
    for column in told:
        assert list(chain(*(event[column] for event in events))) == told[column]
    none = server.post(TEXT, {**body, "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert none["token_logprobs"] == told["token_logprobs"]
    assert not any(none["top_logprobs"])


def test_only_tokens_of_the_content_are_listed(talker: Served, demo: Pair) -> None:
    """Neither tokens of reasoning nor the marks are listed."""
    body = {**HI, "logprobs": True, "enable_thinking": True, "thinking_budget_tokens": 4}
    choice = talker.post(CHAT, body).json()["choices"][0]
    assert choice["message"]["reasoning_content"]
    told = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    assert told.decode().lstrip("\n") == choice["message"]["content"]


def test_no_token_ends_a_completion_that_ignores_the_end(server: Served, alone: Pair) -> None:
    eos = alone.target.vocabulary.eos
    body = {"prompt": "def f(", "max_tokens": 8, "logit_bias": {str(eos): 100}}
    ended = server.post(TEXT, body).json()
    assert (ended["choices"][0]["finish_reason"], ended["usage"]["completion_tokens"]) == ("stop", 1)
    whole = server.post(TEXT, {**body, "ignore_eos": True}).json()
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 8)


def test_biases_in_the_forms_of_llama_server(server: Served, alone: Pair) -> None:
    """Pairs, strings, and false for never; false does not count as 0."""
    usual: dict[str, Any] = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}

    def text(bias: Any) -> str:
        answer = server.post(TEXT, {**usual, "logit_bias": bias})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def expected(bias: dict[int, float]) -> str:
        sampling = Sampling(temperature=0, logit_bias=bias)
        return alone.stream("def f(", sampling=sampling, max_tokens=8).run().text

    words = alone.target.vocabulary
    first = words.tokenize(text({}).encode(), add_special=False).tolist()[0]
    never = expected({first: -1e30})
    assert never != text({})
    assert text([[first, False]]) == text({str(first): False}) == never
    assert text([[str(first), -100], [first, False]]) == never
    tokens = words.tokenize(b"return", add_special=False).tolist()
    certain = expected(dict.fromkeys(tokens, 100.0))
    assert text([["return", 100]]) == text({"return": 100.0}) == certain != text({})
    assert text([[first, 2], [first, -2]]) == text({})


@pytest.mark.parametrize(
    "bias",
    [[[5, True]], {"5": True}, [[5]], [5, 1], [[5, 1, 1]], [[5, "1"]], [[-1, 1]], [["-1", 1]], [["", 1]],
     [[5, 101]], [[True, 1]], [[1.5, 1]], "x", 0],
)  # fmt: skip
def test_a_bias_that_is_wrong_is_named(server: Served, bias: Any) -> None:
    error = server.post(TEXT, {"prompt": "a", "logit_bias": bias}).json()["error"]
    assert error["param"].startswith("logit_bias")
