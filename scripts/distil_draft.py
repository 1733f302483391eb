"""Distil a small draft model from a target: a Llama with the same vocabulary that learns its distribution.

\b
    python scripts/distil_draft.py big.gguf small.gguf corpus.txt more.txt

First the target evaluates the texts, which is much cheaper than generating, and its most probable tokens at
every position are recorded. Then the draft is trained on this record for an hour, on the GPU if there is one.
After Ctrl-C, the same command with the same texts continues the training. The script needs the ``train``
extra.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from gguf import GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

from gguf_writing import copy_vocabulary
from llamaspec import LlamaModel, ModelOptions
from llamaspec.values import TARGET, ForwardRequest, Logits
from small_llama import Llama, Shape, loss_of, train, write_model

SHARE = 0.05  # maximum parameters of the draft, as a share of the target's
HEAD, MOST_WIDTH = 64, 1024  # hidden size of an attention head; of the draft
LENGTH = 512  # tokens of a training window, and so of the draft's context
BATCH = 4096  # tokens per training step
RATE = 4e-3  # peak learning rate
N_BEST = 32  # recorded tokens per position; they have nearly all of the probability


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("draft", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("texts", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(target: Path, draft: Path, texts: Sequence[Path]) -> None:
    """Train and write the draft."""
    if draft.exists():
        sys.exit(f"distil_draft: {draft} exists; name another file")
    distil(target, draft, [path.read_bytes() for path in texts])


def distil(
    target: Path,
    output: Path,
    texts: Sequence[bytes],
    *,
    n_layers: int = 4,
    width: int | None = None,
    minutes: float = 60.0,
    seed: int = 1,
) -> None:
    """Train a draft for a target on texts; `width` None is chosen by the target's size."""
    torch.manual_seed(seed)
    folder = output.with_name(f".{output.name}.distilling")
    with LlamaModel(target, ModelOptions(n_ctx=LENGTH, max_scored=LENGTH)) as model:
        shape = shape_of(model, n_layers, width)
        tokens = np.concatenate([model.vocabulary.tokenize(text) for text in texts])
        windows = np.resize(tokens, (len(tokens) // LENGTH, LENGTH)).astype(np.int64)
        log(f"{windows.size} tokens; a draft of {shape.n_parameters / 1e6:.1f}M parameters")
        best, log_p = record(model, windows, folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draft, checkpoint, rows = Llama(shape).to(device), folder / "checkpoint.pt", BATCH // LENGTH
    # A resumed run draws other windows than the first part.
    chance = np.random.default_rng((seed, checkpoint.exists()))

    def batch_loss(done: float) -> Tensor:
        chosen = chance.integers(0, len(windows), size=rows)
        wanted = torch.from_numpy(best[chosen].astype(np.int64)).to(device).flatten(0, 1)
        weights = torch.from_numpy(log_p[chosen].astype(np.float32)).to(device).flatten(0, 1)
        with torch.autocast(device.type, torch.bfloat16):
            features = draft.hidden(torch.from_numpy(windows[chosen]).to(device)).flatten(0, 1)
        return loss_of(features, draft.embedding.weight, wanted, weights)

    def report(line: str, n_left: float) -> None:
        log(f"draft {line}; time left for {n_left / windows.size:.1f} passes over the texts")

    train(draft, batch_loss, report, checkpoint, minutes=minutes, rate=RATE, batch_tokens=BATCH)

    def describe(writer: GGUFWriter) -> None:
        writer.add_name(f"draft distilled for {target.stem}")
        copy_vocabulary(writer, target)

    write_model(output, draft, describe)
    shutil.rmtree(folder)


def shape_of(target: LlamaModel, n_layers: int, width: int | None) -> Shape:
    """Return the largest shape with at most `SHARE` of the target's parameters."""
    widths = [width] if width else range(HEAD, MOST_WIDTH + 1, HEAD)
    shapes = [
        Shape(n_layers, width, width // HEAD, -(-8 * width // 3 // 32) * 32, target.vocabulary_size, LENGTH)
        for width in widths
    ]
    most = SHARE * target.facts().n_computing
    return max(
        (shape for shape in shapes if shape.n_parameters <= most), key=lambda s: s.width, default=shapes[0]
    )


def record(
    target: LlamaModel, windows: NDArray[np.int64], folder: Path
) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return the target's most probable tokens after each position, and their logarithms: [W, T, k] each.

    The windows are independent texts. What is recorded lies in `folder`, for a run that resumes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "best.npy", folder / "log_p.npy"
    if not all(file.exists() for file in files):
        shape = (*windows.shape, min(N_BEST, target.vocabulary_size))
        best, log_p = np.empty(shape, np.int32), np.empty(shape, np.float16)
        for i, window in enumerate(windows):
            target.forget()
            request = ForwardRequest(TARGET, window.astype(np.int32), LENGTH)
            best[i], log_p[i] = most_probable(target.forward(request), shape[-1])
        for file, array in zip(files, (best, log_p), strict=True):
            np.save(file, array)
    return np.load(files[0], mmap_mode="r"), np.load(files[1], mmap_mode="r")


def most_probable(logits: Logits, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the k most probable tokens per position and their log-probabilities: [T, k] each."""
    best = np.argpartition(logits, -k, axis=1)[:, -k:]
    scores = np.take_along_axis(logits, best, axis=1)
    most = scores.max(axis=1, keepdims=True)
    total = np.exp(logits - most).sum(axis=1, keepdims=True)
    return best, scores - most - np.log(total)


def log(line: object) -> None:
    """Write a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
