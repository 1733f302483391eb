"""A conversation with a model: its messages, the turns that fit, the answer to the next one.

The whole conversation is asked each time; what the KV cache holds of it costs nothing. Knows no terminal:
text comes out of iterators, remarks go to a function that was handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from llamaspec.chat.answer_stream import AnswerStream, ReasoningLimit
from llamaspec.chat.answers import AnswerParser, ContentDelta, ReasoningDelta
from llamaspec.chat.formats import AnswerFormat
from llamaspec.chat.message import Message
from llamaspec.chat.template import ChatTemplate
from llamaspec.chat.transcript import Transcript
from llamaspec.engine.events import Completion, StopReason
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.errors import ContextFullError, PromptError
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sampling.parameters import Sampling
from llamaspec.values import TokenArray

REGENERATION = 1_000_000  # added to the seed for each new attempt: turns that no conversation reaches

Tell = Callable[[str], None]  # receives a remark for the person


@dataclass(frozen=True, slots=True)
class Settings:
    """How every answer of a conversation is generated."""

    sampling: Sampling
    seed: int  # turn n, counted from 0, is drawn with seed + n
    max_tokens: int  # of each answer
    rule: str
    policy: LengthPolicy  # one for the whole conversation, which goes on learning
    reasoning_budget: int | None = None  # tokens of each answer's reasoning
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An answer and how it came about."""

    completion: Completion
    seed: int
    n_thought: int = 0  # characters of reasoning


@dataclass(frozen=True, slots=True)
class Totals:
    """Folds over all answers of a session, dropped and regenerated ones included."""

    n_answers: int = 0
    n_tokens: int = 0  # of the answers
    n_prompt_tokens: int = 0  # of the conversation before each answer, counted for each
    n_cached: int = 0  # those among them that were found in the KV cache

    def plus(self, completion: Completion) -> Totals:
        """With one answer more."""
        return Totals(
            self.n_answers + 1,
            self.n_tokens + len(completion.tokens),
            self.n_prompt_tokens + completion.n_prompt_tokens,
            self.n_cached + completion.n_cached,
        )


class Session:
    """A conversation that goes on.

    Parameters
    ----------
    pair : Pair
        Stays open as long as the session is used.
    template : ChatTemplate
        Of the target.
    settings : Settings
    system : str, optional
        The system prompt.
    tell : callable
        Receives remarks, such as that old turns were left out.
    on_reasoning : callable, optional
        Receives what the model thinks, piece by piece. It is not part of the conversation.
    """

    def __init__(
        self,
        pair: Pair,
        template: ChatTemplate,
        settings: Settings,
        *,
        system: str | None = None,
        tell: Tell,
        on_reasoning: Tell | None = None,
    ) -> None:
        self._pair = pair
        self._template = template
        self._settings = settings
        self._system = system
        self._tell = tell
        self._on_reasoning = on_reasoning
        self._format = AnswerFormat.of(template.source)
        self._begins_thinking = False  # with the prompt last made
        self._transcript = Transcript(pair.target.vocabulary)
        self._turns: tuple[Message, ...] = ()
        self._asked: tuple[Message, ...] = ()  # what the model was asked with last
        self._n_dropped = 0  # messages at the beginning that the model is not asked with any more
        self._attempt = 0  # how often the last answer was regenerated
        self.last: Reply | None = None
        self.totals = Totals()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation, also what the context has no room for, with the system prompt."""
        return (*self._system_messages(), *self._turns)

    def replace(self, messages: Sequence[Message]) -> None:
        """Go on from another conversation; the system prompt stays if that has none.

        Raises
        ------
        PromptError
            A system prompt stands elsewhere than at the beginning.
        """
        first, *others = messages or (None,)
        if first is not None and first.role != "system":
            others = list(messages)
        if any(message.role == "system" for message in others):
            raise PromptError("a conversation has one system prompt, at its beginning; mend the file")
        if first is not None and first.role == "system":
            self._system = first.text
        self._turns = tuple(others)
        self._n_dropped = self._attempt = 0
        self.last = None

    def reset(self) -> None:
        """Begin anew; the system prompt stays."""
        self.replace(())

    def ask(self, text: str, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """The answer to a message, piece by piece. Stopping early keeps what has come.

        Parameters
        ----------
        text : str
            The message.
        on_prefill : callable, optional
            Told how many tokens of the conversation are prefilled, of how many.

        Raises
        ------
        ContextFullError
            The message does not fit. The conversation stays as it was.
        PromptError
            The template refuses it. The conversation stays as it was.
        """
        return self._answer((*self._turns, Message("user", text)), 0, on_prefill)

    def regenerate(self, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Another answer to the last message, with another seed.

        Raises
        ------
        PromptError
            There is no answer yet.
        """
        if not self._turns or self._turns[-1].role != "assistant":
            raise PromptError("there is no answer to regenerate; write a message first")
        if self._settings.sampling.temperature == 0:
            self._tell("at temperature 0 the answer is always the same")
        return self._answer(self._turns[:-1], self._attempt + 1, on_prefill)

    def _answer(
        self, turns: tuple[Message, ...], attempt: int, on_prefill: Progress | None
    ) -> Generator[str, None, None]:
        prompt = self._prompt(turns)
        n_turn = sum(message.role == "user" for message in turns) - 1
        seed = self._settings.seed + n_turn + attempt * REGENERATION
        stream = self._stream(prompt, seed, on_prefill)
        said: list[str] = []
        n_thought = 0
        try:
            for part in stream:
                for delta in part.deltas:
                    if isinstance(delta, ContentDelta):
                        said.append(delta.text)
                        yield delta.text
                    elif isinstance(delta, ReasoningDelta):
                        n_thought += len(delta.text)
                        if self._on_reasoning is not None:
                            self._on_reasoning(delta.text)
        finally:
            stream.close()
            self._keep(turns, Reply(stream.completion, seed, n_thought), "".join(said), attempt)

    def _stream(self, prompt: TokenArray, seed: int, on_prefill: Progress | None) -> AnswerStream:
        settings, vocabulary = self._settings, self._pair.target.vocabulary

        def open_stream(prompt: TokenArray, max_tokens: int) -> TextStream:
            return self._pair.stream(
                prompt,
                sampling=settings.sampling,
                seed=seed,
                max_tokens=max_tokens,
                spelled=self._format.spelled(vocabulary.controls),
                rule=settings.rule,
                policy=settings.policy,
                on_prefill=on_prefill,
            )

        limit = None
        if settings.reasoning_budget is not None and self._format.reasoning is not None:
            limit = ReasoningLimit(self._format.reasoning, settings.reasoning_budget)
        parser = AnswerParser(self._format, thinking=self._begins_thinking)
        return AnswerStream(prompt, settings.max_tokens, open_stream, parser, vocabulary, limit)

    def _keep(self, turns: tuple[Message, ...], reply: Reply, said: str, attempt: int) -> None:
        """Let the conversation go on with an answer, or as before where nothing was said."""
        completion = reply.completion
        if completion.stop_reason is StopReason.INTERRUPT and not said:
            return
        self._transcript.wrote(completion.tokens)
        self._turns = (*turns, self._as_message(said))
        self._attempt = attempt
        self.last = reply
        self.totals = self.totals.plus(completion)

    def _as_message(self, text: str) -> Message:
        """An answer as it goes on in the conversation: without the spaces that the template itself writes."""
        for variant in (text, text.strip()):
            message = Message("assistant", variant)
            with suppress(PromptError):  # a template may want the user to speak last
                rendered = self._template.render(
                    [*self._asked, message], template_kwargs=self._settings.template_kwargs
                )
                if rendered.text.startswith(self._transcript.text):
                    return message
        return Message("assistant", text)

    def _prompt(self, turns: tuple[Message, ...]) -> TokenArray:
        """Tokens of the conversation, without its oldest turns where they leave no room for an answer.

        Once there is no room, turns are dropped until half of the context is free: after every drop what is
        left must be prefilled anew, so it should be rare.
        """
        context_size = self._pair.target.context_size
        room = context_size - min(self._settings.max_tokens, context_size // 4)
        n_dropped = min(self._n_dropped, len(turns) - 1)
        tokens = self._tokens(turns[n_dropped:])
        while len(tokens) > room and (next_start := _next_turn(turns, n_dropped)) is not None:
            n_dropped, room = next_start, context_size // 2
            tokens = self._tokens(turns[n_dropped:])
        if len(tokens) >= context_size:
            raise ContextFullError(
                f"the message has {len(tokens)} tokens with what the template and the system prompt add, the "
                f"context {context_size}; shorten it or open a larger context"
            )
        if n_dropped > self._n_dropped:
            n_turns = sum(message.role == "user" for message in turns[self._n_dropped : n_dropped])
            self._tell(
                f"the conversation has outgrown the context of {context_size} tokens; from now on the model "
                f"is asked without the {n_turns} oldest turns it saw"
                + (", but with the system prompt" if self._system else "")
            )
            self._n_dropped = n_dropped
        return tokens

    def _tokens(self, turns: Sequence[Message]) -> TokenArray:
        self._asked = (*self._system_messages(), *turns)
        rendered = self._template.render(self._asked, template_kwargs=self._settings.template_kwargs)
        self._begins_thinking = self._format.begins_thinking(rendered.text)
        return self._transcript.read(rendered)

    def _system_messages(self) -> tuple[Message, ...]:
        return (Message("system", self._system),) if self._system else ()


def _next_turn(turns: Sequence[Message], start: int) -> int | None:
    """Where the turn after the one at `start` begins; None if that is the last."""
    return next((i for i in range(start + 1, len(turns)) if turns[i].role == "user"), None)
