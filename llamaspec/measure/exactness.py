"""Whether evaluations give the bits of single positions, and whether drafts leave a completion unchanged.

**Exactness** is what `--exact` relies on, for a pair on a machine. A width is exact if its logits are those
of width 1. Prompt processing is exact if a prompt evaluated at once leaves the bits in the KV cache that
narrow evaluations leave: then it does not matter how much of it was cached.

**An audit** checks one completion. It is generated with drafts, then replayed one position at a time. If the
replay contradicts it, a wider batch was rounded differently: a fork. Rules other than coupled draw other
tokens, so there each token must only be possible. Behind a long prompt, log-probabilities must not depend on
what is cached or on other sequences.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.completion import Completion
from llamaspec.measure.compare import Progress, Task, first_difference
from llamaspec.measure.probe import Measurement, compare_widths, sample_tokens, used_time
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy, Stream
from llamaspec.sampling.filters import distribution
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import TARGET, ForwardRequest, Logits, Logprobs, TokenArray

# On a CPU llama.cpp computes single positions by another kernel once the KV cache holds more than 256 tokens.
DEPTHS = (32, 320)  # tokens in the cache
COMPARED = 20  # positions at each depth
SECONDS = 60.0  # no comparison begins after this; a width that was not compared is not exact
WIDEST = 17  # positions
# Lengths of prompts. The short one shows most differences, soon; the long one has more positions than
# llama.cpp evaluates at once.
PROMPTS = (40, 600)
# Of the audit
AUDITED = 16  # positions; widths up to this are compared
N_BEFORE, N_WRITTEN = 700, 48  # tokens of a long prompt, and of the completions behind it
N_BESIDE = 3  # other sequences


@dataclass(frozen=True, slots=True)
class Exactness:
    """The exact evaluations of a pair on this machine."""

    widths: tuple[int, ...]  # bit-identical with width 1, ascending
    reads: bool  # prompts may be processed in any parts
    is_whole: bool = True  # there was time to compare all widths

    def __post_init__(self) -> None:
        if 1 not in self.widths or not all(1 <= width <= WIDEST for width in self.widths):
            raise ValueError(f"exact widths are from 1 to {WIDEST}, 1 among them; got {self.widths}")


def find_exactness(pair: Pair) -> Exactness:
    """Compare widths, without timing anything. The KV caches are emptied."""
    target, used = pair.target, used_time(time.perf_counter, SECONDS)
    widths = range(1, min(WIDEST + 1, target.max_scored + 1, target.context_size // 2))
    pair.forget()
    exact, is_whole = {1, *widths}, True
    for depth in sorted({max(1, min(d, target.context_size - COMPARED)) for d in DEPTHS}):
        tokens = sample_tokens(target.vocabulary, min(depth + COMPARED, target.context_size))
        found = pair.run(compare_widths(tokens, depth, widths, used))
        exact &= {width for width, difference in found.items() if difference == 0}
        is_whole &= len(found) == len(widths)
    return Exactness(tuple(sorted(exact)), reads_exactly(pair, max(exact)), is_whole)


def reads_exactly(pair: Pair, width: int) -> bool:
    """Return whether prompts processed at once have the bits of those processed in parts of an exact width.

    Not if single positions are the only exact width: then a wide evaluation is not exact either.
    """

    def logits(tokens: TokenArray, step: int) -> Logits:
        pair.forget()
        return pair.run(_last_logits(tokens, step))

    for n in sorted({min(n, pair.target.context_size) for n in PROMPTS}) if width > 1 else ():
        tokens = sample_tokens(pair.target.vocabulary, n)
        if not np.array_equal(logits(tokens, n), logits(tokens, width)):
            return False
    return width > 1


def _last_logits(tokens: TokenArray, step: int) -> Measurement[Logits]:
    """Process tokens in parts, the last one alone; return the logits behind it: [1, V] float32."""
    n = len(tokens) - 1
    for end in (*range(step, n, step), n):
        yield ForwardRequest(TARGET, tokens[:end], n_logits=0)
    forward = yield ForwardRequest(TARGET, tokens)
    return forward.logits.copy()


# The audit of a completion


@dataclass(frozen=True, slots=True)
class Fork:
    """A token that plain decoding would not have chosen after the same tokens."""

    index: int  # in the completion
    width: int  # positions that were evaluated at once when it was chosen
    said: str  # with draft tokens
    alone: str  # without
    logit_gap: float  # between the two best logits there, evaluated alone


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of the audit of one completion."""

    n_tokens: int
    forks: tuple[Fork, ...]
    compares_texts: bool  # whether plain decoding with the same seed must give the same tokens
    first_difference: int | None  # index at which it does not; None = the same, or not compared
    largest_logit_difference: dict[int, float]  # width -> against width 1, over the replayed tokens
    # Behind a long prompt, tokens of `n_compared` whose log-probability changes, by what was different
    n_changed: Mapping[str, int] = field(default_factory=dict)
    n_compared: int = 0

    @property
    def identical_widths(self) -> list[int]:
        """Widths that are bit-identical with width 1."""
        return [width for width, difference in self.largest_logit_difference.items() if difference == 0]

    @property
    def is_lossless(self) -> bool:
        """Whether drafting changes nothing, as far as was found."""
        return self.first_difference is None and not self.forks

    @property
    def is_exact(self) -> bool:
        """Whether nothing else changes the completion either."""
        return self.is_lossless and not any(self.n_changed.values())


def run_audit(pair: Pair, task: Task, policy: LengthPolicy, report: Progress) -> Audit:
    """Generate with draft tokens and without, replay, compare widths."""
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
    long = _behind_long_prompt(pair, task)
    n_changed = count_changes(pair, long, policy) if task.repeats and long.max_tokens > 0 else {}
    report(0.9)
    return Audit(
        n_tokens=len(drafted.tokens),
        forks=forks,
        compares_texts=task.repeats,
        first_difference=difference,
        largest_logit_difference=_width_differences(pair, task.prompt, drafted),
        n_changed=n_changed,
        n_compared=long.max_tokens if n_changed else 0,
    )


def count_changes(pair: Pair, task: Task, policy: LengthPolicy) -> dict[str, int]:
    """Count tokens whose log-probability changes with drafts, with a cached prompt, or beside others."""

    def written(task: Task, policy: LengthPolicy | None = policy) -> list[Logprobs]:
        drafter = NoDrafter() if policy is None else None
        rounds = task.run(pair, policy, drafter=drafter, logprobs=0).rounds
        return [each for round_ in rounds for each in round_.logprobs]

    def differing(found: list[Logprobs]) -> int:
        return sum(mine != right for mine, right in zip_longest(found, alone))

    pair.forget()
    alone, n_changed = written(task, None), dict[str, int]()
    pair.forget()
    n_changed["with draft tokens"] = differing(written(task))
    pair.forget()
    written(replace(task, prompt=task.prompt[: 2 * len(task.prompt) // 3 + 1], max_tokens=2))
    n_changed["behind a cached prompt"] = differing(written(task))
    n_changed["behind its own cached text"] = differing(written(task))
    pair.forget()
    others = [
        replace(task, prompt=np.roll(task.prompt, 7 * i), seed=task.seed + i) for i in range(1, N_BESIDE + 1)
    ]
    with ThreadPoolExecutor(1 + N_BESIDE) as threads:
        running = [threads.submit(written, each) for each in (*others, task)]
        n_changed[f"beside {N_BESIDE} other texts"] = differing(running[-1].result())
    return n_changed


def _behind_long_prompt(pair: Pair, task: Task) -> Task:
    """Return the task behind a longer prompt, as far as the context has room."""
    room = pair.target.context_size // (1 + N_BESIDE) - len(task.prompt) - N_WRITTEN
    before = sample_tokens(pair.target.vocabulary, min(N_BEFORE, max(room, 0)))
    n_left = pair.target.context_size - len(before) - len(task.prompt)
    tokens = min(task.max_tokens, N_WRITTEN, n_left)
    return replace(task, prompt=np.concatenate([before, task.prompt]), max_tokens=tokens)


def _forks(pair: Pair, task: Task, drafted: Completion) -> Measurement[tuple[Fork, ...]]:
    """Replay a completion one position at a time."""
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


def _width_differences(pair: Pair, prompt: TokenArray, drafted: Completion) -> dict[int, float]:
    """Return the largest logit difference of each width against width 1, over the first tokens."""
    widest = min(AUDITED, len(drafted.tokens))
    if widest < 2:
        return {}
    path = np.concatenate([prompt, np.array(drafted.tokens[:widest], dtype=np.int32)])
    pair.forget()
    widths = range(1, widest + 1)
    found = pair.run(compare_widths(path, len(prompt), widths))
    return {width: found[width] for width in widths[1:]}
