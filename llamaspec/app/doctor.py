"""`llamaspec doctor`: look at the machine and at two models, and say what will go wrong or be slow.

The models are loaded one by one, so that a damaged one is a finding and the other is examined all the same.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from llamaspec.app.findings import (
    OK,
    PROBLEM,
    WARNING,
    Examined,
    Finding,
    Machine,
    machine_findings,
    model_findings,
    pace_findings,
    room_finding,
    thread_finding,
)
from llamaspec.app.options import ModelChoice, model_options
from llamaspec.app.sample import sample_tokens
from llamaspec.app.terminal import SlowProgress
from llamaspec.errors import LlamaspecError
from llamaspec.llama import runtime
from llamaspec.llama.devices import find_devices
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.pairing import check_pair
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.values import Ask

Clock = Callable[[], float]  # seconds

STEPS, WARM_UP = 9, 2  # tokens that are timed one by one, and those of them that do not count
PATIENCE_SECONDS = 5.0  # for the steps of one model; a very large one is timed less often
N_BEFORE = 16  # tokens in memory when the first step is timed
STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}


@click.command(
    epilog="""\b
Examples:
  llamaspec doctor                                            this machine, with the embedded pair
  llamaspec doctor --target big.gguf --draft small.gguf
  llamaspec doctor --target big.gguf --draft small.gguf --n-ctx 32768 --json
"""
)
@model_options
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def doctor(as_json: bool, **options: Any) -> None:
    """Find out what will go wrong or be slow here, with remedies. Exit code 1 where there is a problem."""
    choice = ModelChoice.from_options(options)
    runtime.set_verbose(choice.verbose)
    if choice.embedded:
        click.echo("llamaspec: no --target given, using the small embedded pair", err=True)
    findings = list(examine(choice))
    counts = {level: sum(finding.level == level for finding in findings) for level in STYLES}
    if as_json:
        listed = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"findings": listed, "problems": counts[PROBLEM], "warnings": counts[WARNING]}))
    else:
        _show(findings)
    if counts[PROBLEM]:
        sys.exit(1)


def examine(choice: ModelChoice, clock: Clock = time.perf_counter) -> Iterator[Finding]:
    """All findings, the machine's first."""
    machine = look_at_machine()
    yield from machine_findings(machine)
    wanted = [("target", choice.target_path, choice.target_options)]
    if choice.draft_path is not None:
        wanted.append(("draft", choice.draft_path, choice.draft_options))
    examined: dict[str, Examined] = {}
    vocabularies: dict[str, LlamaVocabulary] = {}
    with ExitStack() as stack:
        for role, path, options in wanted:
            yield thread_finding(machine, role, options.threads)
            try:
                with SlowProgress(f"loading the {role}") as progress:
                    model = stack.enter_context(LlamaModel(path, options, progress))
                examined[role] = look_at_model(role, model, clock)
            except LlamaspecError as error:
                yield Finding.of_error(role, error)
                continue
            vocabularies[role] = model.vocabulary
            yield from model_findings(machine, examined[role])
        if examined:
            yield room_finding(machine, list(examined.values()))
        if choice.draft_path is None and choice.copies:
            yield Finding(OK, "draft", "none: guesses are copied from earlier text")
        elif choice.draft_path is None:
            yield Finding(
                WARNING,
                "draft",
                "none given: plain decoding, one token at a time",
                "name a small model of the target's family with --draft, or copy with --draft ngram",
            )
        elif len(examined) == len(wanted):
            yield from vocabulary_findings(vocabularies["target"], vocabularies["draft"])
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
        n_logical=os.cpu_count() or 1,
    )


def look_at_model(role: str, model: LlamaModel, clock: Clock) -> Examined:
    """Measure a model that has just been loaded; its memory is emptied."""
    return Examined(
        role=role,
        name=Path(model.path).name,
        description=model.description.replace(" ?B", ""),  # a size that llama.cpp has no name for
        facts=model.facts(),
        memory=model.try_memory(),
        options=model.options,
        context_size=model.context_size,
        trained_context_size=model.trained_context_size,
        flash_attention=runtime.flash_attention(),
        step_seconds=step_seconds(model, clock),
    )


def step_seconds(model: LlamaModel, clock: Clock) -> float:
    """Seconds of one token: the median of a few."""
    tokens = sample_tokens(model.vocabulary, N_BEFORE + STEPS)
    model.forget()
    model.logits([Ask(0, tokens[:N_BEFORE], 1)])
    begin, times = clock(), []
    for n in range(N_BEFORE + 1, len(tokens) + 1):
        start = clock()
        model.logits([Ask(0, tokens[:n], 1)])
        times.append(clock() - start)
        if len(times) > WARM_UP and clock() - begin > PATIENCE_SECONDS:
            break
    model.forget()
    return statistics.median(times[WARM_UP:])


def vocabulary_findings(target: LlamaVocabulary, draft: LlamaVocabulary) -> Iterator[Finding]:
    """Whether both number the same tokens, and begin and end a text alike."""
    try:
        check_pair(target, draft)
    except LlamaspecError as error:
        yield Finding.of_error("vocabulary", error)
    else:
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
    if differing:
        yield Finding(
            WARNING,
            "special tokens",
            "; ".join(differing) + ": guesses there are wrong",
            "choose a draft tuned like the target, both for chat or neither",
        )
    else:
        yield Finding(OK, "special tokens", f"start {_token(target.bos)}, end {_token(target.eos)} in both")


def _token(token: int) -> str:
    return "none" if token < 0 else f"token {token}"


def _show(findings: Sequence[Finding]) -> None:
    """One line for each finding; colour only on a terminal, NO_COLOR honoured."""
    console = Console(highlight=False, soft_wrap=True)
    n_topic = max(len(finding.topic) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.level:<7}  ", style=STYLES[finding.level])
        line.append(f"{finding.topic:<{n_topic}}  ", style="default")
        line.append(finding.text, style="default")
        if finding.remedy is not None:
            line.append(f"; {finding.remedy}", style="default")
        console.print(line)
