"""The saturation curve as a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from llamaspec.errors import LlamaspecError
from llamaspec.measure.probe import Probe
from llamaspec.measure.reasons import break_even_seconds, verdict

_BREAK_EVEN = "break-even: the same as single tokens, if every draft token is accepted"


def check_plot(path: Path) -> None:
    """Refuse, before anything is measured, what cannot be drawn.

    Raises
    ------
    LlamaspecError
        matplotlib is not installed, or the file is of another kind.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise LlamaspecError(f"cannot draw {path}; name a .png or .svg file")
    if find_spec("matplotlib") is None:
        raise LlamaspecError('--plot needs matplotlib; install it with: pip install "llamaspec[plot]"')


def draw_probe(found: Probe, path: Path, title: str) -> None:
    """Draw seconds against width, one line for each depth, and what drafting may cost at most.

    Below the break-even line a batch with draft tokens is faster than single tokens if all are accepted.

    Raises
    ------
    LlamaspecError
        matplotlib is not installed, or the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # an extra, which most people do without

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    widths = [row.width for row in found.widths]
    for i, depth in enumerate(found.depths):
        timings = [row.timings[i] for row in found.widths]
        axes.plot(widths, [1e3 * t.median for t in timings], marker="o", label=f"{depth} cached tokens")
        axes.fill_between(widths, [1e3 * t.low for t in timings], [1e3 * t.high for t in timings], alpha=0.2)
    curve = found.curve
    if found.draft_step is not None:
        axes.plot(curve.widths, [1e3 * s for s in break_even_seconds(curve)], "k--", label=_BREAK_EVEN)
        figure.supxlabel(verdict(curve), fontsize="medium")
    axes.set(title=title, xlabel="positions evaluated at once", ylabel="milliseconds")
    slowest = max(timing.high for row in found.widths for timing in row.timings)
    axes.set_ylim(0, 1.2e3 * slowest)  # the line above goes on
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise LlamaspecError(f"cannot draw {path}: {error}; name a .png or .svg file") from error
