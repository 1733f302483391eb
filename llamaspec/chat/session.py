"""A conversation with a model: its messages and the answer to the next one.

The whole conversation is the prompt each time. The part in the KV cache costs nothing, and text that was read
or generated before keeps its tokens (`Transcript`). This module knows no terminal: iterators return text, and
a function receives remarks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.chat.families import recognize
from llamaspec.chat.messages import ContentDelta, Message, ReasoningDelta
from llamaspec.chat.parse import AnswerParser
from llamaspec.chat.template import ChatTemplate, Rendered, Span
from llamaspec.engine.completion import Completion, StopReason
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.errors import ContextFullError, PromptError
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sampling.filters import Sampling
from llamaspec.values import TokenArray

REGENERATION = 1_000_000  # added to the seed for each new attempt; no conversation has so many turns

Tell = Callable[[str], None]  # receives a remark for the user
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
class AnswerSoFar:
    """An answer up to a point."""

    tokens: tuple[int, ...] = ()
    text: str = ""  # with reasoning and marks
    said: str = ""  # without reasoning and marks


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An answer and how it was generated."""

    completion: Completion
    seed: int
    continues: bool = False  # continues the answer before


@dataclass(slots=True)
class Totals:
    """Sums over all answers of a session, including dropped and regenerated ones."""

    n_answers: int = 0
    n_prompt_tokens: int = 0  # of the conversation before each answer
    n_cached: int = 0  # prompt tokens that were found in the KV cache


class Session:
    """A growing conversation, with an open pair and its target's template.

    `settings` may be replaced between two answers. `tell` receives remarks, for instance that old turns were
    left out. `on_reasoning` receives the reasoning piece by piece; it is not part of the conversation.
    """

    def __init__(
        self,
        pair: Pair,
        template: ChatTemplate,
        settings: ChatSettings,
        *,
        system: str | None = None,
        tell: Tell,
        on_reasoning: Tell | None = None,
    ) -> None:
        self.settings = settings
        self.last: Reply | None = None
        self.totals = Totals()
        self._pair, self._template, self._system = pair, template, system
        self._tell, self._on_reasoning = tell, on_reasoning
        self._format = recognize(template.source)
        self._vocabulary = pair.target.vocabulary
        self._transcript = Transcript(self._vocabulary)
        self._turns: Turns = ()
        self._begin()

    def _begin(self) -> None:
        self._prompted: Turns = ()  # the messages of the last prompt
        self._n_dropped = 0  # oldest messages that prompts leave out
        self._attempt = 0  # how often the last answer was regenerated
        self._answered: AnswerSoFar | None = None  # the last answer, if it was generated here

    @property
    def messages(self) -> Turns:
        """The whole conversation with the system prompt, including turns that prompts leave out."""
        return (*self._system_messages(), *self._turns)

    def replace(self, messages: Sequence[Message]) -> None:
        """Continue another conversation, with its system prompt if it has one; PromptError if it has two."""
        begins = bool(messages) and messages[0].role == "system"
        turns = tuple(messages[1:] if begins else messages)
        if any(message.role == "system" for message in turns):
            raise PromptError("a conversation has one system prompt, at its beginning; correct the file")
        self._system = messages[0].text if begins else self._system
        self._turns, self.last = turns, None
        self._begin()

    def reset(self) -> None:
        """Start over; the system prompt stays."""
        self.replace(())

    def ask(self, text: str, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Answer a message, piece by piece. Stopping early keeps the text so far.

        `on_prefill` receives the number of processed prompt tokens, and of all. If the message does not fit
        (ContextFullError) or the template refuses it (PromptError), nothing changes.
        """
        return self._answer((*self._turns, Message("user", text)), 0, on_prefill)

    @property
    def last_message(self) -> str:
        """The user's last message; PromptError if there is none yet."""
        return self._turns[self._last_asked()].text

    def ask_instead(self, text: str, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Answer another message in place of the last one; otherwise as `ask`."""
        return self._answer((*self._turns[: self._last_asked()], Message("user", text)), 0, on_prefill)

    def go_on(self, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Continue the last answer, as a larger limit would have done; errors as `ask`."""
        self._require_answer("continue")
        return self._answer(self._turns[:-1], self._attempt, on_prefill, more=True)

    def regenerate(self, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Answer the last message again, with another seed; errors as `ask`."""
        self._require_answer("regenerate")
        if self.settings.sampling.temperature == 0:
            self._tell("at temperature 0 the answer is always the same")
        return self._answer(self._turns[:-1], self._attempt + 1, on_prefill)

    def _require_answer(self, what: str) -> None:
        if not self._turns or self._turns[-1].role != "assistant":
            raise PromptError(f"there is no answer to {what}; write a message first")

    def _last_asked(self) -> int:
        asked = [i for i, message in enumerate(self._turns) if message.role == "user"]
        if not asked:
            raise PromptError("there is no message yet; write one first")
        return asked[-1]

    def _answer(
        self, turns: Turns, attempt: int, on_prefill: Progress | None, *, more: bool = False
    ) -> Generator[str, None, None]:
        before = AnswerSoFar()
        if more:
            before = self._answered or self._answer_of_file(self._turns[-1].text, turns)
        prompt, is_thinking = self._prompt(turns, before)
        n_turn = sum(message.role == "user" for message in turns) - 1
        seed = self.settings.seed + n_turn + attempt * REGENERATION
        parser = AnswerParser(self._format, thinking=is_thinking)
        parser.feed(before.text)
        stream = self._stream(prompt, seed, on_prefill, parser)
        said: list[str] = []
        try:
            for deltas in stream:
                for delta in deltas:
                    if isinstance(delta, ContentDelta):
                        said.append(delta.text)
                        yield delta.text
                    elif isinstance(delta, ReasoningDelta) and self._on_reasoning is not None:
                        self._on_reasoning(delta.text)
        finally:
            stream.close()
            reply = Reply(stream.completion, seed, more)
            self._keep(turns, reply, before, "".join(said), attempt)

    def _stream(
        self, prompt: TokenArray, seed: int, on_prefill: Progress | None, parser: AnswerParser
    ) -> AnswerStream:
        settings = self.settings

        def open_stream(prompt: TokenArray, max_tokens: int) -> TextStream:
            return self._pair.stream(
                prompt,
                sampling=settings.sampling,
                seed=seed,
                max_tokens=max_tokens,
                spelled=self._format.spelled(self._vocabulary.controls),
                rule=settings.rule,
                policy=settings.policy,
                on_prefill=on_prefill,
            )

        return AnswerStream(
            prompt, settings.max_tokens, open_stream, parser, self._vocabulary, settings.reasoning_budget
        )

    def _keep(self, turns: Turns, reply: Reply, before: AnswerSoFar, said: str, attempt: int) -> None:
        """Add an answer to the conversation, unless it was interrupted before its first text."""
        completion = reply.completion
        if completion.stop_reason is StopReason.INTERRUPT and not said:
            return
        self._transcript.wrote(completion.tokens)
        self._answered = AnswerSoFar(
            (*before.tokens, *completion.tokens), before.text + completion.text, before.said + said
        )
        self._turns = (*turns, self._as_message(self._answered.said))
        self._attempt = attempt
        self.last = reply
        self.totals.n_answers += 1
        self.totals.n_prompt_tokens += completion.n_prompt_tokens
        self.totals.n_cached += completion.n_cached

    def _system_messages(self) -> Turns:
        return (Message("system", self._system),) if self._system else ()

    def _prompt(self, turns: Turns, answered: AnswerSoFar) -> tuple[TokenArray, bool]:
        """Return the prompt, with the answer that is continued, and whether reasoning comes next.

        Once there is no room for an answer, the oldest turns are dropped until half of the context is free.
        After a drop the rest must be processed again, so drops should be rare.
        """
        size = self._pair.target.context_size
        room = size - min(self.settings.max_tokens, size // 4)
        n_dropped = min(self._n_dropped, len(turns) - 1)
        tokens, is_thinking = self._tokens(turns[n_dropped:], answered)
        while len(tokens) > room and (next_turn := _next_turn(turns, n_dropped)) is not None:
            n_dropped, room = next_turn, size // 2
            tokens, is_thinking = self._tokens(turns[n_dropped:], answered)
        if len(tokens) >= size:
            what = "the message and its answer have" if answered.tokens else "the message has"
            raise ContextFullError(
                f"{what} {len(tokens)} tokens with what the template and the system prompt add, the context "
                f"{size}; shorten it or open a larger context"
            )
        if n_dropped > self._n_dropped:
            n_turns = sum(message.role == "user" for message in turns[self._n_dropped : n_dropped])
            self._tell(
                f"the conversation has outgrown the context of {size} tokens; from now on the model "
                f"does not see the {n_turns} oldest turns"
                + (", but still the system prompt" if self._system else "")
            )
            self._n_dropped = n_dropped
        return tokens, is_thinking

    def _render(self, messages: Turns) -> Rendered:
        return self._template.render(messages, template_kwargs=self.settings.template_kwargs)

    def _tokens(self, turns: Turns, answered: AnswerSoFar) -> tuple[TokenArray, bool]:
        self._prompted = (*self._system_messages(), *turns)
        rendered = self._render(self._prompted)
        tokens = self._transcript.read(rendered)
        self._transcript.wrote(answered.tokens)
        tokens = np.concatenate([tokens, np.array(answered.tokens, dtype=np.int32)])
        return tokens, self._format.begins_thinking(rendered.text)

    def _as_message(self, said: str) -> Message:
        """Return an answer as a message, without the spaces that the template writes itself."""
        for variant in (said, said.strip()):
            message = Message("assistant", variant)
            with suppress(PromptError):  # a template may require a user message at the end
                rendered = self._render((*self._prompted, message))
                if rendered.text.startswith(self._transcript.text):
                    return message
        return Message("assistant", said)

    def _answer_of_file(self, said: str, turns: Turns) -> AnswerSoFar:
        """Return an answer that was not generated here; its reasoning is unknown."""
        rendered = self._render((*self._system_messages(), *turns))
        tokens: list[int] = []
        text = ""
        for part, is_mark in self._format.begun(said, "", rendered.text):
            tokens += self._vocabulary.tokenize_inside(part, parse_special=is_mark).tolist()
            text += part
        return AnswerSoFar(tuple(tokens), text, said)


def _next_turn(turns: Turns, start: int) -> int | None:
    """Return where the turn after the one at `start` begins; None if there is none."""
    return next((i for i in range(start + 1, len(turns)) if turns[i].role == "user"), None)


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Text and its tokens; reused as a whole or not at all."""

    text: bytes
    tokens: TokenArray  # [n]
    specials: tuple[Span, ...] = ()  # control tokens in the text


class Transcript:
    """The tokens of one growing text, as it was read and generated.

    A tokenizer may split a generated text differently than the model wrote it, and nothing behind the first
    token that differs can be reused. So known text is not tokenized again. tests/chat/test_cached_turns.py.
    """

    def __init__(self, vocabulary: LlamaVocabulary) -> None:
        self._vocabulary = vocabulary
        self._controls = {token: text.encode() for text, token in vocabulary.controls.items()}
        self._segments: list[_Segment] = []
        # SentencePiece vocabularies put a space before every text, even in the middle of one.
        first = vocabulary.tokenize(b"a", add_special=False)[:1].tolist()
        self._adds_space = any(vocabulary.piece(token).startswith(b" ") for token in first)

    @property
    def text(self) -> bytes:
        """Everything that was read and generated."""
        return b"".join(segment.text for segment in self._segments)

    def read(self, rendered: Rendered) -> TokenArray:
        """Tokenize a text, with the known tokens for as long as the text is known: int32 [n]."""
        known = self._known(rendered)
        n_known = sum(len(segment.text) for segment in known)
        new = self._continuation(rendered.after(n_known)) if known else None
        if new is None:
            tokens = self._vocabulary.begun(rendered.tokenize(self._vocabulary))
            known, new = [], _Segment(rendered.text, tokens, rendered.specials)
        self._segments = [*known, new] if new.text else known
        return np.concatenate([segment.tokens for segment in self._segments])

    def wrote(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model generated behind the text last read."""
        for token in tokens:
            text = self._vocabulary.piece(token)
            specials: tuple[Span, ...] = ()
            if not text and (text := self._controls.get(token, b"")):  # templates spell it like this
                specials = ((0, len(text)),)
            self._segments.append(_Segment(text, np.array([token], dtype=np.int32), specials))

    def _known(self, rendered: Rendered) -> list[_Segment]:
        """Return the known segments with which a text begins."""
        known: list[_Segment] = []
        end = n_specials = 0
        for segment in self._segments:
            # A token without text, such as a control token, is not part of the text.
            if not (segment.text and rendered.text.startswith(segment.text, end)):
                break
            after = end + len(segment.text)
            # The same letters with control tokens elsewhere are another text.
            specials = rendered.specials[n_specials:]
            here = [span for span in specials[: len(segment.specials) + 1] if span[0] < after]
            if here != [(a + end, b + end) for a, b in segment.specials]:
                break
            known.append(segment)
            end, n_specials = after, n_specials + len(here)
        while known and end < len(rendered.text) and rendered.text[end] & 0xC0 == 0x80:  # within a character
            end -= len(known.pop().text)
        return known

    def _continuation(self, rendered: Rendered) -> _Segment | None:
        """Tokenize a text that follows a known one; None if the tokenizer cannot begin there."""
        tokens = rendered.tokenize(self._vocabulary)
        first = self._vocabulary.piece(int(tokens[0])) if len(tokens) else b""
        if self._adds_space and first.startswith(b" "):
            if first != b" ":
                return None
            tokens = tokens[1:]
        return _Segment(rendered.text, tokens, rendered.specials)
