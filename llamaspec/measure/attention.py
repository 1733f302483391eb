"""How long attention takes, with flash attention or without, for each type of keys and values.

All ways are timed in turns on a tiny model of the same heads, at two depths; attention is linear in depth,
and weights cost the same in all. Some compute one position by another kernel than several, so that the text
depends on what was drafted; this is tried, too. Which is best for a model: `attention_choice.py`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llamaspec.errors import LlamaspecError
from llamaspec.llama.attention import (
    N_LAYERS,
    N_ZEROS,
    READ,
    WIDEST,
    AttentionShape,
    AttentionTrial,
    write_model,
)
from llamaspec.llama.openmp import end_own_threads
from llamaspec.llama.options import ModelOptions

SHALLOW, DEEP = 512, 2048  # tokens of context; kernels change below
SEVERAL = 4  # positions of a round with three draft tokens, of which one is accepted, say
JOBS = {READ: (WIDEST,), SHALLOW: (WIDEST, SEVERAL, 1), DEEP: (SEVERAL, 1)}  # widths timed at each depth
BATCHES = {  # compared with single positions at each depth
    SHALLOW: ([2, 2, 2, 2], [3, 3, 2], [4, 4], [8]),
    DEEP: ([3, 3, 2],),
}
FEWEST_TURNS, MOST_TURNS = 3, 7
PATIENCE = 5.0  # times the time that it should take: slow machines need some
MOST_SECONDS = 1e6

Clock = Callable[[], float]  # seconds


@dataclass(frozen=True, slots=True)
class Configuration:
    """How attention is computed."""

    flash_attention: str  # on or off
    cache_type_k: str
    cache_type_v: str

    def __str__(self) -> str:
        return f"flash attention {self.flash_attention}, keys {self.cache_type_k}, values {self.cache_type_v}"


PLAIN = Configuration("on", "f16", "f16")  # what llama.cpp does unless told otherwise
SAFE = Configuration("on", "f16", "bf16")  # one kernel for all widths, on every CPU
CONFIGURATIONS = (PLAIN, SAFE, Configuration("on", "bf16", "bf16"), Configuration("off", "f16", "f16"))


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of one configuration, each measured once; of N_LAYERS layers.

    Raises
    ------
    ValueError
        They are no seconds.
    """

    single_shallow: float  # one position behind SHALLOW tokens
    single_deep: float  # behind DEEP tokens
    several_shallow: float  # SEVERAL positions
    several_deep: float
    reading_first: float  # WIDEST positions behind READ tokens
    reading_shallow: float  # behind SHALLOW tokens

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 < getattr(self, name) <= MOST_SECONDS:
                raise ValueError(f"{name} must be from 0 to {MOST_SECONDS:g} seconds")

    @property
    def single(self) -> float:
        """Of one position, for each token of the context and each layer."""
        return _slope(self.single_deep - self.single_shallow, DEEP - SHALLOW)

    @property
    def several(self) -> float:
        """Of SEVERAL positions together."""
        return _slope(self.several_deep - self.several_shallow, DEEP - SHALLOW)

    @property
    def reading(self) -> float:
        """Of one position among WIDEST."""
        return _slope(self.reading_shallow - self.reading_first, (SHALLOW - READ) * WIDEST)


def _slope(seconds: float, n: int) -> float:
    return max(seconds, 1e-9) / n / N_LAYERS


@dataclass(frozen=True, slots=True)
class Measured:
    """One configuration."""

    configuration: Configuration
    is_exact: bool  # at every width tried the very numbers of single positions
    turns: tuple[Turn, ...]

    def best(self, some: slice) -> Turn:
        """The least time of each in some of the turns: what else the machine does only adds to them."""
        return Turn(*(min(times) for times in zip(*map(astuple, self.turns[some]), strict=True)))


@dataclass(frozen=True, slots=True)
class AttentionProbe:
    """What was measured of one shape.

    Raises
    ------
    ValueError
        The parts do not belong together.
    """

    measured: tuple[Measured, ...]  # PLAIN first
    weights_single: float  # seconds for each byte of weights, one position
    weights_several: float  # SEVERAL positions
    weights_reading: float  # seconds for each weight and position

    def __post_init__(self) -> None:
        n_turns = {len(one.turns) for one in self.measured}
        if not self.measured or self.measured[0].configuration != PLAIN or len(n_turns) != 1 or 0 in n_turns:
            raise ValueError("a probe of attention needs as many turns of each configuration")
        for value in (self.weights_single, self.weights_several, self.weights_reading):
            if not 0 < value <= MOST_SECONDS:
                raise ValueError("seconds must be positive")


_BUSY = "the machine is too busy to measure attention; close what computes beside it"


class BusyError(LlamaspecError):
    """The machine has no time for a measurement."""


class Trial(Protocol):
    """One configuration that can be timed; `llama.attention.AttentionTrial` is one."""

    def deepen(self, depth: int) -> None:
        """Let the context hold this many tokens."""

    def seconds(self, width: int) -> float:
        """What evaluating so many positions behind the context takes."""

    def logits(self, widths: Sequence[int]) -> npt.NDArray[np.float32]:
        """Of the positions behind the context, evaluated in batches of these widths."""


def measure_attention(shape: AttentionShape, n_threads: int, seconds: float, clock: Clock) -> AttentionProbe:
    """Measure all configurations of a shape, for about some seconds.

    Raises
    ------
    BusyError
        The machine is too busy.
    LlamaspecError, OSError
        llama.cpp cannot compute it, or nothing can be written.
    """
    begin = clock()
    if is_busy():
        raise BusyError(_BUSY)
    with ExitStack() as stack:
        stack.callback(end_own_threads)  # another thread may decode
        # The files are not needed beyond being opened, nor left behind by whatever ends the process then.
        with tempfile.TemporaryDirectory(prefix="llamaspec-", ignore_cleanup_errors=True) as folder:
            zeros, heads = Path(folder) / "zeros.gguf", Path(folder) / "heads.gguf"
            write_model(zeros, AttentionShape(N_LAYERS, 1, 1, 32), N_ZEROS)
            write_model(heads, shape)

            def opened(path: Path, configuration: Configuration) -> AttentionTrial:
                if clock() - begin > seconds:
                    raise BusyError(_BUSY)
                options = ModelOptions(
                    n_ctx=DEEP,
                    threads=n_threads,
                    flash_attention=configuration.flash_attention,
                    cache_type_k=configuration.cache_type_k,
                    cache_type_v=configuration.cache_type_v,
                )
                return stack.enter_context(AttentionTrial(path, options))

            weights, trials = opened(zeros, PLAIN), {c: opened(heads, c) for c in CONFIGURATIONS}
        return time_configurations(trials, weights, seconds, clock)


def is_busy() -> bool:
    """Whether more programs compute than there are processors for."""
    n_running = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return n_running > (os.cpu_count() or 1) + 0.5


def time_configurations(
    trials: Mapping[Configuration, Trial], weights: Trial, seconds: float, clock: Clock
) -> AttentionProbe:
    """Time them in turns, so that a machine that is busy for a while slows all alike.

    Raises
    ------
    BusyError
        PATIENCE times as many seconds did not suffice.
    """
    begin, names = clock(), list(trials)
    exact = dict.fromkeys(names, True)
    times: dict[tuple[Configuration, int, int], list[float]] = {}

    def check() -> float:
        passed = clock() - begin
        if passed > PATIENCE * seconds:
            raise BusyError(_BUSY)
        return passed

    for done, (depth, widths) in enumerate(JOBS.items()):
        for name in names:
            trials[name].deepen(depth)
            if exact[name] and depth in BATCHES:
                exact[name] = _is_exact(trials[name], BATCHES[depth], check)
        for turn in range(MOST_TURNS + 1):  # the first one warms up
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                for width in widths:
                    check()
                    taken = trials[name].seconds(width)
                    if turn:
                        times.setdefault((name, depth, width), []).append(taken)
            if turn >= FEWEST_TURNS and check() > seconds * (done + 1) / len(JOBS):
                break
    plain = [[weights.seconds(width) for _ in range(FEWEST_TURNS + 1)][1:] for width in (1, SEVERAL, WIDEST)]
    single, several, reading = (statistics.median(taken) for taken in plain)
    return AttentionProbe(
        tuple(Measured(name, exact[name], _turns(times, name)) for name in names),
        weights_single=single / (2 * N_ZEROS),
        weights_several=several / (2 * N_ZEROS),
        weights_reading=reading / (N_ZEROS * WIDEST),
    )


Times = Mapping[tuple[Configuration, int, int], list[float]]  # by configuration, depth and width


def _turns(times: Times, name: Configuration) -> tuple[Turn, ...]:
    """As many as all depths have had."""
    fields = ((SHALLOW, 1), (DEEP, 1), (SHALLOW, SEVERAL), (DEEP, SEVERAL), (READ, WIDEST), (SHALLOW, WIDEST))
    n_turns = min(len(taken) for taken in times.values())
    columns = [times[name, depth, width][:n_turns] for depth, width in fields]
    return tuple(Turn(*row) for row in zip(*columns, strict=True))


def _is_exact(trial: Trial, batches: Sequence[Sequence[int]], check: Callable[[], float]) -> bool:
    """Whether positions behind the context have the same bits alone and in batches."""
    alone = trial.logits([1] * sum(batches[0]))
    for widths in batches:
        check()
        if not np.array_equal(trial.logits(widths), alone):
            return False
    return True
