"""What a sequence writes, as deltas that every API puts into its own form; and the figures of an answer.

A delta is content, reasoning, or a tool call; content carries the log-probabilities of its tokens and which
of it was drafted. A token comes with the first content that has text of it; where none has, it is not told.
tests/serve/test_deltas.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from llamaspec.chat.answer_stream import AnswerPart
from llamaspec.chat.parse import ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta, message_of
from llamaspec.chat.template import Message
from llamaspec.engine.detokenize import Span, take_characters
from llamaspec.engine.statistics import Summary
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.bodies import SpeculativeFields
from llamaspec.serve.errors import RequestError
from llamaspec.serve.scheduling import Finished, PromptProgress, Submission
from llamaspec.values import Logprobs, Round, Source

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class TokenLogprobs(NamedTuple):
    """How probable a token and its alternatives were."""

    token: int
    logprobs: Logprobs
    begin: int = 0  # characters of the answer before its text


@dataclass(frozen=True, slots=True)
class Content(ContentDelta):
    """Text of the answer."""

    spans: tuple[Span, ...] = ()  # the same text, split by whether it was drafted
    logprobs: tuple[TokenLogprobs, ...] = ()  # of its tokens, if requested


TextDelta: TypeAlias = "Content | ReasoningDelta | CallDelta | ArgumentsDelta"
Delta: TypeAlias = "TextDelta | PromptProgress | Finished"
Deltas: TypeAlias = AsyncIterator[tuple[int, Delta]]  # with the index of the sequence


async def deltas_of(submission: Submission, deadline: float | None, keep_alive: float) -> Deltas:
    """The deltas of all sequences; a PromptProgress without numbers after `keep_alive` seconds of silence.

    Raises RequestError 504 after the deadline (`time.monotonic`), and whatever ended a sequence.
    """
    builders = [DeltaBuilder() for _ in submission.states]
    told_at = monotonic()
    while not submission.is_over:
        now = monotonic()
        if deadline is not None and now >= deadline:
            raise RequestError(504, "the answer took too long; see --request-timeout", code="timeout")
        if now - told_at >= keep_alive:  # tokens may have come whose text is held back, as in a call
            told_at = now
            yield 0, PromptProgress()
        ends = told_at + keep_alive if deadline is None else min(told_at + keep_alive, deadline)
        index, event = await submission.next_event(ends - now) or (0, ())
        if isinstance(event, Exception):
            raise event
        deltas: Iterable[Delta] = builders[index].add(event) if isinstance(event, tuple) else (event,)
        for delta in deltas:
            told_at = monotonic()
            yield index, delta


class DeltaBuilder:
    """Turns the parts of one answer into deltas."""

    def __init__(self) -> None:
        self._tokens: deque[TokenLogprobs] = deque()  # whose text has not come
        self._spans: deque[Span] = deque()  # text that is in no delta yet
        self._begin = 0  # characters of the answer before that

    def add(self, parts: Iterable[AnswerPart]) -> list[TextDelta]:
        """The deltas of some parts; content that follows content is joined."""
        deltas: list[TextDelta] = []
        for part in parts:
            piece = part.piece
            self._spans += [Span(part.cut, False)] if piece is None else piece.spans
            if piece is not None and piece.logprobs is not None:
                self._tokens.append(TokenLogprobs(piece.token, piece.logprobs, piece.begin))
            for delta in part.deltas:
                if not isinstance(delta, ContentDelta):
                    deltas.append(delta)
                    continue
                content, last = self._content(delta), deltas[-1] if deltas else None
                if isinstance(last, Content):
                    spans = _merged((*last.spans, *content.spans))
                    deltas[-1] = Content(last.text + content.text, spans, last.logprobs + content.logprobs)
                else:
                    deltas.append(content)
        return deltas

    def _content(self, delta: ContentDelta) -> Content:
        """Content with its spans and tokens; passes over the marks, thoughts and calls before it."""
        begin = delta.end - len(delta.text)
        take_characters(self._spans, begin - self._begin)
        spans = take_characters(self._spans, len(delta.text))
        self._begin = delta.end
        return Content(delta.text, _merged(spans), self._tokens_of(begin, delta.end))

    def _tokens_of(self, begin: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Remove the tokens that begin before `end`: those with text behind `begin`."""
        found: list[TokenLogprobs] = []
        while self._tokens and self._tokens[0].begin < end:
            token = self._tokens.popleft()
            # A part of a character counts as the character.
            token_end = max(self._tokens[0].begin, token.begin + 1) if self._tokens else end
            if token_end > begin:
                found.append(token)
        return tuple(found)


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same text, with neighbours of one kind joined."""
    merged: list[Span] = []
    for span in spans:
        if merged and span.text and merged[-1].drafted == span.drafted:
            merged[-1] = Span(merged[-1].text + span.text, span.drafted)
        elif span.text:
            merged.append(span)
    return tuple(merged)


class Answer(NamedTuple):
    """All that one sequence wrote."""

    message: Message
    logprobs: Sequence[TokenLogprobs]  # of its content
    end: Finished


async def answers_of(deltas: Deltas, n: int) -> Sequence[Answer]:
    """Collect the deltas of `n` sequences."""
    found: list[list[TextDelta]] = [[] for _ in range(n)]
    ends: dict[int, Finished] = {}
    async for index, delta in deltas:
        if isinstance(delta, Finished):
            ends[index] = delta
        elif not isinstance(delta, PromptProgress):
            found[index].append(delta)
    answers: list[Answer] = []
    for i, each in enumerate(found):
        tokens = [token for delta in each if isinstance(delta, Content) for token in delta.logprobs]
        answers.append(Answer(message_of(each), tokens, ends[i]))
    return answers


# Log-probabilities and figures, in JSON.


def logprob_list(tokens: Iterable[TokenLogprobs], vocabulary: LlamaVocabulary) -> list[dict[str, Any]]:
    """In the form of OpenAI's chat and responses APIs; control tokens are left out."""
    told: list[dict[str, Any]] = []
    for token, (logprob, top), _ in tokens:
        if vocabulary.piece(token):
            tops = [_token(*each, vocabulary) for each in top]
            told.append({**_token(token, logprob, vocabulary), "top_logprobs": tops})
    return told


def _token(token: int, logprob: float, vocabulary: LlamaVocabulary) -> dict[str, Any]:
    piece = vocabulary.piece(token) or vocabulary.text(token)
    text = piece.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(piece)}


def openai_usage(
    ends: Sequence[Finished], n: int = 1, *, prompt: str = "prompt", completion: str = "completion"
) -> dict[str, Any]:
    """Tokens of all sequences of a request, by OpenAI's names; a prompt with `n` choices counts once."""
    prompts = [end.completion for end in ends[::n]]
    n_prompt = sum(each.n_prompt_tokens for each in prompts)
    n_generated = sum(end.completion.summary.n_tokens for end in ends)
    details = {"reasoning_tokens": sum(end.n_reasoning for end in ends)}
    rounds = [each for end in ends for each in end.completion.rounds if each.source is Source.PREDICTION]
    if rounds:
        details["accepted_prediction_tokens"] = sum(each.n_accepted for each in rounds)
        details["rejected_prediction_tokens"] = sum(each.n_verified - each.n_accepted for each in rounds)
    return {
        f"{prompt}_tokens": n_prompt,
        f"{completion}_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        f"{prompt}_tokens_details": {"cached_tokens": sum(each.n_cached for each in prompts)},
        f"{completion}_tokens_details": details,
    }


def figures(end: Finished, options: SpeculativeFields) -> dict[str, Any]:
    """How a text was generated: llama-server's `timings` and more, and each round if requested."""
    done, summary = end.completion, end.completion.summary
    timings = {
        "cache_n": done.n_cached,
        **_speed("prompt", done.n_prompt_tokens - done.n_cached, done.prefill_seconds),
        **_speed("predicted", summary.n_tokens, summary.decode_seconds),
        "draft_n": summary.n_verified,
        "draft_n_accepted": summary.n_accepted,
        "rounds": summary.n_rounds,
        "accepted_histogram": list(summary.accepted_histogram),
        **_milliseconds(summary),
        "mask_ms": 1e3 * done.mask_seconds,
        "speedup_estimate": end.speedup,
        "unused_draft": None if done.unused_draft is None else done.unused_draft._asdict(),
        "draft_fault": done.draft_fault,
    }
    if not options.rounds:
        return {"timings": timings}
    return {"timings": timings, "rounds": [_round(round_) for round_ in done.rounds]}


def work_of(submission: Submission) -> dict[str, Any]:
    """What was computed for a request, for the log; the speed-up is that of its last completion."""
    done = [state.stream.completion for state in submission.states if state.stream is not None]
    ends = [state.last for state in submission.states if isinstance(state.last, Finished)]
    n_generated = sum(each.summary.n_tokens for each in done)
    seconds = sum(each.summary.decode_seconds for each in done)
    return {
        "prompt_tokens": sum(each.n_prompt_tokens for each in done),
        "cached_tokens": sum(each.n_cached for each in done),
        "generated_tokens": n_generated,
        "tokens_per_second": round(n_generated / seconds, 3) if seconds else None,
        "speedup_estimate": ends[-1].speedup if ends else None,
        "cancelled": submission.is_cancelled,
    }


def _speed(name: str, n: int, seconds: float) -> dict[str, Any]:
    ms = 1e3 * seconds
    per_token, per_second = ms / n if n else None, 1e3 * n / ms if ms else None
    each = {"n": n, "ms": ms, "per_token_ms": per_token, "per_second": per_second}
    return {f"{name}_{key}": value for key, value in each.items()}


def _milliseconds(of: Round | Summary) -> dict[str, float]:
    return {f"{part}_ms": 1e3 * getattr(of, f"{part}_seconds") for part in ("draft", "verify", "overhead")}


def _round(round_: Round) -> dict[str, Any]:
    return {
        **_milliseconds(round_),
        "drafted": round_.n_verified,
        "branches": round_.draft.n_branches,
        "accepted": round_.n_accepted,
        "source": round_.source.value,
        "rows": round_.n_sequences,
    }
