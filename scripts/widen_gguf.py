"""Make a small Llama GGUF as costly as a large one, without changing what it says.

Repeating every hidden unit r times gives the same function at r² the cost; layers that add nothing cost
more still. So the gain of drafting can be measured without a download, on
a target whose cost is real. State plainly wherever you show figures that the target is widened.

It prints the files it wrote, one a line; a file that is newer than its source is not written again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from llamaspec import LlamaspecError, demo_target
from llamaspec.llama.quantize import Copy, write_copy
from widening.forks import compare
from widening.plan import Plan, Widening
from widening.source import Source, UnsuitableFileError
from widening.write import n_bytes_of, write

CHECKS = (b"def read_lines(path):\n", b"import os\n", b"class Node:\n    def __init__(self", b"Return a new")
KINDS = ("Q4_0", "Q8_0", "Q4_K_M")
N_CHECKED = 64  # greedy tokens behind each of them
EXAMPLES = """\b
Examples:
  python scripts/widen_gguf.py --check
  python scripts/widen_gguf.py --layers 16 --quantize Q4_0 --quantize Q8_0
  python scripts/widen_gguf.py --kv-factor 4 --layers 10 --quantize Q4_0 --quantize Q8_0
  python scripts/widen_gguf.py --factor 4 --experts 32 --quantize Q4_0

\b
The first makes the embedded target 8 times as wide: 50 times the weights. The third has grouped queries,
and so a KV cache of realistic size: 40 KB for a token. Depth is measured on it."""


@click.command(help=__doc__, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", type=Path, default=demo_target())
@click.option("--factor", "-r", type=int, default=8, show_default=True, help="Repeat every hidden unit.")
@click.option("--kv-factor", type=int, help="Repeat heads of keys and values only so often: grouped queries.")
@click.option("--layers", type=int, help="With layers that add nothing, up to this number.")
@click.option("--experts", type=int, help="Make it a mixture of that many experts in every layer.")
@click.option("--used", type=int, default=4, show_default=True, help="Experts that each token uses.")
@click.option(
    "--dtype", type=click.Choice(["F16", "F32"]), default="F16", show_default=True, help="Of the matrices."
)
@click.option("--quantize", "kinds", type=click.Choice(KINDS), multiple=True, help="Also so.")
@click.option("--folder", type=Path, default=Path("build/models"), show_default=True, help="For the files.")
@click.option(
    "--check", is_flag=True, help="Compare greedy texts; fail if the wide floats say something else."
)
@click.option("--threads", type=int, default=os.cpu_count() or 1, help="For --quantize and --check.")
def main(
    source: Path,
    factor: int,
    kv_factor: int | None,
    layers: int | None,
    experts: int | None,
    used: int,
    dtype: str,
    kinds: tuple[str, ...],
    folder: Path,
    check: bool,
    threads: int,
) -> None:
    """Widen SOURCE, by default the embedded target."""
    try:
        plan = Plan(Source(source), Widening(factor, layers, dtype, experts, used, kv_factor))
        wide = folder / f"{source.stem}-{plan.widening.label}.gguf"
        _widen(plan, wide)
        print(wide)
        quantized = [quantize(wide, kind, threads) for kind in kinds]
        for path in quantized:
            print(path)
        if check and not _check(plan.source, [wide, *quantized], threads):
            sys.exit(f"widen_gguf: {wide} does not say what {source} says")
    except (UnsuitableFileError, LlamaspecError, ValueError, OSError) as error:
        sys.exit(f"widen_gguf: {error}")


def _widen(plan: Plan, path: Path) -> None:
    """Write the wide file unless it is there and newer than its source."""
    if path.exists() and path.stat().st_mtime > plan.source.path.stat().st_mtime:
        return
    n_bytes = sum(n_bytes_of(plan, target) for target in plan.targets())
    columns = (TextColumn("widening"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("widening", total=n_bytes)
        write(plan, path, lambda _name, n: progress.advance(task, n))


def quantize(path: Path, kind: str, threads: int) -> Path:
    """Quantise a float file, unless that is done already: the new file, beside it."""
    name = path.stem.removesuffix("-F16").removesuffix("-F32")
    quantized = path.with_name(f"{name}-{kind}.gguf")
    if not quantized.exists() or quantized.stat().st_mtime <= path.stat().st_mtime:
        write_copy(path, quantized, Copy(kind), threads)
    return quantized


def _check(source: Source, paths: list[Path], n_threads: int) -> bool:
    """Report on each file; whether the first, the floats, agrees with the source's numbers.

    Kernels for quantised weights round the activations too. That alone moves a score by a tenth, so the
    floats are compared with the source as floats, and quantised files, for information, with the source.
    """
    with tempfile.TemporaryDirectory() as folder:
        floats = source.path
        if source.is_quantized:
            floats = Path(folder) / "floats.gguf"
            write(Plan(source, Widening(dtype="F32")), floats, lambda _name, _n_bytes: None)
        found = compare(floats, paths[0], CHECKS, N_CHECKED, n_threads)
        print(f"{paths[0].name}: {found}", file=sys.stderr)
    for path in paths[1:]:
        print(f"{path.name}: {compare(source.path, path, CHECKS, N_CHECKED, n_threads)}", file=sys.stderr)
    return found.holds


if __name__ == "__main__":
    main()
