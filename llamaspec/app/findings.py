"""What a doctor says of a machine and of two models: judgements of measured facts, one finding each.

Loads, measures and prints nothing. A finding that is not ok names its remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from llamaspec.errors import LlamaspecError
from llamaspec.llama.devices import Device
from llamaspec.llama.facts import MemoryFacts, ModelFacts
from llamaspec.llama.options import CACHE_BYTES, ModelOptions

OK, WARNING, PROBLEM = "ok", "warning", "problem"
CHEAP = 3.0  # a draft should be at least so many times cheaper than its target
CROWDED = 0.9  # of the free memory; computing needs some more than weights and contexts


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: str  # ok, warning or problem
    topic: str
    text: str
    remedy: str | None = None  # None where nothing needs to be done

    @classmethod
    def of_error(cls, topic: str, error: LlamaspecError) -> Finding:
        """A problem; our errors end with their remedy, behind a semicolon."""
        text, _, remedy = str(error).rpartition("; ")
        return cls(PROBLEM, topic, text or str(error), remedy if text else None)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the models will run on."""

    system: str  # sys.platform
    backend: str  # build and CPU features, in one line
    devices: tuple[Device, ...]
    can_offload: bool  # whether this build computes on GPUs
    has_nvidia: bool  # whether this machine has a GPU that CUDA would use
    repacking_is_safe: bool  # False: the build has AMX, which crashes
    free_bytes: int | None  # before any model was loaded; None where the system does not say
    n_physical: int  # cores at full speed
    n_logical: int  # threads of the processor

    @property
    def gpus(self) -> tuple[Device, ...]:
        """Those that this build computes on."""
        return tuple(device for device in self.devices if device.is_gpu and self.can_offload)

    def offloads(self, options: ModelOptions) -> bool:
        """Whether a model loaded like this computes on a GPU."""
        return bool(self.gpus) and options.gpu_layers != 0


@dataclass(frozen=True, slots=True)
class Examined:
    """A loaded model and what was measured of it."""

    role: str  # target or draft
    name: str  # of the file
    description: str  # architecture, size and quantisation
    facts: ModelFacts
    memory: MemoryFacts
    options: ModelOptions
    context_size: int
    trained_context_size: int
    flash_attention: bool | None  # what llama.cpp chose; None where it did not say
    step_seconds: float  # one token

    @property
    def needed_bytes(self) -> int:
        """Weights and the memory of the whole context."""
        return self.facts.weights_bytes + self.memory.size(self.context_size)


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """Build, devices."""
    if machine.repacking_is_safe:
        yield Finding(OK, "backend", machine.backend)
    else:
        yield Finding(
            WARNING,
            "backend",
            f"{machine.backend}: a build with AMX, which crashes, so its fast kernels stay off",
            "build llama.cpp with CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-mno-amx-tile, or by `make run`",
        )
    shown = ", ".join(_device(device) for device in machine.devices)
    if machine.system == "darwin" and not machine.can_offload:
        yield Finding(
            WARNING,
            "devices",
            f"{shown}; this build has no Metal",
            "build llama.cpp anew with CMAKE_ARGS=-DGGML_METAL=on",
        )
    elif machine.has_nvidia and not machine.can_offload:
        yield Finding(
            WARNING,
            "devices",
            f"{shown}; an NVIDIA GPU is here, but this build computes on the CPU only",
            "build llama.cpp anew with CMAKE_ARGS=-DGGML_CUDA=on",
        )
    else:
        yield Finding(OK, "devices", shown + ("" if machine.can_offload else "; no GPU offload"))


def _device(device: Device) -> str:
    free = f", {_size(device.free_bytes)} free" if device.is_gpu else ""
    return f"{device.name} ({device.description}{free})"


def thread_finding(machine: Machine, role: str, asked: int | None) -> Finding:
    """Threads of one model."""
    n, topic = machine.n_physical if asked is None else asked, f"{role} threads"
    text = f"{n} of {machine.n_physical} full-speed cores, {machine.n_logical} hardware threads"
    if n > machine.n_physical:
        return Finding(
            WARNING, topic, f"{text}: too many wait for each other", f"ask for {machine.n_physical}"
        )
    return Finding(OK, topic, text + (" (default)" if asked is None else ""))


def room_finding(machine: Machine, models: Sequence[Examined]) -> Finding:
    """Weights and contexts against what was free before."""
    needed = sum(model.needed_bytes for model in models)
    on_gpu = any(machine.offloads(model.options) for model in models)
    free = sum(device.free_bytes for device in machine.gpus) if on_gpu else machine.free_bytes
    place = "on the GPU" if on_gpu else "in main memory"
    parts = " + ".join(
        f"{model.role} {_size(model.facts.weights_bytes)} weights, "
        f"{_size(model.memory.size(model.context_size))} context"
        for model in models
    )
    text = f"{_size(needed)} needed ({parts})"
    if free is None:
        return Finding(OK, "memory", f"{text}; the system does not say what is free")
    text += f", {_size(free)} free {place}"
    if needed <= CROWDED * free:
        return Finding(OK, "memory", text)
    remedy = "pass a smaller --n-ctx, choose a smaller quantisation, or close programs"
    if on_gpu:
        return Finding(WARNING, "memory", text, f"{remedy}; or lower --gpu-layers")
    return Finding(PROBLEM if needed > free else WARNING, "memory", text, remedy)


def model_findings(machine: Machine, model: Examined) -> Iterator[Finding]:
    """What is to say of one model alone."""
    yield Finding(OK, model.role, f"{model.name}: {model.description}, {_parameters(model.facts)}")
    context = f"{model.context_size} tokens used, trained on {model.trained_context_size}"
    option = "--n-ctx" if model.role == "target" else "--draft-ctx"
    asked = model.options.n_ctx
    if asked is not None and asked > model.trained_context_size:
        yield Finding(
            WARNING,
            f"{model.role} context",
            f"{context}: its text may break down beyond that",
            f"pass {option} {model.trained_context_size} or less",
        )
    else:
        yield Finding(OK, f"{model.role} context", context)
    yield _rollback_finding(model)
    yield _cache_finding(model)
    yield _flash_finding(model, on_gpu=machine.offloads(model.options))


def _rollback_finding(model: Examined) -> Finding:
    """What the memory did when guesses were taken back."""
    facts, memory = model.facts, model.memory
    kind = "states and positions" if facts.keeps_states and facts.keeps_positions else "positions"
    if not facts.keeps_positions:
        kind = "states"
    if facts.window is not None:
        kind += f", some layers see the last {facts.window}"
    topic = f"{model.role} rollback"
    if memory.n_reread == 0:
        how = "to an earlier state in the memory" if facts.keeps_states else "by forgetting just them"
        return Finding(OK, topic, f"keeps {kind}; wrong guesses are taken back {how}")
    if memory.n_kept > 0:
        again = f"{memory.n_reread} of {memory.n_right} tokens were read again in a trial"
        size, cost = decimal(memory.snapshot_bytes), f"{1e3 * memory.snapshot_seconds:.1f} ms"
        how = f"from a snapshot ({size}, {cost} to copy and put back), {again}"
        return Finding(OK, topic, f"keeps {kind}; wrong guesses are taken back {how}")
    return Finding(
        WARNING,
        topic,
        f"keeps {kind}; it cannot go back, so after a wrong guess the whole text is read again",
        "keep texts short, use --draft-length 0, or choose a model that keeps positions only",
    )


def _cache_finding(model: Examined) -> Finding:
    types, topic = (model.options.cache_type_k, model.options.cache_type_v), f"{model.role} KV types"
    text = f"keys {types[0]}, values {types[1]}"
    if model.role == "draft" and min(CACHE_BYTES[kind] for kind in types) < CACHE_BYTES["q8_0"]:
        return Finding(
            WARNING,
            topic,
            f"{text}: below q8_0 guesses get worse",
            "raise --draft-cache-type-k and --draft-cache-type-v to q8_0 or f16",
        )
    return Finding(OK, topic, text)


def _flash_finding(model: Examined, *, on_gpu: bool) -> Finding:
    """On CPUs it is slower in long contexts than attention without it: no reason to warn."""
    asked, topic = model.options.flash_attention, f"{model.role} flash attention"
    if not model.facts.keeps_positions:
        return Finding(OK, topic, "not needed, there is no attention")
    if asked == "off" and on_gpu:
        return Finding(WARNING, topic, "off: long contexts are slower and larger", "drop --flash-attn off")
    text = asked
    if asked == "auto" and model.flash_attention is not None:
        text = f"auto: {'on' if model.flash_attention else 'off, not possible here'}"
    if model.flash_attention and not on_gpu and model.options.cache_type_v == "f16":
        text += "; behind 256 tokens a CPU may be much faster with --cache-type-v bf16 or --flash-attn off"
    return Finding(OK, topic, text)


def pace_findings(target: Examined, draft: Examined) -> Iterator[Finding]:
    """Whether the draft is cheap enough for its target."""
    ratio = target.step_seconds / draft.step_seconds
    text = (
        f"a token takes {1e3 * target.step_seconds:.2f} ms in the target, "
        f"{1e3 * draft.step_seconds:.2f} ms in the draft: {ratio:.1f} times cheaper"
    )
    if ratio >= CHEAP:
        yield Finding(OK, "draft cost", text)
    else:
        yield Finding(
            WARNING,
            "draft cost",
            f"{text}, {CHEAP:.0f} times are wanted",
            "choose a smaller draft, or a larger target; `llamaspec compare` says whether guessing pays",
        )
    if target.facts.n_active_parameters is None:
        return
    text = (
        f"the target uses {_count(target.facts.n_computing)} parameters for a token, "
        f"the draft {_count(draft.facts.n_computing)}"
    )
    if target.facts.n_computing < CHEAP * draft.facts.n_computing:
        yield Finding(WARNING, "experts", f"{text}: too near", "choose a smaller draft")
    else:
        yield Finding(OK, "experts", text)


def _parameters(facts: ModelFacts) -> str:
    text = f"{_count(facts.n_parameters)} parameters"
    if facts.n_active_parameters is None:
        return text
    return f"{text}, about {_count(facts.n_active_parameters)} of them active"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e8 else f"{n / 1e6:.2f} million"


def _size(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**29 else f"{n / 2**20:.1f} MiB"
