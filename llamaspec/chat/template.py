"""A conversation as the text that a model was trained to read, by the Jinja template in its file.

Templates are programs that other people wrote: they run in Jinja's sandbox, and whatever goes wrong inside
one becomes one line. The environment is that of Hugging Face's transformers, for which they are written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamaspec.chat.message import Message
from llamaspec.chat.special_tokens import Cover, Rendered, SpecialTokens
from llamaspec.errors import ModelFileError, PromptError
from llamaspec.llama.model import LlamaModel

KEY = "tokenizer.chat_template"
_NOTHING_SPECIAL = SpecialTokens(())
# What a template can raise: its own refusals, Jinja's errors, and Python's in the expressions it contains or
# in the code that Jinja makes of it.
_FAILURES = (
    jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError,
    RecursionError,
)  # fmt: skip


class NoTemplateError(ModelFileError):
    """A model's file holds no chat template."""


class TemplateError(PromptError):
    """A chat template is not valid, or refuses a conversation."""


class SystemPromptError(TemplateError):
    """A chat template refuses the system prompt."""


class ChatTemplate:
    """Renders conversations for one model.

    Parameters
    ----------
    source : str
        The template, in Jinja.
    bos, eos : str
        How the model spells the beginning and the end of a text; "" where it has no such token.
    special : SpecialTokens, optional
        All control tokens of the model; default: these two.

    Raises
    ------
    TemplateError
        The template is not valid Jinja.

    Examples
    --------
    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "", "")
    >>> template.render([Message("user", "Hello")]).text
    b'<user>Hello'
    """

    def __init__(self, source: str, bos: str, eos: str, special: SpecialTokens | None = None) -> None:
        self._source = source
        self._ends = {"bos_token": bos, "eos_token": eos}
        self._special = SpecialTokens((bos, eos)) if special is None else special
        try:
            self._template = _environment().from_string(source)
        except _FAILURES as error:
            raise TemplateError(
                f"the chat template is not valid: {_line(error)}; give another template"
            ) from error

    @classmethod
    def of(cls, model: LlamaModel, source: str | None = None) -> ChatTemplate:
        """The template in a model's file, or another for the same model.

        Raises
        ------
        NoTemplateError
            The file has none.
        TemplateError
            The template is not valid Jinja.
        """
        if source is None:
            source = model.metadata(KEY)
        if source is None:
            raise NoTemplateError(
                f"{model.path} has no chat template: it was made to continue text, not to converse; choose "
                f"an instruction-tuned model, or give a template"
            )
        bos, eos = (_spelling(model, token) for token in (model.vocabulary.bos, model.vocabulary.eos))
        return cls(source, bos, eos, SpecialTokens(model.vocabulary.controls))

    def render(self, messages: Sequence[Message], *, parse_special: bool = False) -> Rendered:
        """The conversation, up to where the assistant's next words begin.

        Parameters
        ----------
        messages : sequence of Message
        parse_special : bool
            Let messages write control tokens, too.

        Raises
        ------
        TemplateError
            The template refuses: many want user and assistant to take turns, some know no system prompt.
        """
        texts = (self._source, *(message.text for message in messages))
        cover = Cover(_NOTHING_SPECIAL if parse_special else self._special, texts)
        # A list of plain dictionaries is what templates are written for.
        turns = [{"role": message.role, "content": cover.put_on(message.text)} for message in messages]
        try:
            covered = self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                raise_exception=_refuse,
                strftime_now=lambda form: datetime.now().strftime(form),
                **self._ends,
            )
            return Rendered.of(covered, self._special, cover)
        except _FAILURES as error:
            refused = f"the model's chat template refuses: {_line(error)}"
            if _is_about_system(error, messages):
                raise SystemPromptError(f"{refused}; leave the system prompt out") from error
            raise TemplateError(f"{refused}; give another template") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them through."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja wants it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags, as if these were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes for HTML
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


def _is_about_system(error: Exception, messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[0].role == "system" and "system" in str(error).lower()


def _line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _spelling(model: LlamaModel, token: int) -> str:
    return model.vocabulary.text(token).decode("utf-8", errors="replace") if token >= 0 else ""
