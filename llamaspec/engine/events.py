"""What is told of a text while it is written, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from llamaspec.engine.detokenize import Span
from llamaspec.engine.statistics import Summary
from llamaspec.values import Logprobs, Round


class StopReason(str, Enum):
    """Why a text ended."""

    END = "end"  # the model said so
    LIMIT = "limit"  # as many tokens as were asked for
    STOP = "stop"  # a stop string
    CONTEXT = "context"  # the context is full
    CONSTRAINT = "constraint"  # the constraint is not fulfilled, and nothing that it allows can follow
    INTERRUPT = "interrupt"  # the consumer stopped, or the pair was closed


class Piece(NamedTuple):
    """What became certain with one token: text, or none where a character or a stop string may go on."""

    text: str
    token: int
    spans: tuple[Span, ...]  # the same text, split by where it came from
    logprobs: Logprobs | None = None  # of the token, where they are wanted

    @property
    def drafted(self) -> bool:
        """Whether there is text, all of it from accepted draft tokens."""
        return bool(self.spans) and all(span.drafted for span in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """Some of the prompt has been read."""

    n_read: int
    n_to_read: int
    n_cached: int  # of them, tokens that the target's KV cache held before
    seconds: float  # of the target and the draft, up to now


class Written(NamedTuple):
    """A round, and what the text keeps of it."""

    round: Round
    pieces: tuple[Piece, ...]  # one for each token, the end-of-text token counted


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The text is complete."""

    reason: StopReason
    pieces: tuple[Piece, ...]  # what was held back


TextEvent: TypeAlias = "Prefilled | Written | Ended"


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A finished text."""

    text: str
    tokens: tuple[int, ...]  # of the text, without the end-of-text token
    n_prompt_tokens: int
    stop_reason: StopReason
    rounds: tuple[Round, ...]
    summary: Summary
    prefill_seconds: float  # reading the prompt, by target and draft
    n_cached: int = 0  # tokens of the prompt that the target's KV cache held before
    mask_seconds: float = 0.0  # computing what the constraint allows: a part of drafting and of overhead
