"""Weights that are not numbers: a target names its file, a draft stops drafting, and doctor finds both."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from command import invoke, naming, said
from fuzz_gguf import put_together, take_apart
from llamaspec import FixedLength, ModelOptions, NoDrafter, open_pair
from llamaspec.errors import ScoresError
from llamaspec.llama.row_contexts import DraftContext
from model_store import ModelStore
from patience import until
from serving import served
from tiny_hidden import DraftRecipe
from tiny_models import Recipe

CPU = ModelOptions(threads=1)
VALUES = {"not a number": float("nan"), "infinite": float("inf")}


def spoilt(source: Path, path: Path, value: float, tensor: str = "output_norm.weight") -> Path:
    """Write a copy with a weight that is not a number, by default in its last norm."""
    parts = take_apart(source)
    at = next(each.offset for each in parts.tensors if each.name == tensor.encode())
    parts.data = parts.data[:at] + struct.pack("<f", value) + parts.data[at + 4 :]
    path.write_bytes(put_together(parts))
    return path


@pytest.fixture(params=VALUES)
def bad(request: pytest.FixtureRequest, store: ModelStore, tmp_path: Path) -> Path:
    return spoilt(store.path("llama", Recipe()), tmp_path / "bad.gguf", VALUES[request.param])


def test_a_target_names_its_file(bad: Path) -> None:
    answer = invoke("generate", "x", *naming([bad]))
    assert said(answer) == f"llamaspec: {bad} gives scores that are not numbers; download or convert it again"


@pytest.mark.parametrize("streams", [False, True])
def test_clients_learn_no_path(bad: Path, streams: bool) -> None:
    """The log has it."""
    requests: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        "/api/generate": {"prompt": "x"},
        "/completion": {"prompt": "x"},
    }
    with open_pair(bad, target_options=CPU) as pair, served(pair) as server:
        for path, body in requests.items():
            answer = server.post(path, {**body, "stream": streams})
            assert "its file is damaged; the server's log says why" in answer.text
            assert str(bad.parent) not in answer.text
            assert bad.name not in answer.text
    assert sum(f"error: {bad} gives scores" in line for line in server.log) == len(requests)


def test_a_text_with_damaged_scores_ends_no_other(store: ModelStore, tmp_path: Path) -> None:
    """A token that overflows: once, all requests that shared its evaluation ended with an error."""
    parts = take_apart(store.path("llama", Recipe()))
    embeddings = next(tensor for tensor in parts.tensors if tensor.name == b"token_embd.weight")
    with open_pair(store.path("llama", Recipe()), target_options=CPU) as pair:
        prompts = [pair.target.vocabulary.tokenize(text) for text in (b"def f(x):", b"import os")]
        n_bytes = len(parts.data) and 4 * pair.target.weights.hidden_size
    token = int(prompts[0][-1])
    assert token not in prompts[1]
    at = embeddings.offset + token * n_bytes
    parts.data = parts.data[:at] + struct.pack("<f", float("nan")) + parts.data[at + 4 :]
    (tmp_path / "bad.gguf").write_bytes(put_together(parts))
    with open_pair(tmp_path / "bad.gguf", ngram=False, target_options=CPU) as pair:

        def started(prompt: Any) -> Any:
            return pair.stream(prompt, seed=1, max_tokens=12, policy=FixedLength(0))

        alone = started(prompts[1]).run()
        both = [started(prompt) for prompt in prompts]
        for each in both:
            each.begin()
        with pytest.raises(ScoresError):
            both[0].run()
        assert both[1].run().tokens == alone.tokens


@pytest.mark.parametrize("n_texts", [1, 3])
def test_a_draft_falls_silent(target_file: Path, bad: Path, n_texts: int) -> None:
    def texts(draft: Path | None) -> list[tuple[int, ...]]:
        with open_pair(target_file, draft, ngram=False, target_options=CPU, draft_options=CPU) as pair:
            streams = [pair.stream("def f(x):", seed=seed, max_tokens=20, policy=FixedLength(3))
                       for seed in range(n_texts)]  # fmt: skip
            for stream in streams:
                next(stream)
            for stream in streams:
                stream.run()
                assert all(len(round_.draft) == 0 for round_ in stream.completion.rounds)
            return [stream.completion.tokens for stream in streams]

    assert texts(bad) == texts(None)


def test_why_a_draft_fell_silent_is_told(target_file: Path, bad: Path) -> None:
    """By the command, in JSON, and by the server's log; clients learned the path of the draft's file."""
    why = f"{bad} gives scores that are not numbers; download or convert it again"
    arguments = ["generate", "x", *naming([target_file, bad]), "-n", "5", "--draft-length", "2"]
    for detail in ("short", "full"):
        told = invoke(*arguments, "--stats", detail).stderr
        assert f"the draft model failed and is no longer used: {why}\n" in told
    assert invoke(*arguments, "--json").json["statistics"]["draft_fault"] == why
    with open_pair(target_file, bad, target_options=CPU, draft_options=CPU) as pair, served(pair) as server:
        body = {"prompt": "x", "max_tokens": 5}
        answer = server.post("/v1/completions", body)
        assert answer.json()["timings"]["draft_fault"] == "the server's log says why"
        assert str(bad.parent) not in answer.text
        until(lambda: any(f"no longer used ({why})" in line for line in server.log))  # after the answer
        plain = {**body, "speculative": {"enabled": False}}
        assert server.post("/v1/completions", plain).json()["timings"]["draft_fault"] is None


# Of drafts that read hidden rows: what makes all logits, only a confidence, or only DFlash2's lattice wrong.
SPOILT = (
    ("eagle3", "fc.weight"),
    ("dflash", "fc.weight"),
    ("dspark", "conf_proj.weight"),
    ("dflash2", "fc.weight"),
    ("dflash2", "selector_hidden.weight"),
)


@pytest.mark.parametrize(("kind", "tensor"), SPOILT)
def test_a_draft_with_hidden_rows_falls_silent(
    store: ModelStore, tmp_path: Path, kind: str, tensor: str
) -> None:
    """Once, a DFlash2 draft ended every request with an error."""
    path = store.draft(DraftRecipe(kind=kind))
    bad = spoilt(path, tmp_path / "bad.gguf", VALUES["not a number"], tensor)
    assert_silent(store.path("llama", Recipe()), bad)


@pytest.mark.parametrize("token", [-1.0, 288.0, 1e9, float("nan")])
def test_a_candidate_that_is_no_token(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, token: float
) -> None:
    rows_of = DraftContext.hidden_rows

    def wrong(self: DraftContext, n: int) -> Any:
        rows = rows_of(self, n)
        rows[-1, 2] = token
        return rows

    monkeypatch.setattr(DraftContext, "hidden_rows", wrong)
    assert_silent(store.path("llama", Recipe()), store.draft(DraftRecipe(kind="dflash2")))


def assert_silent(target: Path, draft: Path) -> None:
    """Check that a completion goes on without the draft, and says so."""
    with open_pair(target, draft, ngram=False, target_options=CPU) as pair:
        plain = pair.stream("def f(x):", seed=0, max_tokens=12, drafter=NoDrafter()).run()
        for _ in range(2):  # the draft's own KV cache is not spoilt for the next one
            made = pair.stream("def f(x):", seed=0, max_tokens=12, policy=FixedLength(3)).run()
            assert made.tokens == plain.tokens
            assert not sum(len(round_.draft) for round_ in made.rounds)
            assert (
                made.draft_fault == f"{draft} gives scores that are not numbers; download or convert it again"
            )


def test_the_doctor_finds_a_draft_with_hidden_rows(store: ModelStore, tmp_path: Path) -> None:
    bad = spoilt(store.draft(DraftRecipe(kind="dflash2")), tmp_path / "bad.gguf", VALUES["not a number"])
    answer = invoke("doctor", *naming([store.path("llama", Recipe()), bad]), "--json")
    assert answer.code == 1
    found = [finding for finding in answer.json["findings"] if finding["level"] == "problem"]
    assert [(finding["topic"], "not numbers" in finding["text"]) for finding in found] == [("draft", True)]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_doctor_finds_it(target_file: Path, bad: Path, role: str) -> None:
    models = [bad, target_file] if role == "target" else [target_file, bad]
    answer = invoke("doctor", *naming(models), "--json")
    assert answer.code == 1
    found = [finding for finding in answer.json["findings"] if finding["level"] == "problem"]
    assert [(finding["topic"], "not numbers" in finding["text"]) for finding in found] == [(role, True)]
