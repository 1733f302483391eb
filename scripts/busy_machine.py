"""Measure decoding beside other busy programs: with fixed numbers of threads, and as llamaspec chooses them.

    python scripts/busy_machine.py --target big.gguf
    python scripts/busy_machine.py --target big.gguf --draft small.gguf --load 0 --load 2

The load is the script's own: processes that compute, all the time or every other second, and end with it.
Each arm is a process that keeps its model open; arms take turns, and each turn's speeds are compared with
the best fixed number of threads in the same turn. A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from help_text import help_text
from llamaspec import ModelOptions, NoDrafter, Sampling, open_pair
from llamaspec.llama import runtime

ALTERNATING = -1  # a load of one process that comes and goes
AUTO = "llamaspec's choice"
PROMPT = "def read_lines(path):"
_BUSY = "import time\nend = time.monotonic() + 3600\nwhile time.monotonic() < end: sum(range(10000))"
_COMES_AND_GOES = """
import time
end = time.monotonic() + 3600
while time.monotonic() < end:
    if int(time.monotonic()) % 2: time.sleep(0.01)
    else: sum(range(10000))
"""


class Arm:
    """A process with a model and its way to choose threads."""

    def __init__(
        self, target: Path, draft: Path | None, threads: int | None, n: int, **variables: str
    ) -> None:
        settings = {"target": str(target), "draft": draft and str(draft), "threads": threads, "n": n}
        command = [sys.executable, __file__, "--work", json.dumps(settings)]
        environment = {**os.environ, **variables}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.speed()  # loaded and warm

    def speed(self) -> float:
        """Tokens per second of one text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=click.Path(exists=True, path_type=Path))
@click.option("--draft", type=click.Path(exists=True, path_type=Path), help="Default: plain decoding.")
@click.option(
    "--load",
    "loads",
    type=int,
    multiple=True,
    default=(0, 1, 2, ALTERNATING),
    show_default=True,
    help="Busy processes; -1: one that comes and goes.",
)
@click.option("--max-tokens", "-n", type=int, default=64, show_default=True)
@click.option("--turns", "-r", type=int, default=5, show_default=True)
@click.option("--work", hidden=True)
def main(
    target: Path | None,
    draft: Path | None,
    loads: tuple[int, ...],
    max_tokens: int,
    turns: int,
    work: str | None,
) -> None:
    """Measure the arms under each load and print how they compare."""
    if work is not None:
        _work(**json.loads(work))
        return
    if target is None:
        raise click.UsageError("give a --target")
    speeds: dict[tuple[int, str], list[float]] = {}
    with ExitStack() as stack:
        most = runtime.default_threads()
        arms = {f"{n} threads": Arm(target, draft, n, max_tokens) for n in range(1, most + 1)}
        arms[f"{most} threads, waiting asleep"] = Arm(
            target, draft, most, max_tokens, OMP_WAIT_POLICY="passive"
        )
        arms[f"{most} threads, spinning shortly"] = Arm(
            target, draft, most, max_tokens, GOMP_SPINCOUNT="20000"
        )
        arms[AUTO] = Arm(target, draft, None, max_tokens)
        for arm in arms.values():
            stack.enter_context(arm)
        for load in loads:
            with _busy(load):
                for turn in range(turns):
                    shift = turn % len(arms)
                    for name in [*list(arms)[shift:], *list(arms)[:shift]]:
                        speeds.setdefault((load, name), []).append(arms[name].speed())
            click.echo(f"load {load} measured", err=True)
    fixed = [f"{n} threads" for n in range(1, most + 1)]
    _show(speeds, fixed)
    print(json.dumps([{"load": load, "arm": arm, "speeds": own} for (load, arm), own in speeds.items()]))


@contextmanager
def _busy(load: int) -> Iterator[None]:
    program, n = (_COMES_AND_GOES, 1) if load == ALTERNATING else (_BUSY, load)
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _work(target: str, draft: str | None, threads: int | None, n: int) -> None:
    """One arm: generates whenever it is told to."""
    options = ModelOptions(threads=threads)
    with open_pair(target, draft, target_options=options, draft_options=options) as pair:
        for _ in sys.stdin:
            pair.forget()
            stream = pair.stream(
                PROMPT,
                sampling=Sampling(temperature=0),
                seed=0,
                max_tokens=n,
                drafter=None if draft else NoDrafter(),
            )
            print(stream.run().summary.tokens_per_second, flush=True)


def _show(speeds: dict[tuple[int, str], list[float]], fixed: list[str]) -> None:
    table = Table(box=None, pad_edge=False, title="tokens per second, and relative to the best fixed number")
    for title in ("load", "arm", "tokens/s", "ratio"):
        table.add_column(title, justify="left" if title == "arm" else "right")
    for (load, arm), own in speeds.items():
        best = max(fixed, key=lambda name: statistics.median(speeds[load, name]))
        ratio = statistics.median(own) / statistics.median(speeds[load, best])
        title = "comes and goes" if load == ALTERNATING else str(load)
        table.add_row(title, arm, f"{statistics.median(own):.1f}", f"{ratio:.2f}")
    Console(stderr=True, width=110).print(table)


if __name__ == "__main__":
    main()
