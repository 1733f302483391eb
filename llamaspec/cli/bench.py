"""`llamaspec bench`: send whole requests to servers with drafts and without, which take turns."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource
from rich.console import Console

from llamaspec.cli.model_options import ModelChoice, check_files, find_plan, model_options
from llamaspec.cli.option_groups import Decorator, GroupedCommand, Integer, Number, option_group
from llamaspec.cli.options import JSON_OPTION, drafting_options
from llamaspec.cli.output import SlowProgress, check_writable, print_table, say, warns_of_load
from llamaspec.cli.serve import check_installed, serve
from llamaspec.cli.signals import EXIT_INTERRUPTED
from llamaspec.errors import LlamaspecError
from llamaspec.files import write_file
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.measure.bench import Sample, ask_all, speed_ups
from llamaspec.measure.machine import LoadWatch
from llamaspec.measure.report import (
    Report,
    Settings,
    in_short,
    is_comparable,
    make_report,
    markdown,
    next_to_best_type,
    public_options,
    tables,
)
from llamaspec.measure.served_arms import own_arms, peer_arms, program_version, serving
from llamaspec.measure.store import keep_gains, key_of
from llamaspec.measure.tasks import TASKS, context_for, quick_tasks, read_tasks
from llamaspec.opening import Drafting
from llamaspec.plan import DraftPlan
from llamaspec.values import MTP, Copying

_WIDTH = 140  # least columns of a table: a terminal may wrap its lines, but nothing is cut off
QUICK_TYPE = "ngram-mod"  # llama-server's speculation type for a quick comparison
_LEGEND = (
    "speed-ups over {0}, geometric means. whole: entire requests; decoding: after the first text; first: up "
    "to the first text; total: all requests together; spread: a factor; worst: the worst prompt. s, first s: "
    "medians; same text: as {0}; accepted drafts: of those that were verified"
)

_OPTIONS: tuple[Decorator, ...] = (
    click.option("--tasks", type=click.Path(path_type=Path), default=TASKS, show_default="those of llamaspec",
                 metavar="FILE", help="YAML file with other tasks, in the format of llamaspec's own."),
    click.option("--task", "names", multiple=True, metavar="NAME",
                 help="Only this task or group of tasks; may be repeated."),
    click.option("--quick", is_flag=True,
                 help="Only one question, one program to write and one edit, with short answers."),
    click.option("--max-tokens", "-n", type=Integer(min=1), metavar="N",
                 help="Maximum tokens per answer; default: set by the task, 1024 for edits, else 256."),
    click.option("--temperature", "-t", type=Number(min=0.0), default=0.0, show_default=True,
                 help="0 = always the most probable token."),
    click.option("--repeats", "-r", type=Integer(min=1), default=1, show_default=True,
                 help="Runs of each request."),
    click.option("--llama-server", metavar="PROGRAM",
                 help="Also measure llama.cpp's server, started with this program. Speed-ups are then "
                 "relative to that server without a draft."),
    click.option("--spec-types", metavar="TYPE,...",
                 help="Speculation types of llama-server to measure besides none; default: draft-simple or "
                 "draft-mtp if there is such a draft, ngram-simple and ngram-mod; with --quick: ngram-mod."),
    click.option("--against", type=click.Path(path_type=Path), metavar="DIR",
                 help="Also measure the checkout of llamaspec in this folder."),
    click.option("--also", multiple=True, metavar="OPTIONS",
                 help="Also measure llamaspec serve with these additional options, such as '-k 4', or "
                 "'--draft none' for copies alone; may be repeated."),
    click.option("--markdown", is_flag=True, help="Print the tables in Markdown."),
    click.option("--share", type=click.Path(path_type=Path), metavar="FILE",
                 help="Write what --json prints to a file that you can share. It has the machine, versions, "
                 "hashes of models, costs and results, but no texts, paths or names of yours."),
    JSON_OPTION,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options that only `bench` has."""

    tasks: Path
    names: tuple[str, ...]
    quick: bool
    max_tokens: int | None
    temperature: float
    repeats: int
    llama_server: str | None
    spec_types: str | None
    against: Path | None
    also: tuple[str, ...]
    markdown: bool
    share: Path | None
    as_json: bool


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec bench --target big-instruct.gguf --draft small-instruct.gguf --quick
  llamaspec bench --pair qwen3-14b --llama-server llama.cpp/build/bin/llama-server
  llamaspec bench --target big.gguf --draft small.gguf --task edits --task chat -n 1000 --share edits.json
""",
)
@option_group("bench", BenchOptions, _OPTIONS)
@model_options
@drafting_options
def bench(bench: BenchOptions, models: ModelChoice, drafting: Drafting) -> None:
    """Measure whole requests, with drafts and without.

    Each arm is a server: plain (no draft, no copies), auto (llamaspec serve with its defaults), and others on
    request. They take turns. Speed-ups are over plain, or over llama-server without a draft if that is
    measured. Without --n-ctx, the context fits the longest conversation. Ctrl-C stops the benchmark and
    shows the results so far.
    """
    _check(bench)
    tasks = quick_tasks() if bench.quick else read_tasks(bench.tasks, bench.names)
    plan, given = _plan_and_options(models, context_for(tasks, bench.max_tokens))
    arms = [*own_arms(given, bench.also, bench.against)]
    if bench.llama_server is not None:
        types = bench.spec_types or (QUICK_TYPE if bench.quick else "")
        arms += peer_arms(bench.llama_server, plan, types.split(",") if types else ())
    shown = [*given, *(["--quick"] if bench.quick else [])]
    if bench.tasks != TASKS:
        shown += ["--tasks", str(bench.tasks)]
    settings = Settings(
        bench.max_tokens, bench.temperature, bench.repeats, bench.names, public_options(shown)
    )
    key, samples = key_of(plan), list[Sample]()
    say(f"starting {len(arms)} servers, which take turns: {'; '.join(arm.name for arm in arms)}")
    fault, code, n_taken = None, 0, 0.0
    try:
        with _ended_by_signals(), ExitStack() as started:
            with SlowProgress("starting the servers"):
                servers = started.enter_context(serving(arms))
            asks, watch = {name: server.ask for name, server in servers.items()}, LoadWatch()
            for each in ask_all(asks, tasks, settings.fields, settings.repeats, say):
                samples += each
            n_taken = watch.n_taken()
    except KeyboardInterrupt:
        say(f"interrupted{'; results so far:' if samples else ''}")
        code = EXIT_INTERRUPTED
    except LlamaspecError as error:
        fault = error
    if samples:
        is_whole = fault is None and code == 0
        peer_version = None if bench.llama_server is None else program_version(bench.llama_server)
        with_hashes = bench.as_json or bench.share is not None
        report = make_report(samples, plan, settings, peer_version, with_hashes=with_hashes)
        is_usual = drafting == Drafting() and settings.temperature == 0 and settings.max_tokens is None
        is_usual &= bench.repeats == 1  # later runs copy from the answers of earlier ones
        is_calm = is_whole and not warns_of_load(n_taken, "these results are not kept as the verdict")
        if is_calm and is_usual and plan.copying is Copying.WEIGHED and bench.tasks == TASKS:
            keep_gains(key, speed_ups(samples))
        _show(report, bench)
        if bench.share is not None and is_whole:
            write_file(bench.share, f"{json.dumps(report.as_json(), indent=1)}\n")
            say(f"wrote {bench.share}: no texts, paths or names of yours; check it before you share it")
        elif bench.share is not None:
            say(f"{bench.share} was not written: the run is incomplete")
    if fault is not None:
        raise fault
    sys.exit(code)


def _check(bench: BenchOptions) -> None:
    """Raise, before anything is fetched or started, if an option would fail at the end."""
    check_installed()
    if bench.quick and (bench.names or bench.tasks != TASKS or bench.share is not None):
        raise click.UsageError(
            "--quick chooses the tasks, and its results are too few to share; drop --task, --tasks or --share"
        )
    try:
        for options in bench.also:
            shlex.split(options)
    except ValueError as error:
        reason = str(error).lower()
        raise click.UsageError(f"--also cannot be split into options: {reason}; quote it") from error
    if bench.share is not None:
        if bench.tasks != TASKS:
            raise click.UsageError("--share needs the built-in tasks; drop --tasks")
        check_writable(bench.share, "report")
    if bench.llama_server is not None and shutil.which(bench.llama_server) is None:
        raise click.UsageError(f"--llama-server: {bench.llama_server} is not a program; name its file")


def _plan_and_options(models: ModelChoice, n_ctx: int) -> tuple[DraftPlan, list[str]]:
    """Return the plan and the options of `serve`, with this context size unless --n-ctx was given."""
    plan, given = find_plan(models), [*_given()]
    check_files(plan)
    options = models.target_options
    if plan.is_default:  # a server that starts beside others may see less free memory
        used = plan.heads if plan.draft is None else plan.draft
        given += ["--draft", MTP if used is None or plan.has_own_heads else str(used.path)]
    if options.n_ctx is None:
        n_ctx = min(n_ctx, read_gguf(plan.target.path).number("context_length", n_ctx))
        plan = find_plan(replace(models, target_options=replace(options, n_ctx=n_ctx)))
        given += ["--n-ctx", str(n_ctx)]
    return plan, given


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGHUP, so that the servers are stopped."""

    def end(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _given() -> Iterator[str]:
    """Yield the options of this command line that `serve` has, too."""
    context = click.get_current_context()
    known = {parameter.name for parameter in serve.params}
    for parameter in context.command.params:
        name = str(parameter.name)
        if name not in known or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            yield parameter.opts[0] if value else parameter.secondary_opts[0]
        else:
            for each in value if isinstance(value, tuple) else (value,):
                yield from (parameter.opts[0], "auto" if each is None else str(each))


# Output


def _show(report: Report, options: BenchOptions) -> None:
    is_aside = options.as_json and not options.markdown
    console = Console(stderr=is_aside, highlight=False, markup=False, soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    console.print(_LEGEND.format(report.baseline_name))
    if options.markdown:
        click.echo(markdown(report))
    else:
        fields = report.settings.fields.items()
        settings = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in fields)
        machine = f"llamaspec {report.versions['llamaspec']} on {', '.join(report.machine.devices)}"
        console.print(f"{report.title}; {settings}; {machine}")
        for group in report.groups:
            console.print(f"\n{group}")
            for columns, cells in tables(report, group):
                print_table(columns, cells, console)
            if (line := next_to_best_type(report, group)) is not None:
                console.print(line)
    for arm, each in report.all_tasks.items():
        if each.forks and is_comparable(arm, report):
            where = ", ".join(f"{prompt} at character {at[0]}" for prompt, at in each.forks.items())
            console.print(f"{arm}: text differs from {report.baseline} in {where}")
    if not options.markdown:
        console.print(f"\n{in_short(report)}")
    if options.as_json:
        click.echo(json.dumps(report.as_json()))
