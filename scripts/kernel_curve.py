#!/usr/bin/env python3
"""Milliseconds of an evaluation of 1, 2, ... 512 positions, with llama.cpp's kernels and with ours.

    python scripts/kernel_curve.py target.gguf
    python scripts/kernel_curve.py target-Q4_K_M.gguf --truth target-F16.gguf

`--truth` names the same model in a larger type. Then the script also says how far the logits are from that
model's. Each row is measured in a process of its own; nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

WIDTHS = (1, 2, 4, 8, 16, 64)
PROMPT, REPEATS, SCORED = 512, 5, 48
TEXT = Path(__file__).read_bytes()  # what the accuracy is measured on
ROWS = {
    "off": "llama.cpp", "avx512": "AVX-512", "avx-vnni": "AVX-VNNI", "avx2": "AVX2", "neon-dotprod": "NEON",
}  # fmt: skip


def measure(path: Path, level: str, depth: int, *, scores: bool) -> dict[str, Any]:
    """Return seconds by width, and logits if wanted; empty if this processor lacks the instruction set."""
    from llamaspec import LlamaModel, ModelOptions
    from llamaspec.kernels import library
    from llamaspec.llama import runtime
    from llamaspec.llama.resources import default_threads
    from llamaspec.values import TARGET, ForwardRequest

    runtime.kernels()
    if level != "off" and not library.use_level(level):
        return {}
    options = ModelOptions(n_ctx=depth + PROMPT + 64, threads=default_threads())  # whatever else runs
    with LlamaModel(path, options) as model:
        model.weights.huge_pages.wait()
        tokens = np.resize(model.vocabulary.tokenize(TEXT), depth + PROMPT).astype(np.int32)
        best: dict[int, float] = {}
        for width in [w for _ in range(REPEATS) for w in WIDTHS] + 2 * [PROMPT]:
            model.forward(ForwardRequest(TARGET, tokens[:depth]))
            n = depth + 1
            request = ForwardRequest(TARGET, tokens[:n], 1, tokens[n : n + width - 1])
            if width == PROMPT:  # a prompt has the logits of one position
                request = ForwardRequest(TARGET, tokens[: depth + width])
            model.prepare([(-1, request, 0)])
            begin = time.perf_counter()
            model.evaluate([(-1, request)])
            seconds = time.perf_counter() - begin
            best[width] = min(best.get(width, seconds), seconds)
        found: dict[str, Any] = {"seconds": best}
        if scores:
            model.forget()
            request = ForwardRequest(TARGET, tokens[:1], 1, tokens[1:SCORED])
            found["logits"] = model.forward(request).astype(float).tolist()
        return found


def in_process(path: Path, level: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in another process, because kernels and repacking belong to a process."""
    command = [sys.executable, __file__, str(path), "--depth", str(arguments.depth), "--only", level]
    command += ["--scores"] * (arguments.truth is not None)
    kernels = {"LLAMASPEC_KERNELS": "off"} if level == "off" else {}
    done = subprocess.run(command, env={**os.environ, **kernels}, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def log_probabilities(logits: Any) -> Any:
    x = np.array(logits)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--truth", type=Path, help="the same model in a larger type")
    parser.add_argument("--depth", type=int, default=64, help="tokens in the cache")
    parser.add_argument("--only", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--scores", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        json.dump(
            measure(arguments.model, arguments.only, arguments.depth, scores=arguments.scores), sys.stdout
        )
        return
    found = {level: in_process(arguments.model, level, arguments) for level in ROWS}
    print(f"| kernels | 1, ms | {' | '.join(map(str, WIDTHS[1:]))} | prompt, tokens/s |")
    print("|---|" + "---:|" * (len(WIDTHS) + 1))
    for level, row in found.items():
        if row:
            seconds = {int(width): each for width, each in row["seconds"].items()}
            ratios = " | ".join(f"{seconds[width] / seconds[1]:.2f}" for width in WIDTHS[1:])
            print(f"| {ROWS[level]} | {seconds[1] * 1e3:.1f} | {ratios} | {PROMPT / seconds[PROMPT]:.0f} |")
    if arguments.truth is not None:
        best = next((level for level in found if level != "off" and found[level]), "off")
        right = log_probabilities(in_process(arguments.truth, best, arguments)["logits"])
        for level, row in found.items():
            if row:
                logs = log_probabilities(row["logits"])
                divergence = (np.exp(right) * (right - logs)).sum(axis=1).mean()
                top = (right.argmax(axis=1) == logs.argmax(axis=1)).mean()
                print(f"{ROWS[level]}: divergence {divergence:.5f}, the same best token {top:.0%}")


if __name__ == "__main__":
    main()
