"""The figures of a benchmark, and the report of them that users share: one JSON object.

Ratios compare an arm's answer with the baseline's answer to the same request. A report holds no words of
prompts and answers, no path, and no name of a user or a machine. Strangers write reports, too, so
`read_report` checks sizes, types and every text. `bench_tables` shows them.
"""

from __future__ import annotations

import math
import platform
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import llamaspec
from llamaspec.errors import LlamaspecError, printable
from llamaspec.files import parse_json, read_file
from llamaspec.hub_cache import file_hash
from llamaspec.length.acceptance import LearnedPrior
from llamaspec.length.costs import CostCurve
from llamaspec.llama import runtime
from llamaspec.llama.gguf_file import file_parts, read_gguf
from llamaspec.llama.options import CACHE_TYPES, FLASH_ATTENTION, find_devices
from llamaspec.measure.bench import Sample, baseline_of
from llamaspec.measure.served_arms import AUTO, BEFORE, PEER, PEER_BEST, PEER_PLAIN, PLAIN
from llamaspec.measure.store import stored
from llamaspec.plan import DraftPlan

FORMAT = 2
MAX_BYTES = 4 << 20
_LONGEST = 600  # characters of a text
_UNSAFE = frozenset('`|\\<>"')  # what could end code or a cell of a table
_MOST = 1 << 60  # what any number may be
_HIDDEN = "..."
_PUBLIC = re.compile(r"-{1,2}[a-z][a-z-]*|[0-9.,]+")  # options and numbers
_PUBLIC_WORDS = {*CACHE_TYPES, *FLASH_ATTENTION, "none", "mtp", "ngram"}


# Figures

AnswerPairs: TypeAlias = dict[str, list[tuple[Sample, Sample]]]  # by prompt: an arm's answer, the baseline's


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm on several prompts: geometric means of ratios, medians of seconds; and all requests as one."""

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
    n_same: int  # texts that equal the baseline's
    n_answers: int


def answer_pairs(samples: Sequence[Sample], arm: str, baseline: str) -> AnswerPairs:
    """Return an arm's answers with those of another one to the same requests."""
    beside = {sample.request: sample for sample in samples if sample.arm == baseline}
    pairs: AnswerPairs = {}
    for sample in samples:
        if sample.arm == arm:
            pairs.setdefault(sample.prompt, []).append((sample, beside[sample.request]))
    return pairs


def _whole(pairs: Iterable[tuple[Sample, Sample]]) -> float:
    """Return how many times as fast a prompt is; an answer of other length is scaled to the baseline's."""
    return statistics.median(base.seconds / mine.seconds_for(base.n_tokens) for mine, base in pairs)


def best_of(arms: Sequence[AnswerPairs]) -> AnswerPairs:
    """Return for each prompt the answers of the arm that was fastest there, known afterwards."""
    return {prompt: max((arm[prompt] for arm in arms), key=_whole) for prompt in arms[0]}


def figures(pairs: AnswerPairs) -> Figures:
    """Fold the answers to several prompts, at least one: of each the medians over its repeats."""
    prompts = [*pairs.values()]
    wholes = {prompt: _whole(each) for prompt, each in pairs.items()}
    worst_prompt = min(wholes, key=wholes.__getitem__)
    rates = [
        [
            mine.tokens_per_second / base.tokens_per_second
            for mine, base in each
            if mine.tokens_per_second and base.tokens_per_second
        ]
        for each in prompts
    ]
    decoding = [statistics.median(each) for each in rates if each]
    logs = [math.log(whole) for whole in wholes.values()]
    forks = {
        prompt: tuple(mine.differs_at for mine, _ in each if mine.differs_at is not None)
        for prompt, each in pairs.items()
    }
    answers = [pair for each in prompts for pair in each]
    total_seconds = sum(mine.seconds_for(base.n_tokens) for mine, base in answers)
    return Figures(
        whole=math.exp(statistics.mean(logs)),
        spread=math.exp(statistics.stdev(logs)) if len(logs) > 1 else 1.0,
        worst=wholes[worst_prompt],
        worst_prompt=worst_prompt,
        decoding=statistics.geometric_mean(decoding) if decoding else None,
        first=statistics.geometric_mean(
            statistics.median(base.first_seconds / mine.first_seconds for mine, base in each)
            for each in prompts
        ),
        total=sum(base.seconds for _, base in answers) / total_seconds,
        seconds=statistics.median(statistics.median(mine.seconds for mine, _ in each) for each in prompts),
        first_seconds=statistics.median(
            statistics.median(mine.first_seconds for mine, _ in each) for each in prompts
        ),
        total_seconds=total_seconds,
        forks={prompt: places for prompt, places in forks.items() if places},
        n_same=len(answers) - sum(map(len, forks.values())),
        n_answers=len(answers),
    )


def figures_of_arms(samples: Sequence[Sample]) -> dict[str, Figures]:
    """By arm, next to the baseline; of several llama-servers also the best of each prompt."""
    names = [*dict.fromkeys(sample.arm for sample in samples)]
    arms = {arm: answer_pairs(samples, arm, baseline_of(names)) for arm in names}
    peers = [each for arm, each in arms.items() if arm.startswith(PEER)]
    if len(peers) > 1:
        arms[PEER_BEST] = best_of(peers)
    return {arm: figures(each) for arm, each in arms.items()}


def speed_ups(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how many times as fast llamaspec's defaults are as plain decoding, by group of tasks."""
    return {
        group: figures(answer_pairs(each, AUTO, PLAIN)).whole
        for group, each in grouped(samples, "group").items()
    }


def best_type(arms: Mapping[str, Figures]) -> str | None:
    """The llama-server that is fastest over all of them, which a user can know; None without any."""
    peers = [arm for arm in arms if arm.startswith(PEER) and arm != PEER_BEST]
    return max(peers, key=lambda arm: arms[arm].whole, default=None)


def grouped(samples: Sequence[Sample], kind: str) -> dict[str, list[Sample]]:
    """Samples by one of their fields: group or task."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(getattr(sample, kind), []).append(sample)
    return by_name


# The report


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """A model file."""

    name: str  # as the file calls itself
    architecture: str
    quantization: str
    n_bytes: int
    sha256: str | None  # None where it was not computed; of a model in parts that of the first


@dataclass(frozen=True, slots=True)
class ReportedMachine:
    """What computed."""

    system: str
    devices: tuple[str, ...]
    cores: int
    memory_bytes: int
    backend: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for."""

    max_tokens: int | None  # None = as the tasks say
    temperature: float
    repeats: int
    tasks: tuple[str, ...]  # none = all
    options: str  # of `serve`, names of models left out

    @property
    def command(self) -> str:
        """What was run, but for names and other arms."""
        words = [f"--task {shlex.quote(task)}" for task in self.tasks]
        words += [] if self.max_tokens is None else [f"-n {self.max_tokens}"]
        words += [f"-t {self.temperature:g}", f"-r {self.repeats}"]
        return " ".join(["llamaspec bench", *([self.options] if self.options else []), *words])


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run.

    Raises
    ------
    ValueError
        A text or a number is none that llamaspec writes.
    """

    format: int
    date: str
    machine: ReportedMachine
    versions: dict[str, str | None]
    target: ReportedModel
    drafts: tuple[ReportedModel, ...]
    has_heads: bool  # the target's own heads draft
    settings: Settings
    curve: CostCurve | None  # as far as it is known
    baseline: str  # the arm that ratios are to
    best_type: str | None  # the llama-server that is fastest over all prompts
    groups: dict[str, dict[str, Figures]]  # by group and arm; of several groups, all tasks come last
    tasks: dict[str, dict[str, Figures]]  # by task and arm
    to_best_type: dict[str, Figures]  # by group: `auto` next to the best type, if that is not the baseline
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"it has format {self.format}, this version reads {FORMAT}")
        arms = {frozenset(arms) for arms in self.tasks.values()}
        if not self.groups or len(arms) != 1 or not {self.baseline, AUTO} <= next(iter(arms)):
            raise ValueError("its tasks have not all the same arms, the baseline and auto among them")
        for value in _leaves(asdict(self)):
            if isinstance(value, str) and value != _text(value):
                raise ValueError(f"no report says {printable(value[:40])}")
            if isinstance(value, int | float) and not 0 <= value <= _MOST:
                raise ValueError(f"no report has the number {value}")

    @property
    def all_tasks(self) -> dict[str, Figures]:
        """By arm, over all tasks."""
        return [*self.groups.values()][-1]

    @property
    def baseline_name(self) -> str:
        """The baseline in words."""
        return f"{PEER} without a draft" if self.baseline == PEER_PLAIN else "plain decoding"

    @property
    def title(self) -> str:
        """The models."""
        drafts = [f"{draft.name} {draft.quantization}" for draft in self.drafts]
        drafts += ["its own prediction heads"] if self.has_heads else []
        return f"{self.target.name} {self.target.quantization}, draft: {', '.join(drafts) or 'none'}"


def _leaves(value: Any) -> Iterator[Any]:
    """Every text and number in it, keys included."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


# Making one


def make_report(
    samples: Sequence[Sample],
    plan: DraftPlan,
    settings: Mapping[str, Any],
    tasks: Sequence[str],
    options: Sequence[str],
    peer_version: str | None,
    *,
    with_hashes: bool,
) -> Report:
    """What samples of this machine say; `settings` are the numbers of `Settings`."""
    arms: dict[str, str] = {}
    for arm in dict.fromkeys(sample.arm for sample in samples):
        is_ours = arm in (PLAIN, AUTO, BEFORE) or arm.startswith(PEER)
        name = _text(arm) if is_ours else public_options(shlex.split(arm))
        arms[arm] = name if name not in arms.values() else f"{name} ({len(arms)})"
    shown = [
        replace(
            each,
            arm=arms[each.arm],
            group=_text(each.group),
            task=_text(each.task),
            prompt=_text(each.prompt),
        )
        for each in samples
    ]
    by_group = grouped(shown, "group")
    if len(by_group) > 1:
        by_group["all tasks"] = shown
    groups = {group: figures_of_arms(each) for group, each in by_group.items()}
    baseline, best = baseline_of(arms), best_type([*groups.values()][-1])
    peer = {} if peer_version is None else {PEER: _text(peer_version)}
    versions = {"llamaspec": llamaspec.__version__, "llama-cpp-python": version("llama-cpp-python")}
    return Report(
        format=FORMAT,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        machine=ReportedMachine(
            system=_text(f"{platform.system()} {platform.machine()}"),
            devices=tuple(_text(device.description) for device in find_devices()),
            cores=runtime.default_threads(),
            memory_bytes=runtime.total_bytes(),
            backend=_text(runtime.backend_description().replace(" = 1 |", "").replace(" :", ":")),
        ),
        versions={**versions, "python": platform.python_version(), **peer},
        target=_model(plan.target.path, with_hashes),
        drafts=tuple(_model(model.path, with_hashes) for model in plan.drafts),
        has_heads=plan.heads is not None,
        settings=Settings(**settings, tasks=tuple(map(_text, tasks)), options=public_options(options)),
        curve=None if (prior := stored(plan, LearnedPrior).value) is None else prior.curve,
        baseline=baseline,
        best_type=best,
        groups=groups,
        tasks={task: figures_of_arms(each) for task, each in grouped(shown, "task").items()},
        to_best_type={} if best in (None, baseline) else {
            group: figures(answer_pairs(each, AUTO, best)) for group, each in by_group.items()
        },
        samples=tuple(shown),
    )  # fmt: skip


def public_options(words: Sequence[str]) -> str:
    """Words of a command line, without names that a user chose."""
    return " ".join(word if _PUBLIC.fullmatch(word) or word in _PUBLIC_WORDS else _HIDDEN for word in words)


def _text(text: str) -> str:
    """As a report may have it: short, in one line, without what could end code or a cell of a table."""
    shown = ("?" if letter in _UNSAFE else letter for letter in printable(text[:_LONGEST]))
    return "".join(shown)[:_LONGEST]


def _model(path: Path, with_hash: bool) -> ReportedModel:
    from gguf import LlamaFileType  # a third of a second

    found = read_gguf(path)
    kinds = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    return ReportedModel(
        name=_text(found.texts.get("general.name") or found.architecture)[:80],
        architecture=_text(found.architecture),
        quantization=kinds.get(found.numbers.get("general.file_type", -1), "of unknown type"),
        n_bytes=sum(part.stat().st_size for part in file_parts(path)),
        sha256=file_hash(path, lambda n_bytes: None) if with_hash else None,
    )


# Reading one


def read_report(path: Path) -> Report:
    """A report of anybody; a LlamaspecError where it is none."""
    try:
        return parse_json(Report, read_file(path, MAX_BYTES))
    except OSError as error:
        raise LlamaspecError(f"cannot read {path}: {error.strerror}; name a file of bench --share") from error
    except ValueError as error:
        raise LlamaspecError(f"{path} is no report of bench --share: {error}; leave it out") from error
