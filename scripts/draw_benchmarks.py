"""Draw the pictures of docs/benchmarks.md and README.md: the speed-ups of each result by task.

A part of `make docs`, whose dependency group contains matplotlib. The same result gives the same file.
"""

from __future__ import annotations

from pathlib import Path

import click

from llamaspec.errors import LlamaspecError
from llamaspec.measure.report import Report, read_report
from llamaspec.measure.served_arms import AUTO, PEER, PLAIN

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURES = ROOT / "benchmarks", ROOT / "docs" / "benchmarks"
# Names may contain a "$", which would start a formula.
STYLE = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "llamaspec"}


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def draw_benchmarks() -> None:
    """Draw docs/benchmarks/*.svg from benchmarks/*.json."""
    try:
        draw_results()
    except LlamaspecError as error:
        raise click.ClickException(str(error)) from error


def draw_results(folder: Path = RESULTS, pictures: Path = PICTURES) -> None:
    """Draw a picture of every result."""
    pictures.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.json")):
        draw_report(read_report(path), pictures / f"{path.stem}.svg")


def draw_report(report: Report, path: Path) -> None:
    """Draw the speed-ups of a report by task; of several llama-server arms, draw only the best."""
    from matplotlib import rc_context  # which only `make docs` installs
    from matplotlib.figure import Figure

    arms = [
        arm
        for arm in next(iter(report.tasks.values()))
        if arm != report.baseline and (arm == report.best_type or not arm.startswith(PEER))
    ]
    names = {
        AUTO: "llamaspec",
        "--draft none": "llamaspec, copies alone",
        PLAIN: "llamaspec, plain",
        report.best_type: f"{report.best_type} (best type)",
    }
    with rc_context(STYLE):
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
        axes.axvline(1, color="black", linewidth=1, linestyle="--", zorder=0.5, label=report.baseline_name)
        axes.set(xlabel=f"whole request, speed-up over {report.baseline_name}")
        devices = ", ".join(dict.fromkeys(report.machine.devices))
        axes.set_title(f"{report.title}\n{devices}, {report.machine.cores} cores", fontsize="medium")
        axes.margins(y=0.01)
        figure.legend(loc="outside lower center", ncols=3, fontsize="small")
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw_benchmarks()
