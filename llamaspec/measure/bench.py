"""The benchmark of whole requests: its tasks, the turns of its arms, and the figures.

Arms take turns request by request, in rotated order, with the same prompts, so that a machine that warms up
or is busy slows all alike. Every conversation begins with a number of its own, so that no arm finds its
prompt in a cache; within it the prefix grows, and caches count. Ratios are to the plain arm's answer to the
same request.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from llamaspec.errors import PromptError
from llamaspec.files import parse_json, read_file
from llamaspec.measure.served_arms import PEER, PEER_BEST, PLAIN, Answer, Ask, RefusedError

TASKS = Path(__file__).with_name("tasks.yaml")
WARM_UP = "Count from one to thirty, in words."
WARM_UP_TOKENS = 24
_MAX_TASKS_BYTES = 4 << 20

Message = dict[str, str]  # role and content


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


def read_tasks(path: Path = TASKS, names: Sequence[str] = ()) -> list[BenchTask]:
    """The tasks of a YAML file: all, or those of these names.

    Raises
    ------
    PromptError
        The file cannot be read or used, or has no task of a name.
    """
    try:
        content = yaml.safe_load(read_file(path, _MAX_TASKS_BYTES))
        found = parse_json(TaskFile, json.dumps(content))
    except OSError as error:
        raise PromptError(f"cannot read the tasks {path}: {error.strerror}; name a YAML file") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise PromptError(f"{path} is no file of tasks: {reason}; write it like {TASKS.name}") from error
    known = [task.name for task in found.tasks]
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        told = ", ".join(known) or "none"
        raise PromptError(f"there is no task {', '.join(unknown)} in {path.name}; choose one of {told}")
    chosen = (task for task in found.tasks if not names or task.name in names)
    return [_filled(task, found.files) for task in chosen]


def _filled(task: BenchTask, files: Mapping[str, str]) -> BenchTask:
    def fill(text: str) -> str:
        for name, content in files.items():
            text = text.replace(f"<<{name}>>", content)
        return text

    turns = tuple(Turn(fill(turn.user), turn.answer) for turn in task.turns)
    return replace(task, prompts=tuple(map(fill, task.prompts)), turns=turns)


@dataclass(frozen=True, slots=True)
class Sample:
    """One arm's answer to one request."""

    arm: str
    group: str
    task: str
    prompt: str  # which of the task's, such as "edit 2"
    repeat: int
    answer: Answer

    @property
    def request(self) -> tuple[str, int]:
        """What it shares with the other arms' answers to the same request."""
        return self.prompt, self.repeat


def n_requests(tasks: Sequence[BenchTask]) -> int:
    """Requests to each arm, without repeats."""
    return sum(len(turns) for task in tasks for turns in task.conversations())


def ask_all(
    asks: Mapping[str, Ask],
    tasks: Sequence[BenchTask],
    settings: Mapping[str, Any],
    n_repeats: int,
    tell: Callable[[str], None],
) -> Iterator[list[Sample]]:
    """Put every request to every arm; gives the samples of one request at a time.

    Parameters
    ----------
    asks : Mapping[str, Ask]
        The arms by name; one is `PLAIN`. The first answer of each is not counted.
    settings : Mapping[str, Any]
        What all requests say beside their messages; a max_tokens among them counts instead of the tasks' own.
    tell : Callable[[str], None]
        Hears of a conversation that an arm refuses; it is left out from there on.
    """
    order = [*asks]
    for name in order:
        messages = [{"role": "user", "content": WARM_UP}]
        asks[name]({**settings, "messages": messages, "max_tokens": WARM_UP_TOKENS})
    n_asked, n_begun = 0, 0
    for repeat in range(n_repeats):
        for task in tasks:
            for i, turns in enumerate(task.conversations()):
                n_begun += 1
                said: dict[str, list[Message]] = {name: [] for name in order}  # an arm goes on from its own
                for j, turn in enumerate(turns):
                    number = "" if j else f"[{n_begun}]\n"
                    more = {"max_tokens": task.max_tokens, **settings, "seed": n_asked, **_format(task)}
                    for messages in said.values():
                        messages.append({"role": "user", "content": number + turn.user})
                    label, shift = _label(task, i, j), n_asked % len(order)
                    n_asked += 1
                    try:
                        answers = {
                            name: asks[name]({**more, "messages": [*said[name]]})
                            for name in order[shift:] + order[:shift]
                        }
                    except RefusedError as error:
                        tell(f"{label} is left out: {error}")
                        break
                    yield [
                        Sample(name, task.group, task.name, label, repeat, answers[name]) for name in order
                    ]
                    for name, messages in said.items():
                        reply = answers[name].reply if turn.answer is None else turn.answer
                        messages.append({"role": "assistant", "content": reply or "…"})


def _format(task: BenchTask) -> dict[str, Any]:
    if task.json_schema is None:
        return {}
    wanted = {"name": "answer", "strict": True, "schema": task.json_schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def _label(task: BenchTask, conversation: int, turn: int) -> str:
    conversations = task.conversations()
    label = task.name if len(conversations) == 1 else f"{task.name} {conversation + 1}"
    return label if len(conversations[conversation]) == 1 else f"{label}, turn {turn + 1}"


# Figures


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """One arm on one prompt: medians over the repeats; ratios to the plain arm's answer beside each."""

    whole: float  # times as fast, whole request; an answer of other length is scaled to plain's
    decoding: float | None  # tokens per second after the first
    seconds: float
    first_seconds: float
    forks: tuple[int, ...]  # the first characters in which texts differ from plain's
    n_answers: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm on several prompts: geometric means of ratios, medians of seconds."""

    whole: float
    spread: float  # factor: exp of the standard deviation of the logarithms
    worst: float
    worst_prompt: str
    decoding: float | None
    seconds: float
    first_seconds: float
    forks: dict[str, tuple[int, ...]]  # by prompt
    n_same: int  # texts that equal the plain arm's
    n_answers: int


def fork(text: str, plain: str) -> int | None:
    """The first character in which two texts differ; None where they are the same."""
    if text == plain:
        return None
    pairs = enumerate(zip(text, plain, strict=False))
    return next((i for i, (mine, its) in pairs if mine != its), min(len(text), len(plain)))


def prompt_figures(samples: Sequence[Sample], arm: str) -> dict[str, PromptFigures]:
    """One arm by prompt."""
    plain = {sample.request: sample.answer for sample in samples if sample.arm == PLAIN}
    pairs: dict[str, list[tuple[Answer, Answer]]] = {}
    for sample in samples:
        if sample.arm == arm:
            pairs.setdefault(sample.prompt, []).append((sample.answer, plain[sample.request]))
    return {prompt: _of_prompt(each) for prompt, each in pairs.items()}


def _of_prompt(pairs: Sequence[tuple[Answer, Answer]]) -> PromptFigures:
    rates = [(mine.tokens_per_second, plain.tokens_per_second) for mine, plain in pairs]
    decoding = [mine / plain for mine, plain in rates if mine and plain]
    forks = [fork(mine.text, plain.text) for mine, plain in pairs]
    return PromptFigures(
        whole=statistics.median(plain.seconds / mine.seconds_for(plain.n_tokens) for mine, plain in pairs),
        decoding=statistics.median(decoding) if decoding else None,
        seconds=statistics.median(mine.seconds for mine, _ in pairs),
        first_seconds=statistics.median(mine.first_seconds for mine, _ in pairs),
        forks=tuple(at for at in forks if at is not None),
        n_answers=len(pairs),
    )


def best_of(arms: Sequence[Mapping[str, PromptFigures]]) -> dict[str, PromptFigures]:
    """For each prompt the figures of the arm that was fastest there, known afterwards."""
    return {prompt: max((arm[prompt] for arm in arms), key=lambda each: each.whole) for prompt in arms[0]}


def figures(prompts: Mapping[str, PromptFigures]) -> Figures:
    """Fold the figures of several prompts, at least one."""
    logs = [math.log(each.whole) for each in prompts.values()]
    worst_prompt = min(prompts, key=lambda prompt: prompts[prompt].whole)
    decoding = [each.decoding for each in prompts.values() if each.decoding is not None]
    n_answers = sum(each.n_answers for each in prompts.values())
    return Figures(
        whole=math.exp(statistics.mean(logs)),
        spread=math.exp(statistics.stdev(logs)) if len(logs) > 1 else 1.0,
        worst=prompts[worst_prompt].whole,
        worst_prompt=worst_prompt,
        decoding=statistics.geometric_mean(decoding) if decoding else None,
        seconds=statistics.median(each.seconds for each in prompts.values()),
        first_seconds=statistics.median(each.first_seconds for each in prompts.values()),
        forks={prompt: each.forks for prompt, each in prompts.items() if each.forks},
        n_same=n_answers - sum(len(each.forks) for each in prompts.values()),
        n_answers=n_answers,
    )


def figures_of_arms(samples: Sequence[Sample]) -> dict[str, Figures]:
    """By arm; of several llama-servers also the best of each prompt."""
    arms = {arm: prompt_figures(samples, arm) for arm in dict.fromkeys(sample.arm for sample in samples)}
    peers = [each for arm, each in arms.items() if arm.startswith(PEER)]
    if len(peers) > 1:
        arms[PEER_BEST] = best_of(peers)
    return {arm: figures(each) for arm, each in arms.items()}


def grouped(samples: Sequence[Sample], kind: str) -> dict[str, dict[str, Figures]]:
    """The figures of arms by a field of the samples: group or task."""
    names = dict.fromkeys(getattr(sample, kind) for sample in samples)
    return {
        name: figures_of_arms([each for each in samples if getattr(each, kind) == name]) for name in names
    }
