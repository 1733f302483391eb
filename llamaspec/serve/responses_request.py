"""What `/v1/responses` is asked: its fields, and the conversation that its items make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from llamaspec.chat.message import Message
from llamaspec.serve.completions import ResponseFormat
from llamaspec.serve.constraints import Shape
from llamaspec.serve.conversations import (
    MAX_MESSAGES,
    CallFields,
    Content,
    FunctionFields,
    MessageFields,
    Role,
    conversation,
    function_tool,
    text_of,
)
from llamaspec.serve.faults import RequestError, not_supported
from llamaspec.serve.fields import Count, Fields, SamplingFields
from llamaspec.serve.questions import MAX_TOOLS, Effort, Question, ThinkingFields, ToolName, ToolUse


class InputItem(Fields):
    """A message, or another item of a conversation."""

    type: str | None = None
    role: Role | None = None
    content: Content | None = None
    call_id: str | None = None  # of function_call and function_call_output
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: Content | None = None  # of reasoning


class TextFields(Fields):
    """How the answer is written."""

    format: ResponseFormat | None = None


class Tool(Fields):
    """A function that the model may want called."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Fields):
    """Names a function."""

    type: Literal["function"]
    name: str


class ReasoningFields(Fields):
    """How much the model thinks before it answers."""

    effort: Effort | None = None


class ResponsesRequest(SamplingFields, ThinkingFields):
    """A conversation to answer."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    text: TextFields | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None

    def question(self, *, takes_tools: bool) -> Question:
        """What the model is asked."""
        if isinstance(self.input, str):
            messages = conversation(
                [MessageFields(role="user", content=self.input)], "input", takes_tools=takes_tools
            )
        else:
            asked, places = _messages(self.input)
            messages = conversation(asked, "input", takes_tools=takes_tools, fields=places)
        system = [Message("system", self.instructions)] if self.instructions else []
        effort = None if self.reasoning is None else self.reasoning.effort
        return Question([*system, *messages], "input", self._tool_use(), self.thinking(effort), self._shape())

    @property
    def n_logprobs(self) -> int | None:
        """How many tokens are told with each token; None: nothing is."""
        is_wanted = self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())
        return self.top_logprobs or 0 if is_wanted else None

    def _shape(self) -> Shape | None:
        text_format = None if self.text is None else self.text.format
        return None if text_format is None else text_format.shape("text.format")

    def _tool_use(self) -> ToolUse:
        tools, choice = self.tools or [], self.tool_choice or "auto"
        for i, tool in enumerate(tools):
            if tool.type != "function":
                raise not_supported(f"tools.{i}.type", "this server has no tools of its own")
            if tool.name is None:
                raise RequestError(400, f"tools.{i}.name: is missing", field=f"tools.{i}.name")
        return ToolUse(
            tools=[function_tool(tool.name or "", tool.description, tool.parameters) for tool in tools],
            choice=choice if isinstance(choice, str) else choice.name,
            is_named=not isinstance(choice, str),
            is_parallel=self.parallel_tool_calls is not False,
            is_strict=any(tool.strict for tool in tools),
        )


def _messages(items: Sequence[InputItem]) -> tuple[list[MessageFields], list[str]]:
    """Items as messages, and where each begins: reasoning, text and calls of one answer are one message."""
    found: list[MessageFields] = []
    places: list[str] = []
    for i, item in enumerate(items):
        place = f"input.{i}"
        message = _message(item, place)
        last = found[-1] if found else None
        is_same = last is not None and last.role == message.role == "assistant" and not last.tool_calls
        if item.type == "function_call" and last is not None and last.role == "assistant":
            last.tool_calls = [*(last.tool_calls or []), *(message.tool_calls or [])]
        elif is_same and last is not None and last.content is None and last.reasoning_content:
            last.content = message.content
        else:
            found.append(message)
            places.append(place)
    return found, places


def _message(item: InputItem, place: str) -> MessageFields:
    kind = item.type or "message"
    if kind == "message":
        if item.role is None:
            raise RequestError(400, f"{place}.role: is missing", field=f"{place}.role")
        return MessageFields(role=item.role, content=item.content)
    if kind == "reasoning":
        thought = text_of(item.content or item.summary, f"{place}.content")
        return MessageFields(role="assistant", reasoning_content=thought)
    if kind not in ("function_call", "function_call_output"):
        raise not_supported(f"{place}.type", "only messages, reasoning and calls of functions are supported")
    if item.call_id is None:
        raise RequestError(400, f"{place}.call_id: is missing", field=f"{place}.call_id")
    if kind == "function_call_output":
        return MessageFields(role="tool", content=item.output, tool_call_id=item.call_id)
    if item.name is None:
        raise RequestError(400, f"{place}.name: is missing", field=f"{place}.name")
    function = FunctionFields(name=item.name, arguments=item.arguments or "{}")
    return MessageFields(role="assistant", tool_calls=[CallFields(id=item.call_id, function=function)])
