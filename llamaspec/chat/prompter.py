"""The prompts of one conversation: its turns that fit, through the template, as tokens.

What was read and written before keeps its tokens (`transcript.py`). Knows neither seeds nor answers that
are being written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamaspec.chat.formats import AnswerFormat
from llamaspec.chat.message import Message
from llamaspec.chat.template import ChatTemplate
from llamaspec.chat.transcript import Transcript
from llamaspec.errors import ContextFullError, PromptError
from llamaspec.llama.model import LlamaModel
from llamaspec.values import TokenArray

Tell = Callable[[str], None]  # receives a remark for the person
Kwargs = Mapping[str, Any]  # further variables of the template


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answer consists of up to a point."""

    tokens: tuple[int, ...] = ()
    text: str = ""  # with reasoning and marks
    said: str = ""  # what a person reads of it


class Prompter:
    """Makes what a model is asked with.

    Parameters
    ----------
    target : LlamaModel
    template : ChatTemplate
    tell : callable
        Receives the remark that old turns were left out.
    """

    def __init__(self, target: LlamaModel, template: ChatTemplate, tell: Tell) -> None:
        self.format = AnswerFormat.of(template.source)
        self.begins_thinking = False  # with the prompt last made
        self._template, self._tell = template, tell
        self._vocabulary, self._context_size = target.vocabulary, target.context_size
        self._transcript = Transcript(target.vocabulary)
        self._asked: tuple[Message, ...] = ()  # what the model was asked with last
        self._n_dropped = 0  # turns' messages at the beginning that it is not asked with any more

    def begin_anew(self) -> None:
        """Another conversation follows."""
        self._n_dropped = 0

    def prompt(
        self,
        system: tuple[Message, ...],
        turns: tuple[Message, ...],
        answered: Answer,
        max_tokens: int,
        kwargs: Kwargs,
    ) -> TokenArray:
        """Tokens of the conversation, without its oldest turns where they leave no room for an answer.

        Behind them those of an answer that is gone on with.

        Once there is no room, turns are dropped until half of the context is free: after every drop what is
        left must be prefilled anew, so it should be rare.

        Raises
        ------
        ContextFullError
            The last turn does not fit, or nothing behind it.
        PromptError
            The template refuses.
        """
        context_size = self._context_size
        room = context_size - min(max_tokens, context_size // 4)
        n_dropped = min(self._n_dropped, len(turns) - 1)
        tokens = self._tokens((*system, *turns[n_dropped:]), answered, kwargs)
        while len(tokens) > room and (next_start := _next_turn(turns, n_dropped)) is not None:
            n_dropped, room = next_start, context_size // 2
            tokens = self._tokens((*system, *turns[n_dropped:]), answered, kwargs)
        if len(tokens) >= context_size and answered.tokens:
            raise ContextFullError(
                f"the context of {context_size} tokens has no room for more of this answer; open a larger one"
            )
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
                + (", but with the system prompt" if system else "")
            )
            self._n_dropped = n_dropped
        return tokens

    def wrote(self, tokens: Sequence[int]) -> None:
        """Note what the model wrote behind the prompt."""
        self._transcript.wrote(tokens)

    def as_message(self, text: str, kwargs: Kwargs) -> Message:
        """An answer as it goes on in the conversation: without the spaces that the template itself writes."""
        for variant in (text, text.strip()):
            message = Message("assistant", variant)
            with suppress(PromptError):  # a template may want the user to speak last
                rendered = self._template.render([*self._asked, message], template_kwargs=kwargs)
                if rendered.text.startswith(self._transcript.text):
                    return message
        return Message("assistant", text)

    def answer_from_file(self, said: str, before: Sequence[Message], kwargs: Kwargs) -> Answer:
        """An answer that was not written here: only what was said is known, and not what was thought."""
        rendered = self._template.render(before, template_kwargs=kwargs)
        reasoning = self.format.reasoning if self.format.begins_thinking(rendered.text) else None
        cut = reasoning.cut if reasoning is not None else ""
        tokens = [
            *self._vocabulary.tokenize(cut.encode(), add_special=False, parse_special=True).tolist(),
            *self._vocabulary.tokenize(said.encode(), add_special=False).tolist(),
        ]
        if tokens and self._vocabulary.piece(tokens[0]) == b" " and not (cut or said).startswith(" "):
            del tokens[0]  # SentencePiece begins so
        return Answer(tuple(tokens), cut + said, said)

    def _tokens(self, asked: tuple[Message, ...], answered: Answer, kwargs: Kwargs) -> TokenArray:
        self._asked = asked
        rendered = self._template.render(asked, template_kwargs=kwargs)
        self.begins_thinking = self.format.begins_thinking(rendered.text)
        tokens = self._transcript.read(rendered)
        self._transcript.wrote(answered.tokens)
        return np.concatenate([tokens, np.array(answered.tokens, dtype=np.int32)])


def _next_turn(turns: Sequence[Message], start: int) -> int | None:
    """Where the turn after the one at `start` begins; None if that is the last."""
    return next((i for i in range(start + 1, len(turns)) if turns[i].role == "user"), None)
