"""From a checked body to what is generated: chat requests, prompts, constraints, generation requests.

The chat APIs differ in names only; `ChatRequest` is what they have in common. Text of clients never becomes a
control token. tests/serve/test_tools.py, tests/serve/test_thinking.py, tests/serve/test_shapes.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from llamaspec.chat.escaping import texts_in
from llamaspec.chat.families import HARMONY, AnswerFormat, recognize
from llamaspec.chat.template import RESERVED, ChatTemplate, Message, NoTemplateError, conversation
from llamaspec.chat.tool_grammar import answer_grammar, tool_grammar
from llamaspec.chat.transcript import Transcript
from llamaspec.engine.generation import Completion
from llamaspec.errors import ConstraintError
from llamaspec.pair import Pair
from llamaspec.protocols import Constraint
from llamaspec.sampling.constraint import WHITESPACE
from llamaspec.sampling.filters import Sampling
from llamaspec.serve.bodies import (
    Fields,
    SamplingFields,
    SpeculativeFields,
    required,
)
from llamaspec.serve.errors import ContextOverflowError, RequestError, bad_field, not_supported
from llamaspec.values import TokenArray

MAX_COMPILED = 64  # constraints that are kept
MAX_TOOLS = 512
USUAL_BYTES = 4  # of a token, where a text is too long to be tokenized
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
# Arguments as templates write them in the next turn (Jinja's tojson), so that they come out of the KV cache.
_AS_RENDERED: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_NO_ARGUMENTS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What a text must match."""

    kind: Literal["json_schema", "grammar"]
    text: str
    field: str  # of the request, for errors


class FormatFields(Fields):
    """What the answer must match: in itself, or for some APIs in `format`."""

    type: str | None = None
    json_schema: FormatFields | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    format: FormatFields | None = None

    def wanted(self, field: str) -> ResponseFormat | None:
        """None for text; RequestError if the type is unknown or the schema is missing."""
        if self.type == "text":
            return None
        if self.type not in ("json_object", "json_schema"):
            raise not_supported(f"{field}.type", "must be text, json_object or json_schema")
        schema = (self.json_schema or self).schema_
        if schema is None and self.type == "json_schema":
            raise bad_field(f"{field}.json_schema", "is missing")
        schema = {"type": "object"} if schema is None else schema
        return ResponseFormat("json_schema", json.dumps(schema), field)


def inner_format(fields: FormatFields | None, field: str) -> ResponseFormat | None:
    """What `format` in a field says."""
    return None if fields is None or fields.format is None else fields.format.wanted(f"{field}.format")


class ReasoningFields(Fields):
    """Fields of every chat API that steer reasoning."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None

    def reasoning_options(
        self, effort: str | None = None, budget: int | None = None, off: bool = False
    ) -> tuple[dict[str, Any], int | None]:
        """Variables of the chat template, and how many tokens of reasoning there may be; None = any.

        From these fields and those of one API: OpenAI's effort, Anthropic's budget and switch.
        """
        kwargs = dict(self.chat_template_kwargs or {})
        if effort is not None and effort != "none":
            kwargs.setdefault("reasoning_effort", {"minimal": "low", "xhigh": "high"}.get(effort, effort))
        enabled = self.enable_thinking if self.enable_thinking is not None else kwargs.get("enable_thinking")
        if off or effort == "none":
            enabled = False
        if enabled is not None:
            kwargs["enable_thinking"] = enabled
        if self.thinking_budget_tokens is not None:
            budget = None if self.thinking_budget_tokens < 0 else self.thinking_budget_tokens
        return kwargs, 0 if enabled is False else budget


@dataclass(frozen=True, slots=True, eq=False)
class ToolUse:
    """Tools and how they may be used."""

    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form
    choice: str = "auto"  # auto, none, required, or with `is_named` the name of a tool
    is_named: bool = False
    is_parallel: bool = True
    is_strict: bool = False  # a schema that cannot be enforced is an error
    left_out: Sequence[str] = ()  # tools that are no functions, each with its type

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model sees."""
        return self.tools if self.is_named or self.choice != "none" else ()

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.is_named or self.choice == "required"


class ToolFields(Fields):
    """A tool in the form of any API; OpenAI's chat API has all but the type in `function`."""

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None  # Anthropic's parameters
    strict: bool | None = None
    function: ToolFields | None = None


Tools = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)]


class ToolChoiceFields(Fields):
    """Which tool must be called; OpenAI's chat API has its name in `function`."""

    type: str | None = None
    name: str | None = None
    function: ToolChoiceFields | None = None
    disable_parallel_tool_use: bool | None = None  # Anthropic's


def tool_use(
    tools: Sequence[ToolFields] | None,
    choice: str | ToolChoiceFields | None,
    is_parallel: bool | None,
    *,
    nested: bool = False,
    kind: str = "function",
) -> ToolUse:
    """The functions among the tools of a request; RequestError if one is wrong.

    `nested`: they are in `function`; `kind`: their type. Tools of other types are left out: the API's own
    server would run them, or their input is no JSON.
    """
    found: list[dict[str, Any]] = []
    left_out: list[str] = []
    is_strict = False
    for i, tool in enumerate(tools or ()):
        place, each = f"tools.{i}.function" if nested else f"tools.{i}", tool.function if nested else tool
        if tool.type not in (None, kind):
            left_out.append(f"{tool.type} {tool.name or ''}".strip())
            continue
        if each is None:
            raise bad_field(place, "is missing")
        is_strict |= bool(each.strict)
        description = {} if each.description is None else {"description": each.description}
        parameters = each.parameters or each.input_schema or _NO_ARGUMENTS
        function = {"name": required(each.name, f"{place}.name"), **description, "parameters": parameters}
        found.append({"type": "function", "function": function})
    named: str | None = None
    if isinstance(choice, ToolChoiceFields):
        if choice.disable_parallel_tool_use is not None:
            is_parallel = not choice.disable_parallel_tool_use
        if choice.type in ("function", "tool"):
            named = required((choice.function or choice).name, "tool_choice.name")
        elif choice.type not in (None, "auto", "any", "none"):
            named = choice.name or choice.type
        choice = choice.type
    choice = "required" if choice == "any" else choice or "auto"
    if named is None and choice not in ("auto", "none", "required"):
        raise bad_field("tool_choice", "must be auto, none, required or the name of a tool")
    if is_parallel is None:  # small models that are made to call go on calling
        is_parallel = named is None and choice != "required"
    return ToolUse(found, named or choice, named is not None, is_parallel, is_strict, left_out)


@dataclass(frozen=True, slots=True, eq=False)
class ChatRequest:
    """What a chat model is asked, whatever the API."""

    messages: Sequence[Message]
    field: str  # that holds them, for errors
    tool_use: ToolUse
    reasoning: tuple[Mapping[str, Any], int | None]  # variables of the template, tokens; 0 = none
    response_format: ResponseFormat | None = None
    left_out: Sequence[str] = ()  # what the API knows and this server does not, for the log


@dataclass(frozen=True, slots=True, eq=False)
class GenerationParameters:
    """What a text consists of and must match. Default: any text."""

    answer_format: AnswerFormat = default(default_factory=AnswerFormat)
    tools: Sequence[Mapping[str, Any]] = ()  # that may be called
    starts_in_reasoning: bool = False
    reasoning_budget: int | None = None  # tokens
    constraint: Constraint | None = None
    constraint_after_cut: Constraint | None = None  # replaces it once the budget has ended the reasoning


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One sequence to generate."""

    prompt: TokenArray  # [n] int32
    sampling: Sampling
    seed: int
    max_tokens: int
    stops: tuple[str, ...] = ()
    drafting: SpeculativeFields = default(default_factory=SpeculativeFields)
    parameters: GenerationParameters = default(default_factory=GenerationParameters)
    n_logprobs: int | None = None  # most probable tokens told with each token
    prediction: TokenArray | None = None  # [m] int32, that most of the answer is expected to repeat
    is_interactive: bool = False  # somebody waits for it at a cursor: it goes before others
    max_seconds: float | None = None  # from the first text on; then the text ends once it has a whole line


class RequestBuilder:
    """Makes prompts, constraints and generation requests for one pair; what cannot be is a RequestError.

    Without a template the model only continues text. `parallel` sequences run at once, so one HTTP request
    may ask for that many.
    """

    def __init__(self, pair: Pair, template: ChatTemplate | None, parallel: int) -> None:
        target = pair.target
        self.template, self.vocabulary, self._parallel = template, target.vocabulary, parallel
        self.answer_format = AnswerFormat() if template is None else recognize(template.source)
        self.takes_tools = template is not None and template.takes_tools
        # Marks that are tokens: some files call <tool_call> a control token, others a user-defined one.
        self._marks = {text.decode(errors="replace"): i for i, text in self.vocabulary.specials.items()}
        self._context_size = target.context_size
        longest_token = max(len(self.vocabulary.text(token)) for token in range(self.vocabulary.size))
        self._max_bytes = self._context_size * longest_token  # more cannot fit, so it is not tokenized
        self._compile = lru_cache(MAX_COMPILED)(
            lambda kind, text: (pair.json_schema if kind == "json_schema" else pair.grammar)(text)
        )

    def text_prompt(self, text: str) -> TokenArray:
        """Tokens of a text to continue."""
        if not text:
            raise bad_field("prompt", "must not be empty")
        self.check_size(text, "prompt")
        return self._checked(self.vocabulary.tokenize(text.encode()), "prompt")

    def token_prompt(self, tokens: Sequence[int]) -> TokenArray:
        """Tokens that the client made."""
        self.check_token_ids(tokens, "prompt")
        return self._checked(np.array(tokens, dtype=np.int32), "prompt")

    async def prediction(self, text: str | None) -> TokenArray | None:
        """Tokens of what an answer is expected to repeat; what cannot fit is left out."""
        if text is None:
            return None
        content = text[: self._max_bytes].encode()
        return await run_in_threadpool(self.vocabulary.tokenize, content, add_special=False)

    async def chat_prompt(self, request: ChatRequest, *, must_fit: bool = True) -> tuple[TokenArray, bool]:
        """Tokens up to where the answer begins, and whether it begins with reasoning."""
        use, (kwargs, _) = request.tool_use, request.reasoning
        if use.tools and not self.takes_tools:
            raise not_supported("tools", "this model's chat template takes no tools")
        if use.is_forced and not use.tools:
            raise bad_field("tool_choice", "there are no functions among the tools")
        if use.is_named and use.choice not in {tool["function"]["name"] for tool in use.tools}:
            raise bad_field("tool_choice", "names no function among the tools; name one, or auto")
        if taken := RESERVED.intersection(kwargs):
            names = ", ".join(sorted(taken))
            raise bad_field("chat_template_kwargs", f"the server sets {names}; leave that out")
        return await run_in_threadpool(self._render, request, must_fit)

    def _render(self, request: ChatRequest, must_fit: bool) -> tuple[TokenArray, bool]:
        if self.template is None:
            raise NoTemplateError("the model has no chat template")
        messages = self.template.with_one_system(request.messages)
        tools, (kwargs, _) = request.tool_use.offered, request.reasoning
        self.check_size("".join(texts_in([conversation(messages), tools])), request.field)
        rendered = self.template.render(messages, tools or None, template_kwargs=kwargs)
        tokens = Transcript(self.vocabulary).read(rendered)
        starts_in_reasoning = self.answer_format.begins_thinking(rendered.text)
        return self._checked(tokens, request.field) if must_fit else tokens, starts_in_reasoning

    def check_token_ids(self, tokens: Sequence[int], field: str) -> None:
        """RequestError if a token id is outside the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary.size:
            raise bad_field(field, f"token ids must be from 0 to {self.vocabulary.size - 1}")

    def _checked(self, tokens: TokenArray, field: str) -> TokenArray:
        if len(tokens) == 0:
            raise bad_field(field, "must not be empty")
        if len(tokens) >= self._context_size:
            raise ContextOverflowError(len(tokens), self._context_size, field)
        return tokens

    def check_size(self, text: str, field: str) -> None:
        """RequestError if a text cannot fit the context; before it is tokenized."""
        n = len(text.encode())
        if n > self._max_bytes:
            n_tokens = max(n // USUAL_BYTES, self._context_size)
            raise ContextOverflowError(n_tokens, self._context_size, field, is_estimate=True)

    async def compile(self, wanted: ResponseFormat) -> Constraint:
        """The constraint of a response format, compiled in a thread."""
        try:
            return await run_in_threadpool(self._compile, wanted.kind, wanted.text)
        except ConstraintError as error:
            raise bad_field(wanted.field, str(error)) from error

    async def chat(self, request: ChatRequest) -> tuple[TokenArray, GenerationParameters]:
        """The prompt and the parameters of a chat request."""
        prompt, starts_in_reasoning = await self.chat_prompt(request)
        tools, (_, budget) = request.tool_use.offered, request.reasoning
        parameters = GenerationParameters(self.answer_format, tools, starts_in_reasoning, budget)
        if request.response_format is not None:
            if tools:
                raise not_supported(request.response_format.field, "cannot be combined with tools")
            return prompt, await self._with_format(parameters, request.response_format)
        return prompt, await self._with_tools(parameters, request.tool_use) if tools else parameters

    async def _with_format(
        self, parameters: GenerationParameters, wanted: ResponseFormat
    ) -> GenerationParameters:
        """Constrains the text that follows the reasoning."""
        answer_format = parameters.answer_format
        has_channels = answer_format.calls is HARMONY
        alone = await self.compile(wanted)
        if answer_format.reasoning is None:
            return replace(parameters, constraint=alone)
        if wanted.kind == "grammar":
            if has_channels:
                raise not_supported(wanted.field, "this model's answers have channels; use a JSON schema")
            return replace(parameters, constraint=alone, constraint_after_cut=alone, reasoning_budget=0)
        if parameters.reasoning_budget == 0 and not has_channels:
            return replace(parameters, constraint=alone, constraint_after_cut=alone)
        schema = json.loads(wanted.text)
        schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE})
        thinking = parameters.starts_in_reasoning
        grammar = answer_grammar(answer_format, schema, self._marks, thinking=thinking)
        constraint = await self.compile(ResponseFormat("grammar", grammar, wanted.field))
        return replace(parameters, constraint=constraint, constraint_after_cut=alone)

    async def _with_tools(self, parameters: GenerationParameters, use: ToolUse) -> GenerationParameters:
        """Holds calls to their schemas, where the grammar of the model's calls is known."""
        answer_format = parameters.answer_format
        if answer_format.calls is HARMONY:
            # Cutting the reasoning would lead to the final channel, past the call.
            constraint = await self._tool_constraint(answer_format, False, use)
            return replace(parameters, constraint=constraint, reasoning_budget=None)
        after_cut = await self._tool_constraint(replace(answer_format, reasoning=None), False, use)
        first = after_cut
        if parameters.reasoning_budget != 0:
            first = await self._tool_constraint(answer_format, parameters.starts_in_reasoning, use)
        return replace(parameters, constraint=first, constraint_after_cut=after_cut)

    async def _tool_constraint(
        self, answer_format: AnswerFormat, thinking: bool, use: ToolUse
    ) -> Constraint | None:
        is_free = answer_format.calls is HARMONY  # it was trained to write JSON without spaces
        spaces: Mapping[str, Any] = {"whitespace_pattern": WHITESPACE} if is_free else _AS_RENDERED
        callable_tools = [t for t in use.tools if not use.is_named or t["function"]["name"] == use.choice]
        tools = [_schema_only(tool, spaces, is_strict=use.is_strict) for tool in callable_tools]
        names = [{"function": {"name": tool["function"]["name"], "parameters": {}}} for tool in tools]
        any_object = [_schema_only(tool, spaces, is_strict=False) for tool in names]
        failed: RequestError | None = None
        for each in (tools,) if use.is_strict else (tools, any_object):
            grammar = tool_grammar(
                answer_format,
                each,
                self._marks,
                is_forced=use.is_forced,
                is_parallel=use.is_parallel,
                thinking=thinking,
            )
            if grammar is None:
                break
            try:
                return await self.compile(ResponseFormat("grammar", grammar, "tools"))
            except RequestError as error:
                failed = error
        if failed is not None and (use.is_forced or use.is_strict):
            raise failed
        if use.is_forced:
            raise not_supported("tool_choice", "this model's format of calls cannot be forced")
        return None

    def requests(
        self,
        prompts: Sequence[TokenArray],
        fields: SamplingFields,
        parameters: GenerationParameters,
        seed: int,
        *,
        n: int = 1,
        max_tokens: int | None = None,
        stops: tuple[str, ...] = (),
        n_logprobs: int | None = None,
        prediction: TokenArray | None = None,
    ) -> list[GenerationRequest]:
        """One request for each prompt and choice; choice i of a prompt has the seed + i."""
        if len(prompts) * n > self._parallel:
            told = f"{len(prompts) * n} texts at once, this server runs {self._parallel}"
            raise bad_field("n", f"{told}; ask for fewer, or start it with --parallel")
        self.check_token_ids(list(map(int, fields.logit_bias or ())), "logit_bias")
        sampling, drafting = fields.sampling(self.vocabulary.ends), fields.drafting
        wanted = self._context_size if max_tokens is None or max_tokens < 0 else max_tokens
        found: list[GenerationRequest] = []
        for prompt in prompts:
            limit = min(wanted, self._context_size - len(prompt))
            more = drafting, parameters, n_logprobs, prediction
            found += [GenerationRequest(prompt, sampling, seed + i, limit, stops, *more) for i in range(n)]
        return found

    def matched_stop(self, completion: Completion, stops: Sequence[str]) -> str | None:
        """The stop string that ended a text, if one did."""
        spelled = self.answer_format.spelled(self.vocabulary.controls)
        pieces = (spelled.get(token) or self.vocabulary.piece(token) for token in completion.tokens)
        written = b"".join(pieces).decode(errors="replace")
        return next((stop for stop in stops if written.startswith(stop, len(completion.text))), None)


def _schema_only(tool: Mapping[str, Any], spaces: Mapping[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """A tool without descriptions: grammars have a size limit, and agents' descriptions are long.

    Unless it is strict, llguidance ignores what it does not know of the schema.
    """
    function = tool["function"]
    schema = _without_prose(function["parameters"])
    schema.setdefault("x-guidance", {**spaces, "lenient": not is_strict})
    return {"function": {"name": function["name"], "parameters": schema}}


def _without_prose(schema: Any, *, is_names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_without_prose(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in ("enum", "const") and not is_names
        else _without_prose(value, is_names=key in ("properties", "$defs", "definitions") and not is_names)
        for key, value in schema.items()
        if is_names or key not in ("description", "title", "examples", "default", "$schema")
    }
