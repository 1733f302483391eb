"""Make a small Llama GGUF as costly as a large one, without changing what it says.

Repeating every hidden unit r times gives the same function at r² the cost; layers that add nothing cost
more still. So the gain of drafting can be measured without a download, on
a target whose cost is real. State plainly wherever you show figures that the target is widened.

It prints the files it wrote, one a line; a file that is newer than its source is not written again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from llamaspec import LlamaspecError, demo_target
from llamaspec.llama.quantize import Copy, write_copy
from widening import Source, UnsuitableFileError, Widening, write

KINDS = ("Q4_0", "Q8_0", "Q4_K_M")
EXAMPLES = """\b
Examples:
  python scripts/widen_gguf.py --layers 16 --quantize Q4_0 --quantize Q8_0
  python scripts/widen_gguf.py --kv-factor 4 --layers 10 --quantize Q4_0 --quantize Q8_0

\b
The target is 8 times as wide as the embedded one: 50 times the weights. The second has grouped queries,
and so a KV cache of realistic size: 40 KB for a token. Depth is measured on it."""


@click.command(help=__doc__, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=demo_target())
@click.option("--factor", "-r", type=int, default=8, show_default=True, help="Repeat every hidden unit.")
@click.option("--kv-factor", type=int, help="Repeat heads of keys and values only so often: grouped queries.")
@click.option("--layers", type=int, help="With layers that add nothing, up to this number.")
@click.option("--quantize", "kinds", type=click.Choice(KINDS), multiple=True, help="Also so.")
@click.option("--folder", type=Path, default=Path("build/models"), show_default=True, help="For the files.")
def main(
    source: Path,
    factor: int,
    kv_factor: int | None,
    layers: int | None,
    kinds: Sequence[str],
    folder: Path,
) -> None:
    """Widen SOURCE, by default the embedded target."""
    try:
        widening = Widening(factor, layers, kv_factor=kv_factor)
        wide = folder / f"{source.stem}-{widening.label}.gguf"
        if _is_older(wide, source):
            write(Source(source), widening, wide)
        print(wide)
        for kind in kinds:
            print(quantize(wide, kind))
    except (UnsuitableFileError, LlamaspecError, ValueError, OSError) as error:
        sys.exit(f"widen_gguf: {error}")


def quantize(path: Path, kind: str) -> Path:
    """Quantise a float file, unless that is done already: the new file, beside it."""
    name = path.stem.removesuffix("-F16").removesuffix("-F32")
    quantized = path.with_name(f"{name}-{kind}.gguf")
    if _is_older(quantized, path):
        write_copy(path, quantized, Copy(kind), os.cpu_count() or 1)
    return quantized


def _is_older(path: Path, source: Path) -> bool:
    return not path.exists() or path.stat().st_mtime <= source.stat().st_mtime


if __name__ == "__main__":
    main()
