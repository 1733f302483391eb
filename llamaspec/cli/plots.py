"""Plots of results: the cost curve of a probe, and the speed-ups of a benchmark."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamaspec.cli.output import check_writable
from llamaspec.errors import LlamaspecError
from llamaspec.measure.probe import Probe
from llamaspec.measure.reasons import break_even_seconds, verdict
from llamaspec.measure.report import Report
from llamaspec.measure.served_arms import AUTO, PEER, PLAIN


def check_plot(path: Path) -> None:
    """Raise a LlamaspecError if the picture cannot be drawn."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise LlamaspecError(f"cannot draw {path}; name a .png or .svg file")
    if find_spec("matplotlib") is None:
        raise LlamaspecError('--plot needs matplotlib; install it with: pip install "llamaspec[plot]"')
    check_writable(path, "plot")


# Names may contain a "$", which would start a formula.
_PLAIN = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "llamaspec"}


def draw_probe(found: Probe, path: Path, title: str) -> None:
    """Draw the time by batch size, one line per depth, and the break-even line of full acceptance."""
    check_plot(path)
    from matplotlib import rc_context  # an optional extra
    from matplotlib.figure import Figure

    with rc_context(_PLAIN):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        widths = [row.width for row in found.widths]
        for i, depth in enumerate(found.depths):
            timings = [row.timings[i] for row in found.widths]
            axes.plot(widths, [1e3 * t.median for t in timings], marker="o", label=f"{depth} cached tokens")
            axes.fill_between(
                widths, [1e3 * t.low for t in timings], [1e3 * t.high for t in timings], alpha=0.2
            )
        curve = found.curve
        if found.draft_step is not None:
            break_even = "break-even: every draft token accepted"
            axes.plot(curve.widths, [1e3 * s for s in break_even_seconds(curve)], "k--", label=break_even)
            figure.supxlabel(verdict(curve), fontsize="medium")
        axes.set(title=title, xlabel="batch size", ylabel="milliseconds")
        slowest = max(timing.high for row in found.widths for timing in row.timings)
        axes.set_ylim(0, 1.2e3 * slowest)  # the break-even line may rise far above
        axes.grid(alpha=0.3)
        axes.legend()
        _save(figure, path)


def draw_report(report: Report, path: Path) -> None:
    """Draw the speed-ups of a report by task; of several llama-server arms, draw only the best."""
    from matplotlib import rc_context  # an optional extra
    from matplotlib.figure import Figure

    arms = [
        arm
        for arm in next(iter(report.tasks.values()))
        if arm != report.baseline and (arm == report.best_type or not arm.startswith(PEER))
    ]
    names = {
        AUTO: "llamaspec",
        PLAIN: "llamaspec, plain",
        report.best_type: f"{report.best_type} (best type)",
    }
    with rc_context(_PLAIN):
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
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Write a matplotlib figure; LlamaspecError if that fails."""
    try:
        metadata = {"Date": None} if path.suffix == ".svg" else None  # the same figure gives the same file
        figure.savefig(path, dpi=150, metadata=metadata)
    except (OSError, ValueError) as error:
        raise LlamaspecError(f"cannot draw {path}: {error}; name a .png or .svg file") from error
