"""Requests to a model, as drafting, verifying and reading make them for several rows, and the right answers.

`fresh` asks a second copy of the model one request at a time, with an empty KV cache. With float caches and
no flash attention the answers agree to 1e-4, though not bit for bit: the width of a batch decides the order
of sums. The scores have a standard deviation of 3, so a wrong cache is far outside.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from llamaspec import LlamaModel
from llamaspec.errors import ContextFullError
from llamaspec.llama.batch import Segment
from llamaspec.values import NO_TOKENS, TARGET, Draft, Forward, ForwardRequest, Logits, TokenArray

EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": "off"}
# Largest difference of a score. Gemma's activation is a table of half precision: it amplifies the last bit.
TOLERANCE = {"llama": 1e-4, "gemma3": 2e-2, "mamba": 1e-4, "jamba": 1e-4, "lfm2": 1e-4}
MEMORIES = ("llama", "gemma3", "mamba", "jamba", "lfm2")

Batch = list[tuple[int, ForwardRequest]]  # rows and what they want evaluated


def tokens(*ids: int) -> TokenArray:
    return np.array(ids, dtype=np.int32)


def text(n: int, seed: int = 0) -> TokenArray:
    """Random tokens; the same seed begins alike at every length."""
    return np.random.default_rng(seed).integers(2, 288, 4096).astype(np.int32)[:n]


def request(n: int, seed: int = 0, n_logits: int = 1, draft: TokenArray = NO_TOKENS) -> ForwardRequest:
    return ForwardRequest(TARGET, text(n, seed), n_logits, draft)


def scores(wanted: ForwardRequest) -> Generator[ForwardRequest, Forward, Logits]:
    """A measurement: the logits of one request, as a copy that stays valid."""
    forward = yield wanted
    return forward.logits.copy()


def fresh(model: LlamaModel, wanted: ForwardRequest) -> Logits:
    """The answer of a model that has cached nothing."""
    model.forget()
    return model.forward(wanted).copy()


def assert_same(answer: Logits, expected: Logits, tolerance: float = TOLERANCE["llama"]) -> None:
    assert answer.shape == expected.shape
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer, expected, rtol=0, atol=tolerance)


def evaluate(model: LlamaModel, batch: Batch, n_padding: int = 0) -> dict[int, Logits]:
    """Evaluate requests as the scheduler does; copies, without the rows that have no room.

    Everybody is prepared; prompts longer than a batch are read in parts, one row at a time; the rest
    together, where it fits one evaluation.
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
            is_apart = not model.can_share(row)
            if is_apart and together:
                break
            reads = is_apart and not model.keeps_states
            if reads or (n_new > model.prompt_chunk and not together):
                n_next = min(new[row][1] + model.prompt_chunk, len(wanted.tokens) - wanted.n_logits)
                model.evaluate([(row, ForwardRequest(TARGET, wanted.tokens[:n_next], n_logits=0))])
                break
            n_positions, n_scored = n_positions + n_new, n_scored + wanted.n_scored
            if n_positions > model.batch_size or n_scored > model.max_scored:
                break
            together.append((row, wanted))
            if is_apart:
                break
        if together:
            last, wanted = together[-1]
            is_padded = wanted.n_scored and model.can_share(last)
            logits = model.evaluate(together, n_padding if is_padded else 0)
            answers |= {row: view.copy() for (row, _), view in zip(together, logits, strict=True)}
        batch = [entry for entry in batch if entry[0] not in answers]
    return answers


def full(model: LlamaModel, batch: Batch) -> list[int]:
    """The rows of a batch that have no room."""
    prepared = model.prepare([(row, wanted, 0) for row, wanted in batch])
    return [
        row
        for (row, _), n_cached in zip(batch, prepared, strict=True)
        if isinstance(n_cached, ContextFullError)
    ]


@dataclass
class RandomRows:
    """Batches as several texts make them: they grow, verify drafts, are cut, begin alike, end, and come back.

    Parameters
    ----------
    rng : Generator
    longest : int
        Tokens after which a row ends.
    n_sequences : int
        At most at once.
    """

    rng: np.random.Generator
    longest: int = 60
    n_sequences: int = 4
    texts: dict[int, TokenArray] = field(default_factory=dict)
    ended: list[TokenArray] = field(default_factory=list)  # texts whose prefixes may be cached
    n_started: int = 0

    def some(self, n: int) -> TokenArray:
        # Few distinct tokens: texts that are not related share beginnings too.
        return self.rng.integers(2, 6 if self.rng.random() < 0.5 else 288, n).astype(np.int32)

    def leaving(self) -> list[int]:
        """The rows that end before the next batch."""
        leaving = [
            row for row, held in self.texts.items() if len(held) > self.longest or self.rng.random() < 0.05
        ]
        for row in leaving:
            self.ended = [*self.ended, self.texts.pop(row)][-8:]
        return leaving

    def batch(self) -> Batch:
        """What the rows of one step want; distinct rows, in any order."""
        while not self.texts or (len(self.texts) < self.n_sequences and self.rng.random() < 0.3):
            self.texts[self.n_started] = self.beginning()
            self.n_started += 1
        rows = self.rng.permutation(list(self.texts))
        return [(int(row), self.wanted(int(row))) for row in rows[: self.rng.integers(1, len(rows) + 1)]]

    def beginning(self) -> TokenArray:
        """A prompt: often the beginning of another text, longer than what is worth taking over."""
        known = [*self.texts.values(), *self.ended]
        if not known or self.rng.random() < 0.4:
            return self.some(int(self.rng.integers(1, self.longest * 2 // 3)))
        other = known[int(self.rng.integers(len(known)))]
        shared = other[: int(self.rng.integers(1, len(other) + 1))]
        return np.concatenate([shared, self.some(int(self.rng.integers(1, 10)))])

    def wanted(self, row: int) -> ForwardRequest:
        """Reading, one token, several, or a draft, behind a text that has grown or was cut."""
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
        if n_draft and self.rng.random() < 0.5:  # the text goes on with some of it
            self.texts[row] = np.concatenate([held, draft[: self.rng.integers(0, n_draft + 1)]])
        return ForwardRequest(TARGET, held, n_logits, draft)


@dataclass
class Rounds:
    """What one row is asked while text is generated: draft steps or verifications, and rarer things."""

    rng: np.random.Generator
    verifies: bool  # the target's requests; else the draft's
    longest: int = 300

    def __post_init__(self) -> None:
        self.text = self.some(20)

    def some(self, n: int) -> TokenArray:
        return self.rng.integers(2, 288, n).astype(np.int32)

    def requests(self) -> list[ForwardRequest]:
        """Of one round, and of what sometimes happens between two."""
        if self.rng.random() < 0.1:
            self.text = self.text[: int(self.rng.integers(1, len(self.text) + 1))]  # far back
        elif self.rng.random() < 0.05 or len(self.text) > self.longest:
            self.text = self.some(int(self.rng.integers(1, 40)))  # something else
        draft = self.some(int(self.rng.integers(0, 13)))
        n_accepted = int(self.rng.integers(0, len(draft) + 1))
        before, path = self.text, np.concatenate([self.text, draft])
        self.text = np.concatenate([path[: len(before) + n_accepted], self.some(1)])
        if self.verifies:
            return [ForwardRequest(TARGET, before, draft=draft)]
        return [ForwardRequest(TARGET, path[:end]) for end in range(len(before), len(path) + 1)]


@dataclass
class Count:
    """Positions that llama.cpp was given to evaluate."""

    segments: list[Segment] = field(default_factory=list)

    @property
    def n(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    def taken(self) -> int:
        """The number since the last look."""
        n = self.n
        self.segments.clear()
        return n


@dataclass
class RandomTrees(RandomRows):
    """Batches with trees of draft tokens: new ones, grown ones, and texts that go on along a path."""

    latest: dict[int, ForwardRequest] = field(default_factory=dict)

    def wanted(self, row: int) -> ForwardRequest:
        """As before, or with a tree."""
        last = self.latest.pop(row, None)
        kind = self.rng.choice(["grow", "follow", "else"], p=[0.3, 0.5, 0.2])
        if last is None or kind == "else" or (kind == "grow" and len(last.draft) > 6):
            wanted = super().wanted(row)
            if len(wanted.draft):
                wanted = self.with_tree(wanted.tokens, wanted.n_logits, NO_TOKENS, NO_TOKENS)
        elif kind == "grow":
            assert last.parents is not None
            wanted = self.with_tree(last.tokens, 0, last.draft, last.parents)
        else:
            path = paths(last)[int(self.rng.integers(last.n_scored))]
            self.texts[row] = np.concatenate([path, self.some(int(self.rng.integers(1, 3)))])
            n_logits = int(self.rng.integers(0, 2))
            wanted = ForwardRequest(TARGET, self.texts[row], n_logits)
            if n_logits:
                wanted = self.with_tree(wanted.tokens, 1, NO_TOKENS, NO_TOKENS)
        if wanted.parents is not None:
            self.latest[row] = wanted
        return wanted

    def with_tree(
        self, held: TokenArray, n_logits: int, draft: TokenArray, parents: TokenArray
    ) -> ForwardRequest:
        """A tree that begins with some tokens."""
        n_read, n_more = len(draft), int(self.rng.integers(1, 6))
        more = [self.rng.integers(-1, n_read + i) for i in range(n_more)]
        parents = np.array([*parents, *more], dtype=np.int32)
        tokens = np.concatenate([draft, self.some(n_more)])
        return ForwardRequest(TARGET, held, n_logits, tokens, parents, n_read)


def paths(wanted: ForwardRequest) -> list[TokenArray]:
    """What stands before each row of a request's logits."""
    n, tree = len(wanted.tokens), Draft(wanted.draft, (), (0.5,) * len(wanted.draft), parents=wanted.parents)
    before = [wanted.tokens[: n - wanted.n_logits + 1 + i] for i in range(wanted.n_logits)]
    behind = [np.concatenate([wanted.tokens, tree.tokens[tree.path(i)]]) for i in range(len(tree))]
    return [*before, *behind[wanted.n_read :]]
