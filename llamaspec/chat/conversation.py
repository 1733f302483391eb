"""A conversation with a model: its messages, and the answer to the next one.

The whole conversation is asked each time; what the KV cache holds of it costs nothing. Knows no terminal:
text comes out of iterators, remarks go to a function that was handed in.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamaspec.chat.answer_stream import AnswerStream, ReasoningLimit
from llamaspec.chat.answers import AnswerParser, ContentDelta, ReasoningDelta
from llamaspec.chat.message import Message
from llamaspec.chat.prompter import Answer, Prompter, Tell
from llamaspec.chat.template import ChatTemplate
from llamaspec.engine.events import Completion, StopReason
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.errors import PromptError
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sampling.filters import Sampling
from llamaspec.values import TokenArray

REGENERATION = 1_000_000  # added to the seed for each new attempt: turns that no conversation reaches


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
    before: Answer | None = None  # where an answer was gone on with


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
        May be replaced between two answers.
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
        self.settings = settings
        self._system = system
        self._tell = tell
        self._on_reasoning = on_reasoning
        self._prompter = Prompter(pair.target, template, tell)
        self._turns: tuple[Message, ...] = ()
        self._attempt = 0  # how often the last answer was regenerated
        self._answered: Answer | None = None  # the last answer, where it was written here
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
        self._prompter.begin_anew()
        self._attempt = 0
        self._answered = None
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

    @property
    def last_message(self) -> str:
        """What the user said last.

        Raises
        ------
        PromptError
            Nothing yet.
        """
        return self._turns[self._last_asked()].text

    def ask_instead(self, text: str, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """The answer to another message in place of the last one; else as `ask`."""
        return self._answer((*self._turns[: self._last_asked()], Message("user", text)), 0, on_prefill)

    def go_on(self, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """More of the last answer, piece by piece: what a larger limit would have let it write at once.

        Raises
        ------
        PromptError
            There is no answer yet.
        ContextFullError
            The context has no room for more.
        """
        if not self._turns or self._turns[-1].role != "assistant":
            raise PromptError("there is no answer to go on with; write a message first")
        return self._answer(self._turns[:-1], self._attempt, on_prefill, more=True)

    def _last_asked(self) -> int:
        asked = [i for i, message in enumerate(self._turns) if message.role == "user"]
        if not asked:
            raise PromptError("there is no message yet; write one first")
        return asked[-1]

    def regenerate(self, on_prefill: Progress | None = None) -> Generator[str, None, None]:
        """Another answer to the last message, with another seed.

        Raises
        ------
        PromptError
            There is no answer yet.
        """
        if not self._turns or self._turns[-1].role != "assistant":
            raise PromptError("there is no answer to regenerate; write a message first")
        if self.settings.sampling.temperature == 0:
            self._tell("at temperature 0 the answer is always the same")
        return self._answer(self._turns[:-1], self._attempt + 1, on_prefill)

    def _answer(
        self,
        turns: tuple[Message, ...],
        attempt: int,
        on_prefill: Progress | None,
        *,
        more: bool = False,
    ) -> Generator[str, None, None]:
        prompter, kwargs = self._prompter, self.settings.template_kwargs
        system, answered = self._system_messages(), Answer()
        if more:
            said_before, before = self._turns[-1].text, (*system, *turns)
            answered = self._answered or prompter.answer_from_file(said_before, before, kwargs)
        prompt = prompter.prompt(system, turns, answered, self.settings.max_tokens, kwargs)
        n_turn = sum(message.role == "user" for message in turns) - 1
        seed = self.settings.seed + n_turn + attempt * REGENERATION
        parser = AnswerParser(prompter.format, thinking=prompter.begins_thinking)
        parser.feed(answered.text)
        stream = self._stream(prompt, seed, on_prefill, parser)
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
            reply = Reply(stream.completion, seed, n_thought, answered if more else None)
            self._keep(turns, reply, "".join(said), attempt)

    def _stream(
        self, prompt: TokenArray, seed: int, on_prefill: Progress | None, parser: AnswerParser
    ) -> AnswerStream:
        settings, vocabulary = self.settings, self._pair.target.vocabulary
        answer_format = self._prompter.format

        def open_stream(prompt: TokenArray, max_tokens: int) -> TextStream:
            return self._pair.stream(
                prompt,
                sampling=settings.sampling,
                seed=seed,
                max_tokens=max_tokens,
                spelled=answer_format.spelled(vocabulary.controls),
                rule=settings.rule,
                policy=settings.policy,
                on_prefill=on_prefill,
            )

        limit = None
        if settings.reasoning_budget is not None and answer_format.reasoning is not None:
            limit = ReasoningLimit(answer_format.reasoning, settings.reasoning_budget)
        return AnswerStream(prompt, settings.max_tokens, open_stream, parser, vocabulary, limit)

    def _keep(self, turns: tuple[Message, ...], reply: Reply, said: str, attempt: int) -> None:
        """Let the conversation go on with an answer, or as before where nothing was said."""
        completion = reply.completion
        if completion.stop_reason is StopReason.INTERRUPT and not said:
            return
        before = reply.before or Answer()
        self._prompter.wrote(completion.tokens)
        self._answered = Answer(
            (*before.tokens, *completion.tokens), before.text + completion.text, before.said + said
        )
        message = self._prompter.as_message(self._answered.said, self.settings.template_kwargs)
        self._turns = (*turns, message)
        self._attempt = attempt
        self.last = reply
        self.totals = self.totals.plus(completion)

    def _system_messages(self) -> tuple[Message, ...]:
        return (Message("system", self._system),) if self._system else ()
