"""Questions to a model, as drafting, verifying, batches and trees ask them, and the right answers.

`fresh` asks a second copy of the model one sequence at a time, with an empty memory. With float memories and
no flash attention the answers agree to 1e-4, though not bit for bit: which cells of the memory a sequence got
decides the order of sums. The scores have a standard deviation of 3, so a wrong memory is far outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamaspec import Ask, LlamaModel
from llamaspec.llama.trie import Node
from llamaspec.values import Logits, TokenArray

EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": "off"}
# Largest difference of a score. Gemma's activation is a table of half precision: it amplifies the last bit.
TOLERANCE = {"llama": 1e-4, "gemma3": 2e-2, "mamba": 1e-4, "jamba": 1e-4, "lfm2": 1e-4}
MEMORIES = ("llama", "gemma3", "mamba", "jamba", "lfm2")
LANES = 4


def tokens(*ids: int) -> TokenArray:
    return np.array(ids, dtype=np.int32)


def asked(n: int, seed: int = 0, lane: int = 0, n_scored: int = 1) -> Ask:
    """One sequence of random tokens; the same seed begins alike at every length."""
    return Ask(lane, np.random.default_rng(seed).integers(2, 288, 4096).astype(np.int32)[:n], n_scored)


def fresh(model: LlamaModel, asks: Sequence[Ask]) -> list[Logits]:
    """Every ask on its own, by a model that remembers nothing."""
    answers = []
    for ask in asks:
        model.forget()
        answers.append(model.logits([Ask(0, ask.tokens, ask.n)])[0].copy())
    return answers


def assert_same(
    answers: Sequence[Logits], expected: Sequence[Logits], tolerance: float = TOLERANCE["llama"]
) -> None:
    assert len(answers) == len(expected)
    for answer, right in zip(answers, expected, strict=True):
        assert answer.shape == right.shape
        assert answer.dtype == np.float32
        np.testing.assert_allclose(answer, right, rtol=0, atol=tolerance)


@dataclass
class RandomCalls:
    """Calls as drafting, verifying, batches and trees make them, and some that nobody makes."""

    rng: np.random.Generator
    longest: int = 60

    def __post_init__(self) -> None:
        self.held = [self.fresh_tokens(12) for _ in range(LANES)]

    def fresh_tokens(self, n: int) -> TokenArray:
        # Few distinct tokens: sequences that are not related share beginnings too.
        return self.rng.integers(2, 6 if self.rng.random() < 0.5 else 288, n).astype(np.int32)

    def call(self) -> list[Ask]:
        """The asks of one call."""
        kind = self.rng.choice(["chain", "again", "batch", "tree", "swapped"], p=[0.35, 0.1, 0.2, 0.25, 0.1])
        lanes = self.rng.permutation(LANES)[: int(self.rng.integers(2, LANES + 1))].tolist()
        if kind == "chain":
            return [self.ask(lanes[0], self.varied(self.held[lanes[0]]))]
        if kind == "again":
            return [self.ask(lanes[0], self.held[self.rng.integers(LANES)])]
        if kind == "swapped":
            sequences = [self.held[lane] for lane in lanes]
            return [self.ask(lane, tokens) for lane, tokens in zip(lanes, sequences[::-1], strict=True)]
        if kind == "tree":
            trunk = self.varied(self.held[self.rng.integers(LANES)])
            return [self.ask(lane, self.grown(self.cut(trunk, at_most=4))) for lane in lanes]
        return [self.ask(lane, self.varied(self.held[lane])) for lane in lanes]

    def ask(self, lane: int, sequence: TokenArray) -> Ask:
        self.held[lane] = sequence
        return Ask(lane, sequence, min(len(sequence), int(self.rng.choice([1, 1, 2, 3, 5]))))

    def varied(self, sequence: TokenArray) -> TokenArray:
        """Grown, cut, cut and grown, or another sequence altogether."""
        kind = self.rng.choice(["grow", "cut", "both", "new"], p=[0.35, 0.15, 0.4, 0.1])
        if kind == "new" or len(sequence) > self.longest:
            return self.fresh_tokens(int(self.rng.integers(1, 20)))
        if kind == "grow":
            return self.grown(sequence)
        return self.cut(sequence) if kind == "cut" else self.grown(self.cut(sequence))

    def cut(self, sequence: TokenArray, at_most: int = 9) -> TokenArray:
        return sequence[: max(1, len(sequence) - int(self.rng.integers(0, at_most)))]

    def grown(self, sequence: TokenArray) -> TokenArray:
        return np.concatenate([sequence, self.fresh_tokens(int(self.rng.integers(1, 7)))])


@dataclass
class Rounds:
    """What one lane is asked while text is generated: steps of a draft or verifications, and rarer things."""

    rng: np.random.Generator
    judges: bool  # the target's asks; else the draft's
    longest: int = 300

    def __post_init__(self) -> None:
        self.text = self.some(20)

    def some(self, n: int) -> TokenArray:
        return self.rng.integers(2, 288, n).astype(np.int32)

    def asks(self) -> list[Ask]:
        """Of one round, and of what sometimes happens between two."""
        if self.rng.random() < 0.1:
            self.text = self.text[: int(self.rng.integers(1, len(self.text) + 1))]  # far back
        elif self.rng.random() < 0.05 or len(self.text) > self.longest:
            self.text = self.some(int(self.rng.integers(1, 40)))  # something else
        n = int(self.rng.integers(0, 13))
        path = np.concatenate([self.text, self.some(n)])
        n_right = int(self.rng.integers(0, n + 1))
        start, self.text = len(self.text), np.concatenate([path[: len(self.text) + n_right], self.some(1)])
        if self.judges:
            return [Ask(0, path, n + 1)]
        return [Ask(0, path[:end], 1) for end in range(start, len(path) + 1)]


@dataclass
class Count:
    """Positions that llama.cpp was given to evaluate."""

    nodes: list[Node]

    @property
    def n(self) -> int:
        return len(self.nodes)

    def taken(self) -> int:
        """The number since the last look."""
        n = self.n
        self.nodes.clear()
        return n
