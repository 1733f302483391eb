"""`llamaspec probe`: what a wider batch costs here, and so how many draft tokens can pay."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path

import click
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from llamaspec.cli.model_options import ModelChoice, find_files, find_files_here, model_options
from llamaspec.cli.opening import open_files
from llamaspec.cli.option_groups import Command, Decorator, GroupedCommand, option_group
from llamaspec.cli.plot import check_plot, draw_probe
from llamaspec.cli.terminal import SlowProgress, say
from llamaspec.errors import LlamaspecError, printable
from llamaspec.measure import store as curves
from llamaspec.measure.probe import FULL, QUICK, Probe, Timing, measure
from llamaspec.measure.reasons import (
    ACCEPTANCES,
    best_length,
    conclusions,
    dips,
    knees,
    round_seconds,
    saturation_width,
    verdict,
)
from llamaspec.pair import Pair

NOTHING_EXACT = (
    "no wider batch is sure to be bit-identical with single positions here; on a CPU --cache-type-v bf16 "
    "avoids the kernel that differs in long contexts"
)


_OPTIONS: tuple[Decorator, ...] = (
    click.option("--quick", is_flag=True, help="Fewer widths and turns: seconds instead of a minute or two."),
    click.option("--show", is_flag=True, help="Show what an earlier probe found; measure nothing."),
    click.option("--forget", is_flag=True, help="Drop what an earlier probe found."),
    click.option("--plot", metavar="FILE", help="Draw the curve as .png or .svg (needs matplotlib)."),
    click.option("--csv", "as_csv", is_flag=True, help="One row for each width on stdout."),
    click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout."),
)


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What only `probe` can be asked for.

    Raises
    ------
    ValueError
        Two outputs want stdout.
    """

    quick: bool
    show: bool
    forget: bool
    plot: str | None
    as_csv: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.as_csv and self.as_json:
            raise ValueError("--json and --csv both write to stdout; choose one")


def _probe_options(command: Command) -> Command:
    return option_group("output", ProbeOptions, _OPTIONS)(command)


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec probe --target big.gguf --draft small.gguf
  llamaspec probe --target big.gguf --draft small.gguf --quick --json | jq .break_even_acceptance
  llamaspec probe --target big.gguf --draft small.gguf --plot curve.png
""",
)
@model_options
@_probe_options
def probe(models: ModelChoice, output: ProbeOptions) -> None:
    """Measure what evaluating several positions at once costs, and keep it for later runs."""
    if output.plot is not None:
        check_plot(Path(output.plot))
    if output.forget:
        dropped = curves.forget(find_files_here(models))
        click.echo("forgotten" if dropped else "nothing was known of this pair", err=True)
        return
    found, path = _shown(models) if output.show else _measured(models, output)
    if output.plot is not None:
        draw_probe(found, Path(output.plot), printable(path.stem))
    if output.as_json:
        click.echo(json.dumps(conclusions(found)))
    elif output.as_csv:
        click.echo(_csv(found), nl=False)
    else:
        _show(found)


def _shown(models: ModelChoice) -> tuple[Probe, Path]:
    """What an earlier probe found, and the target's file; a model that is not here was never probed."""
    here = find_files_here(models)
    kept = curves.stored_probe(here)
    if kept.value is None:
        reason = kept.fault or "nothing is known of this pair yet"
        raise LlamaspecError(f"{reason}; run the probe without --show")
    return kept.value, here.target.path


def _measured(models: ModelChoice, output: ProbeOptions) -> tuple[Probe, Path]:
    files = find_files(models)
    with open_files(files, models) as pair, SlowProgress("probing") as progress:
        found = measure(pair, QUICK if output.quick else FULL, progress)
        _keep(pair, found)
    return found, files.target.path


def _keep(pair: Pair, found: Probe) -> None:
    """Store what was measured; what took minutes is shown even where it cannot be kept."""
    try:
        curves.store_probe(pair, found)
    except LlamaspecError as error:
        say(f"warning: {error}")


def _csv(found: Probe) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["width", "depth", "median_seconds", "low_seconds", "high_seconds", "logit_difference"])
    for row in found.widths:
        for depth, timing in zip(found.depths, row.timings, strict=True):
            writer.writerow([row.width, depth, timing.median, timing.low, timing.high, row.logit_difference])
    return out.getvalue()


def _show(found: Probe) -> None:
    console, curve = Console(highlight=False), found.curve
    table = Table(box=None, pad_edge=False)
    table.add_column("positions", justify="right")
    for depth in found.depths:
        table.add_column(f"ms, {depth} deep", justify="right")
    for title in ("relative", "ms each", "same"):
        table.add_column(title, justify="right")
    table.add_column("")
    slowest = max(curve.verify_seconds)
    for row in found.widths:
        first = row.timings[0]
        same = "yes" if row.logit_difference == 0 else f"± {row.logit_difference:.2g}"
        table.add_row(
            str(row.width),
            *(_milliseconds(timing) for timing in row.timings),
            f"{first.median / curve.verify_seconds[0]:.2f}",
            f"{1e3 * first.median / row.width:.2f}",
            same,
            Bar(slowest, 0, first.median, width=16),
        )
    console.print(table)
    _show_conclusions(found, console)


def _milliseconds(timing: Timing) -> str:
    """How far it varied, too, where there was time to measure more than once."""
    varied = f" ±{timing.spread:.0%}" if timing.low < timing.high else ""
    return f"{1e3 * timing.median:.2f}{varied}"


def _show_conclusions(found: Probe, console: Console) -> None:
    curve = found.curve
    if found.draft_step is not None:
        console.print(f"a draft token: {1e3 * found.draft_step.median:.2f} ms")
        behind = ", ".join(f"{c.n_tokens} in {1e3 * c.seconds:.2f} ms" for c in found.catch_ups)
        console.print(f"tokens that the draft prefills at once: {behind}")
    console.print(f"sampling: {1e6 * found.sampling_seconds:.0f} µs for each position")
    console.print(
        f"a position more costs less than half of a single one up to {saturation_width(curve)} at once"
    )
    if found_knees := knees(curve):
        console.print(f"the cost rises sharply after {', '.join(map(str, found_knees))} positions")
    for depth in found.left_out_depths:
        console.print(f"a context of {depth} tokens takes too long to prefill here; it was left out")
    if found.identical_widths == {1}:
        console.print(NOTHING_EXACT)
    for dip in dips(curve):
        console.print(f"{dip.width} positions cost more than {dip.cheaper_width}: they are padded")
    if found.draft_step is None:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("acceptance")
    table.add_column("best draft length", justify="right")
    table.add_column("predicted speed-up", justify="right")
    seconds = round_seconds(curve)
    for acceptance in ACCEPTANCES:
        best = best_length(seconds, acceptance)
        table.add_row(f"{acceptance:.2f}", str(best.n_guesses), f"{best.speed_up:.2f}x")
    console.print(table)
    console.print(verdict(curve))
