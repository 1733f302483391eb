"""Prompt in, pieces out: why a text ends, what is left after an early stop, how the prompt is read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from fakes import CountingUp, FakeModel
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.silent import SilentDrafter
from llamaspec.engine.decode import Speculation, decode
from llamaspec.engine.generate import PREFILL_PART, StopReason, TextStream
from llamaspec.errors import PromptError
from llamaspec.protocols import Drafter, LengthPolicy
from llamaspec.rules.dice import SeededDice
from llamaspec.rules.lengths import FixedLength
from llamaspec.rules.verify import RULES
from llamaspec.values import Ask, Draft, Logits, Round, Sampling, TokenArray

GREEDY = Sampling(temperature=0)


@dataclass
class Letters:
    """Token n is the n-th letter."""

    end: int | None = None

    def tokenize(self, text: bytes) -> TokenArray:
        return np.array([byte - 97 for byte in text], dtype=np.int32)

    def piece(self, token: int) -> bytes:
        return bytes([97 + token])

    def is_end(self, token: int) -> bool:
        return token == self.end


class Alphabet:
    """A model that says the alphabet over and over."""

    vocabulary_size = 5
    context_size = 600

    def __init__(self) -> None:
        self.asked: list[int] = []

    def logits(self, asks: Sequence[Ask]) -> list[Logits]:
        (ask,) = asks
        assert len(ask.tokens) <= self.context_size
        self.asked.append(len(ask.tokens))
        following = (ask.tokens[len(ask.tokens) - ask.n :] + 1) % 5
        return [np.eye(5, dtype=np.float32)[following] * 9]


def speculate(target: Alphabet, drafter: Drafter, policy: LengthPolicy) -> Speculation:
    ticks = itertools.count()
    return Speculation(
        target, drafter, policy, RULES["coupled"], GREEDY, SeededDice(0), lambda: float(next(ticks))
    )


def stream(prompt: str = "ab", k: int = 2, end: int | None = None, **settings: object) -> TextStream:
    vocabulary = Letters(end)
    speculation = speculate(Alphabet(), CountingUp(5), FixedLength(k))
    tokens = vocabulary.tokenize(prompt.encode())
    return TextStream(tokens, vocabulary, speculation, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize(
    ("settings", "text", "reason"),
    [
        ({"max_tokens": 7}, "cdeabcd", StopReason.LIMIT),
        ({"max_tokens": 1}, "c", StopReason.LIMIT),
        ({"max_tokens": 99, "end": 0}, "cde", StopReason.END),
        ({"max_tokens": 99, "stops": ("ab",)}, "cde", StopReason.STOP),
        ({"max_tokens": 4, "stops": ("ea",)}, "cd", StopReason.STOP),
        ({"max_tokens": 4, "stops": ("abx",)}, "cdea", StopReason.LIMIT),  # held back, then shown
    ],
)
def test_why_a_text_ends(settings: dict[str, object], text: str, reason: StopReason, k: int) -> None:
    made = stream(k=k, **settings)  # type: ignore[arg-type]
    shown = "".join(piece.text for piece in made)
    assert (shown, made.completion.stop_reason) == (text, reason)
    assert made.completion.text == shown


def test_a_full_context_ends_the_text_and_keeps_it() -> None:
    done = stream("ab" * 295, max_tokens=99).run()
    assert done.stop_reason is StopReason.CONTEXT
    assert len(done.text) == 10


def test_stopping_early_keeps_what_was_produced() -> None:
    made = stream(max_tokens=50)
    assert next(made).text == "c"
    assert next(made).text == "d"
    made.close()
    assert made.completion.text == "cd"
    assert made.completion.stop_reason is StopReason.INTERRUPT
    assert list(made) == []


def test_statistics_count_what_the_text_kept() -> None:
    done = stream(k=3, end=1, max_tokens=99).run()  # c d e a, then the end inside a draft
    summary = done.summary
    assert done.tokens == (2, 3, 4, 0)
    assert summary.n_tokens == 5
    assert summary.n_rounds == 2
    assert (summary.n_drafted, summary.n_verified, summary.n_accepted) == (6, 6, 6)
    assert summary.accepted_histogram == (0, 0, 0, 2)
    assert summary.n_rounds_cut == 1
    assert summary.decode_seconds == 6  # three ticks of the clock in each round
    assert summary.mean_tokens_per_round == 4


def test_a_long_prompt_is_read_in_parts_and_told() -> None:
    told: list[tuple[int, int]] = []
    target = Alphabet()
    prompt = np.zeros(PREFILL_PART + 30, dtype=np.int32)
    speculation = speculate(target, SilentDrafter(), FixedLength(0))
    made = TextStream(
        prompt, Letters(), speculation, max_tokens=1, on_prefill=lambda *part: told.append(part)
    )
    made.run()
    assert told == [(PREFILL_PART, PREFILL_PART + 29), (PREFILL_PART + 29, PREFILL_PART + 29)]
    assert target.asked == [PREFILL_PART, PREFILL_PART + 29, PREFILL_PART + 30]


@pytest.mark.parametrize(("prompt", "complaint"), [("", "empty"), ("a" * 600, "leaves no room")])
def test_prompts_that_cannot_be_used(prompt: str, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint):
        stream(prompt)


class Wide(FixedLength):
    """Pads every evaluation to ten positions."""

    def width(self, n_guesses: int) -> int:
        return max(10, n_guesses + 1)


def test_padding_is_evaluated_and_changes_nothing() -> None:
    target = Alphabet()
    speculation = speculate(target, CountingUp(5), Wide(2))
    prompt = np.array([0, 1], dtype=np.int32)
    rounds = list(decode(prompt, 12, speculation))
    assert [token for round_ in rounds for token in round_.tokens.tolist()] == [2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert target.asked[0] == len(prompt) + 9


def test_padding_never_exceeds_the_context() -> None:
    target = Alphabet()
    prompt = np.zeros(597, dtype=np.int32)
    rounds = list(decode(prompt, 600, speculate(target, CountingUp(5), Wide(2))))
    assert sum(len(round_.tokens) for round_ in rounds) == 3
    assert max(target.asked) <= 600


def test_a_draft_model_reads_nothing_twice() -> None:
    draft = FakeModel(vocabulary_size=5, context_size=100)
    drafter = ModelDrafter(draft, GREEDY, RULES["coupled"], SeededDice(0))
    drafter.propose(np.array([1, 2], dtype=np.int32), FixedLength(4))
    assert draft.asked == [1, 1, 1, 1]


def test_a_small_draft_context_slides_in_halves() -> None:
    lengths: list[int] = []

    class Small(FakeModel):
        def logits(self, asks: Sequence[Ask]) -> list[Logits]:
            lengths.append(len(asks[0].tokens))
            return super().logits(asks)

    drafter = ModelDrafter(Small(context_size=8, vocabulary_size=5), GREEDY, RULES["coupled"], SeededDice(0))
    for n in range(6, 14):
        drafter.propose(np.zeros(n, dtype=np.int32), FixedLength(1))
    assert lengths == [6, 7, 8, 5, 6, 7, 8, 5]


def test_a_policy_sees_every_round() -> None:
    class Watching(FixedLength):
        seen: list[int] = []  # noqa: RUF012

        def wants_more(self, draft: Draft) -> bool:
            return len(draft) < 2

        def observe(self, round_: Round) -> None:
            self.seen.append(len(round_.tokens))

    policy = Watching(2)
    rounds = decode(np.array([0], dtype=np.int32), 9, speculate(Alphabet(), CountingUp(5), policy))
    assert [len(round_.tokens) for round_ in rounds] == policy.seen == [3, 3, 2]
