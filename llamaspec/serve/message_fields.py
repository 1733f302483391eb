"""The conversation and the tools of a request: their fields in every API, and one form for all of them.

Messages become those of the chat template. tests/serve/test_agents.py, tests/serve/test_tools.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from llamaspec.chat.attached import Attached
from llamaspec.chat.messages import Message, ToolCall, finite
from llamaspec.serve.bodies import Fields, FieldsByType, JsonList, JsonObject
from llamaspec.serve.http_errors import bad_field, not_supported

_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")  # types of parts
_PARTS = (*_TEXTS, "thinking", "redacted_thinking", "tool_use", "tool_result")  # known types
_PICTURES = ("image", "image_url", "input_image")  # Anthropic's and Ollama's, OpenAI's two
MAX_MESSAGES = 4096
# Names of roles in newer and older clients, and in data sets.
_ROLES = {"developer": "system", "function": "tool", "ipython": "tool", "human": "user", "ai": "assistant",
          "model": "assistant"}  # fmt: skip
Role = Annotated[
    Literal["system", "user", "assistant", "tool"],
    BeforeValidator(lambda given: _ROLES.get(given, given) if isinstance(given, str) else given),
]
# Claude Code begins the system prompt with this header. Its values change with each request, and a cached
# prompt can be reused only up to the first token that differs. github.com/ggml-org/llama.cpp/pull/21793
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:(\s*[\w-]+=[^;\s]*;)*\s*")


def _as_parts(given: Any) -> Any:
    """Return a list of parts for a single one."""
    return [given] if isinstance(given, dict) else given


def _as_result(given: Any) -> Any:
    """Return the content of a result as text or parts; anything else, which a tool may give, as JSON."""
    parts = _as_parts(given)
    if parts is None or isinstance(parts, str):
        return parts
    is_known = isinstance(parts, list) and all(map(_is_part, parts))
    return parts if is_known else json.dumps(finite(given), ensure_ascii=False)


def _is_part(given: Any) -> bool:
    return isinstance(given, ContentPart) or (isinstance(given, dict) and isinstance(given.get("type"), str))


class ContentPart(FieldsByType):
    """A part of a message: text, or one of Anthropic's blocks."""

    known = (*_PARTS, *_PICTURES)
    type: str
    image_url: str | JsonObject | None = None  # a URL, or an object with one
    source: str | JsonObject | None = None  # of Anthropic's image
    text: str | None = None
    refusal: str | None = None
    thinking: str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None
    id: str | None = None  # of tool_use, as the next two
    name: str | None = None
    input: JsonObject | str | JsonList | None = None  # an object, unless the call was cut off
    tool_use_id: str | None = None  # of tool_result, as the next
    content: Annotated[
        str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)] | None,
        BeforeValidator(_as_result),
    ] = None


_Content = str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)]
Content = Annotated[_Content, BeforeValidator(_as_parts)]
Result = Annotated[_Content, BeforeValidator(_as_result)]


class FunctionFields(Fields):
    """The name and the arguments of a call; arguments are JSON in a string, or an object in some clients."""

    name: str
    arguments: str | JsonObject | None = None


class CallFields(Fields):
    """A tool call of the assistant."""

    id: str | None = None
    function: FunctionFields


class MessageFields(Fields):
    """A message of a conversation, as in OpenAI's APIs or Anthropic's."""

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallFields], Field(max_length=MAX_MESSAGES)] | None = None
    function_call: FunctionFields | None = None  # of older clients, whose calls have no ids
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | dict[str, Any] | list[Any] | None = (
        None  # another server's name for it; text, or objects of its own
    )

    @field_validator("content", mode="before")
    @classmethod
    def _result(cls, given: Any, info: ValidationInfo) -> Any:
        return _as_result(given) if info.data.get("role") == "tool" else given


def conversation(field: str, messages: Iterable[tuple[int, MessageFields]]) -> list[Message]:
    """Return the messages for the chat template. Each message of the request comes with its index in `field`.

    RequestError if there are none, or if the last one has a part that is neither text nor a picture. In
    earlier ones a remark stands for such a part: clients send it again in every turn. A mark stands for a
    picture, which is not read yet.
    """
    found: list[Message] = []
    names: dict[str, str] = {}  # call id -> tool; some templates need the tool's name with its result
    given = list(messages)
    for i, fields in given:
        is_last = fields is given[-1][1]
        pictures = _pictures(fields.content, f"{field}.{i}.content", is_new=is_last)
        for message in _messages(fields, place := f"{field}.{i}", is_last=is_last):
            names.update({call.id: call.name for call in message.tool_calls})
            name = message.name or (names.get(message.tool_call_id or "") if message.role == "tool" else None)
            shown = tuple(each for each in pictures if each.mark in message.text)
            found.append(replace(message, name=name, place=place, pictures=shown))
    if not found:
        raise bad_field(field, "must not be empty")
    return found


def parts_of(content: Content | None) -> list[ContentPart]:
    """Return the parts of a message."""
    return [ContentPart(type="text", text=content)] if isinstance(content, str) else content or []


def text_of(content: Content | None, place: str, *, may_omit: bool = False, marks: bool = False) -> str:
    """Return the text of a message, with its parts joined; RequestError if a part is not text.

    With `may_omit`, a remark stands for such a part; with `marks`, the mark of a picture.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = enumerate(content)
    return "".join(_part_text(part, f"{place}.{i}", may_omit=may_omit, marks=marks) for i, part in parts)


def _part_text(part: ContentPart, place: str, *, may_omit: bool, marks: bool = True) -> str:
    if part.type not in _TEXTS:
        if marks and part.type in _PICTURES and (picture := _picture(part, place)) is not None:
            return picture.mark
        if may_omit:
            return f"[{part.type} left out: not text]"
        raise not_supported(f"{place}.type", "only text is supported here, no images, audio or files")
    return required(part.refusal if part.type == "refusal" else part.text, f"{place}.text")


def _picture(part: ContentPart, place: str, *, is_new: bool = True) -> Attached | None:
    """Return the picture of a part; None if it has none."""
    source = part.source if isinstance(part.source, dict) else {}
    url = part.image_url.get("url") if isinstance(part.image_url, dict) else part.image_url
    given = source.get("data") or source.get("url") or url
    return Attached(given, part.type, place, is_new) if isinstance(given, str) else None


def _pictures(content: Content | None, place: str, *, is_new: bool) -> list[Attached]:
    """Return the pictures of a message, also those in results of tools."""
    found: list[Attached] = []
    for i, part in enumerate(parts_of(content)):
        if part.type == "tool_result":
            found += _pictures(part.content, f"{place}.{i}.content", is_new=is_new)
        elif part.type in _PICTURES and (picture := _picture(part, f"{place}.{i}", is_new=is_new)):
            found.append(picture)
    return found


def _messages(fields: MessageFields, place: str, *, is_last: bool) -> list[Message]:
    """Return a message, after the tool results among its parts, which become messages of their own."""
    role, content = fields.role, fields.content
    is_assistant = role == "assistant"
    if role == "tool":
        text = text_of(content, f"{place}.content", may_omit=True, marks=True)
        return [Message("tool", text, name=fields.name, tool_call_id=fields.tool_call_id)]
    if fields.tool_calls and not is_assistant:
        raise bad_field(f"{place}.tool_calls", "only the assistant calls tools")
    calls = [
        ToolCall(call.id or "", call.function.name, _as_text(call.function.arguments))
        for call in fields.tool_calls or ()
    ]
    if is_assistant and (function := fields.function_call) is not None:
        calls.append(ToolCall("", function.name, _as_text(function.arguments)))
    thoughts = fields.reasoning_content or fields.reasoning
    text, reasoning, results = "", thoughts if isinstance(thoughts, str) else "", list[Message]()
    for i, part in enumerate(parts_of(content)):
        at = f"{place}.content.{i}"
        if part.type == "thinking" and is_assistant:
            reasoning += text_of(part.thinking, f"{at}.thinking")  # may be missing in another server's block
        elif is_assistant and (part.type == "redacted_thinking" or part.type not in _PARTS):
            continue  # encrypted by another server, or of a tool that another server ran
        elif part.type == "tool_use" and is_assistant:
            name, call_id = required(part.name, f"{at}.name"), required(part.id, f"{at}.id")
            calls.append(ToolCall(call_id, name, _as_text(part.input)))
        elif part.type == "tool_result" and role == "user":
            call_id = required(part.tool_use_id, f"{at}.tool_use_id")
            result = text_of(part.content, f"{at}.content", may_omit=True, marks=True)
            results.append(Message("tool", result, tool_call_id=call_id))
        else:
            text += _part_text(part, at, may_omit=not is_last and part.type not in _PARTS)
    if results and not text:
        return results
    if role == "system":
        return [system_message(text)]
    message = Message(role, text, name=fields.name, tool_calls=tuple(calls), reasoning=reasoning or None)
    return [*results, message]


def _as_text(arguments: Any) -> str:
    """Return the arguments of a call as text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def system_message(text: str, place: str = "") -> Message:
    """Return a system message, without Claude Code's billing header."""
    return Message("system", _BILLING_HEADER.sub("", text), place=place)


def required(value: str | None, place: str) -> str:
    """Return the value; RequestError if it is missing."""
    if value is None:
        raise bad_field(place, "is missing")
    return value


# Tools

MAX_TOOLS = 512
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
_CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
_NO_ARGUMENTS = {"type": "object", "properties": {}}


class CustomFormat(Fields):
    """What the input of a custom tool must match."""

    type: str | None = None  # text, or grammar with the next two
    syntax: str | None = None
    definition: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ToolUse:
    """The tools of a request, and how the model may use them."""

    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form
    choice: str = "auto"  # auto, none or required; the name of a tool if `is_named`
    is_named: bool = False
    is_parallel: bool = True
    strict: Set[str] = frozenset()  # names of the tools whose schemas must be enforced
    left_out: Sequence[str] = ()  # type and name of each tool that is not a function
    customs: Mapping[str, CustomFormat] = field(default_factory=dict)  # formats of the custom tools, by name

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model sees."""
        return self.tools if self.is_named or self.choice != "none" else ()

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.is_named or self.choice == "required"


class ToolFields(Fields):
    """A tool, in any API. In OpenAI's chat API all fields but the type are in `function`."""

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    input_schema: JsonObject | None = None  # Anthropic's parameters
    strict: bool | None = None
    format: CustomFormat | None = None  # of a custom tool
    function: ToolFields | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)] | None = None  # of a namespace


Tools = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)]


class ToolChoiceFields(Fields):
    """The tools that may or must be called. In OpenAI's chat API the name is in `function`."""

    type: str | None = None
    name: str | None = None
    function: ToolChoiceFields | None = None
    mode: str | None = None  # of allowed_tools, as the next; the chat API nests both in `allowed_tools`
    tools: Tools | None = None
    allowed_tools: ToolChoiceFields | None = None
    disable_parallel_tool_use: bool | None = None  # Anthropic's


def tool_use(
    tools: Sequence[ToolFields] | None,
    choice: str | ToolChoiceFields | None,
    is_parallel: bool | None,
    *,
    nested: bool = False,
    kind: str = "function",
) -> ToolUse:
    """Return the functions among the tools of a request, and their use; RequestError if one is wrong.

    `nested`: the fields of a tool are in `function`. `kind` is the API's type of functions. Tools of other
    types are left out: the API's own server would run them, or their input is not JSON.
    """
    found: list[dict[str, Any]] = []
    left_out: list[str] = []
    strict: set[str] = set()
    for i, tool in enumerate(tools or ()):
        place, each = f"tools.{i}.function" if nested else f"tools.{i}", tool.function if nested else tool
        if tool.type not in (None, kind):
            left_out.append(f"{tool.type} {tool.name or ''}".strip())
            continue
        if each is None:
            raise bad_field(place, "is missing")
        name = required(each.name, f"{place}.name")
        if each.strict:
            strict.add(name)
        description = {} if each.description is None else {"description": each.description}
        schema = each.parameters or each.input_schema or _NO_ARGUMENTS
        parameters = {key: value for key, value in schema.items() if value is not None}
        function = {"name": name, **description, "parameters": parameters}
        found.append({"type": "function", "function": function})
    given = ToolChoiceFields(type=choice) if isinstance(choice, str) else choice or ToolChoiceFields()
    if given.disable_parallel_tool_use is not None:
        is_parallel = not given.disable_parallel_tool_use
    if given.type == "allowed_tools":
        allowed = given.allowed_tools or given
        names = {(tool.function or tool).name for tool in allowed.tools or ()}
        found = [tool for tool in found if tool["function"]["name"] in names]
        if not found:
            raise bad_field("tool_choice", "allows no function among the tools; name one, or use auto")
        given = ToolChoiceFields(type=allowed.mode)
    how = given.type or "auto"
    chosen = _CHOICES.get(how)
    is_named = chosen is None
    if how in ("function", "tool"):
        chosen = required((given.function or given).name, "tool_choice.name")
    elif chosen is None:  # the name itself, or the type of a tool that the API's own server would run
        chosen = given.name or how
    if is_parallel is None:  # small models never stop calling if calls are forced
        is_parallel = chosen in ("auto", "none") and not is_named
    return ToolUse(found, chosen, is_named, is_parallel, strict, left_out)


def called(name: str, namespace: str | None) -> str:
    """Return the model's name for a tool of a namespace."""
    return name if namespace in (None, "", "functions") else f"{namespace.rstrip('_')}__{name}"


def without_namespaces(tools: Iterable[ToolFields]) -> tuple[list[ToolFields], dict[str, tuple[str, str]]]:
    """Return all tools in one list; and, by the model's names, the namespace and name of those in namespaces.

    Codex sends the tools of an MCP server as a namespace, and expects both names in a call.
    """
    found: list[ToolFields] = []
    names: dict[str, tuple[str, str]] = {}
    for tool in tools:
        if tool.type != "namespace" or not tool.tools or tool.name is None:
            found.append(tool)
            continue
        for inner in tool.tools:
            name = None if inner.name is None else called(inner.name, tool.name)
            found.append(inner.model_copy(update={"name": name}))
            if name is not None and name != inner.name:
                names[name] = (tool.name, inner.name or "")
    return found, names
