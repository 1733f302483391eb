"""A conversation with a model: its messages and the answer to the next one.

Each prompt is the whole conversation (`chat/prompt.py`). The part that the KV cache holds costs nothing.
This module knows no terminal: iterators return text, and functions receive remarks and reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.chat.messages import ContentDelta, Message, ReasoningDelta
from llamaspec.chat.parse import AnswerParser
from llamaspec.chat.prompt import render_prompt
from llamaspec.chat.template import ChatTemplate
from llamaspec.engine.completion import Completion, StopReason
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.errors import ContextFullError, PromptError
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sampling.filters import Sampling
from llamaspec.values import TokenArray

REGENERATION = 1_000_000  # added to the seed for each new attempt; no conversation has so many turns

OnText = Callable[[str], None]
Turns = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How every answer of a conversation is generated."""

    sampling: Sampling
    seed: int  # turn n, counted from 0, is drawn with seed + n
    max_tokens: int  # of each answer
    rule: str
    policy: LengthPolicy  # one for the whole conversation, so that it keeps learning
    reasoning_budget: int | None = None  # maximum number of tokens of each answer's reasoning
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that may be continued or regenerated.

    If it is continued, its own tokens follow the prompt, so that it goes on as with a larger limit.
    """

    begun: str = ""  # the part that was not generated here, such as an answer from a file
    tokens: tuple[int, ...] = ()  # of the rest
    text: str = ""  # of the rest, with reasoning and marks
    content: str = ""  # of the whole, without reasoning and marks
    attempt: int = 0  # how often it was regenerated


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A prompt, up to where the model continues."""

    tokens: TokenArray  # [n] int32: of the messages, and of the answer that is continued
    is_thinking: bool  # reasoning comes next


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An answer and how it was generated."""

    completion: Completion
    seed: int
    continues: bool = False  # it continues the previous answer


@dataclass(slots=True)
class Totals:
    """Sums over all answers of a session, including dropped and regenerated ones."""

    n_answers: int = 0
    n_prompt_tokens: int = 0
    n_cached: int = 0  # prompt tokens that were found in the KV cache


class Session:
    """A growing conversation, with an open pair and its target's template.

    `settings` may be replaced between two answers. `on_remark` receives remarks for the user, such as that
    the model no longer sees the oldest turns. `on_reasoning` receives the reasoning piece by piece; it is not
    part of the conversation.
    """

    def __init__(
        self,
        pair: Pair,
        template: ChatTemplate,
        settings: ChatSettings,
        *,
        system: str | None = None,
        on_remark: OnText,
        on_reasoning: OnText | None = None,
    ) -> None:
        self.settings = settings
        self.last: Reply | None = None
        self.totals = Totals()
        self._pair, self._template, self._system = pair, template, system
        self._on_remark, self._on_reasoning = on_remark, on_reasoning
        self._turns: Turns = ()
        self._n_dropped = 0  # oldest messages that prompts leave out
        self._last_answer: _Answer | None = None  # the last answer, if it was generated here

    @property
    def messages(self) -> Turns:
        """The whole conversation with the system prompt, including turns that prompts leave out."""
        return (*self._system_messages(), *self._turns)

    def replace(self, messages: Sequence[Message]) -> None:
        """Continue another conversation, with its system prompt if it has one; PromptError if it has two."""
        has_system = bool(messages) and messages[0].role == "system"
        turns = tuple(messages[1:] if has_system else messages)
        if any(message.role == "system" for message in turns):
            raise PromptError("a conversation has one system prompt, at its beginning; correct the file")
        self._system = messages[0].text if has_system else self._system
        self._turns, self.last = turns, None
        self._n_dropped, self._last_answer = 0, None

    def reset(self) -> None:
        """Start over; the system prompt stays."""
        self.replace(())

    def ask(self, text: str, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Answer a message, piece by piece. Stopping early keeps the text so far.

        `on_prefill` receives the number of prompt tokens processed so far, and their total. If the message
        does not fit (ContextFullError) or the template refuses it (PromptError), nothing changes.
        """
        return self._generate((*self._turns, Message("user", text)), on_prefill)

    @property
    def last_message(self) -> str:
        """The user's last message; PromptError if there is none yet."""
        return self._turns[self._last_asked()].text

    def ask_instead(self, text: str, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Answer another message in place of the last one; otherwise as `ask`."""
        return self._generate((*self._turns[: self._last_asked()], Message("user", text)), on_prefill)

    def continue_answer(self, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Continue the last answer, as a larger limit would have done; errors as `ask`."""
        self._require_answer("continue")
        return self._generate(self._turns[:-1], on_prefill, continues=True)

    def regenerate(self, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Answer the last message again, with another seed; errors as `ask`."""
        self._require_answer("regenerate")
        if self.settings.sampling.temperature == 0:
            self._on_remark("at temperature 0 the answer is always the same")
        attempt = 1 if self._last_answer is None else self._last_answer.attempt + 1
        return self._generate(self._turns[:-1], on_prefill, attempt)

    def _require_answer(self, action: str) -> None:
        if not self._turns or self._turns[-1].role != "assistant":
            raise PromptError(f"there is no answer to {action}; write a message first")

    def _last_asked(self) -> int:
        asked = [i for i, message in enumerate(self._turns) if message.role == "user"]
        if not asked:
            raise PromptError("there is no message yet; write one first")
        return asked[-1]

    def _generate(
        self, turns: Turns, on_prefill: Progress | None, attempt: int = 0, *, continues: bool = False
    ) -> Generator[str, None, None]:
        before = _Answer(attempt=attempt)
        if continues:
            said = self._turns[-1].text
            before = self._last_answer or _Answer(begun=said, content=said)
        prompt = self._fitting_prompt(turns, before)
        n_turn = sum(message.role == "user" for message in turns) - 1
        seed = self.settings.seed + n_turn + before.attempt * REGENERATION
        parser = AnswerParser(self._template.answer_format, thinking=prompt.is_thinking)
        parser.feed(before.text)
        stream = self._stream(prompt.tokens, seed, on_prefill, parser)
        content: list[str] = []
        try:
            for delta in (delta for deltas in stream for delta in deltas):
                if isinstance(delta, ContentDelta):
                    content.append(delta.text)
                    yield delta.text
                elif isinstance(delta, ReasoningDelta) and self._on_reasoning is not None:
                    self._on_reasoning(delta.text)
        finally:
            stream.close()
            reply = Reply(stream.completion, seed, continues)
            # An answer that was interrupted before its first text leaves the conversation as it was.
            if content or reply.completion.stop_reason is not StopReason.INTERRUPT:
                self._keep(turns, reply, before, "".join(content))

    def _stream(
        self, prompt: TokenArray, seed: int, on_prefill: Progress | None, parser: AnswerParser
    ) -> AnswerStream:
        settings, vocabulary = self.settings, self._pair.target.vocabulary

        def open_stream(prompt: TokenArray, max_tokens: int) -> TextStream:
            return self._pair.stream(
                prompt,
                sampling=settings.sampling,
                seed=seed,
                max_tokens=max_tokens,
                spelled=parser.answer_format.spelled(vocabulary.controls),
                rule=settings.rule,
                policy=settings.policy,
                on_prefill=on_prefill,
            )

        return AnswerStream(
            prompt, settings.max_tokens, open_stream, parser, vocabulary, settings.reasoning_budget
        )

    def _keep(self, turns: Turns, reply: Reply, before: _Answer, content: str) -> None:
        """Add an answer to the conversation."""
        completion = reply.completion
        self._last_answer = answer = replace(
            before,
            tokens=(*before.tokens, *completion.tokens),
            text=before.text + completion.text,
            content=before.content + content,
        )
        self._turns = (*turns, Message("assistant", answer.content))
        self.last = reply
        self.totals.n_answers += 1
        self.totals.n_prompt_tokens += completion.n_prompt_tokens
        self.totals.n_cached += completion.n_cached

    def _system_messages(self) -> Turns:
        return (Message("system", self._system),) if self._system else ()

    def _fitting_prompt(self, turns: Turns, answer: _Answer) -> _Prompt:
        """Return the prompt, with the answer that is continued.

        If an answer no longer fits after it, the oldest turns are dropped until half of the context is free.
        The model must process the rest again after a drop, so drops should be rare.
        """
        size = self._pair.target.context_size
        room = size - min(self.settings.max_tokens, size // 4)
        n_dropped = min(self._n_dropped, len(turns) - 1)
        prompt = self._prompt_of(turns[n_dropped:], answer)
        while len(prompt.tokens) > room and (next_turn := _next_turn(turns, n_dropped)) is not None:
            n_dropped, room = next_turn, size // 2
            prompt = self._prompt_of(turns[n_dropped:], answer)
        if len(prompt.tokens) >= size:
            subject = (
                "the message and its answer have" if answer.begun or answer.tokens else "the message has"
            )
            raise ContextFullError(
                f"{subject} {len(prompt.tokens)} tokens with the template and the system prompt, but the "
                f"context has {size}; shorten it or open a larger context"
            )
        if n_dropped > self._n_dropped:
            n_turns = sum(message.role == "user" for message in turns[self._n_dropped : n_dropped])
            self._on_remark(
                f"the conversation has outgrown the context of {size} tokens; from now on the model "
                f"does not see the {n_turns} oldest turns"
                + (", but still the system prompt" if self._system else "")
            )
            self._n_dropped = n_dropped
        return prompt

    def _prompt_of(self, turns: Turns, answer: _Answer) -> _Prompt:
        begun = (Message("assistant", answer.begun),) if answer.begun else ()
        messages = (*self._system_messages(), *turns, *begun)
        prompt = render_prompt(self._template, messages, template_kwargs=self.settings.template_kwargs)
        tokens = prompt.tokenize(self._pair.target.vocabulary)
        tokens = np.concatenate([tokens, np.array(answer.tokens, dtype=np.int32)])
        return _Prompt(tokens, prompt.is_thinking)


def _next_turn(turns: Turns, start: int) -> int | None:
    """Return where the turn after the one at `start` begins; None if there is none."""
    return next((i for i in range(start + 1, len(turns)) if turns[i].role == "user"), None)
