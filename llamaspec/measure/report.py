"""The report of a benchmark, which users share as one JSON object, and its tables.

A report holds no words of prompts and answers, no paths, and no names of users or machines. All its figures
follow from its samples. It may come from a stranger, so in Markdown every text of it is code, without
characters that could end the code.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llamaspec
from llamaspec.errors import LlamaspecError, printable
from llamaspec.files import file_hash, parse_json, read_file
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.prior import LearnedPrior
from llamaspec.llama import resources
from llamaspec.llama.file_facts import file_facts
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.llama.options import CACHE_TYPES, FLASH_ATTENTION
from llamaspec.measure.bench import (
    Figures,
    Sample,
    answer_pairs,
    baseline_of,
    best_type,
    figures,
    figures_of_arms,
    grouped,
)
from llamaspec.measure.machine import look_at_machine
from llamaspec.measure.served_arms import AUTO, BEFORE, PEER, PEER_PLAIN, PLAIN
from llamaspec.measure.store import stored
from llamaspec.plan import DraftPlan

FORMAT = 2
MAX_BYTES = 4 << 20
_LONGEST, _LONGEST_NAME = 600, 80  # characters of any text, and of the name of a model
_LARGEST = 1 << 50  # bytes of a file or of the memory
_UNSAFE = str.maketrans(dict.fromkeys('`|\\<>"', "?"))  # could end code or a cell of a table
_HIDDEN = "..."
_PUBLIC = re.compile(r"-{1,2}[a-z][a-z-]*|[0-9.,]+")  # options and numbers
_PUBLIC_WORDS = {*CACHE_TYPES, *FLASH_ATTENTION, "none", "mtp", "ngram"}
SPEED = ("<arm", "whole", "spread", "worst", "<prompt", "decoding", "first", "total")
ANSWERS = ("<arm", "s", "first s", "total s", "same text", "accepted drafts")


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """A model file."""

    name: str  # from the file's metadata
    architecture: str
    quantization: str
    n_bytes: int
    sha256: str | None  # None if not computed; of the first part if the model is split into files


@dataclass(frozen=True, slots=True)
class ReportedMachine:
    """The machine."""

    system: str
    devices: tuple[str, ...]
    cores: int
    memory_bytes: int
    backend: str


@dataclass(frozen=True, slots=True)
class Settings:
    """How the tasks were run."""

    max_tokens: int | None = None  # None = as each task says
    temperature: float = 0.0
    repeats: int = 1
    tasks: tuple[str, ...] = ()  # empty = all
    options: str = ""  # of `serve`, without names that the user chose

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of every request."""
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {**limit, "temperature": self.temperature}

    @property
    def command(self) -> str:
        """The command line, without names that the user chose and without further arms."""
        words = [f"--task {shlex.quote(task)}" for task in self.tasks]
        words += [] if self.max_tokens is None else [f"-n {self.max_tokens}"]
        words += [f"-t {self.temperature:g}", f"-r {self.repeats}"]
        return " ".join(["llamaspec bench", *([self.options] if self.options else []), *words])


@dataclass(frozen=True)
class Report:
    """A whole run; ValueError if its samples do not belong together, or if it has another format."""

    format: int
    date: str
    machine: ReportedMachine
    versions: dict[str, str | None]
    target: ReportedModel
    drafts: tuple[ReportedModel, ...]
    has_heads: bool  # the target's own prediction heads draft
    settings: Settings
    curve: CostCurve | None  # None if nothing is known of costs
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"it has format {self.format}, this version reads {FORMAT}")
        files = [model.n_bytes for model in (self.target, *self.drafts)]
        if not all(0 <= size <= _LARGEST for size in (*files, self.machine.memory_bytes, self.machine.cores)):
            raise ValueError("the size of a file, of the memory or of the processor is impossible")
        arms: dict[object, list[str]] = {}
        for each in self.samples:
            arms.setdefault((each.group, each.task, *each.request), []).append(each.arm)
        kinds = {tuple(sorted(names)) for names in arms.values()}
        if len(kinds) != 1 or not {self.baseline, AUTO} <= {*next(iter(kinds))}:
            raise ValueError("each request needs an answer of every arm, the baseline and auto among them")

    @cached_property
    def baseline(self) -> str:
        """The arm that others are compared with."""
        return baseline_of({sample.arm for sample in self.samples})

    @cached_property
    def groups(self) -> dict[str, dict[str, Figures]]:
        """Figures by group and arm; if there are several groups, all tasks come last."""
        return {group: figures_of_arms(each) for group, each in self._by_group.items()}

    @cached_property
    def tasks(self) -> dict[str, dict[str, Figures]]:
        """Figures by task and arm."""
        return {task: figures_of_arms(each) for task, each in grouped(self.samples, "task").items()}

    @cached_property
    def best_type(self) -> str | None:
        """The llama-server that is fastest over all prompts; None if there is none."""
        return best_type(self.all_tasks)

    @cached_property
    def to_best_type(self) -> dict[str, Figures]:
        """Figures of `auto` by group, compared with the best type; empty if that is the baseline."""
        if self.best_type in (None, self.baseline):
            return {}
        return {
            group: figures(answer_pairs(each, AUTO, str(self.best_type)))
            for group, each in self._by_group.items()
        }

    @property
    def _by_group(self) -> dict[str, Sequence[Sample]]:
        groups: dict[str, Sequence[Sample]] = {**grouped(self.samples, "group")}
        return {**groups, "all tasks": self.samples} if len(groups) > 1 else groups

    @property
    def all_tasks(self) -> dict[str, Figures]:
        """Figures by arm, over all tasks."""
        return [*self.groups.values()][-1]

    @property
    def baseline_name(self) -> str:
        """The baseline in words."""
        return f"{PEER} without a draft" if self.baseline == PEER_PLAIN else "plain decoding"

    @property
    def title(self) -> str:
        """The models in words."""
        drafts = [f"{draft.name} {draft.quantization}" for draft in self.drafts]
        drafts += ["its own prediction heads"] if self.has_heads else []
        return f"{self.target.name} {self.target.quantization}, draft: {', '.join(drafts) or 'none'}"

    def as_json(self) -> dict[str, Any]:
        """Return the report and its figures, for JSON."""
        return {
            **asdict(self),
            "baseline": self.baseline,
            "best_type": self.best_type,
            "groups": {group: _figures_json(arms) for group, arms in self.groups.items()},
            "tasks": {task: _figures_json(arms) for task, arms in self.tasks.items()},
            "to_best_type": _figures_json(self.to_best_type),
        }


def _figures_json(by_name: Mapping[str, Figures]) -> dict[str, Any]:
    return {name: {**asdict(each), "n_same": each.n_same} for name, each in by_name.items()}


# Making and reading a report


def make_report(
    samples: Sequence[Sample],
    plan: DraftPlan,
    settings: Settings,
    peer_version: str | None,
    *,
    with_hashes: bool,
) -> Report:
    """Make a report of samples that were measured on this machine; names that the user chose are hidden."""
    arms: dict[str, str] = {}
    for arm in dict.fromkeys(sample.arm for sample in samples):
        is_ours = arm in (PLAIN, AUTO, BEFORE) or arm.startswith(PEER)
        name = arm if is_ours else public_options(shlex.split(arm))
        arms[arm] = name if name not in arms.values() else f"{name} ({len(arms)})"
    machine, prior = look_at_machine(), stored(plan, LearnedPrior)
    versions = {"llamaspec": llamaspec.__version__, "llama-cpp-python": version("llama-cpp-python")}
    peer = {} if peer_version is None else {PEER: printable(peer_version)}
    return Report(
        format=FORMAT,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        machine=ReportedMachine(
            system=f"{platform.system()} {platform.machine()}",
            devices=tuple(device.description for device in machine.devices),
            cores=machine.n_physical,
            memory_bytes=resources.total_bytes(),
            backend=machine.backend,
        ),
        versions={**versions, "python": platform.python_version(), **peer},
        target=_model(plan.target.path, with_hashes),
        drafts=tuple(_model(model.path, with_hashes) for model in plan.models[1:]),
        has_heads=plan.heads is not None,
        settings=settings,
        curve=None if prior is None else prior.curve,
        samples=tuple(replace(each, arm=arms[each.arm]) for each in samples),
    )


def public_options(words: Sequence[str]) -> str:
    """Return the words of a command line, with names that the user chose hidden."""
    return " ".join(word if _PUBLIC.fullmatch(word) or word in _PUBLIC_WORDS else _HIDDEN for word in words)


def _model(path: Path, with_hash: bool) -> ReportedModel:
    found, name = file_facts(path), read_gguf(path).text("general.name")
    return ReportedModel(
        name=printable(name or found.architecture)[:_LONGEST_NAME],
        architecture=printable(found.architecture),
        quantization=found.quantization or "of unknown type",
        n_bytes=found.n_bytes,
        sha256=file_hash(path, lambda n_bytes: None) if with_hash else None,
    )


def read_report(path: Path) -> Report:
    """Read a report, whoever wrote it, and compute its figures again; LlamaspecError if it cannot be used."""
    try:
        return parse_json(Report, read_file(path, MAX_BYTES), unknown="ignore")
    except OSError as error:
        raise LlamaspecError(f"cannot read {path}: {error.strerror}; name a file of bench --share") from error
    except ValueError as error:
        raise LlamaspecError(f"{path} is not a report of bench --share: {error}; leave it out") from error


# Tables


def is_comparable(arm: str, report: Report) -> bool:
    """Return whether an arm should generate what the baseline does; programs agree at temperature 0 only."""
    is_ours = not any(name.startswith(PEER) for name in (arm, report.baseline))
    return arm != report.baseline and (is_ours or report.settings.temperature == 0)


def tables(report: Report, group: str) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Return the columns and rows of a group's tables, with a row for each arm: speed, then answers."""
    arms = report.groups[group]
    return [
        (SPEED, [_speed(arm, each, report) for arm, each in arms.items()]),
        (ANSWERS, [_answers(arm, each, report) for arm, each in arms.items()]),
    ]


def _shown(arm: str, report: Report) -> str:
    return f"{arm} (best type)" if arm == report.best_type else arm


def _speed(arm: str, each: Figures, report: Report) -> tuple[str, ...]:
    if arm == report.baseline:
        return (_shown(arm, report), "1.00", "", "", "", "1.00", "1.00", "1.00")
    return (
        _shown(arm, report),
        f"{each.whole:.2f}",
        f"{each.spread:.2f}",
        f"{each.worst:.2f}",
        each.worst_prompt,
        "" if each.decoding is None else f"{each.decoding:.2f}",
        f"{each.first:.2f}",
        f"{each.total:.2f}",
    )


def _answers(arm: str, each: Figures, report: Report) -> tuple[str, ...]:
    seconds = [f"{number:.2f}" for number in (each.seconds, each.first_seconds, each.total_seconds)]
    same = f"{each.n_same}/{each.n_answers}" if is_comparable(arm, report) else ""
    accepted = f"{each.n_accepted}/{each.n_drafted}" if each.n_drafted else ""
    return (_shown(arm, report), *seconds, same, accepted)


def next_to_best_type(report: Report, group: str, quote: Callable[[str], str] = str) -> str | None:
    """Return a line that compares `auto` with llama-server's best type; None if that is the baseline."""
    each = report.to_best_type.get(group)
    if each is None:
        return None
    parts = [f"whole {each.whole:.2f}", f"worst {each.worst:.2f} ({quote(each.worst_prompt)})"]
    parts += [] if each.decoding is None else [f"decoding {each.decoding:.2f}"]
    parts += [f"first {each.first:.2f}", f"total {each.total:.2f}"]
    return f"{quote(AUTO)} next to {quote(str(report.best_type))}: {', '.join(parts)}."


def in_short(report: Report) -> str:
    """Return the result in one sentence."""
    gains = [f"{arms[AUTO].whole:.2f}× as fast for {group}" for group, arms in report.groups.items()]
    return (
        f"In short: with its defaults, llamaspec is {', '.join(gains)}, compared with {report.baseline_name}."
    )


def markdown(report: Report) -> str:
    """Return a section of a page: models, machine, costs, and a table for each group."""
    machine = report.machine
    lines = [f"### {_code(report.title)}", ""]
    parts = [_code(name) for name in dict.fromkeys(machine.devices)]
    parts += [f"{machine.cores} cores", f"{machine.memory_bytes / 1e9:.1f} GB", _code(machine.system)]
    parts += [_code(f"{name} {number}") for name, number in report.versions.items() if number]
    lines += [f"{', '.join(parts)}; {_code(report.date)}.", ""]
    models = {"target": report.target, **{f"draft {i}": each for i, each in enumerate(report.drafts, 1)}}
    sizes = [
        f"{role} {each.n_bytes / 1e9:.2f} GB"
        + (f", SHA-256 {_code(each.sha256[:12])}" if each.sha256 else "")
        for role, each in models.items()
    ]
    lines += [f"Files: {'; '.join(sizes)}.", ""]
    if report.curve is not None and len(report.curve.widths) > 1:
        lines += [_costs(report.curve), ""]
    lines += [f"{_code(report.settings.command)}. Ratios are to {report.baseline_name}.", ""]
    for group in report.groups:
        lines += [f"**{_code(group)}**", ""]
        for columns, cells in tables(report, group):
            lines += [_table(columns, cells), ""]
        line = next_to_best_type(report, group, _code)
        lines += [] if line is None else [line, ""]
    return "\n".join(lines)


def _costs(curve: CostCurve) -> str:
    single, *wider = curve.verify_seconds
    widths = ", ".join(map(str, curve.widths[1:]))
    times = ", ".join(f"{seconds / single:.2f}" for seconds in wider)
    step = f"; a draft token {curve.draft_step_seconds / single:.2f}" if curve.draft_step_seconds else ""
    return f"Batches of {widths} cost {times} times a single token{step}."


def _table(columns: Sequence[str], cells: Sequence[tuple[str, ...]]) -> str:
    titles = [title.lstrip("<") for title in columns]
    left = [title.startswith("<") for title in columns]
    rules = ["---" if is_left else "---:" for is_left in left]
    shown = [
        [_code(cell) if is_left else cell for cell, is_left in zip(row, left, strict=True)] for row in cells
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, rules, *shown))


def _code(text: str) -> str:
    safe = printable(text[:_LONGEST]).translate(_UNSAFE)
    return f"`{safe}`" if safe else ""
