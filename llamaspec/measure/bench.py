"""The benchmark of whole requests: its tasks, their order, the turns of its arms, and the figures.

Arms take turns request by request, in rotated order, with the same prompts, so that a machine that warms up
or is busy slows all alike. Requests of all tasks are mixed, so that a conversation continues after thousands
of tokens of others, as at a server that has run for a while. Every conversation begins with a number of its
own, so that no arm finds its prompt in a cache; within it the prefix grows, and caches count. Ratios compare
an arm's answer with the baseline's answer to the same request.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from llamaspec.errors import PromptError, printable
from llamaspec.files import parse_json, read_file
from llamaspec.llama.options import DEFAULT_CONTEXT
from llamaspec.measure.compare import first_difference, in_turn
from llamaspec.measure.served_arms import AUTO, PEER, PEER_BEST, PEER_PLAIN, PLAIN, Answer, RefusedError

TASKS = Path(__file__).with_name("tasks.yaml")
WARM_UP = "Count from one to thirty, in words."
WARM_UP_TOKENS = 24
_MAX_TASKS_BYTES = 4 << 20
_GOLDEN = 0.618034  # no other number has multiples, modulo 1, that are spread more evenly
_BYTES_PER_TOKEN = 2  # at least, in nearly any language: English has about 4
_TOKENS_PER_MESSAGE = 32  # at most, that a chat template adds

Message = dict[str, str]  # role and content
Ask: TypeAlias = Callable[[Mapping[str, Any]], Answer]  # (body of a chat request)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the user, and the answer with which the conversation continues; None = the arm's own."""

    user: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class BenchTask:
    """Requests of one kind: `prompts` are conversations of one turn each, `turns` are one conversation."""

    name: str
    group: str
    prompts: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    json_schema: dict[str, Any] | None = None  # for every answer
    max_tokens: int = 256  # of an answer, by default

    def __post_init__(self) -> None:
        if not self.prompts and not self.turns:
            raise ValueError(f"the task {self.name!r} has neither prompts nor turns")

    def conversations(self) -> list[tuple[Turn, ...]]:
        """All of them; each has at least one turn."""
        single: list[tuple[Turn, ...]] = [(Turn(prompt),) for prompt in self.prompts]
        return [*single, self.turns] if self.turns else single


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The content of a file of tasks; <<NAME>> in a message stands for one of its `files`."""

    tasks: tuple[BenchTask, ...]
    files: dict[str, str] = field(default_factory=dict)


def read_task_file(path: Path = TASKS) -> TaskFile:
    """Read a YAML file of tasks; a PromptError if it cannot be read or used."""
    try:
        content = yaml.safe_load(read_file(path, _MAX_TASKS_BYTES))
        return parse_json(TaskFile, json.dumps(content))
    except OSError as error:
        raise PromptError(f"cannot read the tasks {path}: {error.strerror}; name a YAML file") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise PromptError(f"{path} is no file of tasks: {reason}; write it like {TASKS.name}") from error


def read_tasks(path: Path = TASKS, names: Sequence[str] = ()) -> list[BenchTask]:
    """Return the tasks of a YAML file: all, or those with these names or in groups with these names.

    PromptError if the file cannot be used, or has neither a task nor a group with one of the names.
    """
    found = read_task_file(path)
    known = [*dict.fromkeys([each.name for each in found.tasks] + [each.group for each in found.tasks])]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        choices = ", ".join(known) or "none"
        raise PromptError(f"there is no task {', '.join(unknown)} in {path.name}; choose one of {choices}")
    chosen = (task for task in found.tasks if not names or {task.name, task.group} & {*names})
    return [_filled(task, found.files) for task in chosen]


def quick_tasks() -> list[BenchTask]:
    """Return three requests with short answers: do drafts help here at all?"""
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
    conversation: int  # among those of all tasks, from 0
    turn: Turn
    label: str  # for people, such as "ask 2"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that the task sets."""
        if self.task.json_schema is None:
            return {"max_tokens": self.task.max_tokens}
        wanted = {"name": "answer", "strict": True, "schema": self.task.json_schema}
        form = {"type": "json_schema", "json_schema": wanted}
        return {"max_tokens": self.task.max_tokens, "response_format": form}


def requests_of(tasks: Sequence[BenchTask]) -> list[Request]:
    """Return all requests in the order in which they are sent, which depends only on the tasks.

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
    """Return the size of a context in which every conversation has room, in tokens."""
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
    """The figures of one arm's answer to one request, without any text of it, because reports are shared."""

    arm: str
    group: str
    task: str
    prompt: str  # of the task, such as "ask 2"
    repeat: int
    n_prompt_tokens: int
    n_tokens: int
    seconds: float  # from the request to the end of the stream
    first_seconds: float  # to the first text
    n_drafted: int | None  # as the server reports
    n_accepted: int | None
    differs_at: int | None  # the first character that differs from the baseline's answer

    @classmethod
    def of(cls, arm: str, request: Request, repeat: int, answer: Answer, baseline: Answer) -> Sample:
        """Keep the figures of an answer."""
        figures = asdict(answer)
        del figures["text"], figures["reply"]
        figures["differs_at"] = first_difference(answer.text, baseline.text)
        group, task, prompt = map(printable, (request.task.group, request.task.name, request.label))
        return cls(arm, group, task, prompt, repeat, **figures)

    @property
    def request(self) -> tuple[str, int]:
        """The prompt and repeat, which the answers of all arms to the same request share."""
        return self.prompt, self.repeat

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token; None if there was no second one."""
        decoding = self.seconds - self.first_seconds
        return (self.n_tokens - 1) / decoding if self.n_tokens > 1 and decoding > 0 else None

    def seconds_for(self, n_tokens: int) -> float:
        """Return the seconds for so many tokens: answers that differ have other lengths."""
        rate = self.tokens_per_second
        if rate is None or n_tokens == self.n_tokens or n_tokens < 1:
            return self.seconds
        return self.first_seconds + (n_tokens - 1) / rate


def baseline_of(arms: Iterable[str]) -> str:
    """Return the arm to compare with: llama-server without a draft, else our own plain decoding."""
    return PEER_PLAIN if PEER_PLAIN in arms else PLAIN


def ask_all(
    asks: Mapping[str, Ask],
    tasks: Sequence[BenchTask],
    fields: Mapping[str, Any],
    n_repeats: int,
    tell: Callable[[str], None],
) -> Iterator[list[Sample]]:
    """Send every request to every arm, and yield the samples of one request at a time.

    `fields` of all requests replace those of the tasks. The first answer of each arm does not count. `tell`
    is called with a line for each answer, and for a conversation that an arm refuses, which is left out from
    there on.
    """
    order = [*asks]
    for name in order:
        messages = [{"role": "user", "content": WARM_UP}]
        asks[name]({**fields, "messages": messages, "max_tokens": WARM_UP_TOKENS})
    requests = requests_of(tasks)
    total = len(requests) * n_repeats
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
            body = {**request.fields, **fields, "seed": number}
            try:
                answers: dict[str, Answer] = {}
                for name in in_turn(order, number):
                    answers[name] = asks[name]({**body, "messages": [*said[here][name]]})
                    tell(f"{number + 1}/{total} {request.label}, {name}: {answers[name].seconds:.2f} s")
            except RefusedError as error:
                tell(f"{request.label} is left out: {error}")
                refused.add(here)
                continue
            baseline = answers[baseline_of(order)]
            yield [Sample.of(name, request, repeat, answers[name], baseline) for name in order]
            for name, messages in said[here].items():
                recorded = request.turn.answer
                reply = answers[name].reply if recorded is None else recorded
                messages.append({"role": "assistant", "content": reply or "…"})


# Figures

AnswerPairs: TypeAlias = dict[str, list[tuple[Sample, Sample]]]  # by prompt: an arm's answer, the baseline's


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm on several prompts: geometric means of ratios, medians of seconds, and all requests as one."""

    whole: float
    spread: float  # factor: exp of the standard deviation of the logarithms
    worst: float
    worst_prompt: str
    decoding: float | None
    first: float
    total: float  # the baseline's total_seconds next to these
    seconds: float
    first_seconds: float
    total_seconds: float  # of all requests together, each as if it had the baseline's number of tokens
    forks: dict[str, tuple[int, ...]]  # by prompt
    n_same: int  # answers that equal the baseline's
    n_answers: int


def answer_pairs(samples: Sequence[Sample], arm: str, baseline: str) -> AnswerPairs:
    """Return an arm's answers with those of another one to the same requests."""
    beside = {sample.request: sample for sample in samples if sample.arm == baseline}
    pairs: AnswerPairs = {}
    for sample in samples:
        if sample.arm == arm:
            pairs.setdefault(sample.prompt, []).append((sample, beside[sample.request]))
    return pairs


def _whole(mine: Sample, base: Sample) -> float:
    """Return how many times as fast a request is; an answer of other length is scaled to the baseline's."""
    return base.seconds / mine.seconds_for(base.n_tokens)


def best_of(arms: Sequence[AnswerPairs]) -> AnswerPairs:
    """Return for each prompt the answers of the arm that was fastest there, known afterwards."""
    return {
        prompt: max(
            (arm[prompt] for arm in arms), key=lambda pairs: statistics.median(starmap(_whole, pairs))
        )
        for prompt in arms[0]
    }


def figures(pairs: AnswerPairs) -> Figures:
    """Fold the answers to several prompts, at least one: of each the medians over its repeats."""

    def medians(value: Callable[[Sample, Sample], float]) -> list[float]:
        return [statistics.median(starmap(value, each)) for each in pairs.values()]

    wholes = dict(zip(pairs, medians(_whole), strict=True))
    worst_prompt = min(wholes, key=wholes.__getitem__)
    rates = [
        [
            mine.tokens_per_second / base.tokens_per_second
            for mine, base in each
            if mine.tokens_per_second and base.tokens_per_second
        ]
        for each in pairs.values()
    ]
    decoding = [statistics.median(each) for each in rates if each]
    logs = [math.log(whole) for whole in wholes.values()]
    forks = {
        prompt: tuple(mine.differs_at for mine, _ in each if mine.differs_at is not None)
        for prompt, each in pairs.items()
    }
    answers = [pair for each in pairs.values() for pair in each]
    total_seconds = sum(mine.seconds_for(base.n_tokens) for mine, base in answers)
    return Figures(
        whole=math.exp(statistics.mean(logs)),
        spread=math.exp(statistics.stdev(logs)) if len(logs) > 1 else 1.0,
        worst=wholes[worst_prompt],
        worst_prompt=worst_prompt,
        decoding=statistics.geometric_mean(decoding) if decoding else None,
        first=statistics.geometric_mean(medians(lambda mine, base: base.first_seconds / mine.first_seconds)),
        total=sum(base.seconds for _, base in answers) / total_seconds,
        seconds=statistics.median(medians(lambda mine, _: mine.seconds)),
        first_seconds=statistics.median(medians(lambda mine, _: mine.first_seconds)),
        total_seconds=total_seconds,
        forks={prompt: places for prompt, places in forks.items() if places},
        n_same=len(answers) - sum(map(len, forks.values())),
        n_answers=len(answers),
    )


def figures_of_arms(samples: Sequence[Sample]) -> dict[str, Figures]:
    """Return figures by arm, over the baseline; of several llama-servers also the best of each prompt."""
    names = [*dict.fromkeys(sample.arm for sample in samples)]
    arms = {arm: answer_pairs(samples, arm, baseline_of(names)) for arm in names}
    peers = [each for arm, each in arms.items() if arm.startswith(PEER)]
    if len(peers) > 1:
        arms[PEER_BEST] = best_of(peers)
    return {arm: figures(each) for arm, each in arms.items()}


def speed_ups(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how many times as fast llamaspec's defaults are as plain decoding, by group of tasks."""
    groups = grouped(samples, "group").items()
    return {group: figures(answer_pairs(each, AUTO, PLAIN)).whole for group, each in groups}


def best_type(arms: Mapping[str, Figures]) -> str | None:
    """Return the llama-server that is fastest over all prompts; None without any."""
    peers = [arm for arm in arms if arm.startswith(PEER) and arm != PEER_BEST]
    return max(peers, key=lambda arm: arms[arm].whole, default=None)


def grouped(samples: Sequence[Sample], kind: str) -> dict[str, list[Sample]]:
    """Sort samples by one of their fields: group or task."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(getattr(sample, kind), []).append(sample)
    return by_name
