"""The benchmark of whole requests: its tasks, their order, and the turns of its arms.

Arms take turns request by request, in rotated order, with the same prompts, so that a machine that warms up
or is busy slows all alike. Requests of all tasks are mixed, so that a conversation goes on after thousands of
tokens of others, as at a server that has run for a while. Every conversation begins with a number of its own,
so that no arm finds its prompt in a cache; within it the prefix grows, and caches count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from llamaspec.errors import PromptError
from llamaspec.files import parse_json, read_file
from llamaspec.llama.options import DEFAULT_CONTEXT
from llamaspec.measure.compare import in_turn
from llamaspec.measure.served_arms import PEER_PLAIN, PLAIN, Answer, RefusedError

TASKS = Path(__file__).with_name("tasks.yaml")
WARM_UP = "Count from one to thirty, in words."
WARM_UP_TOKENS = 24
_MAX_TASKS_BYTES = 4 << 20
_GOLDEN = 0.618034  # of numbers, multiples of this one are the most evenly spread
_BYTES_PER_TOKEN = 2  # at least, of nearly any text: English has about 4
_TOKENS_PER_MESSAGE = 32  # at most, that a chat template writes beside

Message = dict[str, str]  # role and content
Ask: TypeAlias = Callable[[Mapping[str, Any]], Answer]  # (body of a chat request)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the user, and the answer with which the conversation goes on: None = the arm's own."""

    user: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class BenchTask:
    """Requests of one kind: `prompts` are conversations of one turn each, `turns` are one conversation."""

    name: str
    group: str
    prompts: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    json_schema: dict[str, Any] | None = None  # that every answer is held to
    max_tokens: int = 256  # of an answer, where the user does not say

    def __post_init__(self) -> None:
        if not self.prompts and not self.turns:
            raise ValueError(f"the task {self.name!r} has neither prompts nor turns")

    def conversations(self) -> list[tuple[Turn, ...]]:
        """All of them; each has a turn at least."""
        single: list[tuple[Turn, ...]] = [(Turn(prompt),) for prompt in self.prompts]
        return [*single, self.turns] if self.turns else single


@dataclass(frozen=True, slots=True)
class TaskFile:
    """What a file of tasks holds; <<NAME>> in a message stands for one of its `files`."""

    tasks: tuple[BenchTask, ...]
    files: dict[str, str] = field(default_factory=dict)


def read_task_file(path: Path = TASKS) -> TaskFile:
    """A YAML file of tasks; a PromptError if it cannot be read or used."""
    try:
        content = yaml.safe_load(read_file(path, _MAX_TASKS_BYTES))
        return parse_json(TaskFile, json.dumps(content))
    except OSError as error:
        raise PromptError(f"cannot read the tasks {path}: {error.strerror}; name a YAML file") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise PromptError(f"{path} is no file of tasks: {reason}; write it like {TASKS.name}") from error


def read_tasks(path: Path = TASKS, names: Sequence[str] = ()) -> list[BenchTask]:
    """The tasks of a YAML file: all, or those of these names, which may be names of groups.

    Raises
    ------
    PromptError
        The file cannot be read or used, or has no task and no group of a name.
    """
    found = read_task_file(path)
    known = [*dict.fromkeys([each.name for each in found.tasks] + [each.group for each in found.tasks])]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        told = ", ".join(known) or "none"
        raise PromptError(f"there is no task {', '.join(unknown)} in {path.name}; choose one of {told}")
    chosen = (task for task in found.tasks if not names or {task.name, task.group} & {*names})
    return [_filled(task, found.files) for task in chosen]


def quick_tasks() -> list[BenchTask]:
    """Three requests with short answers: do drafts help here at all?"""
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
    """One turn of a conversation, as it is asked."""

    task: BenchTask
    conversation: int  # which one of all tasks, from 0
    turn: Turn
    label: str  # what people call it, such as "ask 2"

    @property
    def fields(self) -> dict[str, Any]:
        """What the task says of the answer."""
        if self.task.json_schema is None:
            return {"max_tokens": self.task.max_tokens}
        wanted = {"name": "answer", "strict": True, "schema": self.task.json_schema}
        form = {"type": "json_schema", "json_schema": wanted}
        return {"max_tokens": self.task.max_tokens, "response_format": form}


def requests_of(tasks: Sequence[BenchTask]) -> list[Request]:
    """All requests in the order in which they are asked, which depends on nothing but the tasks.

    The requests of each task are spread evenly over the whole run, and each task begins at another time.
    """
    placed: list[tuple[float, Request]] = []
    n_conversations = 0
    for i, task in enumerate(tasks):
        own = [*_requests(task, n_conversations)]
        n_conversations += len(task.conversations())
        begin = (i + 1) * _GOLDEN % 1
        placed += [((n + begin) / len(own), request) for n, request in enumerate(own)]
    return [request for _, request in sorted(placed, key=lambda each: each[0])]


def _requests(task: BenchTask, n_before: int) -> Iterator[Request]:
    conversations = task.conversations()
    for i, turns in enumerate(conversations):
        name = task.name if len(conversations) == 1 else f"{task.name} {i + 1}"
        for j, turn in enumerate(turns):
            yield Request(task, n_before + i, turn, name if len(turns) == 1 else f"{name}, turn {j + 1}")


def context_for(tasks: Sequence[BenchTask], max_tokens: int | None) -> int:
    """Tokens of a context in which every conversation has room."""
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


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one arm's answer to one request; a report holds it, so it holds no text."""

    arm: str
    group: str
    task: str
    prompt: str  # which of the task's, such as "ask 2"
    repeat: int
    n_prompt_tokens: int
    n_tokens: int
    seconds: float  # from the request to the end of the stream
    first_seconds: float  # to the first text
    n_drafted: int | None  # as the server says
    n_accepted: int | None
    differs_at: int | None  # the first character that differs from the baseline's text

    @classmethod
    def of(cls, arm: str, request: Request, repeat: int, answer: Answer, baseline: Answer) -> Sample:
        """Keep the figures of an answer."""
        figures = asdict(answer)
        del figures["text"], figures["reply"]
        task, differs_at = request.task, first_difference(answer.text, baseline.text)
        return cls(arm, task.group, task.name, request.label, repeat, **figures, differs_at=differs_at)

    @property
    def request(self) -> tuple[str, int]:
        """What it shares with the other arms' answers to the same request."""
        return self.prompt, self.repeat

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding: after the first token; None if there was no second one."""
        decoding = self.seconds - self.first_seconds
        return (self.n_tokens - 1) / decoding if self.n_tokens > 1 and decoding > 0 else None

    def seconds_for(self, n_tokens: int) -> float:
        """Return the seconds for so many tokens: texts that differ have other lengths."""
        rate = self.tokens_per_second
        if rate is None or n_tokens == self.n_tokens or n_tokens < 1:
            return self.seconds
        return self.first_seconds + (n_tokens - 1) / rate


def first_difference(text: str, other: str) -> int | None:
    """Return the first character in which two texts differ; None if they are the same."""
    if text == other:
        return None
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (mine, its) in pairs if mine != its), min(len(text), len(other)))


def baseline_of(arms: Iterable[str]) -> str:
    """Return the arm that ratios are to: llama-server without a draft, else our own plain decoding."""
    return PEER_PLAIN if PEER_PLAIN in arms else PLAIN


def ask_all(
    asks: Mapping[str, Ask],
    tasks: Sequence[BenchTask],
    settings: Mapping[str, Any],
    n_repeats: int,
    tell: Callable[[str], None],
    heard: Callable[[Request, str, Answer], None] = lambda request, arm, answer: None,
) -> Iterator[list[Sample]]:
    """Put every request to every arm; gives the samples of one request at a time.

    Parameters
    ----------
    asks : Mapping[str, Ask]
        The arms by name. The first answer of each is not counted.
    settings : Mapping[str, Any]
        What all requests say beside their messages; a max_tokens among them counts instead of the tasks' own.
    tell : Callable[[str], None]
        Hears of a conversation that an arm refuses; it is left out from there on.
    heard : Callable[[Request, str, Answer], None]
        Hears of each answer at once, with the name of its arm.
    """
    order = [*asks]
    for name in order:
        messages = [{"role": "user", "content": WARM_UP}]
        asks[name]({**settings, "messages": messages, "max_tokens": WARM_UP_TOKENS})
    requests = requests_of(tasks)
    for repeat in range(n_repeats):
        said: dict[int, dict[str, list[Message]]] = {}  # by conversation and arm
        refused: set[int] = set()
        for number, request in enumerate(requests, repeat * len(requests)):
            here, user = request.conversation, request.turn.user
            if here in refused:
                continue
            if here not in said:
                said[here] = {name: [] for name in order}
                user = f"[{repeat * len(requests) + here + 1}]\n{user}"
            for messages in said[here].values():
                messages.append({"role": "user", "content": user})
            more = {**request.fields, **settings, "seed": number}
            try:
                answers: dict[str, Answer] = {}
                for name in in_turn(order, number):
                    answers[name] = asks[name]({**more, "messages": [*said[here][name]]})
                    heard(request, name, answers[name])
            except RefusedError as error:
                tell(f"{request.label} is left out: {error}")
                refused.add(here)
                continue
            beside = answers[baseline_of(order)]
            yield [Sample.of(name, request, repeat, answers[name], beside) for name in order]
            for name, messages in said[here].items():
                recorded = request.turn.answer
                reply = answers[name].reply if recorded is None else recorded  # an arm goes on from its own
                messages.append({"role": "assistant", "content": reply or "…"})
