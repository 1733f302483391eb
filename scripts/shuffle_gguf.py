"""Shuffle the rows of every matrix of a GGUF: the same cost, and nothing learnt is left.

For measuring what drafting costs with a draft that is never right; with `--part 0.02` one that is weaker.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import gguf
import numpy as np

from llamaspec import demo_draft


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", type=Path, default=demo_draft())
@click.option("--folder", type=Path, default=Path("build/models"), show_default=True, help="For the file.")
@click.option("--part", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Of the rows.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(source: Path, folder: Path, part: float, seed: int) -> None:
    """Write the shuffled file and print its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{source.stem}-shuffled{'' if part == 1 else f'-{part:g}'}.gguf"
    shutil.copyfile(source, path)
    rng = np.random.default_rng(seed)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.data.ndim > 1:
            rows = (rng.random(len(tensor.data)) < part).nonzero()[0]
            tensor.data[rows] = tensor.data[rng.permutation(rows)]
    print(path)


if __name__ == "__main__":
    main()
