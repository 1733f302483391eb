"""Probe many models under many settings: one JSON line each, added to a file.

Every combination of target, threads and GPU layers is measured in turn. A model that cannot be loaded gets
a line with its error, and the sweep goes on. Combinations that the file has already are not measured again,
so an interrupted sweep is continued by the same command.

The picture, left: the time of a batch relative to that of a single position; below the dotted line a further
position is cheaper than a single one. Right: the predicted speed-up of the best fixed draft length.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from llamaspec import LlamaspecError, ModelOptions, open_pair
from llamaspec.llama import runtime
from llamaspec.measure.probe import FULL, QUICK, measure
from llamaspec.measure.reasons import conclusions

MOST_LINES = 20  # more cannot be told apart


@dataclass(frozen=True, slots=True)
class Case:
    """One combination of the sweep."""

    target: str  # path
    draft: str | None
    threads: int | None  # None = the machine's full-speed physical cores
    gpu_layers: int | None  # None = all that the backend takes
    full: bool

    @property
    def label(self) -> str:
        """How the case is named while it is measured."""
        threads = "" if self.threads is None else f", threads {self.threads}"
        layers = "" if self.gpu_layers is None else f", GPU layers {self.gpu_layers}"
        return f"{Path(self.target).name}{threads}{layers}"


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  python scripts/sweep_probe.py sweep.jsonl big-*.gguf --draft small.gguf --threads 2 --threads 4
  python scripts/sweep_probe.py sweep.jsonl a.gguf b.gguf --gpu-layers 0 --gpu-layers 99 --full
  python scripts/sweep_probe.py sweep.jsonl --plot sweep.png      # only draws
""",
)
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("targets", nargs=-1, type=click.Path(path_type=Path))
@click.option("--draft", type=click.Path(path_type=Path), help="Of all targets; default: none.")
@click.option(
    "--threads", type=click.IntRange(1), multiple=True, help="May be repeated; default: physical cores."
)
@click.option(
    "--gpu-layers", "-ngl", type=click.IntRange(0), multiple=True, help="May be repeated; default: all."
)
@click.option("--full", is_flag=True, help="The full probe: minutes instead of seconds for each.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw OUT as .png or .svg.")
def main(
    out: Path,
    targets: tuple[Path, ...],
    draft: Path | None,
    threads: tuple[int, ...],
    gpu_layers: tuple[int, ...],
    full: bool,
    plot: Path | None,
) -> None:
    """Probe TARGETS and add a JSON line for each to OUT."""
    if not targets and plot is None:
        raise click.UsageError("name a target to probe, or a picture with --plot")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise click.BadParameter(f"{plot}: name a .png or .svg file")
    if plot is not None and find_spec("matplotlib") is None:
        raise click.ClickException('drawing needs matplotlib; install it with: pip install "llamaspec[plot]"')
    draft_name = None if draft is None else str(draft)
    cases = [
        Case(str(target), draft_name, n, layers, full)
        for target, n, layers in itertools.product(targets, threads or (None,), gpu_layers or (None,))
    ]
    done = [entry["case"] for entry in read(out) if entry["host"] == platform.node()]
    for i, case in enumerate(cases):
        if asdict(case) in done:
            click.echo(f"[{i + 1}/{len(cases)}] {case.label}: known", err=True)
            continue
        line = probed(case)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        outcome = line.get("error") or line["probe"]["verdict"]
        click.echo(f"[{i + 1}/{len(cases)}] {case.label}: {outcome}", err=True)
    if plot is not None:
        entries = read(out)
        if not entries:
            raise click.ClickException(f"{out} has no measured case")
        draw([Line.of(entry) for entry in entries[-MOST_LINES:]], plot)


def read(out: Path) -> list[dict[str, Any]]:
    """The measured cases of a file, without those that failed."""
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = read_line(line)
        if entry is None:
            click.echo(f"line {number} of {out} is not of a sweep; passed over", err=True)
        elif "probe" in entry:
            found.append(entry)
    return found


def read_line(line: str) -> dict[str, Any] | None:
    """One entry of a sweep; None for anything else, such as a line that was cut short."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and {"case", "host"} <= entry.keys() else None


def probed(case: Case) -> dict[str, Any]:
    """Measure one case; what the file keeps of it."""
    line: dict[str, Any] = {
        "case": asdict(case),
        "host": platform.node(),
        "backend": runtime.backend_description(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    try:
        options = ModelOptions(threads=case.threads, gpu_layers=case.gpu_layers)
        one_score = replace(options, max_scored=1)
        with open_pair(case.target, case.draft, target_options=options, draft_options=one_score) as pair:
            found = measure(pair, FULL if case.full else QUICK)
            return {**line, "description": pair.target.description, "probe": conclusions(found)}
    except (LlamaspecError, ValueError) as error:
        return {**line, "error": str(error)}


@dataclass(frozen=True, slots=True)
class Line:
    """One case of a sweep, as it is drawn."""

    label: str
    widths: list[int]
    relative_seconds: list[float]  # of each width, behind the shortest context, divided by those of width 1
    acceptances: list[float]
    speed_ups: list[float]
    has_draft: bool

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Line:
        """From a line of the file."""
        case, probe = entry["case"], entry["probe"]
        seconds = [row["timings"][0]["median"] for row in probe["widths"]]
        best = probe["best_fixed_length"]
        settings = (("threads", "threads"), ("gpu_layers", "GPU layers"))
        parts = [f"{words} {case[name]}" for name, words in settings if case[name] is not None]
        return cls(
            label=", ".join([Path(case["target"]).stem, *parts]),
            widths=[row["width"] for row in probe["widths"]],
            relative_seconds=[s / seconds[0] for s in seconds],
            acceptances=[float(acceptance) for acceptance in best],
            speed_ups=[plan["speed_up"] for plan in best.values()],
            has_draft=case["draft"] is not None,
        )


def draw(lines: list[Line], picture: Path) -> None:
    """Two panels and one legend below."""
    from matplotlib.figure import Figure  # an extra, which most people do without

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    widest = max(max(line.widths) for line in lines)
    highest = max(max(line.relative_seconds) for line in lines)
    left.plot(
        [1, widest], [1, widest], color="grey", linestyle=":", label="no gain: n positions, n times the time"
    )
    for line in lines:
        (drawn,) = left.plot(line.widths, line.relative_seconds, marker="o", markersize=4, label=line.label)
        if line.has_draft:
            right.plot(line.acceptances, line.speed_ups, marker="o", markersize=4, color=drawn.get_color())
    left.set(
        title="Time of a batch, relative to a single position",
        xlabel="batch size",
        ylabel="times the time of one",
        ylim=(0, 1.1 * highest),
    )
    right.axhline(1, color="grey", linestyle=":")
    right.set(
        title="Best fixed draft length",
        xlabel="acceptance of a draft token",
        ylabel="predicted speed-up",
    )
    if not any(line.has_draft for line in lines):
        right.text(0.5, 0.5, "measured without a draft", ha="center", transform=right.transAxes)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"sweep_probe.py: {error}")
