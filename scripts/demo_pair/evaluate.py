"""Measure the two files as llama.cpp runs them: the share of the draft's first guesses that is accepted.

The one idea: the target writes, the draft reads along. At temperature 0 a guess is accepted where
both have the same most likely token; at 0.8 with probability sum(min(p, q)). And how often what is written
repeats itself, next to what people wrote in its place.

It knows only GGUF files and texts, nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llama_cpp import Llama
from numpy.typing import NDArray

N_CONTEXT = 1024
N_PROMPT = 160  # tokens
N_WRITTEN = 160  # tokens per continuation
PROMPTS_PER_MODULE = 4
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Agreement:
    """What was measured on one module, each number a mean over its prompts."""

    name: str
    greedy: float  # share of positions where both have the same most likely token
    overlap: float  # sum(min(p, q)) at `TEMPERATURE`
    distinct_lines: float  # share of the greedy lines that are not repetitions
    repeated: float  # share of 4-grams of tokens, at `TEMPERATURE`, that came before in the same continuation
    repeated_by_people: float  # the same of as many tokens of the module itself
    sample: str

    def row(self) -> str:
        """One line of the table."""
        return (
            f"{self.name:18s}  {self.greedy:6.3f}  {self.overlap:8.3f}  {self.distinct_lines:8.2f}"
            f"  {self.repeated:8.3f}  {self.repeated_by_people:6.3f}"
        )


HEADER = f"{'kept-out module':18s}  greedy  min(p,q)  distinct  repeated  people"


def load(path: Path, n_threads: int = 1) -> Llama:
    """Open a model that keeps the logits of every position; one thread, as models this small want."""
    return Llama(str(path), n_ctx=N_CONTEXT, logits_all=True, n_threads=n_threads, verbose=False)


def measure(target: Llama, draft: Llama, name: str, text: str, chance: np.random.Generator) -> Agreement:
    """Continue evenly spaced prompts of `text` and compare the two distributions at every step."""
    ids = target.tokenize(text.encode())
    starts = np.linspace(0, len(ids) - N_PROMPT - N_WRITTEN, PROMPTS_PER_MODULE).astype(int)
    greedy, overlap, distinct, repeated, people, sample = [], [], [], [], [], ""
    for start in starts:
        prompt = [target.token_bos(), *ids[max(1, start) : start + N_PROMPT]]
        p, q, written = _read_along(target, draft, prompt, lambda scores: int(scores.argmax()))
        greedy.append(float((p.argmax(-1) == q.argmax(-1)).mean()))
        distinct.append(_distinct_lines(_text(target, written)))
        p, q, written = _read_along(target, draft, prompt, lambda scores: _sampled(scores, chance))
        shared = np.minimum(_softmax(p / TEMPERATURE), _softmax(q / TEMPERATURE)).sum(-1)
        overlap.append(float(shared.mean()))
        repeated.append(repetition(written))
        people.append(repetition(ids[start + N_PROMPT : start + N_PROMPT + N_WRITTEN]))
        sample = sample or _text(target, written)
    return Agreement(
        name, _mean(greedy), _mean(overlap), _mean(distinct), _mean(repeated), _mean(people), sample
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that came before among these tokens."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len({*grams}) / max(1, len(grams))


def _read_along(
    target: Llama, draft: Llama, prompt: list[int], choose: Callable[[NDArray[np.float32]], int]
) -> tuple[NDArray[np.float32], NDArray[np.float32], list[int]]:
    """Logits [n, V] of target and draft before each of the n tokens the target wrote, and these."""
    target.reset()
    target.eval(prompt)
    written: list[int] = []
    while len(written) < N_WRITTEN:
        written.append(choose(target.scores[target.n_tokens - 1]))
        if written[-1] == target.token_eos():
            break
        target.eval(written[-1:])
    draft.reset()
    draft.eval([*prompt, *written])
    before = slice(len(prompt) - 1, len(prompt) - 1 + len(written))
    return target.scores[before].copy(), draft.scores[before].copy(), written


def _sampled(scores: NDArray[np.float32], chance: np.random.Generator) -> int:
    return int(chance.choice(len(scores), p=_softmax(scores.astype(np.float64) / TEMPERATURE)))


def _softmax(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    out: NDArray[np.floating] = powers / powers.sum(-1, keepdims=True)
    return out


def _text(model: Llama, ids: list[int]) -> str:
    text: bytes = model.detokenize(ids)
    return text.decode(errors="replace")


def _distinct_lines(text: str) -> float:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(set(lines)) / max(1, len(lines))
