"""What cells that no row needs cost: an evaluation beside more and more of them, and moving a cell.

    python scripts/clutter_costs.py build/models/target-x8-L10-Q4_0.gguf --threads 2

`MOVE` in llamaspec/llama/clutter.py is how many evaluations that pass over a cell cost as much as moving it.
Every amount of clutter has a context of its own; they take turns.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click
import numpy as np

from help_text import help_text
from llamaspec import LlamaModel, ModelOptions
from llamaspec.llama import clutter
from llamaspec.llama.cells import LlamaCells
from llamaspec.values import TARGET, ForwardRequest, TokenArray

AMOUNTS = (0, 256, 1024, 2048)  # cells
PIECE = 128  # tokens of each prefix that nobody uses
N_NEEDED = 100  # tokens of the row that goes on
WIDTHS = (1, 4, 16)


def cluttered(path: str, options: ModelOptions, n: int) -> LlamaModel:
    """A model whose first `n` cells hold what nobody needs."""
    model = LlamaModel(Path(path), options)
    for row in range(n // PIECE):
        model.forward(ForwardRequest(TARGET, texts(row, PIECE)), row)
        model.release(row)
    return model


def texts(seed: int, n: int) -> TokenArray:
    """Any tokens."""
    return np.random.default_rng(seed).integers(300, 900, n).astype(np.int32)


def seconds(model: LlamaModel, width: int, seed: int) -> float:
    """Of one evaluation of so many positions, behind a text of a hundred."""
    text = np.concatenate((texts(1000, N_NEEDED), texts(seed, width)))
    start = time.perf_counter()
    model.forward(ForwardRequest(TARGET, text), row=1000)
    return time.perf_counter() - start


def moving_seconds(model: LlamaModel) -> float:
    """Of copying one cell out and back."""
    context = model._contexts[0]
    cells, number = LlamaCells(context.pointer, can_copy=True), context.cache.sequence(1000).number
    start = time.perf_counter()
    content = cells.copy_out(number, 0)
    assert content is not None
    cells.copy_in(number, content)
    return (time.perf_counter() - start) / context.cache.sequence(1000).n


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=help_text(__doc__))
@click.argument("target")
@click.option("--threads", type=int)
@click.option("-r", "--turns", default=40, show_default=True)
def main(target: str, threads: int | None, turns: int) -> None:
    """Time evaluations beside clutter."""
    clutter.LOOK = 1 << 62  # it stays
    for attention in ("on", "off"):
        options = ModelOptions(n_ctx=4096, threads=threads, flash_attention=attention)
        models = {n: cluttered(target, options, n) for n in AMOUNTS}
        for width in WIDTHS:
            taken: dict[int, list[float]] = {n: [] for n in AMOUNTS}
            for turn in range(turns):
                for n in np.random.default_rng(turn).permutation(AMOUNTS).tolist():
                    taken[n].append(seconds(models[n], width, turn))
            base = statistics.median(taken[0])
            click.echo(f"flash attention {attention}, {width} positions: {1e3 * base:.2f} ms without clutter")
            for n in AMOUNTS[1:]:
                more = statistics.median(b - a for a, b in zip(taken[0], taken[n], strict=True))
                each = 1e6 * more / n
                click.echo(
                    f"  {n:5} cells: {1e3 * more:+.2f} ms, {1 + more / base:.2f} times, {each:.2f} us a cell"
                )
        moves = statistics.median(moving_seconds(models[0]) for _ in range(turns))
        click.echo(f"  moving a cell: {1e6 * moves:.2f} us")
        for model in models.values():
            model.close()


if __name__ == "__main__":
    main()
