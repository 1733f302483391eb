"""A conversation as the text that a model was trained to read, by the Jinja template in its file.

Templates are programs that other people wrote: they run in a process of their own, bounded in time and memory
(`chat/template_process.py`), and whatever goes wrong inside one becomes one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llamaspec.chat.covering import conversation, covered_conversation, covered_json, covered_tools, texts_in
from llamaspec.chat.message import Message
from llamaspec.chat.special_tokens import Cover, Rendered, SpecialTokens
from llamaspec.chat.template_process import PROCESS, RenderError
from llamaspec.errors import ModelFileError, PromptError
from llamaspec.llama.model import LlamaModel

KEY = "tokenizer.chat_template"
RESERVED = frozenset(  # what a template's own variables may not replace
    {
        "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token",
        "raise_exception",
        "strftime_now",
    }
)  # fmt: skip
_NOTHING_SPECIAL = SpecialTokens(())

Json = Any  # what json.loads makes


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
            PROCESS.check(source)
        except RenderError as error:
            raise TemplateError(f"the chat template is not valid: {error}; give another template") from error

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

    @property
    def source(self) -> str:
        """The template, in Jinja."""
        return self._source

    @property
    def takes_tools(self) -> bool:
        """Whether the template tells the model about tools; if not, it would not know of any."""
        return re.search(r"\btools\b", self._source) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        template_kwargs: Mapping[str, Json] | None = None,
        parse_special: bool = False,
    ) -> Rendered:
        """The conversation, up to where the assistant's next words begin.

        Nothing in it becomes a control token but what the template itself writes.

        Parameters
        ----------
        messages : sequence of Message
        tools : sequence of dict, optional
            What may be called, in OpenAI's form: {"type": "function", "function": {"name", "parameters"}}.
        template_kwargs : dict, optional
            More variables for the template, such as {"enable_thinking": False}.
        parse_special : bool
            Let messages write control tokens, too.

        Raises
        ------
        TemplateError
            The template refuses: many want user and assistant to take turns, some know no system prompt. Or
            it takes too much time or memory.
        PromptError
            `template_kwargs` would replace what the template gets in any case.

        Examples
        --------
        >>> template = ChatTemplate("{{ tools[0].function.name }} {{ mood }}", "", "")
        >>> tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
        >>> template.render([Message("user", "Time?")], tools, template_kwargs={"mood": "calm"}).text
        b'now calm'
        """
        if taken := RESERVED.intersection(template_kwargs or {}):
            raise PromptError(f"the template gets {', '.join(sorted(taken))} from llamaspec; leave that out")
        try:
            texts = texts_in([self._source, conversation(messages), tools, template_kwargs])
            cover = Cover(_NOTHING_SPECIAL if parse_special else self._special, texts)
            # Plain dictionaries and lists are what templates are written for.
            covered = PROCESS.render(
                self._source,
                {
                    **covered_json(template_kwargs or {}, cover, keep_keys=True),
                    "messages": covered_conversation(messages, cover),
                    "tools": covered_tools(tools, cover) if tools else None,
                    "documents": None,
                    "add_generation_prompt": True,
                    **self._ends,
                },
            )
            return Rendered.of(covered, self._special, cover)
        except (RenderError, ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            refused = f"the model's chat template refuses: {reason}"
            if messages and messages[0].role == "system" and "system" in reason.lower():
                raise SystemPromptError(f"{refused}; leave the system prompt out") from error
            raise TemplateError(f"{refused}; give another template") from error


def _spelling(model: LlamaModel, token: int) -> str:
    return model.vocabulary.text(token).decode("utf-8", errors="replace") if token >= 0 else ""
