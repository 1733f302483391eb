"""How an API writes an answer: as one JSON object, or as a stream of events.

A `Form` holds the state of one response. An API overrides what its JSON looks like; by default a stream has
server-sent events and OpenAI's errors. tests/serve/test_forms.py.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from pydantic_core import from_json
from starlette.responses import Response

from llamaspec.chat.deltas import ContentDelta, Delta, TokenLogprobs, message_of
from llamaspec.chat.template import Message
from llamaspec.serve.bodies import without_half_pairs
from llamaspec.serve.errors import openai_error
from llamaspec.serve.scheduling import Events, Finished, PromptProgress


class WholeAnswer(NamedTuple):
    """Everything that one sequence generated."""

    message: Message
    logprobs: Sequence[TokenLogprobs]  # of its content
    end: Finished


async def collected(events: Events, n: int) -> Sequence[WholeAnswer]:
    """Collect the events of `n` sequences."""
    found: list[list[Delta]] = [[] for _ in range(n)]
    ends: dict[int, Finished] = {}
    async for index, event in events:
        if isinstance(event, Finished):
            ends[index] = event
        elif not isinstance(event, PromptProgress):
            found[index].append(event)
    answers: list[WholeAnswer] = []
    for i, each in enumerate(found):
        tokens = [token for delta in each if isinstance(delta, ContentDelta) for token in delta.logprobs]
        answers.append(WholeAnswer(message_of(each), tokens, ends[i]))
    return answers


class Form(ABC):
    """The response of one API to one request."""

    media_type: ClassVar[str] = "text/event-stream"  # of a stream

    @abstractmethod
    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """The response as one object."""

    @abstractmethod
    def _add(self, index: int, delta: Delta) -> bytes:
        """The events of a delta of a sequence."""

    @abstractmethod
    def _finish(self, index: int, end: Finished) -> bytes:
        """The last events of a sequence."""

    def _begin(self) -> bytes:
        """The events before anything is generated."""
        return b""

    def _end(self) -> bytes:
        """The events after all sequences have ended."""
        return b""

    def _keep_alive(self, index: int, progress: PromptProgress) -> bytes:
        """A sign of life, which clients ignore."""
        if progress.n_read is None:
            return b": waiting\n\n"
        return f": prompt {progress.n_read}/{progress.n_to_read}\n\n".encode()

    def _error(self, exception: Exception) -> bytes:
        """The event of an error."""
        return sse(openai_error(exception))

    def refusal(self, exception: Exception) -> Response:
        """A stream that ends before anything is generated."""
        return Response(self._begin() + self._error(exception), media_type=self.media_type)

    async def stream(self, events: Events, on_error: Callable[[Exception], object]) -> AsyncIterator[bytes]:
        """The response as a stream; an exception becomes its last event."""
        yield self._begin() or self._keep_alive(0, PromptProgress())
        try:
            async for index, event in events:
                if isinstance(event, PromptProgress):
                    yield self._keep_alive(index, event)
                elif isinstance(event, Finished):
                    yield self._finish(index, event)
                else:
                    yield self._add(index, event)
        except Exception as exception:  # noqa: BLE001  # the client gets the error
            on_error(exception)
            yield self._error(exception)
            return
        yield self._end()


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; if the answer was cut off, as much as there is."""
    try:
        found = from_json(without_half_pairs((text or "{}").encode()), allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def sse(data: Any, name: str | None = None) -> bytes:
    """One server-sent event; JSON has no line breaks of its own."""
    line = f"event: {name}\n" if name is not None else ""
    return f"{line}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
