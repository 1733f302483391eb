"""Probe many models under many settings: one JSON line each, added to a file.

Every combination of target, threads and GPU layers is measured in turn. A model that cannot be loaded gets
a line with its error, and the sweep goes on. Combinations that the file has already are not measured again,
so an interrupted sweep is continued by the same command.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from llamaspec import LlamaspecError, ModelOptions, open_pair
from llamaspec.cli.output import SlowProgress
from llamaspec.llama import runtime
from llamaspec.measure.probe import FULL, QUICK, measure
from llamaspec.measure.reasons import conclusions


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
  python scripts/plot_sweep.py sweep.jsonl sweep.png
""",
)
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("targets", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--draft", type=click.Path(path_type=Path), help="Of all targets; default: none.")
@click.option(
    "--threads", type=click.IntRange(1), multiple=True, help="May be repeated; default: physical cores."
)
@click.option(
    "--gpu-layers", "-ngl", type=click.IntRange(0), multiple=True, help="May be repeated; default: all."
)
@click.option("--full", is_flag=True, help="The full probe: minutes instead of seconds for each.")
def main(
    out: Path,
    targets: tuple[Path, ...],
    draft: Path | None,
    threads: tuple[int, ...],
    gpu_layers: tuple[int, ...],
    full: bool,
) -> None:
    """Probe TARGETS and add a JSON line for each to OUT."""
    draft_name = None if draft is None else str(draft)
    cases = [
        Case(str(target), draft_name, n, layers, full)
        for target, n, layers in itertools.product(targets, threads or (None,), gpu_layers or (None,))
    ]
    done = list(finished(out))
    for i, case in enumerate(cases):
        if asdict(case) in done:
            click.echo(f"[{i + 1}/{len(cases)}] {case.label}: known", err=True)
            continue
        line = probed(case)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        outcome = line.get("error") or line["probe"]["verdict"]
        click.echo(f"[{i + 1}/{len(cases)}] {case.label}: {outcome}", err=True)


def finished(out: Path) -> Iterator[dict[str, Any]]:
    """The cases that a file holds for this machine, without those that failed."""
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    for number, line in enumerate(text.splitlines(), start=1):
        entry = read_line(line)
        if entry is None:
            click.echo(f"line {number} of {out} is not of a sweep; passed over", err=True)
        elif "probe" in entry and entry["host"] == platform.node():
            yield entry["case"]


def read_line(line: str) -> dict[str, Any] | None:
    """One entry of a sweep; None for anything else, such as a line that was cut short."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    wanted = {"case", "host"}
    return entry if isinstance(entry, dict) and wanted <= entry.keys() else None


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
        with (
            open_pair(case.target, case.draft, target_options=options, draft_options=one_score) as pair,
            SlowProgress(case.label) as progress,
        ):
            found = measure(pair, FULL if case.full else QUICK, progress)
            return {**line, "description": pair.target.description, "probe": conclusions(found)}
    except (LlamaspecError, ValueError) as error:
        return {**line, "error": str(error)}


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"sweep_probe.py: {error}")
