"""A completion among others is the one of a sequence that runs alone.

Sequences join and leave a pair at random, share prompts, are cancelled, and run out of KV cache. Models with
float caches agree within a tolerance, so their tokens are compared, for every kind of memory. Where our
kernels compute everything, every row of logits must equal that of the sequence alone, bit by bit. llama.cpp's
kernels do the same for Q8_0 and Q4_0 weights with values cached as bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from forward_requests import EXACT, MEMORIES, paths, text
from llamaspec import (
    FixedLength,
    LlamaModel,
    ModelOptions,
    NoDrafter,
    Pair,
    Sampling,
    StopReason,
    TextStream,
    open_pair,
)
from llamaspec.errors import ContextFullError, MemoryFullError
from llamaspec.llama import runtime
from llamaspec.llama.cells import CellTable
from llamaspec.measure.probe import sample_tokens
from llamaspec.protocols import LengthPolicy
from llamaspec.values import ForwardRequest, Logits, TokenArray
from model_store import ModelStore
from tiny_hidden import DraftRecipe
from tiny_models import Recipe

LONG = 2048  # tokens that the longest model was trained on
HIDDEN = ("eagle3", "dflash", "dspark", "dflash2")  # drafts that read hidden rows


@dataclass(frozen=True)
class Wanted:
    """A completion to generate."""

    number: int
    n_prompt: int
    prompt_seed: int  # prompts of the same seed begin alike
    seed: int
    max_tokens: int
    temperature: float
    n_draft: int
    n_read: int | None  # pieces after which the stream is closed; None = read all

    def stream(self, pair: Pair) -> TextStream:
        prompt = text(self.n_prompt, self.prompt_seed)
        prompt[-2:] = 2 + self.number, 3  # prompts that begin alike end differently
        return pair.stream(
            prompt,
            sampling=Sampling(temperature=self.temperature),
            seed=self.seed,
            max_tokens=self.max_tokens,
            policy=FixedLength(self.n_draft),
        )


def some_texts(rng: np.random.Generator, n: int, *, longest_prompt: int, longest: int) -> list[Wanted]:
    return [
        Wanted(
            number,
            int(rng.integers(3, longest_prompt)),
            int(rng.integers(3)),
            int(rng.integers(100)),
            int(rng.integers(1, longest)),
            float(rng.choice([0.0, 0.7, 1.3])),
            int(rng.integers(0, 6)),
            int(rng.integers(0, 20)) if rng.random() < 0.2 else None,
        )
        for number in range(n)
    ]


@dataclass
class Outcome:
    """Completions by number."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[int, StopReason] = field(default_factory=dict)
    most_sequences: int = 0  # that shared an evaluation
    n_chunked: int = 0  # rounds beside which a prompt chunk was processed

    def note(self, wanted: Wanted, stream: TextStream) -> None:
        completion = stream.completion
        self.tokens[wanted.number] = completion.tokens
        self.reasons[wanted.number] = completion.stop_reason
        self.most_sequences = max(
            [self.most_sequences, *(round_.n_sequences for round_ in completion.rounds)]
        )
        self.n_chunked += sum(round_.verified_in.n_prefill > 0 for round_ in completion.rounds)


def alone(pair: Pair, texts: Sequence[Wanted]) -> Outcome:
    """Generate each completion alone, from empty KV caches."""
    outcome = Outcome()
    for wanted in texts:
        pair.forget()
        stream = wanted.stream(pair)
        stream.run()
        outcome.note(wanted, stream)
    return outcome


def interleaved(pair: Pair, texts: Sequence[Wanted], rng: np.random.Generator, n_sequences: int) -> Outcome:
    """Generate all completions from one thread, up to `n_sequences` at once; close some early."""
    outcome, waiting, running = Outcome(), list(texts), list[tuple[Wanted, TextStream]]()
    while waiting or running:
        while waiting and (not running or (len(running) < n_sequences and rng.random() < 0.2)):
            running.append((waiting[0], waiting.pop(0).stream(pair)))
        wanted, stream = running[int(rng.integers(len(running)))]
        try:
            is_over = next(stream, None) is None
        except ContextFullError:  # not even the prompt has room
            outcome.tokens[wanted.number], outcome.reasons[wanted.number] = (), StopReason.CONTEXT
            running.remove((wanted, stream))
            continue
        if wanted.n_read is not None and len(stream.completion.tokens) > wanted.n_read:
            stream.close()
            is_over = True
        if is_over:
            outcome.note(wanted, stream)
            running.remove((wanted, stream))
    return outcome


def threaded(pair: Pair, texts: Sequence[Wanted], n_threads: int) -> Outcome:
    """Generate all completions from several threads."""
    outcome = Outcome()

    def work(wanted: Wanted) -> TextStream:
        stream = wanted.stream(pair)
        for _ in stream:
            if wanted.n_read is not None and len(stream.completion.tokens) > wanted.n_read:
                stream.close()
        return stream

    with ThreadPoolExecutor(n_threads) as threads:
        for wanted, stream in zip(texts, threads.map(work, texts), strict=True):
            outcome.note(wanted, stream)
    return outcome


def assert_same_texts(outcome: Outcome, expected: Outcome, *, n_short: int = 0) -> None:
    """Check that completions are equal, except cancelled ones and at most `n_short` without enough room."""
    short = 0
    for number, right in expected.tokens.items():
        got, reason = outcome.tokens[number], outcome.reasons[number]
        if reason in (StopReason.INTERRUPT, StopReason.CONTEXT) and len(got) < len(right):
            assert got == right[: len(got)], number
            short += reason is StopReason.CONTEXT
            continue
        assert got == right, number
        assert reason is expected.reasons[number]
    assert short <= n_short


@contextmanager
def tiny_pair(store: ModelStore, kind: str, dtype: str = "f32", **options: object) -> Iterator[Pair]:
    recipe = Recipe(dtype=dtype, n_context=LONG)
    wanted = ModelOptions(**{"threads": 1, **options})  # type: ignore[arg-type]
    draft = recipe.draft(0.03)
    with open_pair(
        store.path(kind, recipe), store.path(kind, draft), target_options=wanted, draft_options=wanted
    ) as pair:
        yield pair


@pytest.mark.parametrize("kind", MEMORIES)
def test_texts_among_others_are_the_texts_alone(
    store: ModelStore, compactions: list[CellTable], kind: str
) -> None:
    """There are so few cells that sequences go to the store, cells are moved, and a sequence has to end."""
    rng = np.random.default_rng(5)
    texts = some_texts(rng, 24, longest_prompt=90, longest=60)
    with tiny_pair(store, kind, n_ctx=160, n_cells=512, **EXACT) as pair:
        expected = alone(pair, texts)
        outcome = interleaved(pair, texts, rng, n_sequences=7)
        assert_same_texts(outcome, expected, n_short=4)
        if kind in ("llama", "gemma3"):
            assert outcome.most_sequences > 2
            assert outcome.n_chunked > 5
            assert len(compactions) > 2
        assert_same_texts(threaded(pair, texts, 5), expected, n_short=4)


@pytest.mark.parametrize("kind", ["qwen35", "step35", "step35-one", *HIDDEN])
def test_texts_among_others_with_hidden_rows(
    store: ModelStore, compactions: list[CellTable], kind: str
) -> None:
    """A sequence keeps its hidden rows if others share its evaluations, leave, or take over its prefix."""
    rng = np.random.default_rng(7)
    texts = some_texts(rng, 24, longest_prompt=90, longest=60)
    options = ModelOptions(threads=1, n_ctx=160, n_cells=512, **EXACT)  # type: ignore[arg-type]
    recipe = Recipe(n_context=LONG)
    if kind in HIDDEN:
        draft = DraftRecipe(replace(recipe, spread=0.5), kind)
        files: tuple[Path, Path | str] = (store.path("llama", draft.target), store.draft(draft))
    else:
        files = (store.path(kind, recipe), "mtp")
    with open_pair(*files, target_options=options) as pair:
        expected = alone(pair, texts)
        outcome = interleaved(pair, texts, rng, n_sequences=7)
        assert_same_texts(outcome, expected, n_short=4)
        if kind != "qwen35":
            assert outcome.most_sequences > 2
            assert outcome.n_chunked > 5
            assert compactions
        assert_same_texts(threaded(pair, texts, 5), expected, n_short=4)


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_a_text_waits_if_there_is_no_memory_for_its_states(
    store: ModelStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence of such a model has its own context. Once, a second request ended with an error."""

    def full(*_: object) -> None:
        raise MemoryFullError("no room for a second context")

    with open_pair(store.path(kind, Recipe()), target_options=ModelOptions(threads=1)) as pair:

        def started(seed: int) -> TextStream:
            return pair.stream("def f(x):", seed=seed, max_tokens=30, policy=FixedLength(0))

        alone = [started(seed).run().tokens for seed in range(3)]
        monkeypatch.setattr(pair.target, "_open", full)
        streams = [started(seed) for seed in range(3)]
        for each in streams:
            each.begin()
        assert [each.run().tokens for each in streams] == alone


def test_texts_that_are_swapped_out_stay_the_same(store: ModelStore) -> None:
    """There are far too few cells, so sequences wait for each other, but each completion is whole."""
    rng = np.random.default_rng(6)
    texts = some_texts(rng, 20, longest_prompt=120, longest=100)
    with tiny_pair(store, "llama", n_ctx=256, n_cells=256, **EXACT) as pair:
        expected = alone(pair, texts)
        assert_same_texts(interleaved(pair, texts, rng, n_sequences=6), expected)
        outcome = threaded(pair, texts, 6)
        assert_same_texts(outcome, expected)
        assert outcome.most_sequences > 1


@dataclass
class Recorder:
    """Records every row of logits of the target by the tokens before it."""

    model: LlamaModel
    seen: dict[bytes, Logits] = field(default_factory=dict)
    differing: list[tuple[int, int, float]] = field(default_factory=list)  # position, rows, difference
    n_compared: int = 0
    n_read: set[int] = field(default_factory=set)  # ends of prompt chunks

    def arrange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        evaluate = LlamaModel.evaluate

        def recorded(
            model: LlamaModel, batch: Sequence[tuple[int, ForwardRequest]], n_padding: int = 0
        ) -> list[Logits]:
            answers = evaluate(model, batch, n_padding)
            if model is self.model:
                for (_, wanted), logits in zip(batch, answers, strict=True):
                    self._note(wanted, logits, len(batch))
                    if not wanted.n_scored:
                        self.n_read.add(wanted.n_tokens)
            return answers

        monkeypatch.setattr(LlamaModel, "evaluate", recorded)

    def _note(self, wanted: ForwardRequest, logits: Logits, n_sequences: int) -> None:
        for path, row in zip(paths(wanted), logits, strict=True):
            key = path.tobytes()
            known = self.seen.get(key)
            self.n_compared += known is not None
            if known is None:
                self.seen[key] = row.copy()
            elif not np.array_equal(known, row):
                self.differing.append((len(path), n_sequences, float(np.abs(known - row).max())))


@pytest.mark.parametrize(("kind", "dtype", "threads"), [
    ("llama", "q8_0", 1), ("llama", "q4_0", 1), ("gemma3", "q8_0", 1), ("lfm2", "q8_0", 1),
    ("jamba", "q8_0", 1), ("llama", "q8_0", 2), ("llama", "q4_0", 2),
])  # fmt: skip
def test_logits_among_others_are_those_alone_bit_by_bit(
    store: ModelStore,
    compactions: list[CellTable],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: str,
    threads: int,
) -> None:
    """Contexts are shorter and longer than 256 tokens, from which llama.cpp may use another kernel."""
    rng = np.random.default_rng(7)
    if threads == 1:
        texts = some_texts(rng, 12, longest_prompt=400, longest=60)
    else:  # two threads are slow on a busy machine
        texts = some_texts(rng, 4, longest_prompt=400, longest=30)
    options = {"n_ctx": 512, "n_cells": 1024, "cache_type_v": "bf16", "threads": threads}
    with tiny_pair(store, kind, dtype, **options) as pair:
        recorder = Recorder(pair.target)
        recorder.arrange(monkeypatch)
        expected = alone(pair, texts)
        pair.forget()
        recorder.n_compared = 0
        outcome = interleaved(pair, texts, rng, n_sequences=6)
        assert_same_texts(outcome, expected, n_short=3)
        assert recorder.n_compared > (100 if threads == 1 else 30)
        assert (outcome.most_sequences > 1) == (kind not in ("lfm2", "jamba"))  # evaluated one by one
        if kind == "llama" and threads == 1:
            assert compactions
            assert outcome.n_chunked > 5
        assert recorder.differing == []


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_text_has_the_same_logits_whatever_ran_before(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The kernel of flash attention over f16 values, the default, depends on the number of full cells.

    Finished sequences stayed in the cache, so a server gave other completions than at first.
    """
    texts = [Wanted(number, 60 + 90 * number, number, 7, 30, 0.7, 0, None) for number in range(4)]
    with tiny_pair(store, kind, "f16", n_ctx=512, n_cells=2048, threads=2) as pair:
        recorder = Recorder(pair.target)
        recorder.arrange(monkeypatch)
        first = texts[0].stream(pair).run().tokens
        pair.forget()
        for wanted in texts[1:]:
            wanted.stream(pair).run()
        assert texts[0].stream(pair).run().tokens == first
        assert recorder.n_compared == 30
        assert recorder.differing == []
        assert pair.target.cache_use()[0] == 60 + 29


def in_every_situation(pair: Pair, policy: LengthPolicy, prompts: Sequence[TokenArray], n: int) -> None:
    """Complete a prompt alone, with and without drafts, after cached and stored prefixes, beside others."""

    def write(prompt: TokenArray, policy: LengthPolicy | None = policy) -> None:
        drafter = NoDrafter() if policy is None else None
        pair.stream(prompt, seed=3, max_tokens=n, policy=policy, drafter=drafter).run()

    first, *others = prompts
    pair.forget()
    write(first, None)
    pair.forget()
    write(first)
    for n_known in (len(first) // 3, len(first) - 3):
        pair.forget()
        write(first[:n_known])
        write(first)
        write(first)
        for prompt in others:  # so that the first sequence comes back from the store
            write(prompt)
        write(first)
    pair.forget()
    with ThreadPoolExecutor(len(prompts)) as threads:
        for each in [threads.submit(write, prompt) for prompt in (*others, first)]:
            each.result()


def assert_the_same_in_every_situation(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, prompts: Sequence[TokenArray], n: int
) -> None:
    if (reason := pair.call(pair.target.why_inexact)) is not None:
        assert runtime.kernels().level is None, reason
        pytest.skip(reason)
    recorder = Recorder(pair.target)
    recorder.arrange(monkeypatch)
    in_every_situation(pair, pair.auto_length(), prompts, n)
    assert recorder.n_compared > 7 * n
    assert recorder.differing == []


def test_logits_of_the_embedded_pair_are_the_same_in_every_situation(
    demo_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, own_cache: None
) -> None:
    """With default options. With llama.cpp's kernels, logits change after a cached prefix."""
    options = ModelOptions(n_ctx=1024, n_cells=4096)
    with open_pair(*demo_files, target_options=options) as pair:
        prompts = [np.roll(sample_tokens(pair.target.vocabulary, 540), 5 * i) for i in range(4)]
        assert_the_same_in_every_situation(pair, monkeypatch, prompts, 40)


EVERY_KIND = [
    *itertools.product(["llama", "mixtral", "gemma3", "deepseek2"], ["f16", "q4_0"], ["f16"]),
    *itertools.product(["mamba", "jamba", "lfm2", "nemotron_h", "granitehybrid"], ["f16"], ["f16"]),
]


@pytest.mark.parametrize(
    ("kind", "dtype", "cache"), [*EVERY_KIND, ("llama", "q4_0", "q8_0"), ("gemma3", "f16", "q8_0")]
)
def test_logits_are_the_same_in_every_situation(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, own_cache: None, kind: str, dtype: str, cache: str
) -> None:
    """Also if llama.cpp would change kernels with the width, as it does for F16 weights."""
    caches = {"cache_type_k": cache, "cache_type_v": cache}
    with tiny_pair(store, kind, dtype, n_ctx=512, n_cells=2048, threads=2, **caches) as pair:
        prompts = [text(200, seed) for seed in range(4)]
        assert_the_same_in_every_situation(pair, monkeypatch, prompts, 20)
