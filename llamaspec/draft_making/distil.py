"""Distils a small draft from a target: a Llama with its vocabulary, which learns the target's distribution.

The target evaluates the user's texts, which is much cheaper than generating, and its most probable tokens at
every position are recorded. Then the draft is trained on the record. Each stage keeps its files in a folder
and resumes there after an interruption. Needs the extra `train` (torch, gguf).
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

from llamaspec.draft_making.student import (
    Llama,
    Shape,
    copy_vocabulary,
    loss_of,
    train,
    write_model,
)
from llamaspec.errors import LlamaspecError, PromptError
from llamaspec.files import file_identity, write_file
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.plan import DRAFT_FOR
from llamaspec.values import TARGET, ForwardRequest, Logits

SHARE = 0.05  # maximum size of a draft, as a share of the target's parameters
LEAST_WIDTH, MOST_WIDTH, HEAD = 64, 1024, 64
LENGTH = 512  # tokens of a window, and of the draft's context, because it learns no longer one
BATCH = 4096  # tokens per training step
RATE = 4e-3  # peak learning rate
N_BEST = 32  # recorded tokens per position; they have nearly all of the probability
RECORDED_BYTES = 6  # per recorded token
TRAINED_BYTES = 34  # per parameter: two checkpoints (weights, optimizer state) and the GGUF file

Tell = Callable[[str], None]  # receives one line of progress
Report = Callable[[float], None]  # the finished fraction, 0 to 1


@dataclass(frozen=True, slots=True)
class Distillation:
    """Settings of a distillation; ValueError if a number is out of range."""

    minutes: float = 60.0  # of training
    n_layers: int = 4
    width: int | None = None  # None = chosen by the target's size
    seed: int = 1
    length: int = LENGTH
    batch: int = BATCH

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
    """Windows of a text, with the target's most probable tokens after each of their tokens."""

    tokens: NDArray[np.int32]  # [W, T]
    best: NDArray[np.int32]  # [W, T, k] ids
    log_p: NDArray[np.float16]  # [W, T, k] natural logarithms


def distil_draft(
    target: Path,
    options: ModelOptions,
    texts: Sequence[bytes],
    wish: Distillation,
    output: Path,
    tell: Tell,
    report: Report = lambda fraction: None,
) -> None:
    """Train a draft for a target on texts, and write it to `output`.

    After an interruption the same call resumes from files in a folder beside the output. LlamaspecError if
    that holds another distillation, or the text is too short.
    """
    torch.manual_seed(wish.seed)
    device = _device()
    with LlamaModel(target, replace(options, n_ctx=wish.length, max_scored=wish.length)) as model:
        shape = _shape(model, wish)
        tokens = _tokens(model, texts, wish.length)
        folder = output.with_name(f".{output.name}.distilling")
        _claim(folder, target, tokens, wish, shape)
        _check_disk(folder, len(tokens), shape)
        seconds = _reading_seconds(model, tokens, wish.length)
        tell(
            f"the target evaluates {len(tokens)} tokens, about {seconds / 60:.0f} min; then a draft of "
            f"{shape.n_parameters / 1e6:.1f}M parameters trains for {wish.minutes:g} min on {device.type}"
        )
        recorded = record(model, tokens, wish.length, folder, report)
    draft = Llama(shape).to(device)
    _train(draft, recorded, wish, folder / "checkpoint.pt", tell, report)

    def describe(writer: GGUFWriter) -> None:
        writer.add_name(f"draft distilled for {target.stem}")
        writer.add_string(DRAFT_FOR, file_identity(target))
        copy_vocabulary(writer, target)

    write_model(output, draft, describe)
    shutil.rmtree(folder)


def record(
    target: LlamaModel, tokens: NDArray[np.int32], length: int, folder: Path, report: Report
) -> Record:
    """Evaluate a text with the target in independent windows of `length` tokens.

    The record grows in files in `folder`. An incomplete last window is ignored.
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
    """Open or create an array in a file, so that it survives an interruption."""
    if path.exists():
        array: NDArray[Any] = np.load(path, mmap_mode="r+")
        return array
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)


def _train(
    draft: Llama, recorded: Record, wish: Distillation, checkpoint: Path, tell: Tell, report: Report
) -> None:
    device = draft.embedding.weight.device
    rows = max(1, wish.batch // wish.length)
    chance = np.random.default_rng((wish.seed, checkpoint.exists()))  # a resumed run draws other windows

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
        tell(f"{line}; time left for {n_left / recorded.tokens.size:.1f} passes over the text")

    train(
        draft,
        batch_loss,
        report_progress,
        checkpoint,
        minutes=wish.minutes,
        rate=RATE,
        batch_tokens=rows * wish.length,
        report_seconds=min(30.0, 60 * wish.minutes / 4),
    )


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _shape(target: LlamaModel, wish: Distillation) -> Shape:
    """Return the largest shape within `SHARE` of the target."""
    most, n_vocab = SHARE * target.facts().n_computing, target.vocabulary_size
    widths = (wish.width,) if wish.width else range(LEAST_WIDTH, MOST_WIDTH + 1, HEAD)
    shapes = [
        Shape(wish.n_layers, width, width // HEAD, -(-8 * width // 3 // 32) * 32, n_vocab, wish.length)
        for width in widths
    ]
    fitting = [shape for shape in shapes if shape.n_parameters <= most]
    return max(fitting, key=lambda shape: shape.n_parameters, default=shapes[0])


def _tokens(target: LlamaModel, texts: Sequence[bytes], length: int) -> NDArray[np.int32]:
    tokens = np.concatenate([target.vocabulary.tokenize(text) for text in texts])
    if len(tokens) < 2 * length:
        raise PromptError(f"the texts have {len(tokens)} tokens; give {2 * length} or more, better millions")
    return tokens


def _reading_seconds(target: LlamaModel, tokens: NDArray[np.int32], length: int) -> float:
    """Estimate the time to evaluate all tokens from the time for one window."""
    target.forward(ForwardRequest(TARGET, tokens[:length]))  # warms up
    target.forget()
    start = time.monotonic()
    target.forward(ForwardRequest(TARGET, tokens[:length], length))
    return (time.monotonic() - start) * len(tokens) / length


def _claim(folder: Path, target: Path, tokens: NDArray[np.int32], wish: Distillation, shape: Shape) -> None:
    """Create the folder, or resume in one that holds the same distillation."""
    text = hashlib.sha256(tokens.tobytes()).hexdigest()
    # The training time may change between runs.
    settings = {"target": file_identity(target), "text": text, "shape": asdict(shape), "length": wish.length}
    folder.mkdir(parents=True, exist_ok=True)
    plan, wanted = folder / "plan.json", json.dumps(settings)
    if not plan.exists():
        write_file(plan, wanted)
    elif plan.read_text() != wanted:
        raise LlamaspecError(f"{folder} holds another distillation; delete it, or name another --output")


def _check_disk(folder: Path, n_tokens: int, shape: Shape) -> None:
    """Raise a LlamaspecError if the record, the checkpoint and the draft do not fit on the disk."""
    needed = n_tokens * N_BEST * RECORDED_BYTES + shape.n_parameters * TRAINED_BYTES
    held = sum(file.stat().st_size for file in folder.iterdir())
    free = shutil.disk_usage(folder).free + held
    if free < needed:
        raise LlamaspecError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, distilling needs {needed / 1e9:.1f} GB; give "
            "less text, or name a file on another disk with --output"
        )
