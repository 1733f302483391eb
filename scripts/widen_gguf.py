"""Make a small Llama GGUF as costly as a large one, without changing what it says.

    python scripts/widen_gguf.py                                    # the embedded target, 8 times as wide
    python scripts/widen_gguf.py small.gguf --factor 4 --layers 16 --quantize Q4_0 --quantize Q8_0

Repeating every hidden unit r times gives the same function at r² the cost; layers that add nothing and
tokens that are never said cost more still. So the gain of guessing can be measured without a download, on
a target whose cost is real. State plainly wherever you show figures that the target is widened.
Prints the files it wrote, one a line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import llama_cpp.llama_cpp as lib
import numpy as np
from rich.progress import Progress

from llamaspec import demo_target
from llamaspec.app.terminal import stderr_console
from llamaspec.llama import runtime
from plain_llama import PlainLlama
from widening.plan import Plan, Widening
from widening.source import Source, UnsuitableFileError
from widening.write import write

FILE_TYPES = {
    "Q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K_M": lib.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
CHECKS = (b"def read_lines(path):\n", b"import os\n", b"Return a new array")
N_CHECKED = 64  # greedy tokens compared for each of them


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", type=Path, default=demo_target())
@click.option("--factor", "-r", type=int, default=8, show_default=True, help="Repeat every hidden unit.")
@click.option("--layers", type=int, help="With layers that add nothing, up to this number.")
@click.option("--vocabulary", type=int, help="With tokens that are never said, up to this number.")
@click.option("--dtype", type=click.Choice(["F16", "F32"]), default="F16", show_default=True)
@click.option("--quantize", "kinds", type=click.Choice(list(FILE_TYPES)), multiple=True, help="Also so.")
@click.option("--folder", type=Path, default=Path("build/models"), show_default=True)
@click.option("--check", is_flag=True, help="Compare greedy texts with the source's.")
def main(
    source: Path,
    factor: int,
    layers: int | None,
    vocabulary: int | None,
    dtype: str,
    kinds: tuple[str, ...],
    folder: Path,
    check: bool,
) -> None:
    """Widen SOURCE, by default the embedded target."""
    try:
        plan = Plan(Source(source), Widening(factor, layers, vocabulary, dtype))
        wide = folder / f"{source.stem}-{plan.widening.label}.gguf"
        _widen(plan, wide)
        print(wide)
        for kind in kinds:
            print(quantize(wide, kind))
        if check:
            _check(source, wide)
    except (UnsuitableFileError, ValueError, OSError) as error:
        sys.exit(f"widen_gguf: {error}")


def _widen(plan: Plan, path: Path) -> None:
    """Write the wide file unless it is there and newer than its source."""
    if path.exists() and path.stat().st_mtime > plan.source.path.stat().st_mtime:
        return
    n_tensors = sum(1 for _ in plan.targets())
    with Progress(console=stderr_console(), transient=True) as progress:
        task = progress.add_task("widening", total=n_tensors)
        write(plan, path, lambda _name, _n_bytes: progress.advance(task))


def quantize(path: Path, kind: str) -> Path:
    """Quantise a float file with llama.cpp's own routine, unless that is done already.

    Raises
    ------
    OSError
        llama.cpp refuses.
    """
    name = path.stem.removesuffix("-F16").removesuffix("-F32")
    quantized = path.with_name(f"{name}-{kind}.gguf")
    if quantized.exists() and quantized.stat().st_mtime > path.stat().st_mtime:
        return quantized
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[kind]
    runtime.start()  # which also silences llama.cpp's log
    if lib.llama_model_quantize(os.fsencode(path), os.fsencode(quantized), parameters):
        raise OSError(f"llama.cpp cannot quantise {path} to {kind}")
    return quantized


def _check(source: Path, wide: Path) -> None:
    """Say where the greedy texts of two files first differ, and how close the choice was."""
    with PlainLlama(source) as narrow, PlainLlama(wide) as wider:
        for prompt in CHECKS:
            tokens = narrow.tokenize(prompt)
            a, b = narrow.greedy(tokens, N_CHECKED), wider.greedy(tokens, N_CHECKED)
            same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), N_CHECKED)
            told = f"the same {N_CHECKED} tokens"
            if same < N_CHECKED:
                best = np.sort(narrow.logits([*tokens, *a[:same]])[-1])[-2:]
                told = f"differs at token {same}, where the two best lie {best[1] - best[0]:.4f} apart"
            print(f"{prompt.decode()!r}: {told}", file=sys.stderr)


if __name__ == "__main__":
    main()
