"""Completions in editors: `/infill` as llama.vim uses it, and `suffix` in `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llamaspec import FixedLength, ModelOptions, Pair, Sampling, open_pair
from llamaspec.chat.infill import File, fitting_infill_prompt
from model_store import ModelStore
from serving import CONTEXT, Gate, Served, served
from tiny_models import Recipe
from tiny_vocabulary import BYTES, FIM

CODER = Recipe(vocabulary=BYTES.with_controls(*FIM), dtype="q8_0", end_score=5)
FILES: list[dict[str, Any]] = [
    {"filename": "a.py", "text": "A = 1\n" * 8, "time": [1, 2]},
    {"filename": "b.py", "text": "B = 2"},
]
CURSOR = {"input_prefix": "def f(x):\n", "prompt": "    re", "input_suffix": "\n\nf(1)\n"}
SETTINGS = {
    "n_indent": 4,
    "id_slot": 0,
    "cache_prompt": True,
    "samplers": ["top_k", "top_p", "infill"],
    "stop": [],
}
LLAMA_VIM: dict[str, Any] = {
    **CURSOR, **SETTINGS, "input_extra": FILES, "n_predict": 30, "top_k": 40, "top_p": 0.99, "stream": False,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 10**9,
    "response_fields": ["content", "timings/prompt_n", "timings/prompt_ms", "truncated", "tokens_cached"],
}  # fmt: skip


@pytest.fixture(scope="module")
def coder(store: ModelStore) -> Iterator[Pair]:
    files = store.path("llama", CODER), store.path("llama", CODER.draft())
    options = ModelOptions(n_ctx=CONTEXT, n_cells=4 * CONTEXT, threads=1, cache_type_v="bf16")
    with open_pair(*files, target_options=options, draft_options=options) as pair:
        yield pair


@pytest.fixture(scope="module")
def server(coder: Pair) -> Iterator[Served]:
    with served(coder, template=None) as running:
        yield running


def written(pair: Pair, prefix: str, suffix: str, files: list[File], **more: Any) -> str:
    """Return the completion at the cursor from the Python API, without a draft."""
    prompt = fitting_infill_prompt(pair.target.vocabulary, prefix, suffix, files, CONTEXT - 30)
    stream = pair.stream(prompt, seed=3, max_tokens=30, policy=FixedLength(0), **more)
    return stream.run().text


def test_ollama_s_clients_see_that_the_model_fills_in(server: Served) -> None:
    assert server.post("/api/show", {"model": "any"}).json()["capabilities"] == ["completion", "insert"]


def test_the_fields_that_llama_vim_asks_for_and_no_others(server: Served, coder: Pair) -> None:
    answer = server.post("/infill", {**LLAMA_VIM, "seed": 3})
    assert answer.status_code == 200, answer.text
    assert list(answer.json()) == LLAMA_VIM["response_fields"]
    files = [File(each["filename"], each["text"]) for each in FILES]
    text = written(coder, "def f(x):\n    re", "\n\nf(1)\n", files, sampling=Sampling(top_p=0.99))
    assert answer.json()["content"] == text


def test_why_a_completion_ends(server: Served) -> None:
    def told(**more: Any) -> tuple[str, str, int]:
        answer = server.post("/infill", {**CURSOR, "n_predict": 30, "seed": 3, **more}).json()
        return answer["stop_type"], answer["stopping_word"], answer["tokens_predicted"]

    whole = server.post("/infill", {**CURSOR, "n_predict": 30, "seed": 3, "ignore_eos": True}).json()[
        "content"
    ]
    assert told(ignore_eos=True) == ("limit", "", 30)
    assert told(ignore_eos=True, stop=[whole[7]])[:2] == ("word", whole[7])
    next_file = server.service.builder.vocabulary.controls["<|file_sep|>"]
    assert told(logit_bias={str(next_file): 100.0}) == ("eos", "", 1)


def test_suffix_is_the_same_completion(server: Served) -> None:
    prefix = CURSOR["input_prefix"] + CURSOR["prompt"]
    body = {"prompt": prefix, "suffix": CURSOR["input_suffix"], "max_tokens": 30, "seed": 3}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert text == server.post("/infill", {**CURSOR, "max_tokens": 30, "seed": 3}).json()["content"]
    error = server.post("/v1/completions", {**body, "prompt": [5, 6]}).json()["error"]
    assert error["param"] == "suffix"


def test_other_files_are_processed_before_they_are_needed(server: Served) -> None:
    """llama.vim asks for this while the user does not type."""
    files = [{"filename": "c.py", "text": "C = 3\n" * 20}]
    nothing = {"input_prefix": "", "input_suffix": "", "prompt": "", "input_extra": files, "n_predict": 0}
    warmed = server.post("/infill", {**nothing, "response_fields": [""]})
    assert (warmed.status_code, warmed.json()) == (200, {})
    answer = server.post("/infill", {**CURSOR, "input_extra": files, "n_predict": 5}).json()
    n_file = len(server.service.builder.vocabulary.tokenize(files[0]["text"].encode()))
    assert answer["tokens_cached"] >= n_file
    assert server.post("/infill", {**nothing, "seed": 3}).json()["tokens_predicted"] == 0


def test_text_that_does_not_fit_is_trimmed_or_refused(server: Served) -> None:
    long = "x = 1\n" * (4 * CONTEXT)
    answer = server.post("/infill", {**CURSOR, "input_prefix": long, "input_suffix": long, "n_predict": 5})
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens_evaluated"] <= CONTEXT - 5
    error = server.post("/v1/completions", {"prompt": long, "suffix": "b"}).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_the_next_key_cancels_within_one_evaluation(coder: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The editor closes the connection; the first request does not change the answer to the next."""
    gate = Gate(coder, monkeypatch)
    body = {**CURSOR, "n_predict": 400, "ignore_eos": True, "seed": 3}
    with served(coder, template=None, parallel=1) as server:
        server.lose_client("/infill", body, gate)
        assert gate.n_evaluations <= 1
        answer = server.post("/infill", {**body, "prompt": "    ret", "n_predict": 30}).json()
    sampling = Sampling(logit_bias=dict.fromkeys(coder.target.vocabulary.ends, -1e30))
    assert answer["content"] == written(coder, "def f(x):\n    ret", "\n\nf(1)\n", [], sampling=sampling)
