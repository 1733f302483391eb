"""`llamaspec bench`: whole requests to servers with drafts and without, in turns, on a user's own models."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from rich.bar import Bar
from rich.console import Console

from llamaspec.cli.model_options import ModelChoice, find_files, model_options
from llamaspec.cli.options import DRAFTING, JSON_OPTION, Decorator, GroupedCommand, Separated, option_group
from llamaspec.cli.output import check_plot, check_writable, print_table, save_figure, say
from llamaspec.cli.serve import check_installed, serve
from llamaspec.cli.signals import EXIT_INTERRUPTED
from llamaspec.errors import LlamaspecError
from llamaspec.files import write_file
from llamaspec.llama.gguf_file import check_gguf
from llamaspec.measure.bench import (
    TASKS,
    Figures,
    Sample,
    ask_all,
    figures_of_arms,
    n_requests,
    read_tasks,
)
from llamaspec.measure.report import COLUMNS, Report, is_comparable, make_report, markdown, rows
from llamaspec.measure.served_arms import (
    AUTO,
    PEER,
    PEER_BEST,
    PLAIN,
    own_arms,
    peer_arms,
    program_version,
    serving,
)

_LEGEND = (
    "whole, decoding: times as fast as plain, geometric mean; spread: a factor; worst: of one prompt; "
    "s, TTFT: median seconds of a request, and to its first token; same: texts that equal plain's"
)

_OPTIONS: tuple[Decorator, ...] = (
    click.option("--tasks", type=click.Path(path_type=Path), default=TASKS, show_default="those of llamaspec",
                 metavar="FILE", help="Other tasks, in a YAML file like that of the package."),
    click.option("--task", "names", multiple=True, metavar="NAME", help="Only this task; may be repeated."),
    click.option("--max-tokens", "-n", type=click.IntRange(min=1), metavar="N",
                 help="Of an answer; default: as the task says, 1024 of an edit and 256 of all others."),
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
    click.option("--share", type=click.Path(path_type=Path), metavar="FILE",
                 help="Write what --json prints into a file to show to others: machine, versions, hashes of "
                 "models, costs, results; no texts, no paths, no names of yours."),
    JSON_OPTION,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What only `bench` can be asked for."""

    tasks: Path
    names: tuple[str, ...]
    max_tokens: int | None
    temperature: float
    repeats: int
    llama_server: str | None
    spec_types: tuple[str, ...] | None
    against: Path | None
    also: tuple[str, ...]
    markdown: bool
    plot: Path | None
    share: Path | None
    as_json: bool

    @property
    def settings(self) -> dict[str, Any]:
        """What every request says beside its messages."""
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {**limit, "temperature": self.temperature}


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec bench --target big-instruct.gguf --draft small-instruct.gguf
  llamaspec bench --pair qwen3-14b --llama-server llama.cpp/build/bin/llama-server --plot bench.png
  llamaspec bench --target big.gguf --draft small.gguf --task edit --task chat -n 1000 --share edits.json
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
    if bench.share is not None:
        if bench.tasks != TASKS:
            raise click.UsageError("--share compares with others, on the tasks of llamaspec; drop --tasks")
        check_writable(bench.share, "report")
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
        is_whole = fault is None and code == 0
        asked = {"max_tokens": bench.max_tokens, "temperature": bench.temperature, "repeats": bench.repeats}
        report = make_report(
            samples, files, asked, bench.names, [*_given()],
            bench.llama_server and program_version(bench.llama_server),
            with_hashes=bench.as_json or bench.share is not None,
        )  # fmt: skip
        _show(samples, report, bench)
        if bench.share is not None and is_whole:
            write_file(bench.share, f"{json.dumps(asdict(report), indent=1)}\n")
            say(f"wrote {bench.share}: no texts, no paths, no names of yours; look before you share it")
        elif bench.share is not None:
            say(f"{bench.share} was not written: the run is not whole")
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


def _show(samples: Sequence[Sample], report: Report, options: BenchOptions) -> None:
    is_aside = options.as_json and not options.markdown
    console = Console(stderr=is_aside, highlight=False, markup=False, soft_wrap=True)
    if options.markdown:
        click.echo(markdown(report))
    else:
        asked = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in options.settings.items())
        machine = f"llamaspec {report.versions['llamaspec']} on {', '.join(report.machine.devices)}"
        console.print(f"{report.title}; {asked}; {machine}")
        for group, arms in report.groups.items():
            console.print(f"\n{group}")
            print_table(COLUMNS, rows(arms, options.temperature), console)
    console.print(f"\n{_LEGEND}\n")
    for arm, each in figures_of_arms(samples).items():
        if each.forks and is_comparable(arm, options.temperature):
            where = ", ".join(f"{prompt} at character {at[0]}" for prompt, at in each.forks.items())
            console.print(f"{arm}: other text than plain in {where}")
    if not options.markdown:
        _show_bars(report.tasks, console)
    if options.plot is not None:
        draw(report, options.plot)
    if options.as_json:
        click.echo(json.dumps(asdict(report)))


def _show_bars(by_task: Mapping[str, Mapping[str, Figures]], console: Console) -> None:
    most = max(each.whole for arms in by_task.values() for each in arms.values())
    rows = [
        (task if arm == AUTO else "", arm, Bar(most, 0, each.whole, width=40), f"{each.whole:.2f}")
        for task, arms in by_task.items()
        for arm, each in arms.items()
        if arm != PLAIN
    ]
    print_table(("<task", "<arm", "<", "whole"), rows, console)


def draw(report: Report, path: Path) -> None:
    """Draw the ratios of a report by task; of several llama-servers only the best of each prompt."""
    from matplotlib import rc_context  # an extra, which most people do without
    from matplotlib.figure import Figure

    arms = [arm for arm in next(iter(report.tasks.values())) if arm != PLAIN]
    if PEER_BEST in arms:
        arms = [arm for arm in arms if arm == PEER_BEST or not arm.startswith(PEER)]
    names = {AUTO: "llamaspec", PEER_BEST: f"{PEER}'s best"}
    with rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "llamaspec"}):
        figure = Figure(figsize=(8, 1.5 + 0.17 * len(report.tasks) * (len(arms) + 1)), layout="constrained")
        axes, thick = figure.subplots(), 0.85 / len(arms)
        for i, arm in enumerate(arms):
            places = [at + i * thick for at in range(len(report.tasks))]
            ratios = [each[arm].whole for each in report.tasks.values()]
            bars = axes.barh(places, ratios, thick, label=names.get(arm, arm))
            axes.bar_label(bars, fmt="%.2f", fontsize="small", padding=2)
        middle = (len(arms) - 1) * thick / 2
        axes.set_yticks([at + middle for at in range(len(report.tasks))], list(report.tasks))
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=1, linestyle="--", zorder=0.5, label=PLAIN)
        axes.set(xlabel="whole request, times as fast as plain decoding")
        devices = ", ".join(dict.fromkeys(report.machine.devices))
        axes.set_title(f"{report.title}\n{devices}, {report.machine.cores} cores", fontsize="medium")
        axes.margins(y=0.01)
        figure.legend(loc="outside lower center", ncols=3, fontsize="small")
        save_figure(figure, path)
