"""A draft that writes in tokens of its own: what it is asked, and what becomes of its text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakes import FakeModel, Length, answer_alone, tokens
from foreign import FakeVocabulary, related
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.spelling import Spelling
from llamaspec.drafters.text_alignment import MOST_STEPS
from llamaspec.engine.speculate import Speculation, speculate
from llamaspec.protocols import Drafter
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.parameters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import DRAFT, TARGET, Draft, Forward, Logits, TokenArray

POEM = b"a bed, a bad bee; \xc3\xa9\xf0\x9f\x91\xa9 a deed. " * 6
BYTES = [bytes([i]) for i in range(256)]
WORDS = FakeVocabulary(
    [*BYTES, b" a", b" bad", b" bed", b" deed", "👩".encode(), b"<end>"], {261: b"<end>"}, eos=261
)
HALVES = FakeVocabulary(
    [b"[end]", *reversed(BYTES), b" b", b"ad", b"ee", b" a", b", a", "é".encode()], {0: b"[end]"}, eos=0
)
HALVES_THAT_BEGIN = replace(
    HALVES,
    pieces=[*HALVES.pieces, b"[begin]"],
    specials={0: b"[end]", 263: b"[begin]"},
    bos=263,
    adds_bos=True,
)


class Reciter(FakeModel):
    """Knows a poem: says the longest token that goes on with it, and the end behind it."""

    def __init__(self, vocabulary: FakeVocabulary, poem: bytes = POEM) -> None:
        super().__init__(vocabulary_size=vocabulary.size, context_size=512)
        self.vocabulary, self.poem = vocabulary, poem

    def after(self, tokens: TokenArray) -> Logits:
        said = b"".join(self.vocabulary.piece(token) for token in tokens.tolist())
        assert self.poem.startswith(said), "what is read is not the text"
        rest = self.poem[len(said) :]
        fits = [token for token in range(self.vocabulary.size) if rest.startswith(self._piece(token))]
        following = max(fits, key=lambda token: len(self._piece(token)), default=self.vocabulary.eos)
        logits: Logits = 40 * np.eye(self.vocabulary_size, dtype=np.float32)[following]
        return logits

    def _piece(self, token: int) -> bytes:
        return self.vocabulary.piece(token) or b"\xff"  # which no poem holds


def drafter(draft: FakeVocabulary, whole: float, rule: str = "coupled", temperature: float = 0.0) -> Drafter:
    own = ModelDrafter(draft.size, 512, Sampling(temperature=temperature), RULES[rule], SeededStreams(0))
    return related(WORDS, draft, intersection=False, whole=whole).adapted(own)


def recited(made: Drafter, models: dict[str, Any], n_draft: int, rule: str, n_tokens: int = 60) -> list[Any]:
    prompt = Spelling(WORDS).tokens(POEM[:8])
    sampling = Sampling(temperature=0.7)
    config = Speculation(made, Length(n_draft), RULES[rule], sampling, SeededStreams(0), 512)
    return answer_alone(speculate(prompt, len(prompt) + n_tokens, config), models)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("n_draft", [1, 2, 5])
@pytest.mark.parametrize(
    "draft", [HALVES, HALVES_THAT_BEGIN, WORDS], ids=["halves", "halves that begin", "same"]
)
def test_a_draft_that_knows_the_text_is_never_rejected(
    draft: FakeVocabulary, n_draft: int, rule: str
) -> None:
    """A draft that reads a stale text is lossless, too: nothing else sees it."""
    models = {TARGET: Reciter(WORDS), DRAFT: Reciter(draft)}
    made = recited(drafter(draft, 0.3, rule), models, n_draft, rule)
    assert all(round_.n_accepted == len(round_.draft) for round_ in made)
    assert max(len(round_.draft) for round_ in made) == n_draft


def test_a_token_that_may_go_on_is_proposed_where_that_is_seldom() -> None:
    models = {TARGET: Reciter(WORDS), DRAFT: Reciter(HALVES)}
    eager, careful = (recited(drafter(HALVES, whole), models, 2, "coupled") for whole in (1.0, 0.3))
    verified, accepted = (
        [sum(number(round_) for round_ in made) for made in (eager, careful)]
        for number in (lambda round_: len(round_.draft), lambda round_: round_.n_accepted)
    )
    assert accepted[0] < verified[0]
    assert accepted[1] == verified[1]


def proposed(made: Drafter, context: TokenArray, n_draft: int, model: Reciter) -> tuple[Draft, int]:
    """A draft, and how many evaluations it took."""
    coroutine: Any = made.propose(context, Length(n_draft))
    try:
        wanted, n = next(coroutine), 1
        while True:
            wanted, n = coroutine.send(Forward(model.logits(wanted), 0.0, 1, 1, 0, 1)), n + 1
    except StopIteration as end:
        return end.value, n


@pytest.mark.parametrize("context_size", [512, 8])
def test_the_first_draft_token_finds_all_but_the_last_token_read(context_size: int) -> None:
    made: Any = replace(drafter(HALVES_THAT_BEGIN, 1.0), context_size=context_size)  # type: ignore[type-var]
    context = Spelling(WORDS).tokens(POEM[:20])
    (request,) = made.prepare(context)
    path = next(made.propose(context, Length(1))).tokens
    assert (request.model, request.n_logits) == (DRAFT, 0)
    assert request.tokens.tolist() == path[:-1].tolist()
    assert 3 < len(path) <= context_size
    assert list(made.prepare(tokens())) == []


def test_the_end_of_the_text_is_proposed_as_the_targets() -> None:
    poem = b"a bad bed"
    draft, _ = proposed(drafter(HALVES, 0.3), Spelling(WORDS).tokens(b"a"), 9, Reciter(HALVES, poem))
    assert draft.tokens.tolist() == [257, 258, WORDS.eos]
    assert all(0.9 < confidence <= 1 for confidence in draft.confidences)


def test_no_more_tokens_than_are_wanted() -> None:
    """A token of the draft may be several of the target."""
    model, context = Reciter(HALVES), Spelling(WORDS).tokens(POEM[:5])
    draft, n_steps = proposed(drafter(HALVES, 1.0), context, 1, model)
    assert (draft.tokens.tolist(), n_steps) == ([ord(",")], 1)
    assert proposed(drafter(HALVES, 1.0), context, 2, model)[0].tokens.tolist() == [ord(","), 256]


def test_text_of_which_nothing_is_a_token_comes_to_an_end() -> None:
    """The draft says one character without end, and the target has no token for it."""

    class Stuck(Reciter):
        def after(self, tokens: TokenArray) -> Logits:
            logits: Logits = np.eye(self.vocabulary_size, dtype=np.float32)[1] * 40
            return logits

    few = FakeVocabulary([b"a", b"b"])
    own = ModelDrafter(HALVES.size, 512, Sampling(temperature=0), RULES["coupled"], SeededStreams(0))
    made = related(few, HALVES, intersection=False).adapted(own)
    draft, n_steps = proposed(made, tokens(0), 5, Stuck(HALVES))
    assert len(draft) == 0
    assert n_steps == MOST_STEPS


class Renumbered(FakeModel):
    """The same model with other numbers: token i is what token `order[i]` is there."""

    def __init__(self, model: FakeModel, order: list[int]) -> None:
        super().__init__(vocabulary_size=model.vocabulary_size, context_size=512)
        self.model, self.order = model, np.array(order, dtype=np.int32)

    def after(self, tokens: TokenArray) -> Logits:
        return self.model.after(self.order[tokens])[self.order]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_shared_tokens_are_drawn_with_the_targets_noise(temperature: float) -> None:
    """So under the coupled rule a target that drafts for itself is never rejected, at any temperature."""
    letters = [b"a", b"b", b"c", b"d", b"e"]
    target, order = FakeModel(3, vocabulary_size=5, context_size=512), [3, 0, 4, 1, 2]
    models = {TARGET: target, DRAFT: Renumbered(target, order)}
    sampling = Sampling(temperature=temperature, top_k=None, top_p=None, min_p=None)
    own = ModelDrafter(5, 512, sampling, RULES["coupled"], streams := SeededStreams(1))
    foreign = related(
        FakeVocabulary(letters), FakeVocabulary([letters[i] for i in order]), intersection=False
    )
    config = Speculation(foreign.adapted(own), Length(4), RULES["coupled"], sampling, streams, 512)
    made = answer_alone(speculate(tokens(1, 2), 80, config), models)
    assert all(round_.n_accepted == len(round_.draft) for round_ in made)
    assert len(made) < 20
