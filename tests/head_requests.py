"""Helpers for tests of prediction heads: pairs, requests to heads, and completions side by side."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from forward_requests import EXACT
from llamaspec import FixedLength, ModelOptions, NoDrafter, Pair, Sampling, open_pair
from llamaspec.engine.completion import Completion
from llamaspec.values import MTP, TARGET, Forward, ForwardRequest, Logits, TokenArray

Asking = Generator[ForwardRequest, Forward, list[Logits]]


@contextmanager
def opened(files: tuple[Path, Path | str], **options: object) -> Iterator[Pair]:
    """Open a target and a draft whose logits do not depend on the width of batches."""
    wanted = ModelOptions(**{"threads": 1, **EXACT, **options})  # type: ignore[arg-type]
    with open_pair(*files, target_options=wanted) as pair:
        yield pair


def drafting(read: TokenArray, draft: TokenArray) -> Asking:
    """Return the heads' logits after tokens that the target has evaluated, and after each draft token."""
    answers = []
    for n in range(len(draft) + 1):
        forward = yield ForwardRequest(MTP, np.concatenate([read, draft[:n]]))
        answers.append(forward.logits.copy())
    return answers


def reading(read: TokenArray, draft: TokenArray) -> Asking:
    """The same, but the target evaluates the tokens first."""
    yield ForwardRequest(TARGET, read[:-1], n_logits=0)
    return (yield from drafting(read, draft))


def drafted_side_by_side(pair: Pair, prompts: Sequence[TokenArray], temperature: float) -> list[Completion]:
    """Complete all prompts at once with three draft tokens per round; check against plain decoding."""
    sampling = Sampling(temperature=temperature)
    plain = []
    for seed, prompt in enumerate(prompts):
        pair.forget()
        stream = pair.stream(prompt, seed=seed, sampling=sampling, max_tokens=30, drafter=NoDrafter())
        plain.append(stream.run().tokens)
    pair.forget()
    streams = [
        pair.stream(prompt, seed=seed, sampling=sampling, max_tokens=30, policy=FixedLength(3))
        for seed, prompt in enumerate(prompts)
    ]
    while [stream for stream in streams if next(stream, None) is not None]:
        pass
    found = [stream.completion for stream in streams]
    assert [completion.tokens for completion in found] == plain
    assert all(completion.summary.n_verified > 20 for completion in found)
    return found
