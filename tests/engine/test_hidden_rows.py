"""The loop reports each token that becomes a part of the sequence, in order, with the target's hidden row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from fakes import CountingUp, FakeModel, Length, hidden_rows, tokens
from llamaspec.drafters.fallback import FallbackDrafter, NoDrafter
from llamaspec.engine import prefill_decode
from llamaspec.errors import EvaluationError
from llamaspec.values import TARGET, Rows, TokenArray
from stepped import Stepped
from texts import V, alone, stream, target


@dataclass
class Following(CountingUp):
    """Notes what is reported, and compares every row with the one of a sequence that is computed at once."""

    vocabulary_size: int = V
    first: int = 0  # position of the first row that it needs
    reads_rows: bool = True
    starts: list[int] = field(default_factory=list)
    sequence: TokenArray = field(default_factory=lambda: tokens())
    seen: dict[int, Rows] = field(default_factory=dict)

    def first_row(self, prompt: TokenArray) -> int:
        self.sequence = prompt
        return self.first

    def committed(self, tokens: TokenArray, rows: Rows, position: int) -> None:
        assert len(tokens) == len(rows) > 0
        assert not self.seen or position > max(self.seen), "in order, and none twice"
        self.sequence = np.concatenate([self.sequence[:position], tokens])
        self.seen |= {position + i: row.copy() for i, row in enumerate(rows)}
        self.starts.append(position)

    def check(self, path: TokenArray, first: int) -> None:
        """Check that all positions from `first` to the last evaluated one were reported."""
        assert [*self.seen] == [*range(first, first + len(self.seen))]
        assert len(path) - 1 - max(self.seen) <= 3, "except those of the last round"
        for position, row in self.seen.items():
            assert (row == hidden_rows(path, position, position + 1)[0]).all()


PROMPT = tuple(i % V for i in range(23))


def path_of(prompt: tuple[int, ...], made: tuple[int, ...]) -> TokenArray:
    return tokens(*prompt, *made)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 22, 64])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_chunks_of_every_size(batch_size: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_decode, "PREFILL_PART", 9)
    models, drafter = {TARGET: target(batch_size=max(batch_size, k + 1))}, Following()
    both = FallbackDrafter([NoDrafter(), drafter])
    made = stream(Stepped(models), models, PROMPT, length=Length(k), drafter=both).run().tokens
    assert made == alone(PROMPT)
    drafter.check(path_of(PROMPT, made), 0)


@pytest.mark.parametrize("prompt", [(1,), (1, 2)])
def test_a_short_prompt(prompt: tuple[int, ...]) -> None:
    models, drafter = {TARGET: target()}, Following()
    made = stream(Stepped(models), models, prompt, drafter=drafter).run().tokens
    drafter.check(path_of(prompt, made), 0)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_sequence_that_is_swapped_out(is_lost: bool) -> None:
    """An interactive one takes its room. Rows that were reported before are not reported again."""
    models, drafters = {TARGET: target(n_cells=60)}, [Following(), Following()]
    scheduler = Stepped(models)
    first = stream(scheduler, models, PROMPT, seed=0, drafter=drafters[0], max_tokens=30)
    for _ in range(5):
        next(first)
    other = stream(scheduler, models, PROMPT[1:], seed=1, drafter=drafters[1], is_interactive=True)
    next(other)
    assert models[TARGET].released == [0]
    if is_lost:
        models[TARGET].forget()
    for i, of in enumerate((first, other)):
        made = of.run().tokens
        prompt = PROMPT[i:]
        assert made == alone(prompt, seed=i, max_tokens=30 - 18 * i)
        drafters[i].check(path_of(prompt, made), 0)


@pytest.mark.parametrize("first", [0, 4, 17, 21, 22, 99])
@pytest.mark.parametrize("repeated", [5, 512])
def test_behind_a_cached_prefix(first: int, repeated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are needed are computed again, but not for more than `REPEATED` cached tokens."""
    monkeypatch.setattr(prefill_decode, "REPEATED", repeated)
    monkeypatch.setattr(prefill_decode, "PREFILL_PART", 8)
    models = {TARGET: target()}
    scheduler, n_known = Stepped(models), 20
    stream(scheduler, models, PROMPT[:n_known], drafter=NoDrafter(), max_tokens=1).run()
    n_before, drafter = len(models[TARGET].evaluated), Following(first=first)
    of = stream(scheduler, models, PROMPT, drafter=drafter, n_cached=lambda prompt: n_known)
    made = of.run().tokens
    begin = min(max(first, n_known - repeated), len(PROMPT) - 1)
    drafter.check(path_of(PROMPT, made), begin)
    n_prompt = sum(
        each.n_new for each in models[TARGET].evaluated[n_before:] if not each.requests[0].n_scored
    )
    assert n_prompt == len(PROMPT) - 1 - min(begin, n_known)


def test_a_drafter_that_reads_no_rows_gets_none() -> None:
    models, drafter = {TARGET: target()}, Following(reads_rows=False)
    stream(Stepped(models), models, PROMPT, drafter=drafter).run()
    assert not drafter.seen
    requests = [request for each in models[TARGET].evaluated for request in each.requests]
    assert {request.rows_from for request in requests} == {None}


def test_an_evaluation_that_fails_beside_others_is_repeated() -> None:
    def fails(n: int) -> None:
        if n in (5, 8):
            raise EvaluationError("lost")

    models: dict[str, FakeModel] = {TARGET: target(before=fails)}
    scheduler, drafters = Stepped(models), [Following() for _ in range(3)]
    streams = [stream(scheduler, models, PROMPT, seed=i, drafter=drafters[i]) for i in range(3)]
    running = list(streams)
    while running:
        running = [of for of in running if next(of, None) is not None]
    for i, of in enumerate(streams):
        drafters[i].check(path_of(PROMPT, of.completion.tokens), 0)
