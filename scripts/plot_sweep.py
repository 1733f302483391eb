"""Draw what sweep_probe.py has measured: one line for each model and setting.

Left: the time of a batch relative to that of a single position; below the dotted line a position more is
cheaper than a single one. Right: the predicted speed-up of the best fixed draft length, by acceptance.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from sweep_probe import read_line

MOST_LINES = 20  # more cannot be told apart


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


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  python scripts/plot_sweep.py sweep.jsonl sweep.png
  python scripts/plot_sweep.py sweep.jsonl sweep.svg --match Q4_0
""",
)
@click.argument("sweep", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--match", default="", metavar="TEXT", help="Only cases whose label holds this text.")
def main(sweep: Path, picture: Path, match: str) -> None:
    """Draw SWEEP, a file of sweep_probe.py, as PICTURE, a .png or .svg file."""
    if picture.suffix.lower() not in (".png", ".svg"):
        raise click.BadParameter(f"{picture}: name a .png or .svg file")
    if find_spec("matplotlib") is None:
        raise click.ClickException('drawing needs matplotlib; install it with: pip install "llamaspec[plot]"')
    lines = [line for line in read(sweep) if match in line.label]
    if not lines:
        raise click.ClickException(f"no measured case of {sweep} matches {match!r}")
    if len(lines) > MOST_LINES:
        click.echo(
            f"{len(lines)} cases; only the first {MOST_LINES} are drawn, choose with --match", err=True
        )
    draw(lines[:MOST_LINES], picture)
    click.echo(picture)


def read(sweep: Path) -> list[Line]:
    """The measured cases; of those measured more than once the latest."""
    found: dict[str, Line] = {}
    for number, text in enumerate(sweep.read_text(encoding="utf-8").splitlines(), start=1):
        entry = read_line(text)
        if entry is None:
            click.echo(f"line {number} of {sweep} is not of a sweep; passed over", err=True)
        elif "probe" in entry:
            line = Line.of(entry)
            found[f"{entry['host']} {line.label} {entry['case']['draft']}"] = line
    return list(found.values())


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
        xlabel="positions evaluated at once",
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
        sys.exit(f"plot_sweep.py: {error}")
