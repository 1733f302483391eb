"""What the benchmark's samples say of its arms: ratios to a baseline, and seconds.

The baseline is the peer: llama-server without a draft, where it is among the arms; else our own plain
decoding. A ratio compares an arm's answer with the baseline's answer to the same request.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llamaspec.measure.bench import Sample
from llamaspec.measure.served_arms import AUTO, PEER, PEER_BEST, PEER_PLAIN, PLAIN, Answer


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """One arm on one prompt: medians over the repeats, of ratios to the baseline's answer and of seconds."""

    whole: float  # times as fast, whole request; an answer of other length is scaled to the baseline's
    decoding: float | None  # tokens per second after the first
    first: float  # times as fast, to the first text
    seconds: float
    first_seconds: float
    total_seconds: float  # of all its answers, scaled as in `whole`
    baseline_seconds: float  # of all the baseline's
    forks: tuple[int, ...]  # the first characters in which texts differ from the baseline's
    n_answers: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm on several prompts: geometric means of ratios, medians of seconds; and all requests as one."""

    whole: float
    spread: float  # factor: exp of the standard deviation of the logarithms
    worst: float
    worst_prompt: str
    decoding: float | None
    first: float
    total: float  # the baseline's total_seconds next to these
    seconds: float
    first_seconds: float
    total_seconds: float  # of all requests together, each as if it had the baseline's number of tokens
    forks: dict[str, tuple[int, ...]]  # by prompt
    n_same: int  # texts that equal the baseline's
    n_answers: int


def baseline_of(arms: Iterable[str]) -> str:
    """The arm that ratios are to."""
    return PEER_PLAIN if PEER_PLAIN in arms else PLAIN


def arms_of(samples: Sequence[Sample]) -> list[str]:
    """The names of all arms."""
    return [*dict.fromkeys(sample.arm for sample in samples)]


def fork(text: str, baseline: str) -> int | None:
    """The first character in which two texts differ; None where they are the same."""
    if text == baseline:
        return None
    pairs = enumerate(zip(text, baseline, strict=False))
    return next((i for i, (mine, its) in pairs if mine != its), min(len(text), len(baseline)))


def prompt_figures(samples: Sequence[Sample], arm: str, baseline: str) -> dict[str, PromptFigures]:
    """One arm by prompt, next to another one."""
    answers = {sample.request: sample.answer for sample in samples if sample.arm == baseline}
    pairs: dict[str, list[tuple[Answer, Answer]]] = {}
    for sample in samples:
        if sample.arm == arm:
            pairs.setdefault(sample.prompt, []).append((sample.answer, answers[sample.request]))
    return {prompt: _of_prompt(each) for prompt, each in pairs.items()}


def _of_prompt(pairs: Sequence[tuple[Answer, Answer]]) -> PromptFigures:
    rates = [(mine.tokens_per_second, base.tokens_per_second) for mine, base in pairs]
    decoding = [mine / base for mine, base in rates if mine and base]
    scaled = [mine.seconds_for(base.n_tokens) for mine, base in pairs]
    forks = [fork(mine.text, base.text) for mine, base in pairs]
    return PromptFigures(
        whole=statistics.median(base.seconds / own for own, (_, base) in zip(scaled, pairs, strict=True)),
        decoding=statistics.median(decoding) if decoding else None,
        first=statistics.median(base.first_seconds / mine.first_seconds for mine, base in pairs),
        seconds=statistics.median(mine.seconds for mine, _ in pairs),
        first_seconds=statistics.median(mine.first_seconds for mine, _ in pairs),
        total_seconds=sum(scaled),
        baseline_seconds=sum(base.seconds for _, base in pairs),
        forks=tuple(at for at in forks if at is not None),
        n_answers=len(pairs),
    )


def best_of(arms: Sequence[Mapping[str, PromptFigures]]) -> dict[str, PromptFigures]:
    """For each prompt the figures of the arm that was fastest there, known afterwards."""
    return {prompt: max((arm[prompt] for arm in arms), key=lambda each: each.whole) for prompt in arms[0]}


def figures(prompts: Mapping[str, PromptFigures]) -> Figures:
    """Fold the figures of several prompts, at least one."""
    each = [*prompts.values()]
    logs = [math.log(one.whole) for one in each]
    worst_prompt = min(prompts, key=lambda prompt: prompts[prompt].whole)
    decoding = [one.decoding for one in each if one.decoding is not None]
    total_seconds = sum(one.total_seconds for one in each)
    n_answers = sum(one.n_answers for one in each)
    return Figures(
        whole=math.exp(statistics.mean(logs)),
        spread=math.exp(statistics.stdev(logs)) if len(logs) > 1 else 1.0,
        worst=prompts[worst_prompt].whole,
        worst_prompt=worst_prompt,
        decoding=statistics.geometric_mean(decoding) if decoding else None,
        first=statistics.geometric_mean(one.first for one in each),
        total=sum(one.baseline_seconds for one in each) / total_seconds,
        seconds=statistics.median(one.seconds for one in each),
        first_seconds=statistics.median(one.first_seconds for one in each),
        total_seconds=total_seconds,
        forks={prompt: one.forks for prompt, one in prompts.items() if one.forks},
        n_same=n_answers - sum(len(one.forks) for one in each),
        n_answers=n_answers,
    )


def figures_of_arms(samples: Sequence[Sample]) -> dict[str, Figures]:
    """By arm, next to the baseline; of several llama-servers also the best of each prompt."""
    names = arms_of(samples)
    arms = {arm: prompt_figures(samples, arm, baseline_of(names)) for arm in names}
    peers = [each for arm, each in arms.items() if arm.startswith(PEER)]
    if len(peers) > 1:
        arms[PEER_BEST] = best_of(peers)
    return {arm: figures(each) for arm, each in arms.items()}


def speed_ups(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how many times as fast llamaspec's defaults are as plain decoding, by group of tasks."""
    return {
        group: figures(prompt_figures(each, AUTO, PLAIN)).whole
        for group, each in grouped(samples, "group").items()
    }


def best_type(arms: Mapping[str, Figures]) -> str | None:
    """The llama-server that is fastest over all of them, which a user can know; None without any."""
    peers = [arm for arm in arms if arm.startswith(PEER) and arm != PEER_BEST]
    return max(peers, key=lambda arm: arms[arm].whole, default=None)


def grouped(samples: Sequence[Sample], kind: str) -> dict[str, list[Sample]]:
    """Samples by one of their fields: group or task."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(getattr(sample, kind), []).append(sample)
    return by_name
