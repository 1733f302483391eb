"""Helpers for tests of prediction heads: pairs, requests to heads, and completions side by side."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from forward_requests import EXACT
from llamaspec import FixedLength, ModelOptions, NoDrafter, Pair, Sampling, open_pair
from llamaspec.drafters.hidden import NO_ROWS
from llamaspec.engine.completion import Completion
from llamaspec.errors import RowsMissingError
from llamaspec.values import (
    MTP,
    TARGET,
    Forward,
    ForwardRequest,
    HiddenInput,
    HiddenRows,
    Logits,
    TokenArray,
)

Asking = Generator[ForwardRequest, Forward, list[Logits]]


@contextmanager
def opened(files: tuple[Path, Path | str], **options: object) -> Iterator[Pair]:
    """Open a target and a draft whose logits do not depend on the width of batches."""
    wanted = ModelOptions(**{"threads": 1, **EXACT, **options})  # type: ignore[arg-type]
    with open_pair(*files, target_options=wanted) as pair:
        yield pair


def drafting(read: TokenArray, draft: TokenArray, rows: HiddenRows, begin: int = 1) -> Asking:
    """Return the heads' logits after tokens with known hidden rows, and after each draft token."""
    answers, own = [], NO_ROWS
    for n in range(len(draft) + 1):
        hidden = HiddenInput(begin, rows, own)
        forward = yield ForwardRequest(MTP, np.concatenate([read, draft[:n]]), hidden=hidden)
        assert forward.hidden is not None
        answers.append(forward.logits.copy())
        own = np.concatenate([own, forward.hidden.rows]) if n else forward.hidden.rows.copy()
    return answers


def evaluating(wanted: ForwardRequest) -> Generator[ForwardRequest, Forward, HiddenRows]:
    """Return the target's hidden rows of a request."""
    forward = yield wanted
    assert forward.hidden is not None
    return forward.hidden._replace(rows=forward.hidden.rows.copy())


def reading(read: TokenArray, draft: TokenArray, rows_from: int = 0) -> Asking:
    """The same, but first the target and all heads process the tokens."""
    rows = yield from evaluating(ForwardRequest(TARGET, read[:-1], n_logits=0, rows_from=rows_from))
    yield ForwardRequest(MTP, read[:-1], n_logits=0, hidden=HiddenInput(1, rows, NO_ROWS))
    return (yield from drafting(read, draft, rows))


def n_known(read: TokenArray, begin: int = 1) -> Generator[ForwardRequest, Forward, int]:
    """Return how many tokens the heads have cached if they see those from `begin` on."""
    hidden = HiddenInput(begin, HiddenRows(0, NO_ROWS), NO_ROWS)
    try:
        yield ForwardRequest(MTP, read, n_logits=0, hidden=hidden)
    except RowsMissingError as error:
        return error.n_cached
    return len(read)


def joined(*rows: HiddenRows) -> HiddenRows:
    """Return rows of consecutive ranges as one; of positions that several have, those of the last."""
    first, *others = rows
    for each in others:
        kept = first.part(first.start, each.start)
        first = HiddenRows(first.start, np.concatenate([kept, each.rows]))
    return first


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
