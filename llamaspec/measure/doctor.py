"""Check the machine and the models, and yield findings about whatever will fail or be slow.

Models are loaded one by one: a damaged file becomes a finding, and the other model is still checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from typing import TypeAlias

from llamaspec.drafters.fallback import NoDrafter
from llamaspec.errors import EvaluationError, LlamaspecError
from llamaspec.hidden_drafts import open_hidden_draft
from llamaspec.kernels import Kernels
from llamaspec.length.fixed import FixedLength
from llamaspec.llama import runtime
from llamaspec.llama.devices import Device
from llamaspec.llama.gguf_file import read_gguf
from llamaspec.llama.hidden_draft_file import heads_in_file
from llamaspec.llama.memory_sizes import MemoryFacts
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.llama.weights import LoadProgress
from llamaspec.measure.findings import OK, PROBLEM, WARNING, Finding, check, option_findings
from llamaspec.measure.machine import CROWDED, LoadWatch, MachineFacts, load_in_words, look_at_machine
from llamaspec.measure.probe import STEPS, Probe, measure, sample_tokens
from llamaspec.measure.verdict import pair_verdict
from llamaspec.pair import Pair
from llamaspec.plan import DraftPlan, ModelFile, weights_bytes
from llamaspec.protocols import Drafter

Working: TypeAlias = Callable[[str], AbstractContextManager[LoadProgress]]  # shows progress under a label

CHEAP = 3.0  # a draft should be at least this many times as fast as its target
N_PROMPT, N_WRITTEN, N_DRAFT = 64, 48, 2  # tokens in the trial of a draft with another vocabulary
N_TIMED = 512  # tokens of the prompt that is timed with prediction heads and without
TRIAL_SECONDS = 5.0  # time limit of that trial
FEW = 0.3  # acceptance below which drafting is hardly ever faster


@dataclass(frozen=True, slots=True)
class Examined:
    """A loaded model and its measurements."""

    role: str  # target or draft
    model: LlamaModel
    memory: MemoryFacts
    flash_attention: bool | None  # llama.cpp's choice; None if it reported none


def examine(plan: DraftPlan, working: Working) -> Iterator[Finding]:
    """Yield all findings, the machine's first."""
    runtime.choose_kernels(plan.target.options.kernels)
    machine = look_at_machine()
    yield from machine_findings(machine)
    if plan.heads is not None and not plan.has_own_heads:  # it cannot be loaded without its target
        what = "a prediction head that reads the target's KV cache"
        if plan.hidden_draft is not None:
            what = f"a {plan.hidden_draft.name} draft that reads the target's hidden rows"
        text = f"{plan.heads.path.name} is {what}"
        yield Finding(OK, "draft", text)
    wanted = [*zip(("target", "draft"), plan.models, strict=False)]
    examined: list[Examined] = []
    with ExitStack() as stack:
        for role, file in wanted:
            yield thread_finding(machine, role, file.options.threads)
            try:
                with working(f"loading the {role}") as on_load:
                    model = stack.enter_context(LlamaModel(file.path, file.options, on_load))
                with working(f"trying the {role}"):
                    memory = model.try_memory()
                examined.append(Examined(role, model, memory, model.context.flash_attention))
            except LlamaspecError as error:
                yield Finding.of_error(role, error)
                continue
            yield from model_findings(machine, examined[-1])
        if examined:
            yield room_finding(machine, examined)
        yield from file_findings(plan)
        if plan.draft is not None and len(examined) == len(wanted):
            target, draft = (each.model for each in examined)
            yield from pair_findings(target, draft, pair_verdict(plan), working)
        elif plan.heads is not None and examined:
            yield heads_finding(plan, plan.heads, examined[0].model, working)


# The machine


def machine_findings(machine: MachineFacts) -> Iterator[Finding]:
    """Yield findings about the build, the devices, and other programs that use the cores."""
    fault = ": this build uses AMX, which crashes, so its fast kernels stay off"
    remedy = "build llama.cpp with CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-mno-amx-tile, or by `make run`"
    yield check("backend", machine.backend, machine.repacking_is_safe, fault, remedy)
    yield _kernels_finding(machine.kernels)
    shown, fault, option = ", ".join(_device(device) for device in machine.devices), "", ""
    if machine.system == "darwin" and not machine.can_offload:
        fault, option = "; this build has no Metal", "METAL"
    elif machine.has_nvidia and not machine.can_offload:
        fault, option = "; this machine has an NVIDIA GPU, but this build computes on the CPU only", "CUDA"
    elif not machine.can_offload:
        shown += "; no GPU offload"
    remedy = f"rebuild llama.cpp with CMAKE_ARGS=-DGGML_{option}=on"
    yield check("devices", shown, not fault, fault, remedy)
    if machine.is_busy:
        text = f"other programs use {machine.n_taken:.1f} of {machine.n_logical} hardware threads"
        fault = "; until they stop, llamaspec uses fewer threads and is slower"
        yield Finding(WARNING, "load", text + fault, "stop other CPU-heavy programs")


def _kernels_finding(kernels: Kernels) -> Finding:
    """Return which kernels compute; a warning if something can be done to get our own."""
    text, _, remedy = kernels.describe().rpartition("; ")
    return Finding(WARNING, "kernels", text, remedy) if text else Finding(OK, "kernels", remedy)


def _device(device: Device) -> str:
    free = f", {as_size(device.free_bytes)} free" if device.is_gpu else ""
    return f"{device.name} ({device.description}{free})"


def as_size(n: int) -> str:
    """Format a number of bytes."""
    return f"{n / 2**30:.1f} GiB" if n >= 2**29 else f"{n / 2**20:.1f} MiB"


def thread_finding(machine: MachineFacts, role: str, asked: int | None) -> Finding:
    """Check the number of threads of one model."""
    n, topic = machine.n_physical if asked is None else asked, f"{role} threads"
    text = f"{n} of {machine.n_physical} full-speed cores, {machine.n_logical} hardware threads"
    text += " (default)" if asked is None else ""
    is_fine, remedy = n <= machine.n_physical, f"use {machine.n_physical}"
    option = "--threads" if role == "target" else "--draft-threads"
    return check(topic, text, is_fine, ": more threads than cores slow each other down", remedy, option)


def room_finding(machine: MachineFacts, models: Sequence[Examined]) -> Finding:
    """Check that weights and contexts fit the memory that was free before loading."""
    sizes = [
        (each.role, each.model.facts().weights_bytes, each.memory.size(each.model.context_size))
        for each in models
        if not each.model.options.workers
    ]
    if not sizes:
        return Finding(OK, "memory", "the weights and contexts are on the workers")
    needed = sum(weights + context for _, weights, context in sizes)
    on_gpu = any(machine.offloads(each.model.options) for each in models)
    free = sum(device.free_bytes for device in machine.gpus) if on_gpu else machine.free_bytes
    parts = " + ".join(f"{role} {as_size(w)} weights, {as_size(c)} context" for role, w, c in sizes)
    text = f"{as_size(needed)} needed ({parts})"
    if free is None:
        return Finding(OK, "memory", f"{text}; free memory is unknown on this system")
    text += f", {as_size(free)} free {'on the GPU' if on_gpu else 'in main memory'}"
    if needed <= CROWDED * free:
        return Finding(OK, "memory", text)
    remedy = "use a smaller context or quantization, or close other programs"
    if on_gpu:
        remedy += ", or put fewer layers on the GPU (--n-ctx, --gpu-layers)"
        return Finding(WARNING, "memory", text, remedy)
    return Finding(PROBLEM if needed > free else WARNING, "memory", text, f"{remedy} (--n-ctx)")


# One model


def model_findings(machine: MachineFacts, examined: Examined) -> Iterator[Finding]:
    """Yield findings about one model."""
    role, model = examined.role, examined.model
    facts, options = model.facts(), model.options
    text = f"{model.path.name}: {model.description}"
    if facts.n_active_parameters is not None:
        text += f", about {facts.n_active_parameters / 1e9:.2f}B parameters used for each token"
    yield Finding(OK, role, text)
    if machine.kernels.level is not None:
        weights = model.weights
        weights.huge_pages.wait()
        if not weights.suits_kernels:
            text = f"{weights.kernels}: llamaspec's do not take all types of its weights"
            yield Finding(OK, f"{role} kernels", text)
        elif (pages := weights.huge_pages.describe()) is not None:
            yield Finding(OK, f"{role} memory", pages)
    yield from option_findings(role, model)
    yield _rollback_finding(examined)
    yield _flash_finding(examined, on_gpu=machine.offloads(options) or options.workers != ())


def _rollback_finding(examined: Examined) -> Finding:
    """Return how the model rolls back rejected draft tokens; a warning if it cannot."""
    facts, memory, topic = examined.model.facts(), examined.memory, f"{examined.role} rollback"
    kind = "the model keeps states; " if facts.keeps_states else ""
    if facts.window is not None:
        kind += f"some layers see the last {facts.window} positions; "
    if memory.n_repeated and not memory.n_kept:
        fault = "it cannot roll back: after a rejected draft token the whole sequence is evaluated again"
        remedy = "keep sequences short, turn drafting off, or choose a model without states"
        return Finding(WARNING, topic, kind + fault, f"{remedy} (--draft-length 0)")
    how = "rolled back to an earlier state in the cache" if facts.keeps_states else "removed from the cache"
    if memory.n_repeated:
        again = f"{memory.n_repeated} of {memory.n_right} tokens were evaluated again in a trial"
        how = f"rolled back from a snapshot, {again}"
    return Finding(OK, topic, f"{kind}rejected draft tokens are {how}")


def _flash_finding(examined: Examined, *, on_gpu: bool) -> Finding:
    """Check flash attention; turning it off is fine on a CPU, where it may be slower."""
    asked, chosen = examined.model.options.flash_attention, examined.flash_attention
    topic = f"{examined.role} flash attention"
    if not examined.model.facts().keeps_positions:
        return Finding(OK, topic, "not applicable: the model has no attention")
    text = asked
    if asked == "auto" and chosen is not None:
        text = f"auto: {'on' if chosen else 'off, not possible here'}"
    is_fine = not (asked == "off" and on_gpu)
    return check(topic, text, is_fine, ": long contexts are slower and larger", "leave it on", "--flash-attn")


# Both together


def file_findings(plan: DraftPlan) -> Iterator[Finding]:
    """Yield findings about the target's own prediction heads, and a warning if nothing drafts."""
    try:
        found = heads_in_file(plan.target.path)
    except LlamaspecError:
        pass  # loading the target has reported it
    else:
        if found.n_heads and found.fault is not None:
            yield Finding(OK, "target heads", f"the file {found.fault}")
        elif found.n_heads:
            can = "used as the draft" if plan.heads is not None else "can be used as the draft (--draft mtp)"
            yield Finding(OK, "target heads", f"{found.n_heads} in the file, {can}")
    if plan.is_plain:
        remedy = (
            "name a small model of the target's family, or copy draft tokens from earlier text "
            "(--draft FILE, --draft ngram)"
        )
        yield Finding(WARNING, "draft", "none: plain decoding, one token at a time", remedy)
    elif plan.draft is None and plan.heads is None:
        yield Finding(OK, "draft", "none: draft tokens are copied from earlier text")


def heads_finding(plan: DraftPlan, heads: ModelFile, target: LlamaModel, working: Working) -> Finding:
    """Return what a draft that reads the target's hidden rows costs: memory, and time of a prompt."""
    topic = "heads cost"
    found, n_bytes = read_gguf(heads.path), weights_bytes([heads.path])
    if plan.has_own_heads:  # an estimate: layers differ in size
        n_bytes = n_bytes * found.number("nextn_predict_layers") // found.number("block_count", 1)
    try:
        with (
            working("timing a prompt"),
            closing(open_hidden_draft(plan, heads, target)) as draft,
            Pair(target, heads=draft) as pair,
        ):
            alone, both = (prompt_seconds(pair, drafter) for drafter in (NoDrafter(), None))
            fault = (
                pair.stream(b"def", seed=0, max_tokens=N_DRAFT + 2, policy=FixedLength(N_DRAFT))
                .run()
                .draft_fault
            )
    except LlamaspecError as error:
        return Finding.of_error(topic, error)
    if fault is not None:
        return Finding.of_error("draft", EvaluationError(fault))
    slower = max(both / alone - 1.0, 0.0)
    text = f"about {as_size(n_bytes)} of weights; a prompt takes {slower:.0%} longer while they draft"
    return Finding(OK, topic, f"{text}, and no longer while they sleep because they would lose")


def prompt_seconds(pair: Pair, drafter: Drafter | None) -> float:
    """Return the least time of a prompt, processed twice; drafts process it at once."""
    n, seconds = max(1, min(N_TIMED, pair.target.context_size - 2)), list[float]()
    prompt = sample_tokens(pair.target.vocabulary, n)
    for _ in range(2):
        pair.forget()
        done = pair.stream(prompt, max_tokens=1, policy=FixedLength(1), drafter=drafter, scope=None).run()
        seconds.append(done.prefill_seconds)
    return min(seconds)


def pair_findings(
    target: LlamaModel, draft: LlamaModel, known: str | None, working: Working
) -> Iterator[Finding]:
    """Yield findings about a pair, the last one its verdict `known` from earlier runs.

    Acceptance is tried only if the vocabularies differ.
    """
    topic = "vocabulary"
    try:
        with Pair(target, draft) as pair:
            if pair.common is None:
                yield from vocabulary_findings(target.vocabulary, draft.vocabulary)
            else:
                shared = f"{pair.common.is_common.sum()} of the target's {len(pair.common.is_common)} tokens"
                covered = f"covering about {pair.common.of_text:.0%} of typical text"
                text = f"different: both have {shared}, {covered}; the draft draws from the shared tokens"
                yield Finding(OK, topic, text)
                topic = "acceptance"
                with working("trying the draft with the tokens of the target"):
                    found = acceptance_finding(pair)
                yield found
            topic = "draft cost"
            watch = LoadWatch()
            with working("timing the pair"):
                timed = measure(pair, STEPS)
            yield pace_finding(timed, load_in_words(watch.n_taken()), is_known=known is not None)
    except LlamaspecError as error:
        yield Finding.of_error(topic, error)
    if known is not None:
        yield Finding(OK, "speed-up", known)


def pace_finding(timed: Probe, load: str | None = None, *, is_known: bool = False) -> Finding:
    """Check that a draft step is cheap enough; if the pair's verdict is known, no warning is needed.

    Beside the `load` of other programs, times tell nothing.
    """
    curve = timed.curve
    single, step = curve.verify_seconds[0], curve.draft_step_seconds
    ratio = single / step
    text = f"a token takes {1e3 * single:.2f} ms in the target, {1e3 * step:.2f} ms in the draft: "
    text += f"{ratio:.1f} times as fast" if ratio > 1 else "no faster than the target"
    if load is not None:
        return Finding(WARNING, "draft cost", f"{text}; but {load} meanwhile", "stop them and try again")
    remedy = (
        f"use a draft at least {CHEAP:.0f} times as fast as the target, or measure with `llamaspec compare`"
    )
    return check("draft cost", text, ratio >= CHEAP or is_known, "", remedy)


def vocabulary_findings(target: LlamaVocabulary, draft: LlamaVocabulary) -> Iterator[Finding]:
    """Check that two vocabularies with the same token ids also share their start and end tokens."""
    sizes = f"{target.size} tokens"
    if target.size != draft.size:
        sizes = f"{target.size} tokens in the target, {draft.size} in the draft, with the same ids"
    yield Finding(OK, "vocabulary", f"the same: {sizes}")
    ends = ("start", target.bos, draft.bos), ("end", target.eos, draft.eos)
    differing = [
        f"text {name}s with {_token(mine)} in the target and {_token(its)} in the draft"
        for name, mine, its in ends
        if mine != its
    ]
    text = "; ".join(differing) or f"start {_token(target.bos)}, end {_token(target.eos)} in both"
    remedy = "choose a draft tuned like the target: both for chat, or neither"
    yield check("special tokens", text, not differing, ": draft tokens there will be wrong", remedy)


def _token(token: int) -> str:
    return "none" if token < 0 else f"token {token}"


def acceptance_finding(pair: Pair) -> Finding:
    """Check acceptance in a short trial with default sampling."""
    n_prompt = min(N_PROMPT, pair.target.context_size // 2)
    begin, prompt = pair.clock(), sample_tokens(pair.target.vocabulary, n_prompt)
    stream = pair.stream(prompt, seed=0, max_tokens=N_WRITTEN, policy=FixedLength(N_DRAFT))
    for _ in stream:
        if pair.clock() - begin > TRIAL_SECONDS:
            break
    stream.close()
    summary = stream.completion.summary
    if summary.acceptance_rate is None:
        return Finding(OK, "acceptance", "not tried: the draft proposed nothing")
    text = f"{summary.acceptance_rate:.0%} of {summary.n_verified} draft tokens accepted in a short trial"
    remedy = "choose a draft of the target's family, or measure with `llamaspec compare`"
    return check("acceptance", text, summary.acceptance_rate >= FEW, "", remedy)
