"""The memory of attention: what happens if there is none, and that it is counted and given back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from command import python
from hatch_build import find_compiler
from llamaspec.llama import runtime
from model_store import ModelStore
from tiny_models import Recipe

N_CTX, N_THREADS = 1024, 2
CODE = """
import ctypes, json, sys
from pathlib import Path
import numpy as np
from llamaspec import LlamaModel, ModelOptions
from llamaspec.kernels import library
from llamaspec.values import TARGET, ForwardRequest

def evaluate(n):
    model.forget()
    missed = library.n_missed
    logits = model.forward(ForwardRequest(TARGET, tokens[:n])).copy()
    found["missed"].append(library.n_missed - missed)
    found["held"].append(held.value - before)
    return logits

path, n_ctx, n_threads = Path(sys.argv[1]), *map(int, sys.argv[2:])
tokens = np.random.default_rng(0).integers(2, 288, n_ctx).astype(np.int32)
found = {"missed": [], "held": []}
scarce = ctypes.CDLL(None)
refuses, held = ctypes.c_int.in_dll(scarce, "refuses"), ctypes.c_long.in_dll(scarce, "held")
with LlamaModel(path, ModelOptions(n_ctx=n_ctx, threads=n_threads)) as model:
    model.weights.huge_pages.wait()
    before = held.value
    refuses.value = 1
    without = evaluate(n_ctx)
    refuses.value = 0
    difference = np.abs(without - evaluate(n_ctx)).mean()
    evaluate(1)
with LlamaModel(path, ModelOptions(n_ctx=n_ctx, threads=1)) as model:
    model.weights.huge_pages.wait()
    before = held.value
    for _ in range(2100):  # with two layers
        model.forget()
        model.forward(ForwardRequest(TARGET, tokens[:1]))
    evaluate(1)
    estimate = n_ctx * library.bytes_per_cell(1, n_threads)
print(json.dumps({**found, "difference": float(difference), "estimate": estimate}))
"""


def test_the_memory_of_attention(store: ModelStore, tmp_path: Path) -> None:
    """Without it, an exception went through C and ended the process. It was not given back."""
    if runtime.kernels().level is None:
        pytest.skip(f"no kernels: {runtime.kernels().reason}")
    scarce = tmp_path / "scarce.so"
    source = Path(__file__).with_name("scarce_memory.cpp")
    subprocess.run([*find_compiler(), "-shared", "-fPIC", source, "-o", scarce], check=True)
    model = store.path("llama", Recipe(n_context=N_CTX))
    answer = python(CODE, model, str(N_CTX), str(N_THREADS), env={"LD_PRELOAD": str(scarce)})
    assert answer.code == 0, answer.stderr
    found = json.loads(answer.stdout)
    missed, (none, most, later, change) = found["missed"], found["held"]
    assert missed == [2 * 2, 0, 0, 0]  # two layers, two evaluations
    assert 0 < found["difference"] < 0.01  # logits have a standard deviation of 3
    assert none == 0
    assert 0.5 < most / found["estimate"] < 1.1
    assert later == most  # a short text between long ones
    assert -1.1 * most < change < -0.9 * most  # after many short texts
