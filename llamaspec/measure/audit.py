"""Does drafting change the text, on this machine, with these files?

A text is generated with draft tokens, then replayed one position at a time without them. Where the replay
contradicts it, a wider batch was rounded differently: a fork, with how close the choice was. Under the
coupled rule, or at temperature 0, the replay must choose the very token; other rules draw otherwise, and
there the token must at least be possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from llamaspec.engine.generation import Completion
from llamaspec.measure.compare import Task
from llamaspec.measure.probe import Measurement, Report, compare_widths
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy, Stream
from llamaspec.sampling.filters import distribution
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import TARGET, ForwardRequest, TokenArray

WIDEST = 16  # positions; widths up to this are compared


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

    @property
    def identical_widths(self) -> list[int]:
        """Widths that gave the very numbers of width 1."""
        return [width for width, difference in self.largest_logit_difference.items() if difference == 0]

    @property
    def is_lossless(self) -> bool:
        """Whether nothing was found."""
        return self.first_difference is None and not self.forks


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
    report(0.75)
    return Audit(
        n_tokens=len(drafted.tokens),
        forks=forks,
        compares_texts=task.repeats,
        first_difference=first_difference,
        largest_logit_difference=_width_differences(pair, task.prompt, drafted),
    )


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
