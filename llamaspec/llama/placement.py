"""Decides which layers of a target and of its draft lie on GPUs that cannot hold both models whole.

Arithmetic over facts. The time of a round follows from the bytes of weights that the CPU and the GPUs read
and from what further positions cost there; of all placements that fit, the one that writes the most tokens
per second wins. Where everything fits nothing is decided. Loads and measures nothing; a machine whose costs
were not measured has assumed ones. tests/llama/test_placement.py.

Draft on the GPU and target on the CPU: Dovetail, arXiv 2412.18934.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamaspec.llama.devices import as_size

MARGIN_BYTES = 1 << 29  # of each GPU, for what cannot be foreseen
ACCEPTANCE = 0.7  # of a draft token, given that the one before it is accepted; assumed
MOST_DRAFTED = 8  # draft tokens of a round
CLEARLY = 1.05  # times as fast as the placement that is usual


@dataclass(frozen=True, slots=True)
class Pace:
    """What evaluations cost on one kind of device."""

    seconds_per_byte: float  # of weights, at a single position
    seconds_per_layer: float  # besides: what starting its work takes
    further: float  # each further position, as a share of what the bytes take

    def seconds(self, n_bytes: float, n_layers: int, width: int) -> float:
        """Of an evaluation of `width` positions that reads so much of so many layers."""
        per_byte = self.seconds_per_byte * (1 + self.further * (width - 1))
        return n_bytes * per_byte + n_layers * self.seconds_per_layer


@dataclass(frozen=True, slots=True)
class Paces:
    """Of the processor and of the GPUs."""

    cpu: Pace
    gpu: Pace


# Assumed, in want of a measurement. A card beside a desktop's processor, which reads 40 GB/s and is busy with
# arithmetic from the second position on; and Apple's chips, whose GPU reads the same memory twice as fast and
# is the busier of the two (ggml-org/llama.cpp#25250).
DISCRETE = Paces(Pace(1 / 40e9, 10e-6, 0.3), Pace(1 / 300e9, 40e-6, 0.05))
UNIFIED = Paces(Pace(1 / 80e9, 10e-6, 0.3), Pace(1 / 160e9, 40e-6, 0.5))


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a machine, which llama.cpp fills in proportion to what is free."""

    names: tuple[str, ...]
    free_bytes: tuple[int, ...]  # of each
    main_bytes: int | None  # free in main memory; None where the system does not say
    is_unified: bool = False  # their memory is main memory

    @property
    def paces(self) -> Paces:
        """What is assumed of the costs."""
        return UNIFIED if self.is_unified else DISCRETE


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What a model needs, layer by layer."""

    layers: tuple[int, ...]  # weights of each layer; the last is the output
    cache: int  # of the KV cache, for each layer but the last
    compute: int  # buffer for computing, on each GPU that computes any of it
    read_share: float = 1.0  # of the weights, what one token reads: less in a mixture of experts
    n_fixed: int | None = None  # layers on the GPUs, where that is not to be decided

    @property
    def n_wanted(self) -> int:
        """Layers on the GPUs, if there were room for all."""
        return len(self.layers) if self.n_fixed is None else self.n_fixed

    def offloaded(self, n: int) -> int:
        """Bytes of the last `n` layers with their KV cache: llama.cpp begins with the output."""
        n_caches = max(0, n - 1)
        return sum(self.layers[len(self.layers) - n :]) + n_caches * self.cache

    def n_fitting(self, room: int) -> int:
        """The most layers that have room."""
        return sum(self.offloaded(n) <= room for n in range(1, len(self.layers) + 1))

    def seconds(self, n: int, paces: Paces, width: int) -> float:
        """Of an evaluation of `width` positions with `n` layers on the GPUs."""
        n_cpu, share = len(self.layers) - n, self.read_share
        on_cpu = paces.cpu.seconds(share * sum(self.layers[:n_cpu]), n_cpu, width)
        return on_cpu + paces.gpu.seconds(share * sum(self.layers[n_cpu:]), n, width)


@dataclass(frozen=True, slots=True)
class Placement:
    """What goes where, and why."""

    target_layers: int | None  # on the GPUs; None = all
    draft_layers: int | None  # the same of the draft; None also where there is none
    reason: str  # one sentence without its full stop
    is_roomy: bool = True  # whether main memory has room for the rest


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to place both."""

    n_target: int
    n_draft: int
    tokens_per_second: float
    is_roomy: bool


def choose_placement(
    gpus: Gpus, target: ModelBytes, draft: ModelBytes | None = None, paces: Paces | None = None
) -> Placement:
    """Choose the layers of both models that lie on the GPUs.

    Parameters
    ----------
    gpus : Gpus
        At least one.
    target, draft : ModelBytes
    paces : Paces, optional
        Default: what is assumed of such a machine.

    Examples
    --------
    >>> gib = 1 << 30
    >>> big, small = ModelBytes((gib,) * 8, 0, 0), ModelBytes((gib // 8,) * 4, 0, 0)
    >>> choice = choose_placement(Gpus(("CUDA0",), (5 * gib,), 32 * gib), big, small)
    >>> choice.target_layers, choice.draft_layers
    (4, None)
    """
    models = [target] if draft is None else [target, draft]
    needed = sum(model.offloaded(model.n_wanted) for model in models)
    names, free = " and ".join(gpus.names), as_size(sum(gpus.free_bytes))
    has = "has" if len(gpus.names) == 1 else "have"
    if needed <= _room(gpus, [model for model in models if model.n_wanted]):
        return Placement(
            target.n_fixed,
            None if draft is None else draft.n_fixed,
            f"{as_size(needed)} go to {names}, which {has} {free} free: all that may",
        )
    options = _options(gpus, target, draft, paces or gpus.paces)
    best = options[0]
    for option in options[1:]:
        is_faster = option.tokens_per_second > CLEARLY * best.tokens_per_second
        if (option.is_roomy, is_faster) > (best.is_roomy, False):
            best = option
    reason = (
        f"{names} {has} {free} free of {as_size(needed)} that all would take: {_told(best, target, draft)}"
    )
    others = [option for option in options if option is not best]
    if others:
        other = max(others, key=lambda option: (option.is_roomy, option.tokens_per_second))
        ratio = best.tokens_per_second / other.tokens_per_second
        than = f"{ratio:.1f} times as fast as" if ratio >= CLEARLY else "as fast as"
        reason += f", by estimate {than} if {_told(other, target, draft)}"
    if not best.is_roomy:
        reason += "; main memory has no room for the rest"
    whole = None if draft is None or best.n_draft == len(draft.layers) else best.n_draft
    return Placement(
        None if best.n_target == len(target.layers) else best.n_target, whole, reason, best.is_roomy
    )


def _options(gpus: Gpus, target: ModelBytes, draft: ModelBytes | None, paces: Paces) -> list[_Option]:
    """All that fit, the usual one first: the draft whole on the GPUs and what else has room, then without it.

    What is fixed and does not fit is for llama.cpp to refuse.
    """
    of_draft = [0] if draft is None else [len(draft.layers), 0] if draft.n_fixed is None else [draft.n_fixed]
    found: list[_Option] = []
    for n_draft in of_draft:
        on_gpus = [draft] if draft is not None and n_draft else []
        used = sum(model.offloaded(n_draft) for model in on_gpus)
        if used > _room(gpus, on_gpus) and n_draft != of_draft[-1]:
            continue
        most = target.n_fitting(_room(gpus, [*on_gpus, target]) - used)
        for n in dict.fromkeys((most, 0)) if target.n_fixed is None else (target.n_fixed,):
            if (
                n == target.n_fixed
                and n_draft
                and used + target.offloaded(n) > _room(gpus, [*on_gpus, target])
            ):
                continue
            speed = tokens_per_second(target, n, draft, n_draft, paces)
            found.append(_Option(n, n_draft, speed, _is_roomy(gpus, target, n, draft, n_draft)))
    return found


def tokens_per_second(
    target: ModelBytes, n_target: int, draft: ModelBytes | None, n_draft: int, paces: Paces
) -> float:
    """With the best number of draft tokens, of which an assumed share is accepted."""
    best, expected, step = 0.0, 0.0, 0.0
    if draft is not None:
        step = draft.seconds(n_draft, paces, 1)
    for n in range(1 if draft is None else MOST_DRAFTED + 1):
        expected += ACCEPTANCE**n
        best = max(best, expected / (n * step + target.seconds(n_target, paces, n + 1)))
    return best


def _room(gpus: Gpus, models: Sequence[ModelBytes]) -> int:
    """Bytes for layers and KV caches of these models.

    llama.cpp shares layers out whole, so that of all GPUs but one as much as a layer may stay empty.
    """
    compute = sum(model.compute for model in models)
    largest = max((max(model.layers) + model.cache for model in models), default=0)
    free = sum(max(0, n_bytes - MARGIN_BYTES - compute) for n_bytes in gpus.free_bytes)
    return max(0, free - largest * (len(gpus.free_bytes) - 1))


def _is_roomy(gpus: Gpus, target: ModelBytes, n_target: int, draft: ModelBytes | None, n_draft: int) -> bool:
    """Whether main memory has room for what does not go to the GPUs; with unified memory, for everything."""
    if gpus.main_bytes is None:
        return True
    needed = 0
    for model, n in ((target, n_target), (draft, n_draft)):
        if model is not None:
            whole = model.offloaded(len(model.layers))
            needed += whole if gpus.is_unified else whole - model.offloaded(n)
    return needed <= gpus.main_bytes


def _told(option: _Option, target: ModelBytes, draft: ModelBytes | None) -> str:
    """What goes to the GPUs."""
    layers = f"{option.n_target} of {len(target.layers)} target layers"
    if draft is None:
        return f"{layers} go there" if option.n_target else "nothing goes there"
    if not option.n_draft:
        return (
            f"{layers} go there and the draft stays on the CPU" if option.n_target else "nothing goes there"
        )
    if option.n_draft == len(draft.layers):
        return f"the draft and {layers} go there" if option.n_target else "only the draft goes there"
    some = f"{option.n_draft} of {len(draft.layers)} draft layers"
    return f"{some} and {layers} go there" if option.n_target else f"only {some} go there"
