"""Chat templates, which turn a conversation into a prompt in the form that a model was trained on.

A template is a Jinja program in a model's file. It runs in a process of its own (`chat/sandbox.py`), and its
errors become one line. Only a template can write a control token, never a message: before rendering, text of
users, tools and clients that spells a control token, or could complete one, is replaced letter by letter with
private-use characters, which survive trimming, slicing and splitting. So all control tokens in the rendered
text are the template's own; then the letters are put back. Text that a template assembles from parts of a
message is not escaped. tests/chat/test_escaping.py attacks the escaping.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from llamaspec.chat.accepted import PROBE_TOOL, Accepted, in_words
from llamaspec.chat.families import recognize
from llamaspec.chat.messages import Json, Message
from llamaspec.chat.notation import AnswerFormat
from llamaspec.chat.sandbox import PROCESS, RenderError, RenderTimeError
from llamaspec.errors import NoTemplateError, SystemPromptError, TemplateError
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.llama.weights import Weights
from llamaspec.values import NO_TOKENS, TokenArray

KEY = "tokenizer.chat_template"
RESERVED = frozenset(  # variables of a template that clients may not set
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception",
     "strftime_now"}
)  # fmt: skip
_PRIVATE = range(0xF0000, 0xFFFFE)  # code points that Unicode leaves unassigned
_NAMES = ("type", "required")  # keywords of JSON schemas; templates compare their values

Span = tuple[int, int]  # [start, end) in bytes


class ChatTemplate:
    """Renders conversations for one model; TemplateError if the source is not valid Jinja.

    `bos` and `eos` spell the model's tokens for the beginning and the end of a text, "" if it has none.
    `special` are all control tokens, by default these two.
    """

    def __init__(self, source: str, bos: str, eos: str, special: SpecialTokens | None = None) -> None:
        self.source = source
        self._ends = {"bos_token": bos, "eos_token": eos}
        self._special = SpecialTokens((bos, eos)) if special is None else special
        check_template(source)

    @classmethod
    def of(cls, model: LlamaModel | Weights, source: str | None = None) -> ChatTemplate:
        """Return the template in a model's file, or `source` instead; NoTemplateError if there is none."""
        if source is None:
            source = model.metadata(KEY)
        if source is None:
            raise NoTemplateError(
                f"{model.path} has no chat template, because it was trained to continue text, not to chat; "
                f"choose an instruction-tuned model, or give a template"
            )
        vocabulary = model.vocabulary
        bos, eos = (
            vocabulary.text(token).decode(errors="replace") if token >= 0 else ""
            for token in (vocabulary.bos, vocabulary.eos)
        )
        return cls(source, bos, eos, SpecialTokens(vocabulary.controls))

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model writes reasoning and tool calls."""
        return recognize(self.source)

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows the model the tools."""
        return re.search(r"\btools\b", self.source) is not None

    @cached_property
    def accepted(self) -> Accepted:
        """What the template takes."""

        def writes(forms: Sequence[Mapping[str, Json]], with_tools: bool) -> str | None:
            try:
                return self._rendered(
                    forms, [PROBE_TOOL] if with_tools else (), {}, self._special
                ).text.decode()
            except TemplateError:
                return None

        return Accepted(self.source, writes)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] = (),
        *,
        template_kwargs: Mapping[str, Json] | None = None,
        parse_special: bool = False,
    ) -> Rendered:
        """Render the conversation as the template can take it, up to where the assistant's answer begins.

        Only the template can write control tokens; with `parse_special`, messages can, too. Tools are in
        OpenAI's form, {"type": "function", "function": {…}}. `template_kwargs` are more variables for the
        template, such as {"enable_thinking": False}; none may be RESERVED.

        TemplateError if the template takes too long, or refuses.
        """
        escaped = SpecialTokens(()) if parse_special else self._special
        if not self.takes_tools:
            messages, tools = in_words(messages, tools), ()
        messages = self.accepted.messages(messages, with_tools=bool(tools))
        tools = self.accepted.tools(tools)

        def rendered(*, arguments_in_text: bool) -> Rendered:
            forms = [self.accepted.form(each, arguments_in_text=arguments_in_text) for each in messages]
            return self._rendered(forms, tools, template_kwargs or {}, escaped)

        try:
            return rendered(arguments_in_text=False)
        except TemplateError as error:
            # Some templates need the arguments of calls as text.
            if any(message.tool_calls for message in messages) and not _is_out_of_time(error):
                with suppress(TemplateError):
                    return rendered(arguments_in_text=True)
            raise

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]],
        kwargs: Mapping[str, Json],
        escaped: SpecialTokens,
    ) -> Rendered:
        try:
            escaper = Escaper(escaped, texts_in([self.source, messages, tools, kwargs]))
            variables = {
                **{key: escaper.escape_json(value) for key, value in kwargs.items()},
                "messages": [
                    {**escaper.escape_json(message), "role": message["role"]} for message in messages
                ],
                "tools": escaper.escape_json(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": True,
                **self._ends,
            }
            rendered = Rendered.of(PROCESS.render(self.source, variables), self._special, escaper)
        except (RenderError, ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            refused = f"the model's chat template refuses: {reason}"
            if messages and messages[0]["role"] == "system" and "system" in reason.lower():
                raise SystemPromptError(f"{refused}; leave the system prompt out") from error
            raise TemplateError(f"{refused}; give another template") from error
        if not rendered.text:
            raise TemplateError("the chat template writes nothing, so the prompt is empty; give another one")
        return rendered

    def refused_place(self, messages: Sequence[Message], error: TemplateError, **more: Any) -> str:
        """Return the place of the message that `render` refuses.

        It is "" if `render` refuses even an empty conversation, or if time runs out.
        `more` are the other arguments of `render`.
        """
        if _is_out_of_time(error) or self._refuses((), error, **more):
            return ""
        n_accepted = bisect_left(
            range(1, len(messages)), True, key=lambda n: self._refuses(messages[:n], error, **more)
        )
        return messages[n_accepted].place

    def _refuses(self, messages: Sequence[Message], error: TemplateError, **more: Any) -> bool:
        """Whether rendering these messages fails with the same error."""
        try:
            self.render(messages, **more)
        except TemplateError as other:
            return str(other) == str(error)
        return False


def check_template(source: str) -> None:
    """Raise a TemplateError if the source of a chat template is not valid Jinja. This needs no model."""
    try:
        PROCESS.check(source)
    except RenderError as error:
        raise TemplateError(f"the chat template is not valid: {error}; give another template") from error


def _is_out_of_time(error: TemplateError) -> bool:
    return isinstance(error.__cause__, RenderTimeError)


class SpecialTokens:
    """The spellings of a vocabulary's control tokens, except empty ones."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self._spellings = sorted({text for text in spellings if text}, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")
        self._in_bytes = re.compile(self.pattern.pattern.encode())
        self._longest = max(map(len, self._spellings), default=0)
        self._beginnings = {text[:n] for text in self._spellings for n in range(1, len(text))}
        self._ends = {text[n:] for text in self._spellings for n in range(1, len(text))}

    def spans(self, text: bytes) -> list[Span]:
        """Return the places where a text spells control tokens."""
        return [found.span() for found in self._in_bytes.finditer(text)]

    def is_inside(self, text: str) -> bool:
        """Whether a text is part of a spelling."""
        return any(text in spelling for spelling in self._spellings)

    def may_begin_at_the_end_of(self, text: str) -> bool:
        """Whether a text ends with the beginning of a spelling."""
        return any(text[-n:] in self._beginnings for n in range(1, self._longest))

    def may_end_at_the_start_of(self, text: str) -> bool:
        """Whether a text begins with the end of a spelling."""
        return any(text[:n] in self._ends for n in range(1, self._longest))


class Escaper:
    """Replaces characters while a template is rendered, by characters that do not occur in `texts`."""

    def __init__(self, special: SpecialTokens, texts: Iterable[str]) -> None:
        self._special = special
        used = set().union(*texts)
        self._free = (character for character in map(chr, _PRIVATE) if character not in used)
        self._replacements: dict[str, str] = {}

    def escape(self, text: str) -> str:
        """Return a text of which nothing becomes a control token; the template can still trim its spaces."""
        text = self._escape_tokens(text)
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        end = start + len(core)
        if self._special.is_inside(core):
            return text[:start] + self._replaced(core) + text[end:]
        if self._special.may_begin_at_the_end_of(core):
            text = text[: end - 1] + self._replaced(text[end - 1]) + text[end:]
        if self._special.may_end_at_the_start_of(core):
            text = text[:start] + self._replaced(text[start]) + text[start + 1 :]
        return text

    def escape_json(self, value: Json, *, is_name: bool = False) -> Json:
        """Return JSON with its strings escaped; in keys and names, only whole tokens are escaped."""
        if isinstance(value, str):
            return self._escape_tokens(value) if is_name else self.escape(value)
        if isinstance(value, Mapping):
            return {
                self._escape_tokens(str(key)): self.escape_json(inner, is_name=key in _NAMES)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape_json(inner, is_name=is_name) for inner in value]
        return value

    def unescape(self, text: str) -> str:
        """Return a rendered text with the original characters."""
        return text.translate({ord(new): old for old, new in self._replacements.items()})

    def _escape_tokens(self, text: str) -> str:
        return self._special.pattern.sub(lambda found: self._replaced(found[0]), text)

    def _replaced(self, text: str) -> str:
        for character in text:
            if character not in self._replacements:
                self._replacements[character] = next(self._free)
        return "".join(self._replacements[character] for character in text)


def texts_in(value: Json) -> Iterator[str]:
    """Yield all strings and keys in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in([*map(str, value), *value.values()])
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation, and where the template wrote control tokens."""

    text: bytes  # UTF-8
    specials: tuple[Span, ...]  # ascending
    known: SpecialTokens  # all tokens that the tokenizer would recognise

    @classmethod
    def of(cls, escaped: str, known: SpecialTokens, escaper: Escaper) -> Rendered:
        """Return the rendered text of escaped messages."""
        text, specials, start = bytearray(), [], 0
        for found in known.pattern.finditer(escaped):
            text += escaper.unescape(escaped[start : found.start()]).encode()
            specials.append((len(text), len(text) + len(found[0].encode())))
            text += found[0].encode()
            start = found.end()
        text += escaper.unescape(escaped[start:]).encode()
        return cls(bytes(text), tuple(specials), known)

    def followed_by(self, text: str, *, parse_special: bool) -> Rendered:
        """Append text; with `parse_special`, it may contain control tokens."""
        more, n = text.encode(), len(self.text)
        spans = self.known.spans(more) if parse_special else []
        return replace(
            self, text=self.text + more, specials=(*self.specials, *((a + n, b + n) for a, b in spans))
        )

    def tokenize(self, vocabulary: LlamaVocabulary) -> TokenArray:
        """Return the tokens, without the beginning-of-text token: int32 [n]."""
        parts = [
            vocabulary.tokenize(text, add_special=False, parse_special=is_trusted)
            for text, is_trusted in self.segments()
            if text
        ]
        return np.concatenate(parts) if parts else NO_TOKENS

    def segments(self) -> Iterator[tuple[bytes, bool]]:
        """Yield the text in few long parts, each with whether its control tokens are the template's."""
        forged = set(self.known.spans(self.text)).difference(self.specials)
        begin = end = 0
        for start, stop in (*self.specials, (len(self.text), len(self.text))):
            if any(a < start and end < b for a, b in forged):
                yield self.text[begin:end], True
                yield self.text[end:start], False
                begin = start
            end = stop
        yield self.text[begin:], True
