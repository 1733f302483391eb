"""Predict the cycles of the kernels on Arm processors, from LLVM's models of them.

Nothing runs on Arm: `llvm-mca` simulates the inner loop of a product with data in the fastest cache. Needs
`aarch64-linux-gnu-g++` and LLVM 19.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hatch_build import FLAGS, FOLDER, INSTRUCTION_SETS

SOURCE = Path(FOLDER) / "neon_dotprod.cpp"
LLVM_MCA = "llvm-mca-19"  # older ones lack these processors
PROCESSORS = ("neoverse-n1", "neoverse-v1")
TYPES = {"Q4_K": ("BlockQ4K", 144), "Q4_0": ("BlockQ40", 18), "Q8_0": ("BlockQ80", 34)}  # bytes of a block
ROWS = 8  # that are computed together
COLUMNS = (1, 2, 4, 8, 16)
_BRANCH = re.compile(r"^(b|b\.?[a-z]{2}|cbn?z|tbn?z)\s.*?(\.L\d+)$")
_LABEL = re.compile(r"^(\.L\d+):$")


def assembly() -> str:
    """Return the assembly of the kernels."""
    flags = [*FLAGS, *INSTRUCTION_SETS["linux-aarch64"][SOURCE.stem]]
    command = ["aarch64-linux-gnu-g++", *flags, "-S", str(SOURCE), "-o", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def function(text: str, block: str) -> list[str]:
    """Return the lines of the product of one type."""
    match = re.search(
        rf"^_ZN\S*quantized_product\S*{block}E\S*:\n(.*?)\.cfi_endproc", text, re.MULTILINE | re.DOTALL
    )
    assert match, f"no product of {block}"
    lines = [line.split("//")[0].strip() for line in match[1].splitlines()]
    return [line for line in lines if line and (_LABEL.match(line) or not line.startswith("."))]


def loops(lines: list[str]) -> list[range]:
    """Return the lines of each loop, the shortest first."""
    at = {match[1]: i for i, line in enumerate(lines) if (match := _LABEL.match(line))}
    ends = ((at[match[2]], i) for i, line in enumerate(lines) if (match := _BRANCH.match(line)))
    return sorted((range(begin, end + 1) for begin, end in ends if begin < end), key=len)


def straight(lines: list[str], n_columns: int) -> str:
    """Return what is executed for one block of ROWS rows, without the branches."""
    dots = {i for i, line in enumerate(lines) if line.startswith("sdot")}
    with_dots = [loop for loop in loops(lines) if not dots.isdisjoint(loop)]
    inner = {loop.start: loop for loop in with_dots if not any(set(other) < set(loop) for other in with_dots)}
    whole = next(loop for loop in with_dots if dots <= set(loop) and loop != inner.get(loop.start))
    found, i = list[str](), whole.start
    while i < whole.stop:
        loop = inner.get(i, range(i, i + 1))
        found += [lines[j] for j in loop] * (n_columns if len(loop) > 1 else 1)
        i = loop.stop
    return "\n".join(line for line in found if not (_LABEL.match(line) or _BRANCH.match(line)))


def cycles(code: str, processor: str) -> float:
    """Return the predicted cycles of one pass through the code, in a long run."""
    command = [LLVM_MCA, "-mtriple=aarch64-linux-gnu", f"-mcpu={processor}", "-iterations=100"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=True)
    match = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert match
    return int(match[1]) / 100


def main() -> None:
    """Print cycles for each KiB of weights, and instructions."""
    text = assembly()
    print("| weights, processor | " + " | ".join(map(str, COLUMNS)) + " |")
    print("|---|" + "---:|" * len(COLUMNS))
    for kind, (block, n_bytes) in TYPES.items():
        codes = [straight(function(text, block), n) for n in COLUMNS]
        for processor in PROCESSORS:
            found = [cycles(code, processor) / (ROWS * n_bytes) * 1024 for code in codes]
            print(f"| {kind}, {processor} | " + " | ".join(f"{each:.0f}" for each in found) + " |")
        counts = [len(code.splitlines()) / (ROWS * n_bytes) * 1024 for code in codes]
        print(f"| {kind}, instructions | " + " | ".join(f"{each:.0f}" for each in counts) + " |")


if __name__ == "__main__":
    main()
