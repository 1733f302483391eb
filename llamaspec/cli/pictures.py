"""Draws results: the timeline page of a completion, and the cost curve of a probe."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamaspec.cli.output import statistics_lines
from llamaspec.engine.generation import Completion
from llamaspec.errors import LlamaspecError, printable
from llamaspec.measure.probe import Probe
from llamaspec.measure.reasons import break_even_seconds, verdict
from llamaspec.protocols import Vocabulary
from llamaspec.values import COPIES, Round

# The timeline page


def check_writable(path: Path, what: str) -> None:
    """Raise a LlamaspecError if the file cannot be written."""
    existing = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(existing, os.W_OK):
        raise LlamaspecError(f"cannot write the {what} {path}; name a file in a folder that is writable")


def write_timeline(path: Path, completion: Completion, vocabulary: Vocabulary, seed: int) -> None:
    """Write timeline.html with the data as JSON, escaped so that no text can break the page."""
    conclusion, summary, *_ = statistics_lines(completion, seed, "short")
    data = {
        "summary": summary,
        "conclusion": conclusion,
        "prompt": {"n_tokens": completion.n_prompt_tokens, "seconds": completion.prefill_seconds},
        "n_tokens": completion.summary.n_tokens,
        "plain": completion.summary.plain_seconds,
        "rounds": [_round_json(round_, vocabulary) for round_ in completion.rounds],
    }
    template = (files("llamaspec") / "cli" / "timeline.html").read_text(encoding="utf-8")
    page = template.replace("@DATA@", json.dumps(data).replace("<", "\\u003c"))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise LlamaspecError(f"cannot write the timeline {path}: {reason}; name a writable file") from error


def _round_json(round_: Round, vocabulary: Vocabulary) -> dict[str, Any]:
    def text(token: int) -> str:
        return printable(vocabulary.piece(token).decode("utf-8", errors="replace"), keep="\n\t")

    draft = round_.draft
    return {
        "draft": round_.draft_seconds,
        "verify": round_.verify_seconds,
        "rest": round_.overhead_seconds,
        "accepted": round_.n_accepted,
        "verified": round_.n_verified,
        "copied": round_.source in COPIES,
        "drafted": [
            {
                "text": text(token),
                "confidence": round_.confidences[i],
                "parent": draft.parent(i),
                "kept": i in round_.path,
            }
            for i, token in enumerate(draft.tokens.tolist())
        ],
        "next": text(round_.next_token),
    }


# The plot of a probe


def check_plot(path: Path) -> None:
    """Raise a LlamaspecError if the picture cannot be drawn."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise LlamaspecError(f"cannot draw {path}; name a .png or .svg file")
    if find_spec("matplotlib") is None:
        raise LlamaspecError('--plot needs matplotlib; install it with: pip install "llamaspec[plot]"')


def draw_probe(found: Probe, path: Path, title: str) -> None:
    """Draw the time by batch size, one line per depth, and the break-even line of full acceptance."""
    check_plot(path)
    from matplotlib.figure import Figure  # an optional extra

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    widths = [row.width for row in found.widths]
    for i, depth in enumerate(found.depths):
        timings = [row.timings[i] for row in found.widths]
        axes.plot(widths, [1e3 * t.median for t in timings], marker="o", label=f"{depth} cached tokens")
        axes.fill_between(widths, [1e3 * t.low for t in timings], [1e3 * t.high for t in timings], alpha=0.2)
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
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure, or raise a LlamaspecError."""
    try:
        metadata = {"Date": None} if path.suffix == ".svg" else None  # the same figure, the same file
        figure.savefig(path, dpi=150, metadata=metadata)
    except (OSError, ValueError) as error:
        raise LlamaspecError(f"cannot draw {path}: {error}; name a .png or .svg file") from error
