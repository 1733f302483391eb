"""What a sequence writes, as deltas that every API puts into its own form; and the figures of an answer.

A delta is content, reasoning, or a tool call; content carries the log-probabilities of its tokens and which
of it was drafted. tests/serve/test_figures.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from llamaspec.chat.answer_stream import AnswerPart
from llamaspec.chat.parse import ArgumentsDelta, CallDelta, ContentDelta, ReasoningDelta, message_of
from llamaspec.chat.template import Message
from llamaspec.engine.text import Span
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.bodies import RequestError
from llamaspec.serve.scheduling import Failed, Finished, Parts, PromptProgress, Submission
from llamaspec.values import Logprobs

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class TokenLogprobs(NamedTuple):
    """How probable a token and its alternatives were."""

    token: int
    logprobs: Logprobs


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
    while not submission.is_over:
        left = keep_alive if deadline is None else min(keep_alive, deadline - monotonic())
        if left <= 0:
            raise RequestError(504, "the answer took too long; see --request-timeout", code="timeout")
        index, event = await submission.next_event(left) or (0, PromptProgress())
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Parts):
            for delta in builders[index].add(event.parts):
                yield index, delta
        else:
            yield index, event


class DeltaBuilder:
    """Turns the parts of one answer into deltas."""

    def __init__(self) -> None:
        self._tokens: list[TokenLogprobs] = []  # whose text is not out yet
        self._spans: list[Span] = []  # text that is not out yet

    def add(self, parts: Iterable[AnswerPart]) -> list[TextDelta]:
        """The deltas of some parts; content that follows content is joined."""
        deltas: list[TextDelta] = []
        for part in parts:
            if part.piece is not None:
                self._spans += part.piece.spans
                if part.piece.logprobs is not None:
                    self._tokens.append(TokenLogprobs(part.piece.token, part.piece.logprobs))
            for delta in part.deltas:
                if not isinstance(delta, ContentDelta):
                    self._tokens, self._spans = [], []  # they belong to this delta
                    deltas.append(delta)
                    continue
                content, last = self._content(delta.text), deltas[-1] if deltas else None
                if isinstance(last, Content):
                    spans = _merged((*last.spans, *content.spans))
                    deltas[-1] = Content(last.text + content.text, spans, last.logprobs + content.logprobs)
                else:
                    deltas.append(content)
        return deltas

    def _content(self, text: str) -> Content:
        """Content with the spans that make up its text; the parser may have held it back, or stripped it."""
        tokens, self._tokens = tuple(self._tokens), []
        begin = "".join(span.text for span in self._spans).rfind(text)
        if begin < 0:  # not as the model wrote it
            return Content(text, (Span(text, False),), tokens)
        spans, rest, at = list[Span](), list[Span](), 0
        for span in self._spans:
            first, last = max(0, begin - at), max(0, begin + len(text) - at)
            spans.append(Span(span.text[first:last], span.drafted))
            rest.append(Span(span.text[last:], span.drafted))
            at += len(span.text)
        self._spans = [span for span in rest if span.text]
        return Content(text, _merged(spans), tokens)


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same text, with neighbours of one kind joined."""
    merged: list[Span] = []
    for span in spans:
        if merged and span.text and merged[-1].drafted == span.drafted:
            merged[-1] = Span(merged[-1].text + span.text, span.drafted)
        elif span.text:
            merged.append(span)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Answer:
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
    return [
        {
            **_token(token, logprobs.logprob, vocabulary),
            "top_logprobs": [_token(*top, vocabulary) for top in logprobs.top],
        }
        for token, logprobs in tokens
        if vocabulary.piece(token)
    ]


def logprob_columns(
    tokens: Iterable[TokenLogprobs], vocabulary: LlamaVocabulary, offset: int
) -> dict[str, Any]:
    """In the form of the completions API; `offset` is the number of characters before."""
    columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in logprob_list(tokens, vocabulary):
        columns["tokens"].append(token["token"])
        columns["token_logprobs"].append(token["logprob"])
        columns["top_logprobs"].append({top["token"]: top["logprob"] for top in token["top_logprobs"]})
        columns["text_offset"].append(offset)
        offset += len(token["token"])
    return columns


def _token(token: int, logprob: float, vocabulary: LlamaVocabulary) -> dict[str, Any]:
    piece = vocabulary.piece(token) or vocabulary.text(token)
    text = piece.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(piece)}


def openai_usage(ends: Sequence[Finished], n: int = 1) -> dict[str, Any]:
    """Tokens of all sequences of a request; a prompt with `n` choices counts once."""
    prompts = [end.completion for end in ends[::n]]
    n_prompt, n_cached = sum(each.n_prompt_tokens for each in prompts), sum(each.n_cached for each in prompts)
    n_generated = sum(end.completion.summary.n_tokens for end in ends)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {"reasoning_tokens": sum(end.n_reasoning for end in ends)},
    }


def figures(end: Finished, with_rounds: bool) -> dict[str, Any]:
    """How a text was generated: llama-server's `timings` and more, and each round if requested."""
    done, summary = end.completion, end.completion.summary
    n_read, read_ms = done.n_prompt_tokens - done.n_cached, 1e3 * done.prefill_seconds
    n_generated, generate_ms = summary.n_tokens, 1e3 * summary.decode_seconds
    timings = {
        "cache_n": done.n_cached,
        "prompt_n": n_read,
        "prompt_ms": read_ms,
        "prompt_per_token_ms": _ratio(read_ms, n_read),
        "prompt_per_second": _ratio(1e3 * n_read, read_ms),
        "predicted_n": n_generated,
        "predicted_ms": generate_ms,
        "predicted_per_token_ms": _ratio(generate_ms, n_generated),
        "predicted_per_second": _ratio(1e3 * n_generated, generate_ms),
        "draft_n": summary.n_verified,
        "draft_n_accepted": summary.n_accepted,
        "rounds": summary.n_rounds,
        "accepted_histogram": list(summary.accepted_histogram),
        "draft_ms": 1e3 * summary.draft_seconds,
        "verify_ms": 1e3 * summary.verify_seconds,
        "overhead_ms": 1e3 * summary.overhead_seconds,
        "mask_ms": 1e3 * done.mask_seconds,
        "speedup_estimate": end.speedup,
    }
    rounds = [
        {
            "draft_ms": 1e3 * round_.draft_seconds,
            "verify_ms": 1e3 * round_.verify_seconds,
            "overhead_ms": 1e3 * round_.overhead_seconds,
            "drafted": round_.n_verified,
            "branches": round_.draft.n_branches,
            "accepted": round_.n_accepted,
            "source": round_.source.value,
            "rows": round_.n_rows,
        }
        for round_ in done.rounds
    ]
    return {"timings": timings, **({"rounds": rounds} if with_rounds else {})}


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
