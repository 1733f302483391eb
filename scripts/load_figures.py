"""What scripts/serve_load.py has measured: medians, a sentence, a picture; also of an earlier run's file.

    python scripts/load_figures.py loads.jsonl loads.png

Upper row: tokens per second of all clients together. Lower row: K, the draft tokens of a round of one text.
A column for each target and temperature; clients on the horizontal axes.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import Any

import click
from rich.table import Table

from help_text import help_text

AUTO, BASE = "llamaspec", "llamaspec, no draft"  # all ratios are to the latter
PEER = "llama-server"  # what its arms begin with


@dataclass(frozen=True, slots=True)
class Load:
    """What one arm made of one load in one turn."""

    target: str
    arm: str
    n_clients: int
    temperature: float
    turn: int
    n_tokens: int
    seconds: float
    first_seconds: float  # median, from the request to its first text
    gap_p50: float  # seconds between two arrivals of text
    gap_p99: float
    draft_length: float  # draft tokens in a round of one text

    @property
    def speed(self) -> float:
        """Tokens per second of all clients together."""
        return self.n_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm at one load: medians over the turns."""

    target: str
    temperature: float
    n_clients: int
    arm: str
    speed: float  # tokens per second of all clients together
    to_base: float | None  # turn by turn, next to llamaspec without a draft
    to_peer: float | None  # turn by turn, next to the arm of llama-server that is fastest at this load
    first_seconds: float
    gap_p50: float
    gap_p99: float
    draft_length: float


def figures(loads: Iterable[Load]) -> list[Figures]:
    """The medians of every arm at every load."""
    groups: dict[tuple[str, float, int], dict[str, list[Load]]] = {}
    for load in loads:
        group = groups.setdefault((load.target, load.temperature, load.n_clients), {})
        group.setdefault(load.arm, []).append(load)
    found: list[Figures] = []
    for (target, temperature, n_clients), arms in sorted(groups.items()):
        speeds = {arm: _median(own, "speed") for arm, own in arms.items()}
        peer = max((arm for arm in arms if arm.startswith(PEER)), key=speeds.__getitem__, default=None)
        found += [
            Figures(
                target=target,
                temperature=temperature,
                n_clients=n_clients,
                arm=arm,
                speed=speeds[arm],
                to_base=_ratio(own, arms.get(BASE, ())),
                to_peer=None if peer is None else _ratio(own, arms[peer]),
                **{
                    name: _median(own, name)
                    for name in ("first_seconds", "gap_p50", "gap_p99", "draft_length")
                },
            )
            for arm, own in sorted(arms.items())
        ]
    return found


def conclusion(found: Sequence[Figures]) -> str:
    """One sentence: what automatic length is worth where it is worth least, and what becomes of K."""
    own = [each for each in found if each.arm == AUTO]
    if not own:
        return f"Nothing was measured of {AUTO}."
    says: list[str] = []
    for other, name in (("no draft", "to_base"), (f"the best arm of {PEER}", "to_peer")):
        known = [each for each in own if getattr(each, name) is not None]
        if known:
            worst = min(known, key=lambda each: float(getattr(each, name)))
            says.append(f"at least {getattr(worst, name):.2f} times as fast as {other} ({_where(worst)})")
    few, many = min(each.n_clients for each in own), max(each.n_clients for each in own)
    lengths = [statistics.mean(each.draft_length for each in own if each.n_clients == n) for n in (few, many)]
    says.append(f"K {lengths[0]:.1f} with {_clients(few)}, {lengths[1]:.1f} with {_clients(many)}")
    return f"Automatic length: {'; '.join(says)}."


def table(found: Sequence[Figures]) -> Table:
    """All figures, for a person."""
    shown = Table(box=None, pad_edge=False, title=f"tokens per second of all clients; ratio to {BASE!r}")
    titles = ("target", "temperature", "clients", "arm", "tokens/s", "ratio", "first ms", "p50 ms", "p99 ms")
    for title in (*titles, "K"):
        shown.add_column(title, justify="left" if title in ("target", "arm") else "right")
    for each in found:
        shown.add_row(
            each.target,
            f"{each.temperature:g}",
            str(each.n_clients),
            each.arm,
            f"{each.speed:.1f}",
            "" if each.to_base is None else f"{each.to_base:.3f}",
            *(f"{1e3 * seconds:.1f}" for seconds in (each.first_seconds, each.gap_p50, each.gap_p99)),
            f"{each.draft_length:.2f}",
        )
    return shown


def check_picture(picture: Path) -> None:
    """Refuse, before anything is measured, what cannot be drawn.

    Raises
    ------
    click.ClickException
        matplotlib is not installed, or the file is of another kind.
    """
    if picture.suffix.lower() not in (".png", ".svg"):
        raise click.BadParameter(f"{picture}: name a .png or .svg file")
    if find_spec("matplotlib") is None:
        raise click.ClickException('drawing needs matplotlib; install it with: pip install "llamaspec[plot]"')


def draw(found: Sequence[Figures], picture: Path) -> None:
    """Two panels for each target and temperature, one legend below, the conclusion above."""
    from matplotlib.figure import Figure  # an extra, which most people do without

    cases = sorted({(each.target, each.temperature) for each in found})
    clients = sorted({each.n_clients for each in found})
    styles = _styles(sorted({each.arm for each in found}))
    figure = Figure(figsize=(max(3.2 * len(cases), 7.5), 7.5), layout="constrained")
    panels = figure.subplots(2, len(cases), squeeze=False, sharex=True, sharey="row")
    for column, (target, temperature) in enumerate(cases):
        for row, name in enumerate(("speed", "draft_length")):
            axes = panels[row][column]
            for arm, style in styles.items():
                own = [e for e in found if (e.target, e.temperature, e.arm) == (target, temperature, arm)]
                points = [getattr(each, name) for each in own]
                axes.plot([each.n_clients for each in own], points, label=arm, **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(clients, labels=map(str, clients))
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        panels[0][column].set_title(f"{Path(target).stem}\ntemperature {temperature:g}", fontsize="medium")
        panels[1][column].set_xlabel("clients at once")
    panels[0][0].set(ylabel="tokens per second, all clients together", ylim=(0, None))
    longest = max(1.0, *(each.draft_length for each in found))
    panels[1][0].set(ylabel="K: draft tokens in a round of one text", ylim=(0, 1.05 * longest))
    figure.suptitle(fill(conclusion(found), 12 * max(int(figure.get_figwidth()), 6)), fontsize="medium")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(picture, dpi=150)


def read(file: Path) -> list[Load]:
    """The loads of a file that serve_load.py has kept; lines that are none are passed over, and told."""
    loads: list[Load] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        load = _load(line)
        if load is None:
            click.echo(f"line {number} of {file} is no measured load; passed over", err=True)
        else:
            loads.append(load)
    return loads


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=click.Path(dir_okay=False, path_type=Path))
def main(file: Path, picture: Path) -> None:
    """Draw FILE, which `serve_load.py --keep` wrote, as PICTURE, a .png or .svg file."""
    check_picture(picture)
    found = figures(read(file))
    if not found:
        raise click.ClickException(f"{file} has no measured load")
    draw(found, picture)
    click.echo(conclusion(found), err=True)
    print(json.dumps({"figures": [asdict(each) for each in found]}))


def _load(line: str) -> Load | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or entry.keys() != {field.name for field in fields(Load)}:
        return None
    return Load(**entry)


def _median(loads: Sequence[Load], name: str) -> float:
    return float(statistics.median(getattr(load, name) for load in loads))


def _ratio(own: Sequence[Load], others: Sequence[Load]) -> float | None:
    """The median over the turns that both have."""
    speeds = {load.turn: load.speed for load in others}
    ratios = [load.speed / speeds[load.turn] for load in own if load.turn in speeds]
    return statistics.median(ratios) if ratios else None


def _where(found: Figures) -> str:
    return f"{Path(found.target).stem}, temperature {found.temperature:g}, {_clients(found.n_clients)}"


def _clients(n: int) -> str:
    return f"{n} client" + "s" * (n > 1)


def _styles(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """llamaspec stands out; the arms of llama-server are told apart by their marks."""
    own: dict[str, dict[str, Any]] = {
        BASE: {"color": "tab:blue", "linestyle": "--", "marker": "o"},
        AUTO: {"color": "tab:blue", "linewidth": 2.5, "marker": "o"},
    }
    peers = [arm for arm in arms if arm not in own]
    marks: dict[str, dict[str, Any]] = {
        arm: {"color": "tab:orange", "marker": "s^vDPX*<>h"[i % 10]} for i, arm in enumerate(peers)
    }
    for arm in peers:
        marks[arm] |= {"linestyle": "--" if "no draft" in arm else "-", "alpha": 0.7, "markersize": 4}
    return {arm: {**marks, **own}[arm] for arm in [*peers, *(arm for arm in own if arm in arms)]}


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"load_figures.py: {error}")
