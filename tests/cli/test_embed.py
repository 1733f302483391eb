"""`llamaspec embed`: one line of JSON for each text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from llamaspec import open_embedder
from llamaspec.cli.main import main
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import WORD_PIECE


@pytest.fixture(scope="module")
def bert(store: ModelStore) -> Path:
    return store.path("bert", Recipe(vocabulary=WORD_PIECE))


def embed(path: Path, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    found = CliRunner().invoke(main, ["embed", "-m", str(path), "--threads", "1", *arguments], input=stdin)
    return found.exit_code, found.stdout, found.stderr


def test_texts_become_lines(bert: Path, tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(300)]
    with open_embedder(bert) as embedder:
        expected = embedder.embed(texts)
    (tmp_path / "texts").write_text("\n\n".join(texts))
    for arguments, stdin in ((texts, ""), (["-f", str(tmp_path / "texts")], ""), ([], "\n".join(texts))):
        code, out, _ = embed(bert, *arguments, stdin=stdin)
        lines = [json.loads(line) for line in out.splitlines()]
        assert (code, [line["index"] for line in lines]) == (0, list(range(300)))
        np.testing.assert_allclose([line["embedding"] for line in lines], expected, atol=1e-3)
        assert lines[0]["tokens"] == 7
    _, out, _ = embed(bert, "a", "--dimensions", "3")
    assert len(json.loads(out)["embedding"]) == 3


def test_scores(store: ModelStore) -> None:
    path = store.path("qwen3-rank")
    with open_embedder(path) as embedder:
        expected = embedder.rank("who?", ["me", "you"])
    _, out, _ = embed(path, "--query", "who?", "me", "you")
    np.testing.assert_allclose([json.loads(line)["score"] for line in out.splitlines()], expected, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "arguments", "code", "told"),
    [
        ("bert", ["--dimensions", "65", "a"], 1, "dimensions must be from 1 to 64, got 65"),
        ("bert", ["--query", "a", "b"], 1, "is no reranker; drop --query"),
        ("qwen3-rank", ["a"], 1, "is a reranker; give it a --query"),
        ("llama", ["a"], 1, "is a model that generates text; name an embedding model"),
        ("bert", ["the " * 600], 1, "text 0 has 602 tokens, but the context 512; shorten it"),
        ("bert", [], 1, "there is no text; give some"),
        ("bert", ["a", "-f", "b"], 2, "give the texts once"),
        ("bert", ["a", "--query", "b", "--dimensions", "3"], 2, "which have no --dimensions"),
    ],
)
def test_errors(store: ModelStore, bert: Path, kind: str, arguments: list[str], code: int, told: str) -> None:
    found, out, said = embed(bert if kind == "bert" else store.path(kind), *arguments)
    assert (found, out) == (code, "")
    assert told in said
