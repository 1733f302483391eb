"""Looks at the machine and at two models, and yields what will go wrong or be slow.

The models are loaded one by one, so that a damaged one is a finding and the other is examined all the same.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from llamaspec.drafters.common_vocabulary import CommonTokens
from llamaspec.errors import LlamaspecError
from llamaspec.length.fixed import FixedLength
from llamaspec.llama import runtime
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import heads_in_file, what_it_reads
from llamaspec.llama.options import find_devices
from llamaspec.llama.threads import usage
from llamaspec.llama.vocabulary import difference
from llamaspec.llama.weights import LoadProgress
from llamaspec.measure.findings import (
    OK,
    WARNING,
    Examined,
    Finding,
    Machine,
    busy_finding,
    machine_findings,
    model_findings,
    overlap_finding,
    pace_findings,
    room_finding,
    thread_finding,
    vocabulary_findings,
)
from llamaspec.measure.probe import sample_tokens
from llamaspec.measure.store import PairFiles
from llamaspec.pair import Pair
from llamaspec.suffix_store import SuffixStore, folder, kept_texts
from llamaspec.values import TARGET, ForwardRequest

Clock = Callable[[], float]  # seconds
Loading = Callable[[str], AbstractContextManager[LoadProgress]]  # (role) -> told how much is loaded

STEPS, WARM_UP = 9, 2  # tokens that are timed one by one, and those of them that do not count
PATIENCE_SECONDS = 5.0  # for the steps of one model; a very large one is timed less often
LOOK_SECONDS = 0.3  # at what other programs do
N_PROMPT, N_WRITTEN, N_DRAFT = 64, 48, 2  # tokens of the trial of a draft with another vocabulary
TRIAL_SECONDS = 5.0  # for it; a very large target writes less
FEW = 0.3  # of the draft tokens: below that drafting hardly ever pays
N_BEFORE = 16  # cached tokens when the first step is timed


def examine(files: PairFiles, loading: Loading, clock: Clock = time.perf_counter) -> Iterator[Finding]:
    """All findings, the machine's first."""
    machine = look_at_machine()
    yield from machine_findings(machine)
    yield from busy_finding(machine)
    draft = files.draft
    reads = None if draft is None else what_it_reads(draft.path)
    if draft is not None and reads:  # without its target it is nothing
        yield Finding(OK, "draft", f"{draft.path.name} is a prediction head that reads {reads}")
        files, draft = replace(files, draft=None, heads=True), None
    wanted = [("target", files.target)] + ([("draft", draft)] if draft is not None else [])
    examined: dict[str, Examined] = {}
    models: dict[str, LlamaModel] = {}
    with ExitStack() as stack:
        for role, file in wanted:
            yield thread_finding(machine, role, file.options.threads)
            try:
                with loading(role) as on_load:
                    model = stack.enter_context(LlamaModel(file.path, file.options, on_load))
                examined[role] = look_at_model(role, model, clock)
            except LlamaspecError as error:
                yield Finding.of_error(role, error)
                continue
            models[role] = model
            yield from model_findings(machine, examined[role])
        if examined:
            yield room_finding(machine, list(examined.values()))
        yield from heads_findings(files)
        yield from texts_findings(files)
        if files.draft is None:
            yield from _no_draft_findings(files)
        elif len(examined) == len(wanted):
            vocabularies = models["target"].vocabulary, models["draft"].vocabulary
            if difference(*vocabularies) is None:
                yield from vocabulary_findings(*vocabularies)
            else:
                yield from foreign_findings(models["target"], models["draft"], clock)
            yield from pace_findings(examined["target"], examined["draft"])


def look_at_machine() -> Machine:
    """Ask llama.cpp and the system."""
    return Machine(
        system=sys.platform,
        backend=runtime.backend_description().replace(" = 1 |", "").replace(" :", ":").rstrip(),
        devices=find_devices(),
        can_offload=runtime.can_offload(),
        has_nvidia=shutil.which("nvidia-smi") is not None,
        repacking_is_safe=runtime.repacking_is_safe(),
        free_bytes=runtime.available_bytes(),
        n_physical=runtime.default_threads(),
        n_logical=runtime.n_hardware_threads(),
        n_taken=_taken_cores(),
    )


def _taken_cores() -> float:
    """How many hardware threads other programs use, looked at for a moment."""
    before = usage()
    time.sleep(LOOK_SECONDS)
    after = usage()
    wall = after.wall - before.wall
    idle, own = (after.idle - before.idle) / wall, (after.own - before.own) / wall
    return max(0.0, runtime.n_hardware_threads() - idle - own)


def look_at_model(role: str, model: LlamaModel, clock: Clock) -> Examined:
    """Measure a model that has just been loaded; its KV cache is emptied."""
    return Examined(
        role=role,
        name=Path(model.path).name,
        description=model.description.replace(" ?B", ""),  # a size that llama.cpp has no name for
        facts=model.facts(),
        memory=model.try_memory(),
        options=replace(model.options, flash_attention=model.flash_attention),
        context_size=model.context_size,
        trained_context_size=model.trained_context_size,
        flash_attention=runtime.flash_attention(),
        step_seconds=step_seconds(model, clock),
    )


def step_seconds(model: LlamaModel, clock: Clock) -> float:
    """Seconds of one token: the median of a few."""
    tokens = sample_tokens(model.vocabulary, N_BEFORE + STEPS)
    model.forget()
    model.forward(ForwardRequest(TARGET, tokens[:N_BEFORE]))
    begin, times = clock(), []
    for n in range(N_BEFORE + 1, len(tokens) + 1):
        start = clock()
        model.forward(ForwardRequest(TARGET, tokens[:n]))
        times.append(clock() - start)
        if len(times) > WARM_UP and clock() - begin > PATIENCE_SECONDS:
            break
    model.forget()
    return statistics.median(times[WARM_UP:])


def heads_findings(files: PairFiles) -> Iterator[Finding]:
    """What is to say of prediction heads in the target's file."""
    try:
        found = heads_in_file(files.target.path)
    except LlamaspecError:
        return  # said before
    if not found.n_heads:
        return
    if found.fault is not None:
        yield Finding(OK, "target heads", f"the file {found.fault}")
    elif files.heads:
        yield Finding(OK, "target heads", f"{found.n_heads} in the file; they draft")
    else:
        yield Finding(OK, "target heads", f"{found.n_heads} in the file; they can draft", settings=("heads",))


def texts_findings(files: PairFiles) -> Iterator[Finding]:
    """What is kept of earlier texts."""
    kept = kept_texts()
    if not kept.n_bytes:
        return
    try:
        past, fault = SuffixStore.of(files.target.path).read()
    except OSError:
        return  # said before
    if fault is not None:
        yield Finding(WARNING, "past texts", fault, "delete it", ("past_texts",))
    yield Finding(
        OK,
        "past texts",
        f"{len(past.texts)} of this target are kept, {sum(map(len, past.texts))} tokens; of {kept.n_models} "
        f"model{'s' if kept.n_models > 1 else ''} {kept.n_bytes / 1e6:.1f} MB in {folder()}",
        settings=() if fault else ("past_texts",),
    )


def _no_draft_findings(files: PairFiles) -> Iterator[Finding]:
    if files.heads:
        return
    if files.ngram:
        yield Finding(OK, "draft", "none: draft tokens are looked up in earlier text")
        return
    yield Finding(
        WARNING,
        "draft",
        "none given: plain decoding, one token at a time",
        "name a small model of the target's family, or look draft tokens up in earlier text",
        ("draft", "ngram"),
    )


def foreign_findings(target: LlamaModel, draft: LlamaModel, clock: Clock) -> Iterator[Finding]:
    """Common tokens and acceptance of two models that number tokens differently."""
    try:
        common = CommonTokens(target.vocabulary, draft.vocabulary)
    except LlamaspecError as error:
        yield Finding.of_error("vocabulary", error)
        return
    yield overlap_finding(common)
    yield acceptance_finding(target, draft, common, clock)


def acceptance_finding(target: LlamaModel, draft: LlamaModel, common: CommonTokens, clock: Clock) -> Finding:
    """What a short trial accepts, with the usual sampling."""
    pair, begin = Pair(target, draft, 0.0, common=common, clock=clock), clock()
    prompt = sample_tokens(target.vocabulary, N_PROMPT)
    stream = pair.stream(prompt, seed=0, max_tokens=N_WRITTEN, policy=FixedLength(N_DRAFT))
    for _ in stream:
        if clock() - begin > TRIAL_SECONDS:
            break
    stream.close()
    pair.forget()
    summary = stream.completion.summary
    rate = summary.acceptance_rate
    if rate is None:
        return Finding(OK, "acceptance", "not tried: the draft proposed nothing")
    text = f"{rate:.0%} of {summary.n_verified} draft tokens in a trial on a short text"
    if rate >= FEW:
        return Finding(OK, "acceptance", text)
    remedy = "choose a draft of the target's family; a comparison shows whether drafting pays"
    return Finding(WARNING, "acceptance", text, remedy)
