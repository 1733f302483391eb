"""Audit a completion: do drafts, the cache or other sequences change it?

The audit generates a completion with drafts and replays it one position at a time. A token that the replay
would not have chosen is a fork: a wider batch was rounded differently. Rules other than coupled draw other
tokens, so each token must only be possible. The audit also counts how many log-probabilities after a long
prompt change with drafts, with the cache, and with other sequences: none may where our kernels compute
everything (`LlamaModel.why_inexact`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.completion import Completion
from llamaspec.measure.compare import Task, first_difference
from llamaspec.measure.probe import Measurement, sample_tokens
from llamaspec.measure.turns import Progress
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy, Stream
from llamaspec.sampling.filters import distribution
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import TARGET, ForwardRequest, Logprobs

N_BEFORE, N_WRITTEN = 700, 48  # tokens of an audit's long prompt, and of the completions after it
N_BESIDE = 3  # other sequences of an audit


@dataclass(frozen=True, slots=True)
class Fork:
    """A token that plain decoding would not have chosen after the same tokens."""

    index: int  # in the completion
    width: int  # positions in the evaluation that chose the token
    said: str  # the token with drafts
    alone: str  # the token of plain decoding
    logit_gap: float  # between the two largest logits, evaluated alone


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of the audit of one completion."""

    n_tokens: int
    forks: tuple[Fork, ...]
    compares_texts: bool  # whether plain decoding with the same seed must give the same tokens
    first_difference: int | None  # index of the first different token; None if equal, or not compared
    n_changed: Mapping[str, int] = field(default_factory=dict)  # situation -> tokens, see `changes`
    n_compared: int = 0  # tokens in each situation

    @property
    def is_lossless(self) -> bool:
        """Whether drafts changed no token: all that is promised where results are rounded differently."""
        return self.first_difference is None and not self.forks

    @property
    def is_exact(self) -> bool:
        """Whether no log-probability changed in any situation either."""
        return self.is_lossless and not any(self.n_changed.values())


def run_audit(pair: Pair, task: Task, policy: LengthPolicy, report: Progress) -> Audit:
    """Audit one completion. The KV caches are emptied."""
    drafted = task.run(pair, policy)
    report(0.25)
    difference = None
    if task.repeats:
        pair.forget()
        difference = first_difference(drafted.tokens, task.run_plain(pair).tokens)
    report(0.5)
    pair.forget()
    forks = pair.run(_forks(pair, task, drafted))
    report(0.6)
    long = _after_long_prompt(pair, task)
    n_changed: dict[str, int] = {}
    if task.repeats and long.max_tokens > 0:
        for done, (situation, n) in enumerate(changes(pair, long, policy), 1):
            n_changed[situation] = n
            report(0.6 + 0.08 * done)
    return Audit(
        n_tokens=len(drafted.tokens),
        forks=forks,
        compares_texts=task.repeats,
        first_difference=difference,
        n_changed=n_changed,
        n_compared=long.max_tokens if n_changed else 0,
    )


def changes(pair: Pair, task: Task, policy: LengthPolicy) -> Iterator[tuple[str, int]]:
    """Yield situations, and how many tokens have another log-probability there than in plain decoding.

    The situations are: with drafts, after a cached prompt, after a cached completion, beside other sequences.
    """

    def written(task: Task, policy: LengthPolicy | None = policy) -> list[Logprobs]:
        drafter = NoDrafter() if policy is None else None
        rounds = task.run(pair, policy, drafter=drafter, logprobs=0).rounds
        return [each for round_ in rounds for each in round_.logprobs]

    def differing(found: list[Logprobs]) -> int:
        return sum(mine != right for mine, right in zip_longest(found, alone))

    pair.forget()
    alone = written(task, None)
    pair.forget()
    yield "with draft tokens", differing(written(task))
    pair.forget()
    written(replace(task, prompt=task.prompt[: 2 * len(task.prompt) // 3 + 1], max_tokens=2))
    yield "after a cached prompt", differing(written(task))
    yield "after its own cached completion", differing(written(task))
    pair.forget()
    others = [
        replace(task, prompt=np.roll(task.prompt, 7 * i), seed=task.seed + i) for i in range(1, N_BESIDE + 1)
    ]
    with ThreadPoolExecutor(1 + N_BESIDE) as threads:
        running = [threads.submit(written, each) for each in (*others, task)]
        n_changed = differing(running[-1].result())
    yield f"beside {N_BESIDE} other requests", n_changed


def _after_long_prompt(pair: Pair, task: Task) -> Task:
    """Return the task with ordinary text before its prompt, as far as the context has room."""
    room = pair.target.context_size // (1 + N_BESIDE) - len(task.prompt) - N_WRITTEN
    before = sample_tokens(pair.target.vocabulary, min(N_BEFORE, max(room, 0)))
    n_left = pair.target.context_size - len(before) - len(task.prompt)
    tokens = min(task.max_tokens, N_WRITTEN, n_left)
    return replace(task, prompt=np.concatenate([before, task.prompt]), max_tokens=tokens)


def _forks(pair: Pair, task: Task, drafted: Completion) -> Measurement[tuple[Fork, ...]]:
    """Replay a completion one position at a time and return the forks."""
    forks: list[Fork] = []
    vocabulary = pair.target.vocabulary
    streams = SeededStreams(task.seed)
    path = np.concatenate([task.prompt, np.array(drafted.tokens, dtype=np.int32)])
    widths = [round_.width for round_ in drafted.rounds for _ in round_.tokens]
    for i, said in enumerate(drafted.tokens):
        position = len(task.prompt) + i
        forward = yield ForwardRequest(TARGET, path[:position])
        scores = forward.logits[0]
        choices = distribution(scores, task.sampling, path[:position])
        alone = streams.choose(choices, Stream.TOKEN, position)
        if alone == said or (not task.repeats and choices.probability(said) > 0):
            continue
        second, best = np.partition(scores, -2)[-2:]
        texts = [vocabulary.piece(token).decode("utf-8", errors="replace") for token in (said, alone)]
        forks.append(Fork(i, widths[i], texts[0], texts[1], float(best - second)))
    return tuple(forks)
