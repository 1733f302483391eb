"""Distils a small draft model from a target: a Llama with the same vocabulary that learns its distribution.

First the target evaluates the user's texts, which is much cheaper than generating, and its most probable
tokens at every position are recorded. Then the draft model is trained on this record. Both stages keep their
files in a folder and resume after an interruption. Needs the extra `train` (torch, gguf).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

from llamaspec.draft_making.gguf_writing import copy_vocabulary
from llamaspec.draft_making.student import Llama, Shape, loss_of, train, write_model
from llamaspec.errors import LlamaspecError, PromptError
from llamaspec.files import write_file
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.plan import DRAFT_FOR
from llamaspec.values import TARGET, ForwardRequest, Logits

SHARE = 0.05  # maximum parameters of the draft model, as a share of the target's
LEAST_WIDTH, MOST_WIDTH, HEAD = 64, 1024, 64  # hidden sizes; of an attention head
LENGTH = 512  # tokens of a training window, and so of the draft model's context
BATCH = 4096  # tokens per training step
RATE = 4e-3  # peak learning rate
N_BEST = 32  # recorded tokens per position; they have nearly all of the probability
RECORDED_BYTES = 6  # per recorded token
TRAINED_BYTES = 34  # per parameter: two checkpoints (weights, optimizer state) and the GGUF file

Log = Callable[[str], None]  # receives one line of progress
Report = Callable[[float], None]  # receives the finished fraction, 0 to 1


@dataclass(frozen=True, slots=True)
class Distillation:
    """Settings of a distillation; ValueError if a number is out of range."""

    minutes: float = 60.0  # of training
    n_layers: int = 4
    width: int | None = None  # hidden size; None = chosen by the target's size
    seed: int = 1
    length: int = LENGTH  # tokens of a window
    batch: int = BATCH  # tokens per training step

    def __post_init__(self) -> None:
        if not 0 < self.minutes < 1e6:
            raise ValueError(
                f"the training time must be more than 0 and less than a million minutes, got {self.minutes}"
            )
        if not 1 <= self.n_layers <= 64:
            raise ValueError(f"layers must be from 1 to 64, got {self.n_layers}")
        if self.width is not None and (not HEAD <= self.width <= 8192 or self.width % HEAD):
            raise ValueError(f"the width must be a multiple of {HEAD} from {HEAD} to 8192, got {self.width}")


@dataclass(frozen=True)
class Record:
    """Windows of a text, with the target's most probable tokens after each position."""

    tokens: NDArray[np.int32]  # [W, T]
    best: NDArray[np.int32]  # [W, T, k] ids
    log_p: NDArray[np.float16]  # [W, T, k] natural logarithms


def distil_draft(
    target: Path,
    options: ModelOptions,
    texts: Sequence[bytes],
    settings: Distillation,
    output: Path,
    log: Log,
    report: Report = lambda fraction: None,
) -> None:
    """Train a draft model for a target on texts, and write it to `output`.

    After an interruption, the same call resumes from the files in a folder beside `output`. LlamaspecError if
    the folder belongs to another distillation, the texts are too short, or the disk is full.
    """
    torch.manual_seed(settings.seed)
    device = _device()
    with LlamaModel(target, replace(options, n_ctx=settings.length, max_scored=settings.length)) as model:
        shape = _shape(model, settings)
        tokens = _tokens(model, texts, settings.length)
        folder = output.with_name(f".{output.name}.distilling")
        _claim(folder, model, tokens, settings, shape)
        _check_disk(folder, len(tokens), shape)
        seconds = _reading_seconds(model, tokens, settings.length)
        log(
            f"the target evaluates {len(tokens)} tokens, about {seconds / 60:.0f} min; then a draft of "
            f"{shape.n_parameters / 1e6:.1f}M parameters trains for {settings.minutes:g} min on {device.type}"
        )
        recorded = record(model, tokens, settings.length, folder, report)
    draft = Llama(shape).to(device)
    _train(draft, recorded, settings, folder / "checkpoint.pt", log, report)

    def describe(writer: GGUFWriter) -> None:
        writer.add_name(f"draft distilled for {target.stem}")
        writer.add_string(DRAFT_FOR, model.identity)
        copy_vocabulary(writer, target)

    write_model(output, draft, describe)
    shutil.rmtree(folder)


def record(
    target: LlamaModel, tokens: NDArray[np.int32], length: int, folder: Path, report: Report
) -> Record:
    """Evaluate a text with the target, in independent windows of `length` tokens.

    The record is written to files in `folder`, window by window. An incomplete last window is left out.
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
        best[i], log_p[i] = _most_probable(logits, shape[-1])
        write_file(counter, str(i + 1))
        report((i + 1 - n_done) / (len(windows) - n_done))
    return Record(windows, best, log_p)


def _most_probable(logits: Logits, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the k most probable tokens per position and their log-probabilities: [T, k] each."""
    best = np.argpartition(logits, -k, axis=1)[:, -k:]
    scores = np.take_along_axis(logits, best, axis=1)
    most = scores.max(axis=1, keepdims=True)
    total = np.exp(logits - most).sum(axis=1, keepdims=True)
    return best, scores - most - np.log(total)


def _array(path: Path, shape: tuple[int, ...], kind: type[np.generic]) -> NDArray[Any]:
    """Open or create an array in a file, which survives an interruption."""
    if path.exists():
        array: NDArray[Any] = np.load(path, mmap_mode="r+")
        return array
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)


def _train(
    draft: Llama, recorded: Record, settings: Distillation, checkpoint: Path, log: Log, report: Report
) -> None:
    device = draft.embedding.weight.device
    rows = max(1, settings.batch // settings.length)
    # A resumed run draws other windows than the first part.
    chance = np.random.default_rng((settings.seed, checkpoint.exists()))

    def batch_loss(done: float) -> Tensor:
        report(done)
        chosen = chance.integers(0, len(recorded.tokens), size=rows)
        best = torch.from_numpy(recorded.best[chosen].astype(np.int64)).to(device)
        log_p = torch.from_numpy(recorded.log_p[chosen].astype(np.float32)).to(device)
        tokens = torch.from_numpy(recorded.tokens[chosen].astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            features = draft.hidden(tokens).flatten(0, 1)
        return loss_of(features, draft.embedding.weight, best.flatten(0, 1), log_p.flatten(0, 1))

    def report_progress(line: str, n_left: float) -> None:
        log(f"{line}; time left for {n_left / recorded.tokens.size:.1f} passes over the text")

    train(
        draft,
        batch_loss,
        report_progress,
        checkpoint,
        minutes=settings.minutes,
        rate=RATE,
        batch_tokens=rows * settings.length,
        report_seconds=min(30.0, 60 * settings.minutes / 4),
    )


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _shape(target: LlamaModel, settings: Distillation) -> Shape:
    """Return the largest shape with at most `SHARE` of the target's parameters."""
    most, n_vocab = SHARE * target.facts().n_computing, target.vocabulary_size
    widths = (settings.width,) if settings.width else range(LEAST_WIDTH, MOST_WIDTH + 1, HEAD)
    shapes = [
        Shape(
            n_layers=settings.n_layers,
            width=width,
            n_heads=width // HEAD,
            n_ffn=-(-8 * width // 3 // 32) * 32,
            n_vocab=n_vocab,
            n_context=settings.length,
        )
        for width in widths
    ]
    fitting = [shape for shape in shapes if shape.n_parameters <= most]
    return max(fitting, key=lambda shape: shape.n_parameters, default=shapes[0])


def _tokens(target: LlamaModel, texts: Sequence[bytes], length: int) -> NDArray[np.int32]:
    tokens = np.concatenate([target.vocabulary.tokenize(text) for text in texts])
    if len(tokens) < 2 * length:
        raise PromptError(
            f"the texts have {len(tokens)} tokens; give {2 * length} or more with --text, better millions"
        )
    return tokens


def _reading_seconds(target: LlamaModel, tokens: NDArray[np.int32], length: int) -> float:
    """Estimate the seconds for all tokens from those for one window."""
    target.forward(ForwardRequest(TARGET, tokens[:length]))  # warms up
    target.forget()
    start = time.monotonic()
    target.forward(ForwardRequest(TARGET, tokens[:length], length))
    return (time.monotonic() - start) * len(tokens) / length


def _claim(
    folder: Path, target: LlamaModel, tokens: NDArray[np.int32], settings: Distillation, shape: Shape
) -> None:
    """Create the folder, or check that it belongs to the same distillation."""
    text = hashlib.sha256(tokens.tobytes()).hexdigest()
    # The training time is not part of it, so it may change between runs.
    owner = {"target": target.identity, "text": text, "shape": asdict(shape), "length": settings.length}
    folder.mkdir(parents=True, exist_ok=True)
    plan, wanted = folder / "plan.json", json.dumps(owner)
    if not plan.exists():
        write_file(plan, wanted)
    elif plan.read_text() != wanted:
        raise LlamaspecError(
            f"{folder} belongs to another distillation; delete it, or name another file with --output"
        )


def _check_disk(folder: Path, n_tokens: int, shape: Shape) -> None:
    """Raise a LlamaspecError if the record, the checkpoint and the draft do not fit on the disk."""
    needed = n_tokens * N_BEST * RECORDED_BYTES + shape.n_parameters * TRAINED_BYTES
    held = sum(file.stat().st_size for file in folder.iterdir())
    free = shutil.disk_usage(folder).free + held
    if free < needed:
        raise LlamaspecError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, but distilling needs {needed / 1e9:.1f} GB; give "
            "less text, or name a file on another disk with --output"
        )
