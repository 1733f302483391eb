"""`llamaspec bench`: whole requests to servers with drafts and without, in turns, on a user's own models."""

from __future__ import annotations

import json
import platform
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from rich.bar import Bar
from rich.console import Console

import llamaspec
from llamaspec.cli.model_options import ModelChoice, find_files, model_options
from llamaspec.cli.options import DRAFTING, JSON_OPTION, Decorator, GroupedCommand, Separated, option_group
from llamaspec.cli.output import check_plot, print_table, save_figure, say
from llamaspec.cli.serve import check_installed, serve
from llamaspec.cli.signals import EXIT_INTERRUPTED
from llamaspec.errors import LlamaspecError, printable
from llamaspec.llama import runtime
from llamaspec.llama.gguf_file import check_gguf
from llamaspec.llama.options import find_devices
from llamaspec.measure.bench import (
    TASKS,
    Figures,
    Sample,
    ask_all,
    best_of,
    figures,
    fork,
    n_requests,
    prompt_figures,
    read_tasks,
)
from llamaspec.measure.served_arms import AUTO, PEER, PLAIN, own_arms, peer_arms, program_version, serving
from llamaspec.measure.store import PairFiles, stored_prior
from llamaspec.values import MTP

_COLUMNS = ("<arm", "whole", "spread", "worst", "<prompt", "s", "TTFT", "decoding", "same")
_LEGEND = (
    "whole, decoding: times as fast as plain, geometric mean; spread: a factor; worst: of one prompt; "
    "s, TTFT: median seconds of a request, and to its first token; same: texts that equal plain's"
)

_OPTIONS: tuple[Decorator, ...] = (
    click.option("--tasks", type=click.Path(path_type=Path), default=TASKS, show_default="those of llamaspec",
                 metavar="FILE", help="Other tasks, in a YAML file like that of the package."),
    click.option("--task", "names", multiple=True, metavar="NAME", help="Only this task; may be repeated."),
    click.option("--max-tokens", "-n", type=click.IntRange(min=1), default=256, show_default=True,
                 help="Of an answer."),
    click.option("--temperature", "-t", type=click.FloatRange(min=0.0), default=0.0, show_default=True,
                 help="0 = always the best token."),
    click.option("--repeats", "-r", type=click.IntRange(min=1), default=1, show_default=True,
                 help="Times that every request is asked."),
    click.option("--llama-server", metavar="PROGRAM", help="Also llama.cpp's server, from this file."),
    click.option("--spec-types", type=Separated("types", lambda text: tuple(text.split(","))),
                 metavar="TYPE,...", help="What llama-server drafts with, a server each; default: none, "
                 "draft-simple or draft-mtp if there is such a draft, ngram-simple and ngram-mod."),
    click.option("--against", type=click.Path(path_type=Path), metavar="DIR",
                 help="Also another checkout of llamaspec, in this folder."),
    click.option("--also", multiple=True, metavar="OPTIONS",
                 help="Also llamaspec serve with these options beside, such as '-k 4'; may be repeated."),
    click.option("--markdown", is_flag=True, help="The tables in Markdown."),
    click.option("--plot", type=click.Path(path_type=Path), metavar="FILE",
                 help="Draw the ratios as .png or .svg (needs matplotlib)."),
    JSON_OPTION,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What only `bench` can be asked for."""

    tasks: Path
    names: tuple[str, ...]
    max_tokens: int
    temperature: float
    repeats: int
    llama_server: str | None
    spec_types: tuple[str, ...] | None
    against: Path | None
    also: tuple[str, ...]
    markdown: bool
    plot: Path | None
    as_json: bool

    @property
    def settings(self) -> dict[str, Any]:
        """What every request says beside its messages."""
        return {"max_tokens": self.max_tokens, "temperature": self.temperature}


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec bench --target big-instruct.gguf --draft small-instruct.gguf
  llamaspec bench --pair qwen3-14b --llama-server llama.cpp/build/bin/llama-server --plot bench.png
  llamaspec bench --target big.gguf --draft small.gguf --task edit --task chat -n 1000 --json
""",
)
@option_group("bench", BenchOptions, _OPTIONS)
@model_options
@option_group("drafting", dict, DRAFTING)
def bench(bench: BenchOptions, models: ModelChoice, drafting: dict[str, Any]) -> None:
    """Measure whole requests, with drafts and without.

    Each arm is a server: plain (no draft), auto (llamaspec serve as it is by default), and others that are
    asked for. They take turns. Ratios are times as fast as plain, prompt included. Ctrl-C ends it and shows
    what was measured so far.
    """
    check_installed()
    if bench.plot is not None:
        check_plot(bench.plot)
    tasks, files = read_tasks(bench.tasks, bench.names), find_files(models)
    for model in (files.target, *files.draft_models):
        check_gguf(model.path)
    arms = [*own_arms([*_given()], bench.also, bench.against)]
    if bench.llama_server is not None:
        if shutil.which(bench.llama_server) is None:
            raise click.UsageError(f"--llama-server: {bench.llama_server} is no program; name its file")
        arms += peer_arms(bench.llama_server, files, bench.spec_types or ())
    samples: list[Sample] = []
    say(f"starting {len(arms)} servers, which take turns: {'; '.join(arm.name for arm in arms)}")
    total, fault, code = n_requests(tasks) * bench.repeats, None, 0
    try:
        with _ended_by_signals(), serving(arms) as asks:
            for done, each in enumerate(ask_all(asks, tasks, bench.settings, bench.repeats, say), 1):
                samples += each
                times = ", ".join(f"{sample.arm} {sample.answer.seconds:.2f} s" for sample in each)
                click.echo(f"{done}/{total} {each[0].prompt}: {times}", err=True)
    except KeyboardInterrupt:
        say(f"interrupted{'; this was measured so far' if samples else ''}")
        code = EXIT_INTERRUPTED
    except LlamaspecError as error:
        fault = error
    if samples:
        _show(samples, bench, files)
    if fault is not None:
        raise fault
    sys.exit(code)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the servers, too."""

    def end(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _given() -> Iterator[str]:
    """What the command line gives that `serve` takes, too."""
    context = click.get_current_context()
    known = {parameter.name for parameter in serve.params}
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in known or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            yield parameter.opts[0] if value else parameter.secondary_opts[0]
        elif isinstance(value, tuple) and not parameter.multiple:
            yield from (parameter.opts[0], ",".join(map(str, value)) or "none")
        else:
            for each in value if isinstance(value, tuple) else (value,):
                yield from (parameter.opts[0], "auto" if each is None else str(each))


# Output


def _by_arm(samples: Sequence[Sample]) -> dict[str, Figures]:
    arms = {arm: prompt_figures(samples, arm) for arm in dict.fromkeys(sample.arm for sample in samples)}
    peers = [each for arm, each in arms.items() if arm.startswith(PEER)]
    if len(peers) > 1:
        arms[f"{PEER}, best of each prompt"] = best_of(peers)
    return {arm: figures(each) for arm, each in arms.items()}


def _grouped(samples: Sequence[Sample], kind: str) -> dict[str, dict[str, Figures]]:
    names = dict.fromkeys(getattr(sample, kind) for sample in samples)
    return {name: _by_arm([each for each in samples if getattr(each, kind) == name]) for name in names}


def _show(samples: Sequence[Sample], options: BenchOptions, files: PairFiles) -> None:
    by_group, by_task = _grouped(samples, "group"), _grouped(samples, "task")
    if len(by_group) > 1:
        by_group["all tasks"] = _by_arm(samples)
    draft = files.draft.path.name if files.draft is not None else MTP if files.heads else "none"
    names = {"target": files.target.path.name, "draft": draft}
    settings = {**options.settings, "repeats": options.repeats}
    title = f"{names['target']}, draft {draft}; "
    title += ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in settings.items())
    machine, versions = _machine(), _versions(options.llama_server)
    is_aside = options.as_json and not options.markdown
    console = Console(stderr=is_aside, highlight=False, markup=False, soft_wrap=True)
    console.print(printable(f"{title}; llamaspec {versions['llamaspec']} on {', '.join(machine['devices'])}"))
    for group, arms in by_group.items():
        rows = [_row(arm, each, options.temperature) for arm, each in arms.items()]
        console.print(f"\n{'### ' * options.markdown}{group}{chr(10) * options.markdown}")
        if options.markdown:
            click.echo(_markdown(rows))
        else:
            print_table(_COLUMNS, rows, console)
    console.print(f"\n{_LEGEND}\n")
    for arm, each in _by_arm(samples).items():
        if each.forks and _is_comparable(arm, options.temperature):
            where = ", ".join(f"{prompt} at character {at[0]}" for prompt, at in each.forks.items())
            console.print(f"{arm}: other text than plain in {where}")
    if not options.markdown:
        _show_bars(by_task, console)
    if options.plot is not None:
        _draw(by_task, options.plot, title)
    if options.as_json:
        prior = stored_prior(files).value
        told = {
            "machine": machine,
            "versions": versions,
            "files": names,
            "settings": settings,
            "curve": None if prior is None else asdict(prior)["curve"],
            "groups": {
                group: {arm: asdict(each) for arm, each in arms.items()} for group, arms in by_group.items()
            },
            "samples": [*_samples_json(samples)],
        }
        click.echo(json.dumps(told))


def _is_comparable(arm: str, temperature: float) -> bool:
    """Whether an arm should write what plain writes: another program draws otherwise."""
    return arm != PLAIN and (temperature == 0 or not arm.startswith(PEER))


def _row(arm: str, each: Figures, temperature: float) -> tuple[str, ...]:
    ratios = (f"{each.whole:.2f}", f"{each.spread:.2f}", f"{each.worst:.2f}", each.worst_prompt)
    decoding = "" if each.decoding is None else f"{each.decoding:.2f}"
    same = f"{each.n_same}/{each.n_answers}" if _is_comparable(arm, temperature) else ""
    if arm == PLAIN:
        ratios = ("1.00", "", "", "")
    return (arm, *ratios, f"{each.seconds:.2f}", f"{each.first_seconds:.2f}", decoding, same)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    titles = [title.lstrip("<") for title in _COLUMNS]
    rules = ["---" if title.startswith("<") else "---:" for title in _COLUMNS]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, rules, *rows))


def _show_bars(by_task: Mapping[str, Mapping[str, Figures]], console: Console) -> None:
    most = max(each.whole for arms in by_task.values() for each in arms.values())
    rows = [
        (task if arm == AUTO else "", arm, Bar(most, 0, each.whole, width=40), f"{each.whole:.2f}")
        for task, arms in by_task.items()
        for arm, each in arms.items()
        if arm != PLAIN
    ]
    print_table(("<task", "<arm", "<", "whole"), rows, console)


def _draw(by_task: Mapping[str, Mapping[str, Figures]], path: Path, title: str) -> None:
    from matplotlib.figure import Figure  # an extra, which most people do without

    arms = [arm for arm in next(iter(by_task.values())) if arm != PLAIN]
    figure = Figure(figsize=(8, 1.5 + 0.25 * len(by_task) * (len(arms) + 1)), layout="constrained")
    axes, thick = figure.subplots(), 0.85 / len(arms)
    for i, arm in enumerate(arms):
        places = [at + i * thick for at in range(len(by_task))]
        bars = axes.barh(places, [each[arm].whole for each in by_task.values()], thick, label=arm)
        axes.bar_label(bars, fmt="%.2f", fontsize="small", padding=2)
    axes.set_yticks([at + (len(arms) - 1) * thick / 2 for at in range(len(by_task))], list(by_task))
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1, linestyle="--")
    axes.set(title=title, xlabel="whole request, times as fast as without drafts")
    axes.margins(y=0.01)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    save_figure(figure, path)


def _machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "devices": [device.description for device in find_devices()],
        "cores": runtime.default_threads(),
        "backend": runtime.backend_description(),
    }


def _versions(llama_server: str | None) -> dict[str, str | None]:
    own = {"llamaspec": llamaspec.__version__, "llama-cpp-python": version("llama-cpp-python")}
    peer = {} if llama_server is None else {PEER: program_version(llama_server)}
    return {**own, "python": platform.python_version(), **peer}


def _samples_json(samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Without any text, so that they can be shown to others."""
    plain = {sample.request: sample.answer.text for sample in samples if sample.arm == PLAIN}
    for sample in samples:
        told = asdict(sample)
        answer = told.pop("answer")
        del answer["text"], answer["reply"]
        yield {**told, **answer, "differs_at": fork(sample.answer.text, plain[sample.request])}
