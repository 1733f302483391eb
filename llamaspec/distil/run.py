"""Distils a small draft from a target: a Llama with the target's vocabulary that learns to say what it says.

Three stages, each of which leaves its files in a folder and goes on there: the target reads the user's text
and is recorded, the draft is trained, the draft is written. Needs the extra `train` (torch, gguf).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

from llamaspec.distil import train
from llamaspec.distil.export import copy_vocabulary, write_model
from llamaspec.distil.losses import BestTokens, loss_of
from llamaspec.distil.model import Llama, Shape
from llamaspec.distil.teacher import N_BEST, Record, Report, record
from llamaspec.errors import LlamaspecError, PromptError
from llamaspec.files import write_file
from llamaspec.hub.made import DRAFT_FOR, identity
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.options import ModelOptions
from llamaspec.values import TARGET, ForwardRequest

SHARE = 0.05  # of the target's parameters: how large a draft may be
LEAST_WIDTH, MOST_WIDTH, HEAD = 64, 1024, 64
LENGTH = 512  # tokens of a window, and of the draft's context: it can do no more than it has learnt
BATCH = 4096  # tokens of a step
RATE = 4e-3  # of learning
RECORDED_BYTES = 6  # of a token that the target might have said
TRAINED_BYTES = 34  # of a parameter: two checkpoints with weights, averages of gradients; the file

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Distillation:
    """What is wanted.

    Raises
    ------
    ValueError
        A number is out of range.
    """

    minutes: float = 60.0  # of training
    n_layers: int = 4
    width: int | None = None  # None = such that the draft is small next to its target
    seed: int = 1
    length: int = LENGTH
    batch: int = BATCH

    def __post_init__(self) -> None:
        if not 0 < self.minutes < 1e6:
            raise ValueError(
                f"the training must take more than 0 minutes and less than a million, got {self.minutes}"
            )
        if not 1 <= self.n_layers <= 64:
            raise ValueError(f"layers must be from 1 to 64, got {self.n_layers}")
        if self.width is not None and (not HEAD <= self.width <= 8192 or self.width % HEAD):
            raise ValueError(f"the width must be a multiple of {HEAD} from {HEAD} to 8192, got {self.width}")


def distil_draft(
    target: Path,
    options: ModelOptions,
    texts: Sequence[bytes],
    wish: Distillation,
    output: Path,
    tell: Tell,
    report: Report = lambda fraction: None,
) -> None:
    """Train a draft for a target along texts, and write it to `output`.

    What is interrupted goes on with the same call; its files lie in a folder beside the output until then.

    Raises
    ------
    LlamaspecError
        The folder holds another distillation, or the text is too short.
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
            f"the target reads {len(tokens)} tokens, about {seconds / 60:.0f} min; then a draft of "
            f"{_n_parameters(shape) / 1e6:.1f}M parameters learns for {wish.minutes:g} min on {device.type}"
        )
        recorded = record(model, tokens, wish.length, folder, report)
    draft = Llama(shape).to(device)
    _train(draft, recorded, wish, folder / "checkpoint.pt", tell, report)

    def describe(writer: GGUFWriter) -> None:
        writer.add_name(f"draft distilled for {target.stem}")
        writer.add_string(DRAFT_FOR, identity(target))
        copy_vocabulary(writer, target)

    write_model(output, draft, describe)
    shutil.rmtree(folder)


def _train(
    draft: Llama, recorded: Record, wish: Distillation, checkpoint: Path, tell: Tell, report: Report
) -> None:
    device = draft.embedding.weight.device
    rows = max(1, wish.batch // wish.length)
    plan = train.Plan(
        minutes=wish.minutes,
        rate=RATE,
        long_from=0.0,
        batch_tokens=rows * wish.length,
        long=wish.length,
        report_seconds=min(30.0, 60 * wish.minutes / 4),
    )
    chance = np.random.default_rng((wish.seed, checkpoint.exists()))  # other windows than before

    def batch(done: float) -> Tensor:
        report(done)
        return torch.from_numpy(chance.integers(0, len(recorded.tokens), size=rows))

    def loss(picked: Tensor) -> Tensor:
        chosen = picked.numpy()
        best = torch.from_numpy(recorded.best[chosen].astype(np.int64)).to(device)
        log_p = torch.from_numpy(recorded.log_p[chosen].astype(np.float32)).to(device)
        tokens = torch.from_numpy(recorded.tokens[chosen].astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            features = draft.hidden(tokens).flatten(0, 1)
        return loss_of(features, draft.embedding.weight, BestTokens(best.flatten(0, 1), log_p.flatten(0, 1)))

    def told(progress: train.Progress) -> None:
        left = (1 - progress.done) * 60 * wish.minutes * progress.tokens_per_second
        passes = left / recorded.tokens.size
        tell(f"{progress}; the rest of the time is enough to read the text {passes:.1f} times")

    train.run(draft, plan, batch, loss, told, checkpoint)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _shape(target: LlamaModel, wish: Distillation) -> Shape:
    """As large as the target allows."""
    most, n_vocab = SHARE * target.facts().n_computing, target.vocabulary_size
    widths = (wish.width,) if wish.width else range(LEAST_WIDTH, MOST_WIDTH + 1, HEAD)
    shapes = [
        Shape(wish.n_layers, width, width // HEAD, -(-8 * width // 3 // 32) * 32, n_vocab, wish.length)
        for width in widths
    ]
    return max((s for s in shapes if _n_parameters(s) <= most), key=_n_parameters, default=shapes[0])


def _n_parameters(shape: Shape) -> int:
    layer = 4 * shape.width**2 + 3 * shape.width * shape.n_ffn
    return shape.n_vocab * shape.width + shape.n_layers * layer


def _tokens(target: LlamaModel, texts: Sequence[bytes], length: int) -> NDArray[np.int32]:
    tokens = np.concatenate([target.vocabulary.tokenize(text) for text in texts])
    if len(tokens) < 2 * length:
        raise PromptError(f"the texts have {len(tokens)} tokens; give {2 * length} or more, better millions")
    return tokens


def _reading_seconds(target: LlamaModel, tokens: NDArray[np.int32], length: int) -> float:
    """What it takes the target to read all, from what it takes to read one window."""
    target.forward(ForwardRequest(TARGET, tokens[:length]))  # warms up
    target.forget()
    start = time.monotonic()
    target.forward(ForwardRequest(TARGET, tokens[:length], length))
    return (time.monotonic() - start) * len(tokens) / length


def _claim(folder: Path, target: Path, tokens: NDArray[np.int32], wish: Distillation, shape: Shape) -> None:
    """Begin a folder, or go on in one that holds the same distillation."""
    text = hashlib.sha256(tokens.tobytes()).hexdigest()
    # How long to train may change on the way.
    what = {"target": identity(target), "text": text, "shape": asdict(shape), "length": wish.length}
    folder.mkdir(parents=True, exist_ok=True)
    plan, said = folder / "plan.json", json.dumps(what)
    if not plan.exists():
        write_file(plan, said)
    elif plan.read_text() != said:
        raise LlamaspecError(f"{folder} holds another distillation; delete it, or name another --output")


def _check_disk(folder: Path, n_tokens: int, shape: Shape) -> None:
    """Refuse where the record, the checkpoint and the draft do not fit."""
    needed = n_tokens * N_BEST * RECORDED_BYTES + _n_parameters(shape) * TRAINED_BYTES
    held = sum(file.stat().st_size for file in folder.iterdir())
    free = shutil.disk_usage(folder).free + held
    if free < needed:
        raise LlamaspecError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, distilling needs {needed / 1e9:.1f} GB; give "
            "less text, or name a file on another disk with --output"
        )
