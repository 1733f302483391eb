"""`llamaspec probe`: what a wider batch costs here, and so how many guesses can pay."""

from __future__ import annotations

import csv
import io
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from llamaspec.app import curves
from llamaspec.app.measure import FULL, QUICK, Probe, measure
from llamaspec.app.opening import open_choice
from llamaspec.app.options import ModelChoice, model_options
from llamaspec.app.pair import Pair
from llamaspec.app.plot import check_plot, draw_probe
from llamaspec.app.terminal import SlowProgress
from llamaspec.errors import LlamaspecError
from llamaspec.rules.planning import best_fixed_length, break_even_acceptance
from llamaspec.values import CostCurve

NOTHING_EXACT = (
    "no wider batch is sure to be bit-identical with single positions here; on a CPU --cache-type-v bf16 "
    "avoids the kernel that differs in long contexts"
)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Dip:
    """A wider batch that costs less than a narrower one."""

    width: int
    cheaper_width: int


def dips(curve: CostCurve) -> list[Dip]:
    """Widths for which a wider batch is at least 3 % cheaper: the cheapest of these."""
    found = []
    for i, (width, seconds) in enumerate(zip(curve.widths, curve.verify_seconds, strict=True)):
        wider = [(s, w) for w, s in zip(curve.widths[i + 1 :], curve.verify_seconds[i + 1 :], strict=True)]
        if wider and min(wider)[0] < 0.97 * seconds:
            found.append(Dip(width, min(wider)[1]))
    return found


def knees(curve: CostCurve) -> list[int]:
    """Widths after which a position more costs more than twice as much as the one before.

    Padding to a cheaper width is reckoned in; a rise below a tenth of a single position is none.
    """
    costs = np.minimum.accumulate(curve.verify_seconds[::-1])[::-1] / curve.verify_seconds[0]
    rises = np.diff(costs) / np.diff(curve.widths)
    before = np.concatenate([[0.0], rises[:-1]])
    return [
        width
        for width, is_knee in zip(curve.widths, rises > np.maximum(2 * before, 0.1), strict=False)
        if is_knee
    ]


def saturation_width(curve: CostCurve) -> int:
    """The width up to which a position more costs less than half of a single one, as seen from width 1."""
    first, last = curve.verify_seconds[0], 1
    for width, seconds in zip(curve.widths[1:], curve.verify_seconds[1:], strict=True):
        if seconds - first > 0.5 * first * (width - 1):
            break
        last = width
    return last


def verdict(curve: CostCurve) -> str:
    """One plain sentence."""
    needed = break_even_acceptance(curve)
    if needed is None:
        return "guessing does not pay on this machine for this pair, at any acceptance"
    return f"guessing does not pay on this machine for this pair below an acceptance of {needed:.2f}"


@click.command(
    epilog="""\b
Examples:
  llamaspec probe --target big.gguf --draft small.gguf
  llamaspec probe --target big.gguf --draft small.gguf --quick --json | jq .break_even_acceptance
  llamaspec probe --target big.gguf --draft small.gguf --plot curve.png
"""
)
@model_options
@click.option("--quick", is_flag=True, help="Fewer widths and turns: seconds instead of a minute or two.")
@click.option("--show", is_flag=True, help="Show what an earlier probe found; measure nothing.")
@click.option("--forget", is_flag=True, help="Drop what an earlier probe found.")
@click.option("--plot", metavar="FILE", help="Draw the curve as .png or .svg (needs matplotlib).")
@click.option("--csv", "as_csv", is_flag=True, help="One row for each width on stdout.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def probe(quick: bool, show: bool, forget: bool, plot: str | None, **options: Any) -> None:
    """Measure what evaluating several positions at once costs, and keep it for later runs."""
    choice = ModelChoice.from_options(options)
    if options["as_json"] and options["as_csv"]:
        raise click.UsageError("--json and --csv both write to stdout; choose one")
    if plot is not None:
        check_plot(Path(plot))
    if forget:
        dropped = curves.forget(choice.on_disk)
        click.echo("forgotten" if dropped else "nothing was known of this pair", err=True)
        return
    if show:
        known = curves.stored(choice.on_disk)
        if known is None:
            raise LlamaspecError("nothing is known of this pair yet; run the probe without --show")
        found = known
    else:
        with open_choice(choice) as pair, SlowProgress("probing") as progress:
            found = measure(pair, QUICK if quick else FULL, time.perf_counter, progress)
            _keep(pair, found)
    if plot is not None:
        draw_probe(found, Path(plot), choice.target_path.stem)
    if options["as_json"]:
        click.echo(json.dumps(as_json(found)))
    elif options["as_csv"]:
        click.echo(_csv(found), nl=False)
    else:
        _show(found)


def _keep(pair: Pair, found: Probe) -> None:
    """Store what was measured; what took minutes is shown even where it cannot be kept."""
    try:
        curves.store(pair, found)
    except LlamaspecError as error:
        click.echo(f"llamaspec: warning: {error}", err=True)


def as_json(found: Probe) -> dict[str, Any]:
    """What `probe --json` prints."""
    return {
        **asdict(found),
        "identical_widths": sorted(found.identical_widths),
        "saturation_width": saturation_width(found.curve),
        "knees": knees(found.curve),
        "dips": [asdict(dip) for dip in dips(found.curve)],
        "best_fixed_length": {
            str(acceptance): asdict(best_fixed_length(found.curve, acceptance)) for acceptance in ACCEPTANCES
        },
        "break_even_acceptance": break_even_acceptance(found.curve),
        "verdict": verdict(found.curve),
    }


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
            *(f"{1e3 * t.median:.2f} ±{t.spread:.0%}" for t in row.timings),
            f"{first.median / curve.verify_seconds[0]:.2f}",
            f"{1e3 * first.median / row.width:.2f}",
            same,
            Bar(slowest, 0, first.median, width=16),
        )
    console.print(table)
    _show_conclusions(found, console)


def _show_conclusions(found: Probe, console: Console) -> None:
    curve = found.curve
    if found.draft_step is not None:
        console.print(f"a guess of the draft: {1e3 * found.draft_step.median:.2f} ms")
        behind = ", ".join(f"{c.n_tokens} in {1e3 * c.seconds:.2f} ms" for c in found.catch_ups)
        console.print(f"tokens that the draft reads at once: {behind}")
    console.print(f"sampling: {1e6 * found.sampling_seconds:.0f} µs for each position")
    console.print(
        f"a position more costs less than half of a single one up to {saturation_width(curve)} at once"
    )
    if found_knees := knees(curve):
        console.print(f"the cost rises sharply after {', '.join(map(str, found_knees))} positions")
    for depth in found.left_out_depths:
        console.print(f"a context of {depth} tokens takes too long to read here; it was left out")
    if found.identical_widths == {1}:
        console.print(NOTHING_EXACT)
    for dip in dips(curve):
        console.print(f"{dip.width} positions cost more than {dip.cheaper_width}: they are padded")
    if found.draft_step is None:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("acceptance")
    table.add_column("best number of guesses", justify="right")
    table.add_column("predicted speed-up", justify="right")
    for acceptance in ACCEPTANCES:
        best = best_fixed_length(curve, acceptance)
        table.add_row(f"{acceptance:.2f}", str(best.n_guesses), f"{best.speed_up:.2f}x")
    console.print(table)
    console.print(verdict(curve))
