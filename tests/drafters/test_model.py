"""The requests of a model drafter: their number, the window of the context, and no token processed twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fake_constraint import Steps
from fakes import Asleep, FakeModel, Length, answered, tokens
from llamaspec.drafters.model import DeferredPrompt, ModelDrafter, SameTokens
from llamaspec.errors import (
    ContextFullError,
    EvaluationAbortedError,
    EvaluationError,
    MemoryFullError,
    ScoresError,
    WorkerError,
)
from llamaspec.protocols import Drafting
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import DRAFT, MTP, TARGET, Draft, Evaluation, Forward, ForwardRequest, Source
from stepped import Stepped
from texts import PLAIN, draft, stream, target

GREEDY = Sampling(temperature=0)


def drafter(vocabulary_size: int = 5, context_size: int = 100, n_tokens: int | None = None) -> ModelDrafter:
    same = SameTokens(vocabulary_size, n_tokens or vocabulary_size)
    return ModelDrafter(same, context_size, Sampler(GREEDY), RULES["coupled"], SeededStreams(0))


def asked(coroutine: Drafting, model: FakeModel) -> tuple[list[ForwardRequest], Draft]:
    """Let a model answer the requests of a drafter; return the requests and the draft."""
    requests: list[ForwardRequest] = []

    def answer(request: ForwardRequest) -> Forward:
        requests.append(request)
        return Forward(model.logits(request), 0.0, 0, Evaluation(1, 1, 1))

    made: Draft = answered(coroutine, answer)
    return requests, made


def test_one_evaluation_for_each_draft_token() -> None:
    model = FakeModel(vocabulary_size=5, context_size=100)
    requests, made = asked(drafter().propose(tokens(1, 2), Length(4)), model)
    assert [len(request.tokens) for request in requests] == [2, 3, 4, 5]
    assert [request.n_scored for request in requests] == [1, 1, 1, 1]
    assert all(request.likely_only for request in requests)
    path = [1, 2]
    for token in made.tokens.tolist():
        assert token == int(np.argmax(model.after(tokens(*path))))
        path.append(token)


def test_a_token_without_a_choice_costs_no_evaluation() -> None:
    """After a 0 only a 2 is allowed."""
    bound = replace(drafter(3), sampler=Sampler(GREEDY, 1, Steps()))
    requests, made = asked(bound.propose(tokens(1, 0), Length(3)), FakeModel())
    assert [request.tokens.tolist()[:3] for request in requests] == [[1, 0, 2]] * len(requests)
    assert made.tokens.tolist()[0] == 2
    assert (len(made), made.confidences[0]) == (3, 1.0)
    assert made.distributions[0].tokens.tolist() == [2]


FAULTS = (ScoresError("not numbers"), EvaluationError("failed"), MemoryFullError("full"), WorkerError("lost"))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("where", ["prepare", "propose", "after a token"])
def test_a_model_that_failed_is_not_used_again(where: str, fault: Exception) -> None:
    silenced, model = drafter(), FakeModel(vocabulary_size=5)
    failing = (
        silenced.prepare(tokens(1, 2)) if where == "prepare" else silenced.propose(tokens(1, 2), Length(3))
    )
    wanted = next(failing)
    if where == "after a token":
        failing.send(Forward(model.logits(wanted), 0.0, 0, Evaluation(1, 1, 1)))
    with pytest.raises(StopIteration) as end:
        failing.throw(fault)
    if where != "prepare":
        assert len(end.value.value) == (where == "after a token")  # a drawn token stays
    assert silenced.fault == str(fault)
    assert list(silenced.prepare(tokens(1, 2, 3))) == []
    assert asked(silenced.propose(tokens(1, 2, 3), Length(3)), model)[0] == []


@pytest.mark.parametrize("way", ["prepare", "propose"])
def test_an_aborted_evaluation_is_no_fault_of_the_model(way: str) -> None:
    aborted = drafter()
    asking = aborted.prepare(tokens(1, 2)) if way == "prepare" else aborted.propose(tokens(1, 2), Length(3))
    next(asking)
    with pytest.raises(EvaluationAbortedError):
        asking.throw(EvaluationAbortedError("aborted"))
    assert aborted.fault is None


def test_heads_draft_at_most_one_token_each() -> None:
    model = FakeModel(vocabulary_size=5, context_size=100)
    heads = replace(drafter(), model=MTP, source=Source.MTP, longest=2)
    requests, made = asked(heads.propose(tokens(1, 2), Length(4)), model)
    assert (len(made), made.source) == (2, Source.MTP)
    assert [request.model for request in requests] == [MTP, MTP]
    _, nothing = asked(heads.propose(tokens(1, 2), Length(0)), model)
    assert (len(nothing), nothing.source) == (0, Source.MTP)


def test_no_token_is_processed_twice() -> None:
    models = {TARGET: target(), DRAFT: draft()}
    done = stream(Stepped(models), models, (1, 2, 3, 4), length=Length(3), max_tokens=30).run()
    prompt, *steps = models[DRAFT].evaluated
    assert (prompt.n_new, prompt.requests[0].n_logits) == (3, 0)
    assert len(steps) == sum(len(round_.draft) for round_ in done.rounds)
    # After full acceptance the last draft token is not processed yet; otherwise only the target's own token.
    assert {step.n_new for step in steps} == {1, 2}
    n_full = sum(len(r.draft) == r.n_accepted > 0 for r in done.rounds[:-1])
    assert 0 <= n_full - sum(step.n_new == 2 for step in steps) <= 1


def test_a_small_context_slides_in_halves() -> None:
    model = FakeModel(vocabulary_size=5, context_size=8)
    lengths = []
    for n in range(6, 14):
        requests, _ = asked(drafter(context_size=8).propose(np.zeros(n, np.int32), Length(1)), model)
        lengths += [len(request.tokens) for request in requests]
    assert lengths == [6, 7, 8, 5, 6, 7, 8, 5]


def test_a_sequence_longer_than_the_drafts_context() -> None:
    models = {TARGET: target(), DRAFT: draft(context_size=8)}
    done = stream(Stepped(models), models, length=Length(3), max_tokens=40).run()
    assert len(done.tokens) == 40
    assert all(len(round_.draft) == 3 for round_ in done.rounds[:-3])


@pytest.mark.parametrize("n", [1, 2])
def test_a_full_context_ends_the_draft(n: int) -> None:
    coroutine = drafter().propose(tokens(1, 2), Length(4))
    model, wanted = FakeModel(vocabulary_size=5), next(coroutine)
    for _ in range(n - 1):
        wanted = coroutine.send(Forward(model.logits(wanted), 0.0, 0, Evaluation(1, 1, 1)))
    with pytest.raises(StopIteration) as end:
        coroutine.throw(ContextFullError("full"))
    assert len(end.value.value) == n - 1


def test_a_prompt_of_one_token_needs_no_preparation() -> None:
    assert list(drafter().prepare(tokens(1))) == []
    (request,) = drafter().prepare(tokens(1, 2, 3))
    assert (request.tokens.tolist(), request.n_logits) == ([1, 2], 0)


class InChunks(Asleep):
    """Lets the draft model process a prompt in chunks."""

    def __init__(self, *chunks: int) -> None:
        super().__init__(chunks[0])
        self.chunks = iter(chunks[1:])

    def observe_reading(self, n: int, seconds: float) -> None:
        self.n_to_read = next(self.chunks, 0)


@pytest.mark.parametrize(
    ("chunks", "requests"),
    [
        ((0,), [[], [5, 6, 7], [6, 7]]),  # the whole prompt, and a draft
        ((2, 0), [[], [3], [5, 6, 7], [6, 7]]),  # a chunk after the cached token, then the rest
        ((3, 3), [[], [4], [5], [6, 7]]),  # no draft beside the last chunk
    ],
)
def test_a_deferred_prompt_is_processed_as_the_policy_says(
    chunks: tuple[int, ...], requests: list[list[int]]
) -> None:
    policy, prompt = InChunks(*chunks), tokens(0, 1, 2, 3, 4, 0)
    deferred = DeferredPrompt(policy, n_cached=lambda tokens: 1)
    drafting = replace(drafter(), deferred=deferred, sampler=Sampler(GREEDY, len(prompt)))
    for part in (prompt[:3], prompt):
        assert list(drafting.prepare(part)) == []
    assert policy.n_unread == 5
    found = []
    for i in range(len(requests)):
        made, _ = asked(drafting.propose(prompt, Length(2 if i else 0)), FakeModel(vocabulary_size=5))
        found.append([len(request.tokens) for request in made])
    assert found == requests
    assert not deferred.is_pending


def test_tokens_that_only_the_target_has_are_replaced() -> None:
    (request,) = drafter(n_tokens=9).prepare(tokens(1, 8, 4, 2))
    assert request.tokens.tolist() == [1, 0, 4]


def test_only_tokens_of_the_target_are_drafted() -> None:
    model = FakeModel(vocabulary_size=5, context_size=100)
    for first in range(3):
        _, made = asked(drafter(n_tokens=2).propose(tokens(first), Length(6)), model)
        assert set(made.tokens.tolist()) <= {0, 1}


def test_confidence_is_the_drafts_probability() -> None:
    model = FakeModel(vocabulary_size=5, context_size=100)
    own = ModelDrafter(SameTokens(5, 5), 100, Sampler(PLAIN), RULES["rejection"], SeededStreams(0))
    _, made = asked(own.propose(tokens(1, 2), Length(3)), model)
    for token, q, confidence in zip(made.tokens.tolist(), made.distributions, made.confidences, strict=True):
        assert confidence == q.probability(token)
