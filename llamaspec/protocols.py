"""The seams: what the loop needs from models, drafters, policies, rules and chance, and nothing more.

Nothing here must be inherited: whatever has these methods fits. The fakes beside the tests show each
protocol in a few lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from llamaspec.values import Ask, Distribution, Draft, Logits, Round, TokenArray, Verdict


class Model(Protocol):
    """A pure function of token sequences; its memory is a cache that nobody sees."""

    @property
    def vocabulary_size(self) -> int:
        """V, the number of scores for each position."""

    @property
    def context_size(self) -> int:
        """The longest sequence, in tokens, that can be asked."""

    def logits(self, asks: Sequence[Ask]) -> list[Logits]:
        """Scores after each of the last `n` tokens of every asked sequence.

        Returns
        -------
        list of [ask.n, V] float32
            Row i of an answer scores the token that follows the first `len(tokens) - n + 1 + i` tokens.
            Views of the model's buffer: valid until the next call, and not to be written to.
        """


class Vocabulary(Protocol):
    """Text to tokens and back."""

    def tokenize(self, text: bytes) -> TokenArray:
        """Token ids of a text, with the special tokens that the model wants at its start."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; a part of a UTF-8 character is allowed."""

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text."""


class LengthPolicy(Protocol):
    """Decides how many tokens to guess."""

    def wants_more(self, draft: Draft) -> bool:
        """Whether one guess more than those in `draft` is worth its time. Called before every guess."""

    def n_to_verify(self, draft: Draft) -> int:
        """How many of the guesses are worth an evaluation: the first ones, up to `len(draft)`.

        Asked only where guesses may be dropped for what they are: copies, and all guesses under a rule that
        allows it.
        """

    def width(self, n_guesses: int) -> int:
        """How many positions the target should evaluate at once: `n_guesses + 1`, or more.

        More is padding, for machines where a wider batch is cheaper, or exact where a narrower one is not.
        """

    def observe(self, round_: Round) -> None:
        """Learn from what a round brought and cost."""


class Drafter(Protocol):
    """Whatever guesses tokens. Caches are welcome; state that can be wrong is not."""

    def prepare(self, context: TokenArray) -> None:
        """Read a prompt ahead of the first round. Doing nothing is allowed."""

    def propose(self, context: TokenArray, policy: LengthPolicy) -> Draft:
        """Guess what follows the whole `context`, for as long as the policy wants more.

        Fewer guesses, or none, are always allowed.
        """


class Use(IntEnum):
    """What a random number is for: numbers for different uses are independent."""

    TOKEN = 0  # the token at a position; shared by draft and target under the coupled rule
    GUESS = 1  # a guess of the draft under the rejection and block rules
    ACCEPT = 2  # whether a guess stands
    RESIDUAL = 3  # the token in place of a rejected guess


class Dice(Protocol):
    """All chance of a run. The same (use, position, attempt) has the same answer for the same seed.

    `attempt` tells apart draws for one position that must be independent of each other: the index at
    which the round began, or 0 where position alone decides.
    """

    def choose(self, distribution: Distribution, use: Use, position: int, attempt: int = 0) -> int:
        """Draw one token of `distribution`."""

    def chance(self, probability: float, use: Use, position: int, attempt: int = 0) -> bool:
        """True with the given probability."""


class Judge(Protocol):
    """The target's distributions behind every guess, computed on demand."""

    def distribution(self, i: int) -> Distribution:
        """p after the context and the first `i` guesses, 0 <= i <= K."""


class Rule(Protocol):
    """Decides which guesses stand, so that the text keeps the target's law."""

    @property
    def name(self) -> str:
        """The name by which users choose the rule."""

    @property
    def may_drop(self) -> bool:
        """Whether a guess may be left unjudged because of what it is, without a change to the text's law."""

    def guess(self, distribution: Distribution, dice: Dice, start: int, i: int) -> int:
        """Draw guess `i`, counted from 0, of a round whose first guess stands at index `start`."""

    def verify(self, draft: Draft, target: Judge, dice: Dice, start: int) -> Verdict:
        """Judge a draft whose first guess would stand at index `start` of the whole sequence."""
