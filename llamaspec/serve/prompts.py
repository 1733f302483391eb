"""Prompts and conversations as tokens, with limits before the tokenizer sees them.

Text of a client never becomes a control token. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llamaspec.chat.covering import conversation, texts_in
from llamaspec.chat.formats import AnswerFormat
from llamaspec.chat.message import Message
from llamaspec.chat.template import ChatTemplate, NoTemplateError
from llamaspec.chat.transcript import Transcript
from llamaspec.llama.model import LlamaModel
from llamaspec.serve.faults import RequestError
from llamaspec.values import TokenArray


class Prompts:
    """Makes tokens for one target.

    Parameters
    ----------
    target : LlamaModel
    template : ChatTemplate, optional
        None: the model only continues text.
    """

    def __init__(self, target: LlamaModel, template: ChatTemplate | None) -> None:
        self.template = template
        self.answer_format = AnswerFormat() if template is None else AnswerFormat.of(template.source)
        self.takes_tools = template is not None and template.takes_tools
        self.controls = target.vocabulary.controls
        self._vocabulary, self._target = target.vocabulary, target
        self._context_size = target.context_size
        spellings = (len(self._vocabulary.text(token)) for token in range(self._vocabulary.size))
        self._longest_text = self._context_size * max(spellings)  # bytes that could fit the context

    def of_text(self, text: str, *, field: str = "prompt") -> TokenArray:
        """Tokens of a text to continue.

        Raises
        ------
        RequestError
            It is empty or too long.
        """
        if not text:
            raise RequestError(400, f"{field}: must not be empty", field=field)
        self._check_bytes(text, field)
        return self.checked(self._vocabulary.tokenize(text.encode()), field)

    def of_tokens(self, tokens: Sequence[int], *, field: str = "prompt") -> TokenArray:
        """Tokens that a client made itself.

        Raises
        ------
        RequestError
            They are none, too many, or not of this vocabulary.
        """
        if not tokens:
            raise RequestError(400, f"{field}: must not be empty", field=field)
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary.size:
            raise RequestError(
                400, f"{field}: token ids must be from 0 to {self._vocabulary.size - 1}", field=field
            )
        return self.checked(np.array(tokens, dtype=np.int32), field)

    def of_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        field: str = "messages",
        fits: bool = True,
    ) -> tuple[TokenArray, bool]:
        """Tokens of a conversation, up to where the answer begins, and whether it begins with reasoning.

        Raises
        ------
        RequestError
            It is too long.
        NoTemplateError, TemplateError
            There is no template, or it refuses.
        """
        if self.template is None:
            raise NoTemplateError("the model has no chat template")
        texts = texts_in([conversation(messages), tools])
        self._check_bytes("".join(texts), field)
        rendered = self.template.render(messages, tools or None, template_kwargs=kwargs)
        tokens = Transcript(self._vocabulary).read(rendered)
        begins_thinking = self.answer_format.begins_thinking(rendered.text)
        return self.checked(tokens, field) if fits else tokens, begins_thinking

    def tokenize(self, text: str, *, add_special: bool) -> TokenArray:
        """Tokens of any text; [0] for none."""
        return self._vocabulary.tokenize(text.encode(), add_special=add_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no UTF-8 becomes U+FFFD.

        Raises
        ------
        RequestError
            They are not of this vocabulary.
        """
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary.size:
            raise RequestError(
                400, f"tokens: token ids must be from 0 to {self._vocabulary.size - 1}", field="tokens"
            )
        return b"".join(map(self._vocabulary.piece, tokens)).decode(errors="replace")

    def written(self, tokens: Sequence[int]) -> str:
        """The text of an answer's tokens, with the marks of its format."""
        spelled = self.answer_format.spelled(self.controls)
        pieces = (spelled.get(token) or self._vocabulary.piece(token) for token in tokens)
        return b"".join(pieces).decode(errors="replace")

    def room(self, prompt: TokenArray) -> int:
        """Tokens that fit behind a prompt."""
        return self._context_size - len(prompt)

    def checked(self, tokens: TokenArray, field: str) -> TokenArray:
        """The same tokens, if they leave room for an answer."""
        if len(tokens) == 0:
            raise RequestError(400, f"{field}: must not be empty", field=field)
        if len(tokens) >= self._context_size:
            raise self._too_long(f"{len(tokens)} tokens", field)
        return tokens

    def _check_bytes(self, text: str, field: str) -> None:
        n = len(text.encode())
        if n > self._longest_text:
            raise self._too_long(f"{n} bytes", field)

    def _too_long(self, size: str, field: str) -> RequestError:
        message = f"{field}: {size} leave no room in a context of {self._context_size} tokens"
        return RequestError(400, message, field=field, code="context_length_exceeded")
