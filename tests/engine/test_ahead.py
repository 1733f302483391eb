"""Drafting ahead while the target verifies: the texts are those without, whatever was drafted meanwhile.

How many steps the target leaves time for is fixed, so that the clock decides nothing.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import llamaspec.pair
from exact_law import (
    DROPPING,
    PROMPT,
    SAMPLINGS,
    SELF,
    THREE,
    Models,
    TableStreams,
    model_drafter,
    noise_tables,
)
from fakes import Clock, FakeModel, Length, answer_alone
from llamaspec import FixedLength, ModelOptions, Pair, Sampling, open_pair
from llamaspec.drafters.no_drafter import NoDrafter
from llamaspec.engine import scheduler as engine
from llamaspec.engine.ahead import draft_ahead
from llamaspec.engine.evaluation import Evaluator, Job
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.speculate import Speculation, speculate
from llamaspec.errors import EvaluationError
from llamaspec.protocols import Drafter, Model
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.values import DRAFT, TARGET, Draft, Forward, ForwardRequest, Meanwhile, Round
from patience import PATIENCE, until
from texts import alone, draft, stream, target
from texts import model_drafter as text_drafter


def leaving_time(monkeypatch: pytest.MonkeyPatch, n_steps: int) -> None:
    """Each verification lasts as long as so many steps."""

    def ahead(
        models: Mapping[str, Model], rows: Sequence[tuple[int, Meanwhile]], is_wanted: Callable[[], bool]
    ) -> None:
        del is_wanted
        left = iter(range(n_steps))
        draft_ahead(models, rows, lambda: next(left, None) is not None)

    monkeypatch.setattr(engine, "draft_ahead", ahead)


@pytest.mark.parametrize(("n_steps", "k"), [(0, 2), (1, 3), (3, 1), (9, 2)])
@pytest.mark.parametrize("is_right", [True, False])
def test_the_text_is_that_of_plain_decoding(
    n_steps: int, k: int, monkeypatch: pytest.MonkeyPatch, *, is_right: bool
) -> None:
    """Three rows at once; a draft that is never rejected, and one that often is."""
    leaving_time(monkeypatch, n_steps)
    models = {TARGET: target(), DRAFT: target() if is_right else draft()}
    scheduler = Scheduler(models, concurrent=True)
    streams = [stream(scheduler, models, (1, i), seed=i, length=Length(k)) for i in range(3)]
    assert [of.run().tokens for of in streams] == [alone((1, i), seed=i) for i in range(3)]
    scheduler.close()


def rounds_of(monkeypatch: pytest.MonkeyPatch, n_steps: int, k: int, of_draft: FakeModel) -> list[Round]:
    leaving_time(monkeypatch, n_steps)
    models = {TARGET: target(), DRAFT: of_draft}
    scheduler, length = Scheduler(models, concurrent=True), Length(k)
    of = stream(scheduler, models, length=length, max_tokens=(k + 1) * 4)
    assert of.run().tokens == alone(max_tokens=(k + 1) * 4)
    scheduler.close()
    return length.rounds


@pytest.mark.parametrize(
    ("n_steps", "expected"),
    [
        (0, [2, 2, 2, 2]),
        (1, [2, 2, 2, 2]),  # nothing but the guess
        (2, [2, 1, 1, 1]),
        (3, [2, 0, 0, 0]),
        (9, [2, 0, 0, 0]),
    ],
)
def test_what_was_drafted_ahead_is_not_drafted_again(
    n_steps: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft that is the target two tokens are verified in a round; a third step guesses the next one."""
    made = rounds_of(monkeypatch, n_steps, 2, target())
    assert [round_.n_accepted for round_ in made] == [2] * 4
    assert [round_.n_draft_steps for round_ in made] == expected


def test_nothing_is_evaluated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a whole draft is there beyond the guess, however long the target takes."""
    of_draft = target()
    rounds_of(monkeypatch, 100, 2, of_draft)
    texts = [request.tokens.tobytes() for each in of_draft.evaluated for request in each.requests]
    assert len(texts) == len({*texts})
    assert (
        len(texts) == 1 + 2 + 5 + 3 * 3
    )  # the prompt, a draft, what goes on behind it, three tokens a round


def test_after_a_rejection_nothing_of_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rounds_of(monkeypatch, 9, 2, draft())
    before = [None, *made]
    for last, round_ in zip(before, made, strict=False):
        if last is None or last.n_accepted < 2:
            assert round_.n_draft_steps == len(round_.draft)
    assert any(round_.n_accepted < 2 for round_ in made)


def answer_ahead(text: Any, models: Models, n_steps: int) -> list[Any]:
    """As `answer_alone`, with so many steps ahead for each verification."""
    draft_model = cast("dict[str, Model]", {DRAFT: Prepared(models[DRAFT])})

    def step() -> Any:
        wanted = next(text)
        while True:
            if isinstance(wanted, ForwardRequest) and wanted.meanwhile is not None:
                left = iter([True] * n_steps)
                draft_ahead(draft_model, [(0, wanted.meanwhile)], functools.partial(next, left, False))
            try:
                wanted = text.send((yield wanted))
            except StopIteration:
                return

    return answer_alone(step(), models)


class Prepared:
    """A fake model whose KV cache nobody looks after."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self.max_scored, self.batch_size = model.max_scored, model.batch_size

    def prepare(self, batch: Sequence[tuple[int, ForwardRequest, int]]) -> list[int]:
        return [0] * len(batch)

    def evaluate(self, batch: Sequence[tuple[int, ForwardRequest]]) -> list[Any]:
        return [self._model.logits(request) for _, request in batch]


@pytest.mark.parametrize("models", [THREE, SELF], ids=["another", "self-draft"])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("length", [Length(2), *DROPPING.values()], ids=["K=2", *DROPPING])
def test_for_every_noise_the_text_is_the_targets(length: Length, models: Models, sampling: str) -> None:
    chain, rule = SAMPLINGS[sampling], RULES["coupled"]

    def text(drafter: Drafter, streams: TableStreams, n_ahead: int) -> tuple[int, ...]:
        row = length.start_row(drops=rule.drops)
        config = Speculation(drafter, row, rule, chain, streams, models[TARGET].context_size)
        loop = speculate(PROMPT, len(PROMPT) + 5, config)
        made = answer_ahead(loop, models, n_ahead) if n_ahead else answer_alone(loop, models)
        return tuple(int(token) for round_ in made for token in round_.tokens)

    texts = set()
    for noise in noise_tables():
        streams = TableStreams(defaultdict(lambda: (0.2, 0.1, 0.0), noise))
        written = text(model_drafter(models, chain, rule, streams), streams, 4)
        assert written == text(NoDrafter(), streams, 0)
        texts.add(written)
    assert len(texts) > 1 or sampling == "greedy"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_draw_nothing_ahead(rule: str) -> None:
    """Their draws belong to a round, and the target's next token has nothing to do with the draft's."""
    drafter = text_drafter(draft(), 1, rule)
    assert drafter.ahead(PROMPT, Draft.certain([1, 1])) is None
    assert text_drafter(draft(), 1).ahead(PROMPT, Draft.certain([1, 1])) is not None


def test_a_draft_that_fails_meanwhile_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in a round ends the row; what fails ahead of it does not."""
    leaving_time(monkeypatch, 3)
    is_ahead, leaving = [False], vars(engine)["draft_ahead"]
    failed: list[int] = []

    def ahead(*arguments: Any) -> None:
        is_ahead[0] = True
        leaving(*arguments)
        is_ahead[0] = False

    def fail(n: int) -> None:
        if is_ahead[0] and n % 2:
            failed.append(n)
            raise EvaluationError("no; try again")

    monkeypatch.setattr(engine, "draft_ahead", ahead)
    models = {TARGET: target(), DRAFT: target(before=fail)}
    scheduler = Scheduler(models, concurrent=True)
    assert stream(scheduler, models, length=Length(2)).run().tokens == alone()
    assert failed
    scheduler.close()


def test_rows_go_together_as_far_as_a_batch_holds_them() -> None:
    """What is cached takes no place in a batch, and a full context has no room for padding."""
    model, heard = FakeModel(context_size=8, batch_size=10), dict[int, Forward | None]()
    read = ForwardRequest(DRAFT, np.array([0, 1, 2, 0, 1], np.int32))
    model.prepare([(0, read, 0)])
    model.evaluate([(0, read)])
    texts = {0: [0, 1, 2, 0, 1, 2, 0, 1], 1: [1, 2, 0, 1, 2, 0], 2: [2, 2], 3: [2]}  # 3, 6, 2, 1 not cached

    def meanwhile(row: int) -> Meanwhile:
        heard[row] = None
        heard[row] = yield ForwardRequest(DRAFT, np.array(texts[row], np.int32))

    draft_ahead({DRAFT: model}, [(row, meanwhile(row)) for row in texts], lambda: True)
    assert [(of.rows, of.n_new, of.n_padding) for of in model.evaluated[1:]] == [((0, 1, 3), 10, 0)]
    told = {row: forward and (forward.n_positions, forward.n_rows) for row, forward in heard.items()}
    assert told == {0: (10, 3), 1: (10, 3), 2: None, 3: (10, 3)}


def test_a_draft_without_room_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving_time(monkeypatch, 9)
    models = {TARGET: target(), DRAFT: draft(is_full=lambda row, request: len(request.tokens) > 8)}
    scheduler = Scheduler(models, concurrent=True)
    assert stream(scheduler, models, length=Length(2)).run().tokens == alone()
    scheduler.close()


def test_it_is_wanted_until_the_target_is_done() -> None:
    said, go = [], threading.Event()
    model = target(before=lambda n: said.append(go.wait(PATIENCE)))
    request = ForwardRequest(TARGET, PROMPT)
    model.prepare([(0, request, 0)])
    evaluator, done = Evaluator(2, Clock()), []

    def meanwhile(is_wanted: Callable[[], bool]) -> None:
        assert is_wanted()
        go.set()
        until(lambda: not is_wanted())
        done.append(True)

    (evaluation,) = evaluator.evaluate([Job(model, [(0, request)], 0, 1)], meanwhile)
    evaluator.close()
    assert (said, done, evaluation.error) == ([True], [True], None)


def test_cancelling_ends_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target waits until it is aborted, and the draft is told, too."""
    models = {TARGET: target(), DRAFT: target()}
    reached = threading.Event()

    def hold(n: int) -> None:
        if n > 2:
            reached.set()
            assert models[TARGET].aborted.wait(PATIENCE)

    models[TARGET].before = hold
    scheduler = Scheduler(models, concurrent=True)
    of = stream(scheduler, models, length=Length(2), max_tokens=40)
    thread = threading.Thread(target=of.run)
    thread.start()
    assert reached.wait(PATIENCE)
    of.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    scheduler.close()


ONE_THREAD = ModelOptions(n_ctx=256, threads=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_contexts_at_once_write_the_same_text(
    models: list[Path], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two devices: one thread for each context of the real llama.cpp."""
    texts = []
    for is_apart in (False, True):
        monkeypatch.setattr(llamaspec.pair, "_apart", lambda target, draft, is_apart=is_apart: is_apart)
        with open_pair(*models, target_options=ONE_THREAD, draft_options=ONE_THREAD) as pair:
            texts.append(written(pair, temperature))
    assert texts[0] == texts[1]


def written(pair: Pair, temperature: float) -> list[tuple[int, ...]]:
    sampling = Sampling(temperature=temperature)
    return [
        pair.stream("def f(self):", sampling=sampling, seed=seed, max_tokens=40, policy=FixedLength(k))
        .run()
        .tokens
        for seed, k in ((1, 1), (2, 4))
    ]
