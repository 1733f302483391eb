"""Requests to a model as drafting, verification and prompt processing make them, and the right answers.

`fresh` sends one request to a second copy of the model, with an empty KV cache. With float caches and without
flash attention, the logits agree to 1e-4, but not bit for bit: the width of a batch decides the order of
sums. The logits have a standard deviation of 3, so a wrong cache is far outside.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from llamaspec import LlamaModel
from llamaspec.errors import ContextFullError
from llamaspec.llama.batch import Segment
from llamaspec.values import NO_TOKENS, TARGET, Forward, ForwardRequest, Logits, TokenArray, scope_of

EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": "off"}
# Largest difference of a logit. Gemma's activation is a table of half precision, which amplifies the last
# bit.
TOLERANCE = {"llama": 1e-4, "gemma3": 2e-2, "mamba": 1e-4, "jamba": 1e-4, "lfm2": 1e-4}
MEMORIES = ("llama", "gemma3", "mamba", "jamba", "lfm2")

Batch = list[tuple[int, ForwardRequest]]  # rows and their requests


def text(n: int, seed: int = 0) -> TokenArray:
    """Return random tokens; a seed gives the same beginning at every length."""
    return np.random.default_rng(seed).integers(2, 288, 4096).astype(np.int32)[:n]


def request(
    n: int, seed: int = 0, n_logits: int = 1, draft: TokenArray = NO_TOKENS, scope: str = ""
) -> ForwardRequest:
    return ForwardRequest(TARGET, text(n, seed), n_logits, draft, scope=scope_of(scope))


def scores(wanted: ForwardRequest) -> Generator[ForwardRequest, Forward, Logits]:
    """A measurement that returns a copy of one request's logits."""
    forward = yield wanted
    return forward.logits.copy()


def fresh(model: LlamaModel, wanted: ForwardRequest) -> Logits:
    """Return the logits of a model with an empty KV cache."""
    model.forget()
    return model.forward(wanted).copy()


def assert_same(answer: Logits, expected: Logits, tolerance: float = TOLERANCE["llama"]) -> None:
    assert answer.shape == expected.shape
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer, expected, rtol=0, atol=tolerance)


def evaluate(model: LlamaModel, batch: Batch, n_padding: int = 0) -> dict[int, Logits]:
    """Evaluate requests as the scheduler does; return copies of the logits of all rows that have room.

    All requests are prepared. A prompt longer than a chunk is processed in chunks, one row at a time. All
    other requests share an evaluation if they fit.
    """
    answers: dict[int, Logits] = {}
    while batch:
        prepared = model.prepare([(row, wanted, n_padding) for row, wanted in batch])
        new = {
            row: (wanted, n_cached)
            for (row, wanted), n_cached in zip(batch, prepared, strict=True)
            if isinstance(n_cached, int)
        }
        batch = [entry for entry in batch if entry[0] in new]
        for row, (wanted, n_cached) in new.items():
            if n_cached == wanted.n_tokens:
                assert not wanted.n_scored
                answers[row] = np.empty((0, model.vocabulary_size), dtype=np.float32)
        batch = [entry for entry in batch if entry[0] not in answers]
        together: Batch = []
        n_positions = n_scored = n_padding
        for row, wanted in batch:
            n_new = wanted.n_tokens - new[row][1]
            if together and not model.can_share:
                break
            if n_new > model.batch_size and not together:
                n_next = min(new[row][1] + model.batch_size, len(wanted.tokens) - wanted.n_logits)
                model.evaluate([(row, ForwardRequest(TARGET, wanted.tokens[:n_next], n_logits=0))])
                break
            n_positions, n_scored = n_positions + n_new, n_scored + wanted.n_scored
            if n_positions > model.batch_size or n_scored > model.max_scored:
                break
            together.append((row, wanted))
        if together:
            is_padded = together[-1][1].n_scored and model.can_share
            logits = model.evaluate(together, n_padding if is_padded else 0)
            answers |= {row: view.copy() for (row, _), view in zip(together, logits, strict=True)}
        batch = [entry for entry in batch if entry[0] not in answers]
    return answers


def full(model: LlamaModel, batch: Batch) -> list[int]:
    """Return the rows of a batch that have no room."""
    prepared = model.prepare([(row, wanted, 0) for row, wanted in batch])
    return [
        row
        for (row, _), n_cached in zip(batch, prepared, strict=True)
        if isinstance(n_cached, ContextFullError)
    ]


@dataclass
class RandomRows:
    """Random batches of several sequences, which grow, verify drafts, are cut, share prefixes, and end.

    Parameters
    ----------
    rng : Generator
    longest : int
        Tokens after which a row ends.
    n_sequences : int
        Most rows at once.
    """

    rng: np.random.Generator
    longest: int = 60
    n_sequences: int = 4
    texts: dict[int, TokenArray] = field(default_factory=dict)
    ended: list[TokenArray] = field(default_factory=list)  # whose prefixes may be cached
    n_started: int = 0

    def some(self, n: int) -> TokenArray:
        # With few distinct tokens, unrelated sequences share beginnings, too.
        return self.rng.integers(2, 6 if self.rng.random() < 0.5 else 288, n).astype(np.int32)

    def leaving(self) -> list[int]:
        """End some rows before the next batch, and return them."""
        leaving = [
            row for row, held in self.texts.items() if len(held) > self.longest or self.rng.random() < 0.05
        ]
        for row in leaving:
            self.ended = [*self.ended, self.texts.pop(row)][-8:]
        return leaving

    def batch(self) -> Batch:
        """Return the requests of one step: distinct rows, in any order."""
        while not self.texts or (len(self.texts) < self.n_sequences and self.rng.random() < 0.3):
            self.texts[self.n_started] = self.beginning()
            self.n_started += 1
        rows = self.rng.permutation(list(self.texts))
        return [(int(row), self.wanted(int(row))) for row in rows[: self.rng.integers(1, len(rows) + 1)]]

    def beginning(self) -> TokenArray:
        """Return a prompt, often with the beginning of another sequence."""
        known = [*self.texts.values(), *self.ended]
        if not known or self.rng.random() < 0.4:
            return self.some(int(self.rng.integers(1, self.longest * 2 // 3)))
        other = known[int(self.rng.integers(len(known)))]
        shared = other[: int(self.rng.integers(1, len(other) + 1))]
        return np.concatenate([shared, self.some(int(self.rng.integers(1, 10)))])

    def wanted(self, row: int) -> ForwardRequest:
        """Return a request for a row that has grown or was cut: no logits, one or several, or a draft."""
        kind = self.rng.choice(["grow", "cut", "both", "same", "new"], p=[0.4, 0.1, 0.35, 0.1, 0.05])
        held = self.texts[row]
        if kind in ("cut", "both"):
            held = held[: max(1, len(held) - int(self.rng.integers(0, 9)))]
        if kind in ("grow", "both"):
            held = np.concatenate([held, self.some(int(self.rng.integers(1, 7)))])
        if kind == "new":
            held = self.some(int(self.rng.integers(1, 20)))
        self.texts[row] = held
        n_logits = min(len(held), int(self.rng.choice([0, 1, 1, 1, 2, 5])))
        n_draft = int(self.rng.choice([0, 0, 1, 3, 5])) if n_logits else 0
        draft = self.some(n_draft)
        if n_draft and self.rng.random() < 0.5:  # a part of the draft is accepted
            self.texts[row] = np.concatenate([held, draft[: self.rng.integers(0, n_draft + 1)]])
        return ForwardRequest(TARGET, held, n_logits, draft)


@dataclass
class Rounds:
    """The requests of one row during generation: draft steps or verifications, and rarer requests."""

    rng: np.random.Generator
    verifies: bool  # requests of the target; False: of the draft
    longest: int = 300

    def __post_init__(self) -> None:
        self.text = self.some(20)

    def some(self, n: int) -> TokenArray:
        return self.rng.integers(2, 288, n).astype(np.int32)

    def requests(self) -> list[ForwardRequest]:
        """Return the requests of one round; sometimes the text is cut or replaced before it."""
        if self.rng.random() < 0.1:
            self.text = self.text[: int(self.rng.integers(1, len(self.text) + 1))]  # cut anywhere
        elif self.rng.random() < 0.05 or len(self.text) > self.longest:
            self.text = self.some(int(self.rng.integers(1, 40)))  # another text
        draft = self.some(int(self.rng.integers(0, 13)))
        n_accepted = int(self.rng.integers(0, len(draft) + 1))
        before, path = self.text, np.concatenate([self.text, draft])
        self.text = np.concatenate([path[: len(before) + n_accepted], self.some(1)])
        if self.verifies:
            return [ForwardRequest(TARGET, before, draft=draft)]
        return [ForwardRequest(TARGET, path[:end]) for end in range(len(before), len(path) + 1)]


@dataclass
class Count:
    """The positions that llama.cpp had to evaluate."""

    segments: list[Segment] = field(default_factory=list)

    @property
    def n(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    def taken(self) -> int:
        """Return the number since the last call."""
        n = self.n
        self.segments.clear()
        return n


def paths(wanted: ForwardRequest) -> list[TokenArray]:
    """Return the tokens before each row of a request's logits."""
    whole = np.concatenate([wanted.tokens, wanted.draft])
    return [whole[:end] for end in range(wanted.n_before + 1, len(whole) + 1)]
