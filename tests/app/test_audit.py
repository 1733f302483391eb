"""`llamaspec audit`: says so when guessing changes the text, and when it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from command import invoke, naming
from llamaspec import LlamaModel
from llamaspec.values import Ask, Logits


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_sound_pair_passes(target_file: Path, draft_file: Path, temperature: str) -> None:
    answer = invoke(
        "audit", *naming([target_file, draft_file]), "-t", temperature, "-n", "40", "-k", "3", "--json"
    )
    assert answer.code == 0
    assert answer.json["n_tokens"] == 40
    assert answer.json["forks"] == []
    assert answer.json["first_difference"] is None
    assert 2 in answer.json["identical_widths"]


def test_a_machine_that_rounds_wider_batches_otherwise_is_found_out(
    target_file: Path, draft_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LlamaModel.logits

    def biased(self: LlamaModel, asks: list[Ask]) -> list[Logits]:
        answers = honest(self, asks)
        if asks[0].n == 1:
            return answers
        return [np.roll(answer, 1, axis=1) for answer in answers]

    monkeypatch.setattr(LlamaModel, "logits", biased)
    answer = invoke("audit", *naming([target_file, draft_file]), "-t", "0", "-n", "40", "-k", "3", "--json")
    assert answer.code == 1
    found = answer.json
    assert found["first_difference"] is not None
    assert found["forks"]
    assert max(fork["width"] for fork in found["forks"]) == 4
    assert all(fork["logit_gap"] > 0 for fork in found["forks"])
    assert found["identical_widths"] == []


def test_for_people(target_file: Path, draft_file: Path) -> None:
    answer = invoke("audit", *naming([target_file, draft_file]), "-n", "20", "--seed", "3")
    assert answer.stdout.splitlines()[:2] == [
        "same seed, same text: all 20 tokens are those of plain decoding",
        "replayed one token at a time: 0 forks in 20 tokens",
    ]


def test_it_needs_a_draft(target_file: Path) -> None:
    answer = invoke("audit", *naming([target_file]))
    assert answer.code == 1
    assert answer.stderr.strip().endswith("name it with --draft, or copy with --draft ngram")
