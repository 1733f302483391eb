"""Makes a draft out of a target: searches, measures the best, and writes it only if it pays.

What a draft must beat is plain decoding of this target, on this machine, on the user's kind of text. First
the target writes some text and shows what wider batches cost; where even a perfect draft would not pay,
nothing is tried.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llamaspec.errors import LlamaspecError, PromptError
from llamaspec.hub.made import made_path
from llamaspec.llama.layer_influence import layer_influence
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.quantize import COPY
from llamaspec.measure.compare import Spread
from llamaspec.measure.read_along import read_along, write_texts
from llamaspec.measure.sample_text import TEXT
from llamaspec.measure.task import Task
from llamaspec.pair import Pair
from llamaspec.pruning.bench import Bench, Tell
from llamaspec.pruning.machine import Machine, ThisMachine, draft_options
from llamaspec.pruning.search import Found, search
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.filters import Sampling
from llamaspec.values import TokenArray

BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "Q2_K": 3.35}  # of a weight, roughly; the types that are tried
FIRST_TYPE = "Q4_0"  # the fastest for its size on most machines
SMALLER = 0.9  # of the target's bits for each weight: what a type must save to be tried
WORTH = 1.02  # a measured speed-up below this does not pay
N_PROMPTS, PROMPT, WRITTEN, LEAST_WRITTEN = 4, 64, 128, 16  # texts; tokens of each
WRITING = 0.06  # part of the time that writing them may take; the measurement at the end takes six times it
SEARCHING = 0.5  # part of the time after which no candidate is begun

NOTHING_WRITTEN = "the target ends its texts at once; give other texts with --text"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted.

    Raises
    ------
    ValueError
        A number is out of range.
    """

    texts: tuple[bytes, ...] = ()  # of the user's kind; none = an ordinary text
    minutes: float = 15.0  # for all together; what is begun is ended
    types: tuple[str, ...] = ()  # to be tried; none = those that make the target smaller
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 1
    output: Path | None = None  # default: beside the target

    def __post_init__(self) -> None:
        if not 0 < self.minutes < 1e6:
            raise ValueError(
                f"the budget must be more than 0 minutes and less than a million, got {self.minutes}"
            )


@dataclass(frozen=True, slots=True)
class Made:
    """What came of it."""

    found: tuple[Found, ...]  # the best first
    measured: Spread | None  # tokens per second next to plain decoding; None where nothing was worth a try
    path: Path | None  # of the draft; None where none pays
    reason: str | None  # why there is none


def make_draft(target: LlamaModel, wish: Wish, tell: Tell, machine: Machine | None = None) -> Made:
    """Make the best draft of a target out of the target itself.

    Parameters
    ----------
    target : LlamaModel
    wish : Wish
    tell : callable
        Hears what happens, a line at a time.
    machine : Machine, optional
        What things cost; default: this machine.

    Raises
    ------
    LlamaspecError
        There is no room on the disk, or a text cannot be used.
    """
    machine = machine or ThisMachine()
    deadline = time.monotonic() + 60 * wish.minutes * SEARCHING
    output = wish.output or made_path(target.path, "made")  # its folder is what counts until it has a name
    pair = Pair(target, None, 0.0)
    prompts = _prompts(target, wish.texts)
    tell(f"measuring {target.path.name}: what wider batches cost, and what it writes")
    seconds = machine.round_seconds(target)
    ideal = max((n + 1) * seconds[0] / each for n, each in enumerate(seconds))
    if ideal < WORTH:
        return Made((), None, None, f"here even a perfect draft would give {ideal:.2f}x at most")
    tasks = _tasks(prompts, wish, seconds[0])
    texts = write_texts(pair, tasks)
    if not texts:
        raise PromptError(NOTHING_WRITTEN)
    influence = layer_influence(target.weights, target.options, texts[0].tokens)
    types = wish.types or _types(target)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _check_disk(target, output.parent)
        with tempfile.TemporaryDirectory(prefix=".llamaspec-draft-", dir=output.parent) as folder:
            bench = Bench(
                target, len(influence), texts, seconds, wish.sampling, wish.seed, Path(folder), deadline,
                tell, machine,
            )  # fmt: skip
            found = tuple(search(influence, types, bench))
            return _finish(bench, found, tasks, wish)
    except OSError as error:
        raise LlamaspecError(
            f"cannot write into {output.parent}: {error.strerror or error}; name another place with --output"
        ) from error


def _finish(bench: Bench, found: tuple[Found, ...], tasks: Sequence[Task], wish: Wish) -> Made:
    """Measure the best candidate, and keep it if it pays."""
    best, file = bench.best, bench.best_file
    if best is None or file is None:
        return Made(found, None, None, "no smaller copy of this target can be made")
    if best.speed_up < WORTH:
        label = bench.label(best.candidate)
        return Made(found, None, None, f"the best one, {label}, is predicted to give {best.speed_up:.2f}x")
    bench.tell(f"measuring {bench.label(best.candidate)} together with its target")
    measured = bench.machine.speed_up(bench.target, file, tasks)
    if measured.median < WORTH:
        reason = f"the best one, {bench.label(best.candidate)}, gave {measured.median:.2f}x"
        return Made(found, measured, None, reason)
    path = wish.output or made_path(bench.target.path, bench.label(best.candidate))
    file.replace(path)
    return Made(found, measured, path, None)


@dataclass(frozen=True, slots=True)
class Judged:
    """What a draft is worth that was made in another way."""

    cost_ratio: float  # seconds of a draft step next to one token of the target
    acceptance: float  # of draft tokens, on the target's own texts
    measured: Spread  # tokens per second next to plain decoding


def judge_draft(target: LlamaModel, draft_file: Path, wish: Wish, machine: Machine | None = None) -> Judged:
    """Measure a draft together with its target."""
    machine = machine or ThisMachine()
    tasks = _tasks(_prompts(target, wish.texts), wish, machine.round_seconds(target)[0])
    texts = write_texts(Pair(target, None, 0.0), tasks)
    if not texts:
        raise PromptError(NOTHING_WRITTEN)
    with LlamaModel(draft_file, draft_options(target)) as draft:
        agreed = [read_along(draft, text, wish.sampling, wish.seed) for text in texts]
        ratio = machine.step_ratio(target, draft)
    acceptance = float(np.concatenate(agreed).mean())
    return Judged(ratio, acceptance, machine.speed_up(target, draft_file, tasks))


def _prompts(target: LlamaModel, texts: Sequence[bytes]) -> list[TokenArray]:
    """Beginnings at even distances over all texts."""
    vocabulary, room = target.vocabulary, max(2, target.context_size - LEAST_WRITTEN)
    length = min(PROMPT, room)
    all_tokens = [vocabulary.tokenize(text, add_special=False) for text in texts or (TEXT.encode(),)]
    joined = np.concatenate(all_tokens)
    if len(joined) < 2:
        raise PromptError("the texts are too short; give some pages of what the model is used for")
    starts = np.unique(np.linspace(0, max(0, len(joined) - length), N_PROMPTS).astype(int))
    return [vocabulary.begun(joined[start : start + length]) for start in starts]


def _tasks(prompts: Sequence[TokenArray], wish: Wish, token_seconds: float) -> list[Task]:
    """What the target is to write, as much as the time allows."""
    affordable = int(60 * wish.minutes * WRITING / (token_seconds * len(prompts)))
    n = min(WRITTEN, max(LEAST_WRITTEN, affordable))
    return [Task(prompt, wish.sampling, wish.seed, n, DEFAULT_RULE) for prompt in prompts]


def _types(target: LlamaModel) -> tuple[str, ...]:
    """The types that are smaller than the target's, the one to begin with first."""
    facts = target.facts()
    bits = 8 * facts.weights_bytes / facts.n_parameters
    smaller = [name for name, its in BITS.items() if its < SMALLER * bits]
    if FIRST_TYPE in smaller:
        return (FIRST_TYPE, *(name for name in smaller if name != FIRST_TYPE), COPY)
    return (COPY, *smaller)


def _check_disk(target: LlamaModel, folder: Path) -> None:
    """Refuse where a candidate and the best one so far may not fit: both are smaller than it."""
    needed, free = 2 * target.facts().weights_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise LlamaspecError(
            f"{folder} has {free / 1e9:.1f} GB free, the search may need {needed / 1e9:.1f} GB for a while; "
            "name a file on another disk with --output"
        )
