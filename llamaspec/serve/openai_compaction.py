"""`POST /v1/responses/compact`: a conversation becomes its user messages and a summary by the model.

The item with the summary comes back in later requests, as OpenAI's does. Its content is plain text instead of
ciphertext: the client may read it, and the server keeps nothing. tests/serve/test_compaction.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from llamaspec.chat.messages import Delta
from llamaspec.serve.bodies import AnswerOptions, ReasoningOptions, refused
from llamaspec.serve.message_fields import text_of
from llamaspec.serve.openai_responses import SUMMARY_MARK, InputItem, ResponsesBody
from llamaspec.serve.request_queue import Finished
from llamaspec.serve.response_forms import Data, Form, WholeAnswer, figures, new_id, openai_usage
from llamaspec.serve.service import Endpoint, Service

MAX_SUMMARY = 4096  # tokens
_ASK = """\
Summarize this conversation for somebody who will continue it without seeing it. Say what the user \
wants, what was done and decided, what was learnt (names of files, commands, facts), and what is left to do. \
Call no tools. Write only the summary."""


class CompactBody(ResponsesBody):
    """A conversation to summarize."""

    stream: Annotated[bool | None, refused()] = None

    @property
    def items(self) -> list[InputItem]:
        """The conversation as items; the last one asks for the summary."""
        return [*super().items, InputItem(role="user", content=_ASK)]

    def answer_options(self) -> AnswerOptions:
        """Return the options of the summary."""
        return AnswerOptions(limit=min(self.max_output_tokens or MAX_SUMMARY, MAX_SUMMARY))

    def reasoning_options(
        self, effort: str | None = None, budget: int | None = None, off: bool = False
    ) -> ReasoningOptions:
        """Return that the model does not reason: the limit is for the summary."""
        return super().reasoning_options(effort, budget, off=True)

    def kept(self) -> list[Data]:
        """Return the user messages of the conversation; marks stand for what is not text."""
        found = []
        for i, item in enumerate(super().items):
            if item.role == "user" and item.type in (None, "message"):
                text = text_of(item.content, f"input.{i}.content", may_omit=True)
                found.append(_message(text))
        return found


def _message(text: str) -> Data:
    content = [{"type": "input_text", "text": text}]
    return {
        "type": "message",
        "id": new_id("msg_"),
        "role": "user",
        "status": "completed",
        "content": content,
    }


async def _compact(service: Service, http: Request, body: CompactBody) -> Response:
    """Summarize a conversation."""
    prompt = await service.chat(await run_in_threadpool(body.chat_request))
    return await service.respond(http, body, [prompt], CompactionForm(body))


class CompactionForm(Form):
    """Writes a compacted conversation; there are no streams of it."""

    def __init__(self, body: CompactBody) -> None:
        self._kept, self._drafting = body.kept(), body.chosen_options.drafting

    def whole(self, answers: Sequence[WholeAnswer]) -> Data:
        """Return the user messages and the summary."""
        (answer,) = answers
        content = SUMMARY_MARK + answer.message.text.strip()
        summary = {"type": "compaction", "id": new_id("cmp_"), "encrypted_content": content}
        return {
            "id": new_id("resp_"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._kept, summary],
            "usage": openai_usage([answer.end], prompt="input", completion="output"),
            **figures(answer.end, self._drafting),
        }

    def _add(self, index: int, delta: Delta) -> bytes:
        raise AssertionError("a compacted conversation is no stream")

    def _finish(self, index: int, end: Finished) -> bytes:
        raise AssertionError("a compacted conversation is no stream")


ENDPOINTS = (Endpoint("/v1/responses/compact", _compact, CompactBody),)
