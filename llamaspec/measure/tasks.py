"""The tasks of the benchmark, and the requests that they make.

Requests of all tasks are mixed, so that a conversation continues after thousands of tokens of others, as at a
server that has run for a while. The order depends only on the tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from llamaspec.errors import PromptError
from llamaspec.files import parse_json, read_file
from llamaspec.llama.options import DEFAULT_CONTEXT

TASKS = Path(__file__).with_name("tasks.yaml")
_MAX_TASKS_BYTES = 4 << 20
_GOLDEN = 0.618034  # golden ratio: its multiples, modulo 1, are spread most evenly
_BYTES_PER_TOKEN = 2  # at least, in nearly any language; English has about 4
_TOKENS_PER_MESSAGE = 32  # at most, added by a chat template


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, and the answer with which the conversation continues; None = the arm's own answer."""

    user: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class BenchTask:
    """Requests of one kind: each of `prompts` is a conversation of one turn, `turns` are one conversation.

    With `changes`, a similar request comes before each of `prompts`, and does not count: in it, the second
    text of the pair in the same place is replaced by the first.
    """

    name: str
    group: str
    prompts: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    json_schema: dict[str, Any] | None = None  # for every answer
    max_tokens: int = 256  # of an answer, by default
    only_by_name: bool = False  # left out unless it is asked for

    def __post_init__(self) -> None:
        if not self.prompts and not self.turns:
            raise ValueError(f"the task {self.name!r} has neither prompts nor turns")
        if len(self.changes) not in (0, len(self.prompts)):
            raise ValueError(f"the task {self.name!r} needs one change for each of its prompts")
        for prompt, (_, new) in zip(self.prompts, self.changes, strict=False):
            if new not in prompt:
                raise ValueError(f"the task {self.name!r} changes {new!r}, which is not in its prompt")

    @property
    def first(self) -> list[str]:
        """The prompts that come before `prompts`."""
        return [
            prompt.replace(new, old) for prompt, (old, new) in zip(self.prompts, self.changes, strict=False)
        ]

    def conversations(self) -> list[tuple[Turn, ...]]:
        """Return all conversations; each has at least one turn."""
        single: list[tuple[Turn, ...]] = [(Turn(prompt),) for prompt in self.prompts]
        return [*single, self.turns] if self.turns else single


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The content of a file of tasks; <<NAME>> in a message stands for one of its `files`."""

    tasks: tuple[BenchTask, ...]
    files: dict[str, str] = field(default_factory=dict)


def read_task_file(path: Path = TASKS) -> TaskFile:
    """Read a YAML file of tasks; raise PromptError if it cannot be used."""
    try:
        content = yaml.safe_load(read_file(path, _MAX_TASKS_BYTES))
        return parse_json(TaskFile, json.dumps(content))
    except OSError as error:
        raise PromptError(f"cannot read the tasks {path}: {error.strerror}; name a YAML file") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise PromptError(f"{path} is not a file of tasks: {reason}; write it like {TASKS.name}") from error


def read_tasks(path: Path = TASKS, names: Sequence[str] = ()) -> list[BenchTask]:
    """Return the tasks of a YAML file: all, or those whose name or group is among `names`.

    Raise PromptError if the file cannot be used, or if a name is neither a task nor a group.
    """
    found = read_task_file(path)
    known = [*dict.fromkeys([each.name for each in found.tasks] + [each.group for each in found.tasks])]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        choices = ", ".join(known) or "none"
        raise PromptError(f"there is no task {', '.join(unknown)} in {path.name}; choose one of {choices}")
    chosen = (
        task for task in found.tasks if {task.name, task.group} & {*names} or not (names or task.only_by_name)
    )
    return [_filled(task, found.files) for task in chosen]


def quick_tasks() -> list[BenchTask]:
    """Return three requests with short answers, which show whether drafts help at all."""
    limits = {"explain": 96, "write code": 96, "rename": 192}  # tokens of an answer
    tasks = read_tasks(names=[*limits])
    return [replace(each, prompts=each.prompts[:1], max_tokens=limits[each.name]) for each in tasks]


def _filled(task: BenchTask, files: Mapping[str, str]) -> BenchTask:
    def fill(text: str) -> str:
        for name, content in files.items():
            text = text.replace(f"<<{name}>>", content)
        return text

    turns = tuple(Turn(fill(turn.user), turn.answer) for turn in task.turns)
    return replace(task, prompts=tuple(map(fill, task.prompts)), turns=turns)


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of a conversation."""

    task: BenchTask
    conversation: int  # index among the conversations of all tasks
    turn: Turn
    label: str  # shown to the user, such as "ask 2"
    counts: bool = True  # whether its answers are measured

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the request that the task sets."""
        if self.task.json_schema is None:
            return {"max_tokens": self.task.max_tokens}
        wanted = {"name": "answer", "strict": True, "schema": self.task.json_schema}
        form = {"type": "json_schema", "json_schema": wanted}
        return {"max_tokens": self.task.max_tokens, "response_format": form}


def requests_of(tasks: Sequence[BenchTask]) -> list[Request]:
    """Return all requests in the order in which they are sent.

    The requests of each task are spread evenly over the whole run, and each task begins at another time.
    """
    placed: list[tuple[float, Request]] = []
    n_conversations = 0
    for i, task in enumerate(tasks):
        own = [*_requests(task, n_conversations)]
        n_conversations += len(task.conversations()) + len(task.first)
        begin = (i + 1) * _GOLDEN % 1
        placed += [((n + begin) / len(own), request) for n, request in enumerate(own)]
    return [request for _, request in sorted(placed, key=lambda each: each[0])]


def _requests(task: BenchTask, n_before: int) -> Iterator[Request]:
    conversations, first = task.conversations(), task.first
    n_after = n_before + len(conversations)
    for i, turns in enumerate(conversations):
        name = task.name if len(conversations) == 1 else f"{task.name} {i + 1}"
        if i < len(first):
            yield Request(task, n_after + i, Turn(first[i]), f"before {name}", counts=False)
        for j, turn in enumerate(turns):
            yield Request(task, n_before + i, turn, name if len(turns) == 1 else f"{name}, turn {j + 1}")


def context_for(tasks: Sequence[BenchTask], max_tokens: int | None) -> int:
    """Return the size of a context that holds any of the conversations, in tokens."""
    sizes = [
        sum(
            len(f"{turn.user}{turn.answer or ''}".encode()) // _BYTES_PER_TOKEN
            + 2 * _TOKENS_PER_MESSAGE
            + (max_tokens or task.max_tokens)
            for turn in turns
        )
        for task in tasks
        for turns in task.conversations()
    ]
    return max(DEFAULT_CONTEXT, -(-max(sizes) // 1024) * 1024)
