"""`POST /completion`: llama-server's own API for text to continue."""

from __future__ import annotations

from typing import Any

from serving import Served

BODY: dict[str, Any] = {"prompt": "def f(x):", "n_predict": 24, "seed": 11}


def test_the_text_is_that_of_the_other_apis(server: Served) -> None:
    told = server.post("/completion", BODY).json()
    body = {"prompt": BODY["prompt"], "max_tokens": 24, "seed": 11}
    assert told["content"] == server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert (told["stop"], told["stop_type"], told["tokens_predicted"]) == (True, "limit", 24)


def test_a_stream_is_the_whole_answer_in_parts(server: Served) -> None:
    *parts, last = (data for _, data in server.events("/completion", BODY))
    assert "".join(part["content"] for part in parts) == server.post("/completion", BODY).json()["content"]
    assert not any(part["stop"] for part in parts)
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 24)


def test_a_prompt_of_tokens_and_texts(server: Served) -> None:
    tokens = server.post("/tokenize", {"content": "def f", "add_special": True}).json()["tokens"]
    rest = server.post("/tokenize", {"content": "(x):"}).json()["tokens"]
    ids = server.post("/completion", {**BODY, "prompt": [*tokens, *rest]}).json()
    mixed = server.post("/completion", {**BODY, "prompt": [*tokens, "(x):"]}).json()
    assert ids["content"] == mixed["content"]
    assert ids["tokens_evaluated"] == mixed["tokens_evaluated"] == len(tokens) + len(rest)


def test_probabilities(server: Served) -> None:
    told = server.post("/completion", {**BODY, "n_probs": 2}).json()["completion_probabilities"]
    assert len(told) == 24
    assert all(len(token["top_logprobs"]) == 2 for token in told)
    parts = [data for _, data in server.events("/completion", {**BODY, "n_probs": 2})]
    assert [token for part in parts for token in part.get("completion_probabilities", ())] == told
