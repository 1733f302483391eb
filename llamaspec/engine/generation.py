"""A completion as a coroutine: processes the prompt, then speculates until the completion ends.

It yields requests, rounds and events, and knows models only by name. Text becomes certain in whole UTF-8
characters, without what may begin a stop string. tests/engine/test_stream.py, tests/engine/test_text.py.
"""

from __future__ import annotations

import codecs
import itertools
import statistics
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from llamaspec.drafters.fallback import metered, preparing
from llamaspec.engine.sequence import Generating
from llamaspec.engine.speculate import Speculation, speculate
from llamaspec.errors import EVALUATION_FAULTS, ContextFullError
from llamaspec.length.fixed import prompt_reading
from llamaspec.protocols import Drafter, SequenceConstraint, Vocabulary
from llamaspec.values import TARGET, Forward, ForwardRequest, Logprobs, Round, TokenArray, UnusedDraft


class StopReason(str, Enum):
    """Why a completion ended."""

    END = "end"  # an end-of-text token
    LIMIT = "limit"  # the maximum number of tokens
    STOP = "stop"  # a stop string
    CONTEXT = "context"  # the context is full
    CONSTRAINT = "constraint"  # the constraint is not satisfied, and no allowed token can follow
    INTERRUPT = "interrupt"  # the reader stopped, or the pair was closed


class Span(NamedTuple):
    """A stretch of text and whether it came from an accepted draft token."""

    text: str
    drafted: bool


class Piece(NamedTuple):
    """The text that one token made certain; empty while a character or a stop string is incomplete."""

    text: str
    token: int
    spans: tuple[Span, ...]  # the same text, split by origin
    logprobs: Logprobs | None = None  # of the token, if requested
    begin: int = 0  # characters before the token's own text, which may come in a later piece

    @property
    def drafted(self) -> bool:
        """Whether there is text, all of it from accepted draft tokens."""
        return bool(self.spans) and all(span.drafted for span in self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A part of the prompt has been processed."""

    n_read: int
    n_to_read: int
    n_cached: int  # of the tokens read, those that the target's KV cache held before
    seconds: float  # of target and draft up to now


class Written(NamedTuple):
    """A round, and the pieces that the completion keeps of it."""

    round: Round
    pieces: tuple[Piece, ...]  # one for each token, end-of-text token included


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The completion is over."""

    reason: StopReason
    pieces: tuple[Piece, ...]  # text that was held back


TextEvent: TypeAlias = "Prefilled | Written | Ended"


TELLING = 16  # tokens; the speed-up of fewer is noise


@dataclass(frozen=True, slots=True)
class Summary:
    """Costs and gains of a completion, summed over its rounds."""

    n_tokens: int  # tokens that the completion kept, end-of-text token included
    n_rounds: int
    n_rounds_without_draft: int
    n_drafted: int  # draft tokens, including those that were dropped before verification
    n_verified: int  # draft tokens that the target evaluated
    n_accepted: int  # accepted draft tokens; the target's own token of each round does not count
    accepted_histogram: tuple[int, ...]  # [i] = rounds in which i draft tokens were accepted
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float
    plain_seconds: float | None = None  # estimate for a round without a draft, alone; None if unknown
    speed_up: float | None = None  # estimate against plain decoding, see `_speed_up`

    @property
    def decode_seconds(self) -> float:
        """Wall clock of all rounds, without prompt processing."""
        return self.draft_seconds + self.verify_seconds + self.overhead_seconds

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens divided by verified ones; None if none was verified."""
        return self.n_accepted / self.n_verified if self.n_verified else None

    @property
    def mean_tokens_per_round(self) -> float | None:
        """Accepted draft tokens plus the target's own, averaged over all rounds."""
        return (self.n_accepted + self.n_rounds) / self.n_rounds if self.n_rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that the completion kept, divided by `decode_seconds`."""
        return self.n_tokens / self.decode_seconds if self.decode_seconds > 0 else None


def summarize(rounds: Sequence[Round], n_tokens: int) -> Summary:
    """Sum up the rounds of a completion that kept `n_tokens` tokens."""
    counts = Counter(round_.n_accepted for round_ in rounds)
    plain_seconds = _plain_seconds(rounds)
    return Summary(
        n_tokens=n_tokens,
        n_rounds=len(rounds),
        n_rounds_without_draft=sum(round_.n_drafted == 0 for round_ in rounds),
        n_drafted=sum(round_.n_drafted for round_ in rounds),
        n_verified=sum(round_.n_verified for round_ in rounds),
        n_accepted=sum(round_.n_accepted for round_ in rounds),
        accepted_histogram=tuple(counts[i] for i in range(max(counts, default=-1) + 1)),
        draft_seconds=sum(round_.draft_seconds for round_ in rounds),
        verify_seconds=sum(round_.verify_seconds for round_ in rounds),
        overhead_seconds=sum(round_.overhead_seconds for round_ in rounds),
        plain_seconds=plain_seconds.get(1),
        speed_up=_speed_up(rounds, plain_seconds),
    )


def _plain_seconds(rounds: Sequence[Round]) -> dict[int, float]:
    """Seconds of a round without a draft, by the number of sequences that share its evaluation.

    They are the length policy's latest estimate. If it has none, they are the median of these rounds, if
    there are at least three: a single one may have been held up.
    """
    plain = [each.seconds - each.draft_seconds for each in rounds if each.width == 1]
    known = {1: statistics.median(plain)} if len(plain) >= 3 else {}
    return known | {each.n_sequences: each.plain_seconds for each in rounds if each.plain_seconds is not None}


def _speed_up(rounds: Sequence[Round], plain_seconds: Mapping[int, float]) -> float | None:
    """How many times as fast as plain decoding the rounds were.

    None if nothing was verified, if there are fewer than TELLING tokens, or if no plain round was timed.
    Rounds that shared their evaluation with a prompt do not count, because their own share is unknown. No
    round costs less than a plain one, so the tokens of a round bound the result.
    """
    rounds = [round_ for round_ in rounds if not round_.n_prefill]
    seconds = sum(round_.seconds for round_ in rounds)
    is_known = all(round_.n_sequences in plain_seconds for round_ in rounds)
    n_tokens = sum(round_.n_accepted + 1 for round_ in rounds)
    if n_tokens < TELLING or not (is_known and seconds and any(round_.n_verified for round_ in rounds)):
        return None
    plain = sum((round_.n_accepted + 1) * plain_seconds[round_.n_sequences] for round_ in rounds)
    return min(plain / seconds, n_tokens / len(rounds))


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A finished completion."""

    text: str
    tokens: tuple[int, ...]  # without the end-of-text token
    n_prompt_tokens: int
    stop_reason: StopReason
    rounds: tuple[Round, ...]
    summary: Summary
    prefill_seconds: float  # prompt processing, by target and draft
    n_cached: int = 0  # tokens of the prompt that the target's KV cache held before
    unused_draft: UnusedDraft | None = None  # why the draft was never used
    draft_fault: str | None = None  # the error after which the draft was not used
    mask_seconds: float = 0.0  # computing allowed tokens; included in draft and overhead seconds


PREFILL_PART = 512  # tokens of a prompt between two reports of progress


def generate(config: Speculation, text: Detokenizer) -> Generating[TextEvent]:
    """Generate a completion: a coroutine that yields requests, rounds and events."""
    try:
        try:
            yield from _prefill(config)
            reason = yield from _decode(config, text)
        except ContextFullError:  # other sequences hold the room
            reason = StopReason.CONTEXT
        yield Ended(reason, text.rest())
    finally:
        config.close()


def _prefill(config: Speculation) -> Generating[TextEvent]:
    """Process the prompt except its last token, with which decoding begins."""
    prompt, n_to_read = config.prompt, len(config.prompt) - 1
    n_cached, seconds, reading = 0, 0.0, prompt_reading(config.length)
    for begin in range(0, n_to_read, PREFILL_PART):
        end = min(begin + PREFILL_PART, n_to_read)
        forward: Forward = yield ForwardRequest(TARGET, prompt[:end], n_logits=0)
        n_cached += max(0, forward.n_cached - begin)
        seconds += forward.seconds
        if reading is not None and forward.n_sequences == 1:
            reading.observe_prompt(end - max(forward.n_cached, begin), forward.seconds)
        if end < n_to_read:  # prediction heads read along: hidden states are not kept for long
            seconds += yield from _prepare(config.drafter, prompt[: end + 1])
        yield Prefilled(end, n_to_read, n_cached, seconds)
    seconds += yield from _prepare(config.drafter, prompt)
    yield Prefilled(n_to_read, n_to_read, n_cached, seconds)


def _prepare(drafter: Drafter, read: TokenArray) -> Generator[ForwardRequest, Forward, float]:
    """Let the drafter process the part of the prompt that the target has processed; return its seconds."""
    _, spent = yield from metered(preparing(drafter, read))
    return sum(seconds for _, seconds in spent)


def _decode(config: Speculation, text: Detokenizer) -> Generator[Any, Any, StopReason]:
    """Speculate until the completion ends; return the reason."""
    with closing(speculate(config)) as loop:
        wanted = next(loop, None)
        while wanted is not None:
            try:
                answer = yield wanted
            except EVALUATION_FAULTS as error:
                wanted = loop.throw(error)  # a drafter can go on without its model
                continue
            if isinstance(wanted, Round):
                yield text.add(answer, config.constraint)  # before the next draft, which may fail
                if text.end is not None:
                    config.length.observe(answer)  # as the loop would, before its next draft
                    return text.end
            try:
                wanted = loop.send(answer)
            except StopIteration:
                break
    has_all = config.limit == len(config.prompt) + config.max_tokens
    return StopReason.LIMIT if has_all else StopReason.CONTEXT


class Detokenizer:
    """Turns the tokens of a completion into pieces of text, and finds its end.

    `spelled` gives control tokens a text; those it leaves out have none.
    """

    def __init__(
        self, vocabulary: Vocabulary, stops: Sequence[str] = (), spelled: Mapping[int, bytes] | None = None
    ) -> None:
        self._vocabulary, self._spelled = vocabulary, spelled or {}
        self._text = TextAssembler(stops)
        self._tokens: list[int] = []  # of the completion
        self._last: Piece | None = None
        self.end: StopReason | None = None  # set at the end of the completion

    def is_end(self, token: int) -> bool:
        """Whether a token ends the completion."""
        return self._vocabulary.is_end(token)

    def add(self, round_: Round, constraint: SequenceConstraint | None = None) -> Written:
        """Add the tokens of a round, up to the end of the completion."""
        pieces: list[Piece] = []
        logprobs = round_.logprobs or itertools.repeat(None)
        for i, (token, of_token) in enumerate(zip(round_.tokens.tolist(), logprobs, strict=False)):
            begin = self._text.n_characters
            if self.is_end(token):
                is_complete = constraint is None or constraint.is_complete(np.array(self._tokens, np.int32))
                self.end = StopReason.END if is_complete else StopReason.CONSTRAINT
                pieces.append(Piece("", token, (), of_token, begin))
                break
            self._tokens.append(token)
            piece = self._spelled.get(token) or self._vocabulary.piece(token)
            spans = self._text.add(piece, drafted=i < round_.n_accepted)
            pieces.append(Piece(_text_of(spans), token, tuple(spans), of_token, begin))
            if self._text.stopped:
                self.end = StopReason.STOP
                break
        self._last = pieces[-1]
        return Written(round_, tuple(pieces))

    def rest(self) -> tuple[Piece, ...]:
        """The text that was held back."""
        spans = self._text.finish()
        if not spans or self._last is None:
            return ()
        return (self._last._replace(text=_text_of(spans), spans=tuple(spans), logprobs=None),)


class TextAssembler:
    """Joins the bytes of tokens to text, up to the first stop string; holds back what is not certain."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: deque[Span] = deque()  # text that may be the beginning of a stop string
        self.n_characters = 0  # complete characters, including those held back
        self.stopped = False  # a stop string was found

    def add(self, piece: bytes, drafted: bool) -> list[Span]:
        """Add a token; return the text that it makes certain."""
        text = self._decoder.decode(piece)
        self.n_characters += len(text)
        return self._release(text, drafted)

    def finish(self) -> list[Span]:
        """End the text; return what was held back. An incomplete character becomes U+FFFD."""
        spans = self._release(self._decoder.decode(b"", final=True), drafted=False)
        return spans if self.stopped else [*spans, *self._held]

    def _release(self, text: str, drafted: bool) -> list[Span]:
        if self.stopped or not text:
            return []
        if not self._stops:
            return [Span(text, drafted)]
        self._held.append(Span(text, drafted))
        held = "".join(span.text for span in self._held)
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return take_characters(self._held, min(found))
        return take_characters(self._held, len(held) - self._possible_beginning(held))

    def _possible_beginning(self, held: str) -> int:
        """Length of the longest end of `held` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for n in range(min(longest, len(held)), 0, -1):
            if any(stop.startswith(held[-n:]) for stop in self._stops):
                return n
        return 0


def take_characters(spans: deque[Span], n: int) -> list[Span]:
    """Remove the first `n` characters, or all if there are fewer."""
    taken: list[Span] = []
    while n > 0 and spans:
        span = spans.popleft()
        if len(span.text) > n:
            spans.appendleft(Span(span.text[n:], span.drafted))
            span = Span(span.text[:n], span.drafted)
        taken.append(span)
        n -= len(span.text)
    return taken


def _text_of(spans: Sequence[Span]) -> str:
    return "".join([span.text for span in spans])
