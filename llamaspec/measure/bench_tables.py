"""The tables of a report, for a terminal and in Markdown, where all texts are code, which they cannot end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamaspec.length.costs import CostCurve
from llamaspec.measure.report import Figures, Report
from llamaspec.measure.served_arms import AUTO, PEER

COLUMNS = (
    "<arm", "whole", "spread", "worst", "<prompt", "decoding", "first", "total", "s", "first s", "total s",
    "same",
)  # fmt: skip


def is_comparable(arm: str, report: Report) -> bool:
    """Whether an arm should write what the baseline writes: another program draws otherwise."""
    is_ours = not any(name.startswith(PEER) for name in (arm, report.baseline))
    return arm != report.baseline and (is_ours or report.settings.temperature == 0)


def rows(report: Report, group: str) -> list[tuple[str, ...]]:
    """The cells of the table of a group, one row for each arm, by `COLUMNS`."""
    return [_row(arm, each, report) for arm, each in report.groups[group].items()]


def _row(arm: str, each: Figures, report: Report) -> tuple[str, ...]:
    seconds = [f"{number:.2f}" for number in (each.seconds, each.first_seconds, each.total_seconds)]
    name = f"{arm} (best type)" if arm == report.best_type else arm
    if arm == report.baseline:
        return (name, "1.00", "", "", "", "1.00", "1.00", "1.00", *seconds, "")
    same = f"{each.n_same}/{each.n_answers}" if is_comparable(arm, report) else ""
    return (
        name,
        f"{each.whole:.2f}",
        f"{each.spread:.2f}",
        f"{each.worst:.2f}",
        each.worst_prompt,
        "" if each.decoding is None else f"{each.decoding:.2f}",
        f"{each.first:.2f}",
        f"{each.total:.2f}",
        *seconds,
        same,
    )


def next_to_best_type(report: Report, group: str, quote: Callable[[str], str] = str) -> str | None:
    """One line: `auto` next to llama-server's best type; None where that is the baseline."""
    each = report.to_best_type.get(group)
    if each is None:
        return None
    told = [f"whole {each.whole:.2f}", f"worst {each.worst:.2f} ({quote(each.worst_prompt)})"]
    told += [] if each.decoding is None else [f"decoding {each.decoding:.2f}"]
    told += [f"first {each.first:.2f}", f"total {each.total:.2f}"]
    return f"{quote(AUTO)} next to {quote(str(report.best_type))}: {', '.join(told)}."


def in_short(report: Report) -> str:
    """The result in one sentence."""
    gains = [f"{arms[AUTO].whole:.2f}× as fast for {group}" for group, arms in report.groups.items()]
    return (
        f"In short: with its defaults, llamaspec is {', '.join(gains)}, compared with {report.baseline_name}."
    )


def markdown(report: Report) -> str:
    """A section of a page: models, machine, costs, and a table for each group."""
    machine, settings = report.machine, report.settings
    lines = [f"### {_code(report.title)}", ""]
    told = [_code(name) for name in dict.fromkeys(machine.devices)]
    told += [f"{machine.cores} cores", f"{machine.memory_bytes / 1e9:.1f} GB", _code(machine.system)]
    told += [_code(f"{name} {number}") for name, number in report.versions.items() if number]
    lines += [f"{', '.join(told)}; {_code(report.date)}.", ""]
    models = {"target": report.target, **{f"draft {i}": each for i, each in enumerate(report.drafts, 1)}}
    sizes = [
        f"{role} {each.n_bytes / 1e9:.2f} GB"
        + (f", SHA-256 {_code(each.sha256[:12])}" if each.sha256 else "")
        for role, each in models.items()
    ]
    lines += [f"Files: {'; '.join(sizes)}.", ""]
    if report.curve is not None and len(report.curve.widths) > 1:
        lines += [_costs(report.curve), ""]
    lines += [f"{_code(settings.command)}. Ratios are to {report.baseline_name}.", ""]
    for group in report.groups:
        lines += [f"**{_code(group)}**", "", _table(rows(report, group)), ""]
        line = next_to_best_type(report, group, _code)
        lines += [] if line is None else [line, ""]
    return "\n".join(lines)


def _costs(curve: CostCurve) -> str:
    single, *wider = curve.verify_seconds
    widths = ", ".join(map(str, curve.widths[1:]))
    times = ", ".join(f"{seconds / single:.2f}" for seconds in wider)
    step = f"; a draft token {curve.draft_step_seconds / single:.2f}" if curve.draft_step_seconds else ""
    return f"Batches of {widths} cost {times} times a single token{step}."


def _table(cells: Sequence[tuple[str, ...]]) -> str:
    titles = [title.lstrip("<") for title in COLUMNS]
    left = [title.startswith("<") for title in COLUMNS]
    rules = ["---" if is_left else "---:" for is_left in left]
    shown = [
        [_code(cell) if is_left else cell for cell, is_left in zip(row, left, strict=True)] for row in cells
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, rules, *shown))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
