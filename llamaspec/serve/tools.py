"""The tools of a request: their fields in every API, how they may be used, and their schemas.

tests/serve/test_tools.py, tests/serve/test_schemas.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from llamaspec.serve.bodies import Fields
from llamaspec.serve.errors import bad_field
from llamaspec.serve.messages import required

MAX_TOOLS = 512
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
_NO_ARGUMENTS = {"type": "object", "properties": {}}
# Keywords that do not affect validity, and keywords whose value is an object with names as keys.
_PROSE = frozenset(
    ("description", "title", "examples", "default", "deprecated", "readOnly", "writeOnly", "$schema",
     "$comment", "markdownDescription", "enumDescriptions")
)  # fmt: skip
_NAMES = ("properties", "patternProperties", "dependentSchemas", "dependentRequired", "$defs", "definitions")


@dataclass(frozen=True, slots=True, eq=False)
class ToolUse:
    """Tools and how they may be used."""

    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form
    choice: str = "auto"  # auto, none, required, or with `is_named` the name of a tool
    is_named: bool = False
    is_parallel: bool = True
    strict: Set[str] = frozenset()  # names of tools whose schemas must be enforced
    left_out: Sequence[str] = ()  # tools that are not functions, each with its type

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the model sees."""
        return self.tools if self.is_named or self.choice != "none" else ()

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.is_named or self.choice == "required"


class ToolFields(Fields):
    """A tool in the form of any API; OpenAI's chat API has everything but the type in `function`."""

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None  # Anthropic's parameters
    strict: bool | None = None
    function: ToolFields | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)] | None = None  # of a namespace


Tools = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)]


class ToolChoiceFields(Fields):
    """Which tools must or may be called; OpenAI's chat API has the name in `function`."""

    type: str | None = None
    name: str | None = None
    function: ToolChoiceFields | None = None
    mode: str | None = None  # of allowed_tools, like the next; the chat API nests both in it
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
    """Return the functions among the tools of a request; RequestError if one is wrong.

    `nested`: each is in `function`; `kind`: its type. Tools of other types are left out: the API's own server
    would run them, or their input is not JSON.
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
        parameters = each.parameters or each.input_schema or _NO_ARGUMENTS
        function = {"name": name, **description, "parameters": parameters}
        found.append({"type": "function", "function": function})
    named: str | None = None
    if isinstance(choice, ToolChoiceFields):
        if choice.disable_parallel_tool_use is not None:
            is_parallel = not choice.disable_parallel_tool_use
        if choice.type == "allowed_tools":
            allowed = choice.allowed_tools or choice
            names = {(tool.function or tool).name for tool in allowed.tools or ()}
            found = [tool for tool in found if tool["function"]["name"] in names]
            if not found:
                raise bad_field("tool_choice", "allows no function among the tools; name one, or auto")
            choice = ToolChoiceFields(type=allowed.mode)
        if choice.type in ("function", "tool"):
            named = required((choice.function or choice).name, "tool_choice.name")
        elif choice.type not in (None, "auto", "any", "none", "required"):
            named = choice.name or choice.type
        choice = choice.type
    choice = "required" if choice == "any" else choice or "auto"
    if named is None and choice not in ("auto", "none", "required"):
        raise bad_field("tool_choice", "must be auto, none, required or the name of a tool")
    if is_parallel is None:  # small models that are forced to call never stop calling
        is_parallel = named is None and choice != "required"
    return ToolUse(found, named or choice, named is not None, is_parallel, strict, left_out)


def called(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool of a namespace."""
    return name if namespace in (None, "", "functions") else f"{namespace.rstrip('_')}__{name}"


def without_namespaces(tools: Iterable[ToolFields]) -> tuple[list[ToolFields], dict[str, tuple[str, str]]]:
    """Return all tools in one list, and the namespace and original name of those that were in namespaces.

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


def without_prose(schema: Any, *, is_names: bool = False) -> Any:
    """Return a schema without descriptions and the like, which would count towards a grammar's size."""
    if isinstance(schema, list):
        return [without_prose(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in ("enum", "const") and not is_names
        else without_prose(value, is_names=key in _NAMES and not is_names)
        for key, value in schema.items()
        if is_names or key not in _PROSE
    }


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas in a schema, each with its path, such as `properties.a` or `anyOf.0`."""
    for key, value in schema.items():
        inner: Iterable[tuple[str, Any]] = ()
        if isinstance(value, dict) and key in _NAMES:
            inner = ((f"{key}.{name}", each) for name, each in value.items())
        elif isinstance(value, dict) and key not in ("const", "x-guidance"):
            inner = ((key, value),)
        elif isinstance(value, list) and key != "enum":
            inner = ((f"{key}.{i}", each) for i, each in enumerate(value))
        yield from ((path, each) for path, each in inner if isinstance(each, dict))
