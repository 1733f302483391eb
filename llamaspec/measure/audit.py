"""Does drafting change the text, on this machine, with these files?

A text is generated with draft tokens, then replayed one position at a time without them. Where the replay
contradicts it, a wider batch was rounded differently: a fork, with how close the choice was. Under the
coupled rule, or at temperature 0, the replay must choose the very token; other rules draw otherwise, and
there the token must at least be possible. A text behind a long prompt is also written with a part of the
prompt cached, and beside other texts: there the log-probabilities must be the very numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np

from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.generation import Completion
from llamaspec.measure.compare import Task
from llamaspec.measure.probe import Measurement, Report, compare_widths, sample_tokens
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy, Stream
from llamaspec.sampling.filters import distribution
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import TARGET, ForwardRequest, Logprobs, TokenArray

WIDEST = 16  # positions; widths up to this are compared
BEFORE, COMPARED = 700, 48  # tokens before the prompt of texts that are compared, and of these texts
N_BESIDE = 3  # other texts


@dataclass(frozen=True, slots=True)
class Fork:
    """A token that plain decoding would not have chosen after the same text."""

    index: int  # in the completion
    width: int  # positions that were evaluated at once when it was chosen
    said: str  # with draft tokens
    alone: str  # without
    logit_gap: float  # between the two best logits there, evaluated alone


@dataclass(frozen=True, slots=True)
class Audit:
    """What the replay of one text found."""

    n_tokens: int
    forks: tuple[Fork, ...]
    compares_texts: bool  # whether the text must be that of plain decoding with the same seed
    first_difference: int | None  # index at which it is not; None = same text, or not compared
    largest_logit_difference: dict[int, float]  # width -> against width 1, over the replayed text
    # Tokens whose log-probability changes, by what was different: behind a long prompt, of `n_compared`.
    n_changed: Mapping[str, int] = field(default_factory=dict)
    n_compared: int = 0

    @property
    def identical_widths(self) -> list[int]:
        """Widths that gave the very numbers of width 1."""
        return [width for width, difference in self.largest_logit_difference.items() if difference == 0]

    @property
    def is_lossless(self) -> bool:
        """Whether nothing was found that drafting changes."""
        return self.first_difference is None and not self.forks

    @property
    def is_exact(self) -> bool:
        """Whether nothing else changes the text either."""
        return self.is_lossless and not any(self.n_changed.values())


def run_audit(pair: Pair, task: Task, policy: LengthPolicy, report: Report = lambda fraction: None) -> Audit:
    """Generate with draft tokens and without, replay, compare widths."""
    drafted = task.run(pair, policy)
    report(0.25)
    first_difference = None
    if task.repeats:
        pair.forget()
        pairs = zip_longest(drafted.tokens, task.run_plain(pair).tokens)
        first_difference = next((i for i, (mine, plain) in enumerate(pairs) if mine != plain), None)
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
        first_difference=first_difference,
        largest_logit_difference=_width_differences(pair, task.prompt, drafted),
        n_changed=n_changed,
        n_compared=long.max_tokens if n_changed else 0,
    )


def count_changes(pair: Pair, task: Task, policy: LengthPolicy) -> dict[str, int]:
    """Tokens of a text whose log-probability is another one with drafts, cached tokens, texts beside it."""

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
    n_changed["where it is known"] = differing(written(task))
    pair.forget()
    others = [
        replace(task, prompt=np.roll(task.prompt, 7 * i), seed=task.seed + i) for i in range(1, N_BESIDE + 1)
    ]
    with ThreadPoolExecutor(1 + N_BESIDE) as threads:
        running = [threads.submit(written, each) for each in (*others, task)]
        n_changed[f"beside {N_BESIDE} other texts"] = differing(running[-1].result())
    return n_changed


def _behind_long_prompt(pair: Pair, task: Task) -> Task:
    """The beginning of a text behind a long prompt, where its context has room."""
    room = pair.target.context_size // (1 + N_BESIDE) - len(task.prompt) - COMPARED
    before = sample_tokens(pair.target.vocabulary, min(BEFORE, max(room, 0)))
    n_left = pair.target.context_size - len(before) - len(task.prompt)
    tokens = min(task.max_tokens, COMPARED, n_left)
    return replace(task, prompt=np.concatenate([before, task.prompt]), max_tokens=tokens)


def _forks(pair: Pair, task: Task, drafted: Completion) -> Measurement[tuple[Fork, ...]]:
    """Replay the text one position at a time."""
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
        told = [vocabulary.piece(token).decode("utf-8", errors="replace") for token in (said, alone)]
        forks.append(Fork(i, widths[i], told[0], told[1], float(best - second)))
    return tuple(forks)


def _width_differences(pair: Pair, prompt: TokenArray, drafted: Completion) -> dict[int, float]:
    """Largest logit difference of each width against width 1, over the first tokens of the text."""
    widest = min(WIDEST, len(drafted.tokens))
    if widest < 2:
        return {}
    path = np.concatenate([prompt, np.array(drafted.tokens[:widest], dtype=np.int32)])
    pair.forget()
    widths = range(1, widest + 1)
    found = pair.run(compare_widths(path, len(prompt), widths))
    return {width: found[width] for width in widths[1:]}
