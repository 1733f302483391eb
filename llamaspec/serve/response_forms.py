"""The responses of an API: an answer as one JSON object, or as a stream of events.

A `Form` writes one response. Each API has its own forms; by default a stream has server-sent events and
OpenAI's errors. tests/serve/test_forms.py, tests/serve/test_figures.py.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from pydantic_core import from_json
from starlette.responses import Response

from llamaspec.chat.messages import ContentDelta, Delta, Message, TokenLogprobs, finite, message_of
from llamaspec.engine.completion import Summary
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.bodies import SpeculativeFields, without_half_pairs
from llamaspec.serve.http_errors import LOG_SAYS, openai_error
from llamaspec.serve.request_queue import Events, Finished, PromptProgress
from llamaspec.values import Round, Source

Data = dict[str, Any]  # a JSON object


class WholeAnswer(NamedTuple):
    """Everything that one sequence generated."""

    deltas: Sequence[Delta]
    end: Finished

    @property
    def message(self) -> Message:
        """The answer as a message of a conversation."""
        return message_of(self.deltas)

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """The log-probabilities of the tokens of its content."""
        return [token for each in self.deltas if isinstance(each, ContentDelta) for token in each.logprobs]


async def collected(events: Events, n: int) -> Sequence[WholeAnswer]:
    """Return the answers of `n` sequences once all of them have ended."""
    deltas: list[list[Delta]] = [[] for _ in range(n)]
    ends: dict[int, Finished] = {}
    async for index, event in events:
        if isinstance(event, Finished):
            ends[index] = event
        elif not isinstance(event, PromptProgress):
            deltas[index].append(event)
    return [WholeAnswer(deltas[i], ends[i]) for i in range(n)]


class Form(ABC):
    """Writes the response to one request."""

    media_type: ClassVar[str] = "text/event-stream"  # of a stream

    @abstractmethod
    def whole(self, answers: Sequence[WholeAnswer]) -> Data:
        """Return the response as one object."""

    @abstractmethod
    def _add(self, index: int, delta: Delta) -> bytes:
        """Return the events of a delta of a sequence."""

    @abstractmethod
    def _finish(self, index: int, end: Finished) -> bytes:
        """Return the last events of a sequence."""

    def _begin(self) -> bytes:
        """Return the events before the answer begins."""
        return b""

    def _end(self) -> bytes:
        """Return the events after all sequences have ended."""
        return b""

    def _keep_alive(self, index: int, progress: PromptProgress) -> bytes:
        """Return a comment, which clients ignore, or another event without content."""
        if progress.n_processed is None:
            return b": waiting\n\n" if progress.is_waiting else b": working\n\n"
        return f": prompt {progress.n_processed}/{progress.n_total}\n\n".encode()

    def _error(self, exception: Exception) -> bytes:
        """Return the event of an error."""
        return sse(openai_error(exception))

    def refusal(self, exception: Exception) -> Response:
        """Return a stream that has only an error."""
        return Response(self._begin() + self._error(exception), media_type=self.media_type)

    async def stream(self, events: Events, on_error: Callable[[Exception], object]) -> AsyncIterator[bytes]:
        """Yield the response as a stream; an exception becomes its last event."""
        if begin := self._begin():
            yield begin
        try:
            async for index, event in events:
                if isinstance(event, PromptProgress):
                    yield self._keep_alive(index, event)
                elif isinstance(event, Finished):
                    yield self._finish(index, event)
                else:
                    yield self._add(index, event)
            yield self._end()
        except Exception as exception:  # noqa: BLE001  # the client sees the error
            on_error(exception)
            yield self._error(exception)


def arguments_of(text: str) -> Data:
    """Return the arguments of a call as an object; of a call that was cut off, those that have begun."""
    try:
        found = finite(from_json(without_half_pairs((text or "{}").encode()), allow_partial=True))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def new_id(prefix: str) -> str:
    """Return an id for a response, or a part of one."""
    return prefix + secrets.token_hex(12)


def as_line(data: Data) -> str:
    """Return a JSON object as one line."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def sse(data: Data, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    line = f"event: {name}\n" if name is not None else ""
    return f"{line}data: {as_line(data)}\n\n".encode()


# The figures of an answer: log-probabilities, tokens, timings.

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def logprob_list(tokens: Iterable[TokenLogprobs], vocabulary: LlamaVocabulary) -> list[Data]:
    """Return log-probabilities as in OpenAI's chat API, without control tokens."""
    found: list[Data] = []
    for token, (logprob, top), _ in tokens:
        if vocabulary.piece(token):
            tops = [_token(*each, vocabulary) for each in top]
            found.append({**_token(token, logprob, vocabulary), "top_logprobs": tops})
    return found


def _token(token: int, logprob: float, vocabulary: LlamaVocabulary) -> Data:
    piece = vocabulary.piece(token) or vocabulary.text(token)
    text = piece.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(piece)}


def openai_usage(
    ends: Sequence[Finished], n: int = 1, *, prompt: str = "prompt", completion: str = "completion"
) -> Data:
    """Return how many tokens a request used, with OpenAI's names. A prompt with `n` choices counts once.

    The names begin with `prompt` and `completion`.
    """
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


def figures(end: Finished, options: SpeculativeFields) -> Data:
    """Return how an answer was generated: `timings`, a superset of llama-server's; `rounds` if requested."""
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
        "speedup_estimate": summary.speed_up,
        "unused_draft": None if done.unused_draft is None else done.unused_draft._asdict(),
        "draft_fault": None if done.draft_fault is None else LOG_SAYS,
    }
    if not options.rounds:
        return {"timings": timings}
    return {"timings": timings, "rounds": [_round(round_) for round_ in done.rounds]}


def _speed(name: str, n: int, seconds: float) -> Data:
    ms = 1e3 * seconds
    per_token, per_second = ms / n if n else None, 1e3 * n / ms if ms else None
    each = {"n": n, "ms": ms, "per_token_ms": per_token, "per_second": per_second}
    return {f"{name}_{key}": value for key, value in each.items()}


def _milliseconds(of: Round | Summary) -> dict[str, float]:
    return {f"{part}_ms": 1e3 * getattr(of, f"{part}_seconds") for part in ("draft", "verify", "overhead")}


def _round(round_: Round) -> Data:
    return {
        **_milliseconds(round_),
        "drafted": round_.n_verified,
        "accepted": round_.n_accepted,
        "source": round_.source.value,
        "rows": round_.n_sequences,
    }
