"""What a smaller copy of a target is worth as its draft: made, opened, read along with, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llamaspec.errors import EvaluationError, MemoryFullError, ModelFileError
from llamaspec.hub.made import DRAFT_FOR, identity
from llamaspec.llama.gguf_tensors import GgufTensors, read_tensors
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.quantize import COPY, Copy, write_copy
from llamaspec.measure.read_along import WrittenText, read_along, replay
from llamaspec.pruning.machine import Machine, draft_options
from llamaspec.pruning.search import Candidate, Found
from llamaspec.sampling.filters import Sampling

Tell = Callable[[str], None]  # receives a line for the person


@dataclass
class Bench:
    """Measures candidates; keeps the file of the best one."""

    target: LlamaModel
    n_layers: int  # without prediction heads
    texts: Sequence[WrittenText]
    round_seconds: Sequence[float]  # [K] of the target's share of a round with K draft tokens
    sampling: Sampling
    seed: int
    folder: Path  # for files of candidates
    deadline: float  # time.monotonic()
    tell: Tell
    machine: Machine
    best: Found | None = None
    best_file: Path | None = None
    _longest: float = 0.0  # seconds of one candidate
    _n: int = 0
    _header: GgufTensors = field(init=False)
    _texts: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._header = read_tensors(self.target.path)
        self._texts = {DRAFT_FOR: identity(self.target.path)}

    def __call__(self, candidate: Candidate) -> Found | None:
        """What a candidate is worth; None where it cannot be used, or the time is over."""
        start = time.monotonic()
        is_target = not candidate.pruned and candidate.file_type == COPY
        if is_target or (self._n and start + self._longest > self.deadline):
            return None
        self._n += 1
        path = self.folder / f"{self._n}.gguf"
        try:
            found = self._measure(candidate, path)
        except (ModelFileError, EvaluationError, MemoryFullError) as error:
            self.tell(f"{self.label(candidate)}: not possible: {error}")
            path.unlink(missing_ok=True)
            return None
        self._longest = max(self._longest, time.monotonic() - start)
        self.tell(
            f"{self.label(candidate)}: {found.n_bytes / 1e6:.0f} MB, a draft token costs "
            f"{found.cost_ratio:.3f} of a target token, acceptance {found.acceptance:.2f}, "
            f"predicted {found.speed_up:.2f}x"
        )
        self._keep(found, path)
        return found

    def label(self, candidate: Candidate) -> str:
        """A short name: L12-Q4_0."""
        return f"L{self.n_layers - len(candidate.pruned)}-{candidate.file_type}"

    def _measure(self, candidate: Candidate, path: Path) -> Found:
        write_copy(self.target.path, path, self._copy(candidate), self.target.options.threads or 0)
        with LlamaModel(path, draft_options(self.target)) as draft:
            agreed = [read_along(draft, text, self.sampling, self.seed) for text in self.texts]
            ratio = self.machine.step_ratio(self.target, draft)
        step = ratio * self.round_seconds[0]
        n_guesses, speed_up = replay(agreed, [s + n * step for n, s in enumerate(self.round_seconds)])
        acceptance = float(np.concatenate(agreed).mean())
        n_left, n_bytes = self.n_layers - len(candidate.pruned), path.stat().st_size
        return Found(candidate, n_left, n_bytes, ratio, acceptance, n_guesses, speed_up)

    def _copy(self, candidate: Candidate) -> Copy:
        """Without prediction heads, and with the numbers that count layers set right."""
        numbers, name = {}, self._header.texts.get("general.architecture", "")
        pruned, known = list(candidate.pruned), self._header.numbers
        n_heads = known.get(f"{name}.nextn_predict_layers", 0)
        if n_heads:
            numbers[f"{name}.nextn_predict_layers"] = 0
            pruned += range(self.n_layers, self.n_layers + n_heads)
        n_dense = known.get(f"{name}.leading_dense_block_count", 0)
        if n_dense:
            numbers[f"{name}.leading_dense_block_count"] = n_dense - sum(p < n_dense for p in pruned)
        return Copy(candidate.file_type, tuple(pruned), self._texts, numbers)

    def _keep(self, found: Found, path: Path) -> None:
        """Keep the file if it is the best so far, in place of the one before."""
        if self.best is not None and found.speed_up <= self.best.speed_up:
            path.unlink()
            return
        if self.best_file is not None:
            self.best_file.unlink()
        self.best, self.best_file = found, path
