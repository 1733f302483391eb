"""What `doctor` says of a machine, of each of two models, and of both together, from measured facts.

Loads, measures and prints nothing. A finding that is not ok names its remedy, and with which settings: by the
role of the model and the field of its options, such as "draft.n_ctx".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.errors import LlamaspecError
from llamaspec.llama.model import MemoryFacts
from llamaspec.llama.options import CACHE_BYTES, Device, ModelOptions, as_size
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.llama.weights import ModelFacts

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
    settings: tuple[str, ...] = ()  # with which something can be done
    error: LlamaspecError | None = None  # what it was made of

    @classmethod
    def of_error(cls, topic: str, error: LlamaspecError) -> Finding:
        """A problem; our errors end with their remedy, behind a semicolon."""
        text, _, remedy = str(error).rpartition("; ")
        return cls(PROBLEM, topic, text or str(error), remedy if text else None, error=error)


def check(topic: str, text: str, is_fine: bool, fault: str, remedy: str, *settings: str) -> Finding:
    """OK where all is fine; else a warning whose text ends with the fault."""
    if is_fine:
        return Finding(OK, topic, text)
    return Finding(WARNING, topic, text + fault, remedy, settings)


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
    n_taken: float = 0.0  # of these, how many other programs use at the moment

    @property
    def gpus(self) -> tuple[Device, ...]:
        """Those that this build computes on."""
        return tuple(device for device in self.devices if device.is_gpu and self.can_offload)

    def offloads(self, options: ModelOptions) -> bool:
        """Whether a model loaded like this computes on a GPU."""
        return bool(self.gpus) and options.offloads


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
        """Weights and the KV cache of the whole context."""
        return self.facts.weights_bytes + self.memory.size(self.context_size)


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """Build, devices."""
    fault = ": a build with AMX, which crashes, so its fast kernels stay off"
    remedy = "build llama.cpp with CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-mno-amx-tile, or by `make run`"
    yield check("backend", machine.backend, machine.repacking_is_safe, fault, remedy)
    shown, fault, option = ", ".join(_device(device) for device in machine.devices), "", ""
    if machine.system == "darwin" and not machine.can_offload:
        fault, option = "; this build has no Metal", "METAL"
    elif machine.has_nvidia and not machine.can_offload:
        fault, option = "; an NVIDIA GPU is here, but this build computes on the CPU only", "CUDA"
    elif not machine.can_offload:
        shown += "; no GPU offload"
    yield check(
        "devices", shown, not fault, fault, f"build llama.cpp anew with CMAKE_ARGS=-DGGML_{option}=on"
    )


def busy_finding(machine: Machine) -> Iterator[Finding]:
    """Whether other programs use the cores; nothing on a quiet machine."""
    if machine.n_taken >= max(0.5, machine.n_logical - machine.n_physical + 0.5):
        text = f"other programs use {machine.n_taken:.1f} of {machine.n_logical} hardware threads"
        fault = "; llamaspec computes with fewer threads while they do, and is slower than on a quiet machine"
        yield check("load", text, False, fault, "close what computes beside it")


def _device(device: Device) -> str:
    free = f", {as_size(device.free_bytes)} free" if device.is_gpu else ""
    return f"{device.name} ({device.description}{free})"


def thread_finding(machine: Machine, role: str, asked: int | None) -> Finding:
    """Threads of one model."""
    n, topic = machine.n_physical if asked is None else asked, f"{role} threads"
    text = f"{n} of {machine.n_physical} full-speed cores, {machine.n_logical} hardware threads"
    text += " (default)" if asked is None else ""
    is_fine, remedy = n <= machine.n_physical, f"ask for {machine.n_physical}"
    return check(topic, text, is_fine, ": too many wait for each other", remedy, f"{role}.threads")


def room_finding(machine: Machine, models: Sequence[Examined]) -> Finding:
    """Weights and contexts on this machine against what was free before."""
    models = [model for model in models if not model.options.workers]
    if not models:
        return Finding(OK, "memory", "weights and context lie on the workers")
    needed = sum(model.needed_bytes for model in models)
    on_gpu = any(machine.offloads(model.options) for model in models)
    free = sum(device.free_bytes for device in machine.gpus) if on_gpu else machine.free_bytes
    place = "on the GPU" if on_gpu else "in main memory"
    parts = " + ".join(
        f"{model.role} {as_size(model.facts.weights_bytes)} weights, "
        f"{as_size(model.memory.size(model.context_size))} context"
        for model in models
    )
    text = f"{as_size(needed)} needed ({parts})"
    if free is None:
        return Finding(OK, "memory", f"{text}; the system does not say what is free")
    text += f", {as_size(free)} free {place}"
    if needed <= CROWDED * free:
        return Finding(OK, "memory", text)
    remedy = "open a smaller context, choose a smaller quantisation, or close programs"
    if on_gpu:
        settings = ("target.n_ctx", "target.gpu_layers")
        return Finding(WARNING, "memory", text, f"{remedy}; or put fewer layers on the GPU", settings)
    return Finding(PROBLEM if needed > free else WARNING, "memory", text, remedy, ("target.n_ctx",))


def model_findings(machine: Machine, model: Examined) -> Iterator[Finding]:
    """What is to say of one model alone."""
    yield Finding(OK, model.role, f"{model.name}: {model.description}, {_parameters(model.facts)}")
    context = f"{model.context_size} tokens used, trained on {model.trained_context_size}"
    asked, most = model.options.n_ctx, model.trained_context_size
    yield check(
        f"{model.role} context", context, asked is None or asked <= most,
        ": its text may break down beyond that", f"open {most} tokens or less", f"{model.role}.n_ctx",
    )  # fmt: skip
    yield _rollback_finding(model)
    yield _cache_finding(model)
    on_gpu = machine.offloads(model.options) or model.options.workers != ()
    yield _flash_finding(model, on_gpu=on_gpu)


def _rollback_finding(model: Examined) -> Finding:
    """What the KV cache did when draft tokens were taken back."""
    facts, memory = model.facts, model.memory
    kind = "states and positions" if facts.keeps_states and facts.keeps_positions else "positions"
    if not facts.keeps_positions:
        kind = "states"
    if facts.window is not None:
        kind += f", some layers see the last {facts.window}"
    topic = f"{model.role} rollback"
    if memory.n_reread == 0:
        how = "to an earlier state in the cache" if facts.keeps_states else "by removing just them"
        return Finding(OK, topic, f"keeps {kind}; rejected draft tokens are taken back {how}")
    if memory.n_kept > 0:
        again = f"{memory.n_reread} of {memory.n_right} tokens were evaluated again in a trial"
        size, cost = decimal(memory.snapshot_bytes), f"{1e3 * memory.snapshot_seconds:.1f} ms"
        how = f"from a snapshot ({size}, {cost} to copy and put back), {again}"
        return Finding(OK, topic, f"keeps {kind}; rejected draft tokens are taken back {how}")
    fault = "; it cannot go back, so after a rejected draft token the whole text is evaluated again"
    remedy = "keep texts short, decode plainly, or choose a model that keeps positions only"
    return check(topic, f"keeps {kind}", False, fault, remedy, "draft_length")


def _cache_finding(model: Examined) -> Finding:
    types, topic = (model.options.cache_type_k, model.options.cache_type_v), f"{model.role} KV types"
    is_fine = model.role != "draft" or min(CACHE_BYTES[kind] for kind in types) >= CACHE_BYTES["q8_0"]
    return check(
        topic, f"keys {types[0]}, values {types[1]}", is_fine, ": below q8_0 draft tokens get worse",
        "raise both to q8_0 or f16", "draft.cache_type_k", "draft.cache_type_v",
    )  # fmt: skip


def _flash_finding(model: Examined, *, on_gpu: bool) -> Finding:
    """On CPUs attention without it may be the faster: no reason to warn."""
    asked, topic = model.options.flash_attention, f"{model.role} flash attention"
    if not model.facts.keeps_positions:
        return Finding(OK, topic, "not needed, there is no attention")
    text = asked or "auto"
    if asked == "auto" and model.flash_attention is not None:
        text = f"auto: {'on' if model.flash_attention else 'off, not possible here'}"
    fault, setting = ": long contexts are slower and larger", f"{model.role}.flash_attention"
    return check(topic, text, not (asked == "off" and on_gpu), fault, "leave it on", setting)


def pace_findings(target: Examined, draft: Examined) -> Iterator[Finding]:
    """Whether the draft is cheap enough for its target."""
    ratio = target.step_seconds / draft.step_seconds
    text = (
        f"a token takes {1e3 * target.step_seconds:.2f} ms in the target, "
        f"{1e3 * draft.step_seconds:.2f} ms in the draft: {ratio:.1f} times cheaper"
    )
    fault = f", {CHEAP:.0f} times are wanted"
    remedy = "choose a smaller draft, or a larger target; a comparison shows whether drafting pays"
    yield check("draft cost", text, ratio >= CHEAP, fault, remedy)
    if target.facts.n_active_parameters is None:
        return
    text = (
        f"the target uses {_count(target.facts.n_computing)} parameters for a token, "
        f"the draft {_count(draft.facts.n_computing)}"
    )
    is_fine = target.facts.n_computing >= CHEAP * draft.facts.n_computing
    yield check("experts", text, is_fine, ": too near", "choose a smaller draft")


def vocabulary_findings(target: LlamaVocabulary, draft: LlamaVocabulary) -> Iterator[Finding]:
    """Of two that number the same tokens: whether both begin and end a text alike."""
    sizes = f"{target.size} tokens"
    if target.size != draft.size:
        sizes = f"{target.size} tokens in the target, {draft.size} in the draft, those of both equal"
    yield Finding(OK, "vocabulary", f"the same: {sizes}")
    differing = [
        f"{name} is {_token(mine)} in the target and {_token(its)} in the draft"
        for name, mine, its in (
            ("the start of a text", target.bos, draft.bos),
            ("the end of a text", target.eos, draft.eos),
        )
        if mine != its
    ]
    text = "; ".join(differing) or f"start {_token(target.bos)}, end {_token(target.eos)} in both"
    remedy = "choose a draft tuned like the target, both for chat or neither"
    yield check("special tokens", text, not differing, ": draft tokens there are wrong", remedy)


def _token(token: int) -> str:
    return "none" if token < 0 else f"token {token}"


def _parameters(facts: ModelFacts) -> str:
    text = f"{_count(facts.n_parameters)} parameters"
    if facts.n_active_parameters is None:
        return text
    return f"{text}, about {_count(facts.n_active_parameters)} of them active"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e8 else f"{n / 1e6:.2f} million"


def overlap_finding(common: CommonTokens) -> Finding:
    """How much of the target's vocabulary the draft has."""
    shared = f"{common.is_common.sum()} of the target's {len(common.is_common)} tokens"
    text = f"differs: the draft has {shared}, and {common.of_text:.0%} of those of an ordinary text; "
    return Finding(OK, "vocabulary", text + "it draws among these")
