"""A conversation as the text that a model was trained to read, by the Jinja template in its file.

Templates are programs that other people wrote: llama-cpp-python runs them in a sandbox, and whatever goes
wrong inside one becomes one line.
"""

from __future__ import annotations

from collections.abc import Sequence

import jinja2
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from llama_cpp.llama_types import ChatCompletionRequestMessage

from llamaspec.errors import ModelFileError, PromptError
from llamaspec.llama.model import LlamaModel
from llamaspec.values import Message

KEY = "tokenizer.chat_template"
# What a template can raise: its own refusals, Jinja's errors, and Python's in the expressions it contains.
_FAILURES = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate:
    """Renders conversations for one model.

    Parameters
    ----------
    source : str
        The template, in Jinja.
    bos, eos : str
        How the model spells the beginning and the end of a text; "" where it has no such token.

    Raises
    ------
    PromptError
        The template is not valid Jinja.

    Examples
    --------
    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "", "")
    >>> template.render([Message("user", "Hello")])
    '<user>Hello'
    """

    def __init__(self, source: str, bos: str, eos: str) -> None:
        try:
            self._formatter = Jinja2ChatFormatter(template=source, bos_token=bos, eos_token=eos)
        except jinja2.TemplateError as error:
            raise PromptError(
                f"the chat template is not valid: {_line(error)}; pass another with --chat-template"
            ) from error

    @classmethod
    def of(cls, model: LlamaModel, source: str | None = None) -> ChatTemplate:
        """The template in a model's file, or another for the same model.

        Raises
        ------
        ModelFileError
            The file has none.
        PromptError
            The template is not valid Jinja.
        """
        if source is None:
            source = model.metadata(KEY)
        if source is None:
            raise ModelFileError(
                f"{model.path} has no chat template: it was made to continue text, not to converse; name an "
                f"instruction-tuned model with --target, or pass --chat-template FILE"
            )
        return cls(source, _spelling(model, model.vocabulary.bos), _spelling(model, model.vocabulary.eos))

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation, up to where the assistant's next words begin.

        Raises
        ------
        PromptError
            The template refuses: many want user and assistant to take turns, some know no system prompt.
        """
        # A list of plain dictionaries is what templates are written for.
        turns: list[ChatCompletionRequestMessage] = [
            {"role": message.role, "content": message.text}  # type: ignore[misc]
            for message in messages
        ]
        try:
            return self._formatter(messages=turns).prompt
        except _FAILURES as error:
            remedy = (
                "leave --system out"
                if _is_about_system(error, messages)
                else "pass another with --chat-template"
            )
            raise PromptError(f"the model's chat template refuses: {_line(error)}; {remedy}") from error


def _is_about_system(error: Exception, messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[0].role == "system" and "system" in str(error).lower()


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _spelling(model: LlamaModel, token: int) -> str:
    return model.vocabulary.text(token).decode("utf-8", errors="replace") if token >= 0 else ""
