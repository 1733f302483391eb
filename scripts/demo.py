"""Find out whether drafting is faster on this machine, with a target that costs as much as a real one.

The script widens the embedded target (50 times the weights, the same text) and probes it in three
quantisations. The gain depends on the machine and the quantisation: the script prints all predictions, then
compares decoding with and without the draft in the quantisation that should gain most.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from llamaspec import demo_draft

KINDS = ("Q4_0", "Q8_0", "F16")
FOLDER = Path("build/models")
ACCEPTANCE = "0.7"  # about that of the embedded pair; `probe` predicts for this rate
LLAMASPEC = [sys.executable, "-m", "llamaspec"]


@dataclass(frozen=True, slots=True)
class Probed:
    """The predicted gain in one quantisation."""

    kind: str
    speed_up: float  # predicted at ACCEPTANCE
    n_draft: int  # draft tokens per round for that speed-up
    verdict: str


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--layers", type=int, default=10, show_default=True, help="Layers of the widened target.")
@click.option("--factor", type=int, default=8, show_default=True, help="Repetitions of every hidden unit.")
@click.option("--max-tokens", "-n", type=int, default=96, show_default=True)
@click.option("--runs", "-r", type=int, default=2, show_default=True, help="Runs of each method.")
def main(layers: int, factor: int, max_tokens: int, runs: int) -> None:
    """Widen, probe, compare."""
    widen = [sys.executable, str(Path(__file__).with_name("widen_gguf.py")), "--folder", str(FOLDER)]
    _run([*widen, "-r", str(factor), "--layers", str(layers), "--quantize", "Q4_0", "--quantize", "Q8_0"])
    models = {kind: _models(factor, layers, kind) for kind in KINDS}
    found = [_probed(kind, models[kind]) for kind in KINDS]
    click.echo(report(found))
    sys.stdout.flush()
    best = most_gained(found)
    _run([*LLAMASPEC, "compare", *models[best.kind], "-t", "0", "-n", str(max_tokens), "-r", str(runs)])


def _models(factor: int, layers: int, kind: str) -> list[str]:
    target = FOLDER / f"target-x{factor}-L{layers}-{kind}.gguf"
    return ["--target", str(target), "--draft", str(demo_draft())]


def _probed(kind: str, models: list[str]) -> Probed:
    answer = json.loads(_run([*LLAMASPEC, "probe", "--quick", *models, "--json"], is_read=True))
    best = answer["best_fixed_length"][ACCEPTANCE]
    return Probed(kind, best["speed_up"], best["n_guesses"], answer["verdict"])


def most_gained(found: list[Probed]) -> Probed:
    """Return the quantisation that should gain most."""
    return max(found, key=lambda one: one.speed_up)


def report(found: list[Probed]) -> str:
    """Return one line per quantisation, and one that names the quantisation to compare."""
    lines = [f"If {float(ACCEPTANCE):.0%} of the draft tokens are accepted, drafting here should give"]
    for one in found:
        gain = f"{one.speed_up:.2f} times the speed with {one.n_draft} draft tokens a round"
        lines.append(f"  {one.kind:<5} {gain if one.n_draft else 'nothing'}: {one.verdict}")
    lines.append(f"Comparing on {most_gained(found).kind}, where it should gain most:")
    return "\n".join(lines)


def _run(command: list[str], *, is_read: bool = False) -> str:
    """Run a command; if `is_read`, return its stdout."""
    done = subprocess.run(command, stdout=subprocess.PIPE if is_read else None, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


if __name__ == "__main__":
    main()
