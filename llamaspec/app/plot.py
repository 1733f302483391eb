"""The saturation curve as a picture."""

from __future__ import annotations

from pathlib import Path

from llamaspec.app.measure import Probe
from llamaspec.errors import LlamaspecError


def draw_probe(found: Probe, path: Path, title: str) -> None:
    """Draw seconds against width, one line for each depth.

    Raises
    ------
    LlamaspecError
        matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LlamaspecError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    widths = [row.width for row in found.widths]
    for i, depth in enumerate(found.depths):
        timings = [row.timings[i] for row in found.widths]
        axes.plot(widths, [1e3 * t.median for t in timings], marker="o", label=f"{depth} tokens in memory")
        axes.fill_between(widths, [1e3 * t.low for t in timings], [1e3 * t.high for t in timings], alpha=0.2)
    axes.set(title=title, xlabel="positions evaluated at once", ylabel="milliseconds", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise LlamaspecError(f"cannot draw {path}: {error}; name a .png or .svg file") from error
