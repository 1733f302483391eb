"""What a target says along a text: at every position its most probable tokens, recorded once.

The target reads, which costs a fraction of writing; a draft then learns from the record for as long as it
likes, while the target is closed. An interrupted recording goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamaspec.files import write_file
from llamaspec.llama.model import LlamaModel
from llamaspec.values import TARGET, ForwardRequest, Logits

N_BEST = 32  # tokens of a position; they have nearly all of the probability

Report = Callable[[float], None]  # the finished fraction, 0 to 1


@dataclass(frozen=True)
class Record:
    """Windows of a text and what the target says behind each of their tokens."""

    tokens: NDArray[np.int32]  # [W, T]
    best: NDArray[np.int32]  # [W, T, k] ids
    log_p: NDArray[np.float16]  # [W, T, k] natural logarithms


def record(
    target: LlamaModel, tokens: NDArray[np.int32], length: int, folder: Path, report: Report
) -> Record:
    """Let the target read a text in windows, beginning each anew.

    Parameters
    ----------
    target : LlamaModel
        Scores `length` positions at once.
    tokens : [n] int32
        At least `length`; what is left behind the last whole window is left out.
    length : int
        Tokens of a window.
    folder : Path
        Keeps the record.
    report : callable
    """
    windows = np.resize(tokens, (len(tokens) // length, length)).astype(np.int32)
    shape = (*windows.shape, min(N_BEST, target.vocabulary_size))
    best: NDArray[np.int32] = _array(folder / "best.npy", shape, np.int32)
    log_p: NDArray[np.float16] = _array(folder / "log_p.npy", shape, np.float16)
    counter = folder / "recorded.txt"
    n_done = int(counter.read_text()) if counter.exists() else 0
    for i in range(n_done, len(windows)):
        target.forget()
        logits = target.forward(ForwardRequest(TARGET, windows[i], length))
        best[i], log_p[i] = _best(logits, shape[-1])
        write_file(counter, str(i + 1))
        report((i + 1 - n_done) / (len(windows) - n_done))
    return Record(windows, best, log_p)


def _best(logits: Logits, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k most probable tokens of each row and their log-probabilities: [T, k] each."""
    best = np.argpartition(logits, -k, axis=1)[:, -k:]
    scores = np.take_along_axis(logits, best, axis=1)
    most = scores.max(axis=1, keepdims=True)
    total = np.exp(logits - most).sum(axis=1, keepdims=True)
    return best, scores - most - np.log(total)


def _array(path: Path, shape: tuple[int, ...], kind: type[np.generic]) -> NDArray[Any]:
    """An array in a file, which survives an interruption."""
    if path.exists():
        return np.load(path, mmap_mode="r+")
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
