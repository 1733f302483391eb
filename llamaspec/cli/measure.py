"""Commands that measure a pair: `llamaspec compare`, `probe` and `audit`."""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import click
from rich.bar import Bar
from rich.console import Console

from llamaspec.cli import options as shared
from llamaspec.cli import output as out
from llamaspec.cli.model_options import (
    ModelChoice,
    find_plan,
    find_plan_here,
    model_options,
    open_models,
    reporting,
)
from llamaspec.cli.option_groups import Decorator, GroupedCommand, Integer, section
from llamaspec.cli.signals import EXIT_INTERRUPTED
from llamaspec.errors import LlamaspecError, NoTemplateError, PairError
from llamaspec.llama import runtime
from llamaspec.measure import store
from llamaspec.measure.audit import Audit, run_audit
from llamaspec.measure.compare import Arm, Comparison, SpeedUp, Task, run_compare
from llamaspec.measure.machine import LoadWatch
from llamaspec.measure.probe import FULL, QUICK, Probe, measure
from llamaspec.measure.tasks import read_tasks
from llamaspec.measure.turns import Spread
from llamaspec.measure.verdict import (
    ACCEPTANCES,
    best_length,
    break_even,
    pair_verdict,
    round_seconds,
    saturation_width,
    verdict,
)
from llamaspec.pair import Pair
from llamaspec.plan import DraftPlan

AUDIT_PROMPT = "def read_lines(path):\n"
PREDICTABLE_PROMPT = 8 * "    self.assertEqual(result, expected)\n"
_ORDINARY = ("ask", "write code", "explain")  # tasks of the benchmark
_TO_THE_BIT = "llamaspec's kernels compute everything: the same seed gives the same text to the bit"
_ROUNDING = (
    "these differences come from rounding and do not fail the audit, but the same seed may give another text "
    "if the cache or concurrent requests differ"
)


def plan_with_draft(models: ModelChoice, command: str) -> DraftPlan:
    """Return the plan of the chosen models; PairError if nothing drafts."""
    plan = find_plan(models)
    if plan.is_plain:
        raise PairError(f"{command} needs a draft; name it with --draft, or drop --no-ngram")
    return plan


def task_of(pair: Pair, text: bytes, decoding: shared.DecodingOptions, seed: int) -> Task:
    """Return the task of continuing a prompt."""
    prompt = pair.target.vocabulary.tokenize(text)
    return Task(prompt, decoding.sampling, seed, decoding.max_tokens, decoding.rule)


# compare


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec compare
  llamaspec compare --target llama-70b.Q4.gguf --draft llama-8b.Q4.gguf -t 0 -r 3
  llamaspec compare --target big.gguf --draft ngram -f report.txt
  llamaspec compare --target big.gguf --draft big.gguf       sanity check: nothing is rejected
""",
)
@shared.prompt_options("The prompt; default: several prompts of the benchmark, in turn.")
@click.option("--num-runs", "-r", type=Integer(min=1), default=6, show_default=True,
              help="Runs of each method; the second half repeats the first.")  # fmt: skip
@model_options
@shared.measured_decoding_options
@shared.JSON_OPTION
def compare(
    prompt: shared.PromptSource,
    models: ModelChoice,
    decoding: shared.DecodingOptions,
    num_runs: int,
    as_json: bool,
) -> None:
    """Compare the target alone, the draft alone and both together.

    Ctrl-C stops the comparison and shows the results so far.
    """
    text = prompt.read() if prompt.is_named else None
    plan = plan_with_draft(models, "compare")
    if text is None and models.is_embedded:
        text = PREDICTABLE_PROMPT.encode()
    seed = decoding.seed or 0  # so that the next comparison measures the same completions
    with (
        reporting(plan, models, decoding, quiet=True) as pair,
        out.SlowProgress("comparing") as progress,
    ):
        if text is None:
            tasks = _ordinary_tasks(pair, decoding, seed)
        else:
            tasks = [task_of(pair, text, decoding, seed)]
        watch = LoadWatch()
        comparison = run_compare(pair, tasks, num_runs, pair.length, progress)
        out.warns_of_load(watch.n_taken(), "these speeds are not those of a calm machine")
    kept = pair_verdict(plan)
    if as_json:
        click.echo(json.dumps(_comparison_json(comparison, tasks[0], kept)))
    else:
        _show_comparison(comparison, tasks[0])
        if kept is not None:
            out.say(f"so far, {kept}")
    if comparison.is_interrupted:
        out.say(f"stopped after {len(comparison.target.runs)} of {num_runs} runs")
        sys.exit(EXIT_INTERRUPTED)


def _ordinary_tasks(pair: Pair, decoding: shared.DecodingOptions, seed: int) -> list[Task]:
    """Return prompts of the benchmark that fit, in the model's chat template if it has one; at least one."""
    prompts = [prompt.encode() for task in read_tasks(names=_ORDINARY) for prompt in task.prompts]
    tasks = [task_of(pair, prompt, decoding, seed) for prompt in prompts]
    with suppress(NoTemplateError):
        chat = shared.ChatOptions()
        turns = [chat.first_turn(pair.target.weights, each, parse_special=False) for each in prompts]
        tasks = [replace(task, prompt=turn) for task, turn in zip(tasks, turns, strict=True)]
    fitting = [task for task in tasks if len(task.prompt) + task.max_tokens < pair.target.context_size]
    return fitting or tasks[:1]


def _show_comparison(comparison: Comparison, task: Task) -> None:
    rows, shows_nothing, has_range = [], False, False
    for arm in comparison.arms:
        seconds, speed_up = Spread.of(arm.seconds), comparison.speed_up(arm)
        ratio = "1.00x" if arm is comparison.target else ""
        if arm is not comparison.target and speed_up is not None:
            ratio = str(speed_up)
            shows_nothing |= speed_up.shows_nothing
            has_range |= speed_up.low is not None
        spread = f"{seconds.median:.3f}" + (f" ± {seconds.half:.3f}" if len(arm.runs) > 1 else "")
        rows.append((arm.name, str(len(arm.runs)), spread, f"{arm.tokens_per_second:.1f}", ratio))
    out.print_table(("<method", "runs", "seconds", "tokens/s", "speed-up"), rows)
    notes = out.stderr_console()
    range_is = " (19 of 20 repeats will be in this range)" if has_range else ""
    notes.print(
        "seconds, tokens/s: medians (± half the interquartile range); speed-up: mean of paired runs"
        + range_is
    )
    if shows_nothing:
        notes.print("a range around 1.00 shows no difference: repeat on an idle machine, or with a larger -n")
    rate = comparison.speculative.acceptance_rate
    if comparison.speculative.n_drafted == 0:
        click.echo("no draft token was proposed, so any difference is noise")
    elif rate is None:
        click.echo("no draft token was verified: none was expected to save time")
    else:
        click.echo(f"acceptance: {rate:.1%} of the verified draft tokens")
    if comparison.same_file:
        notes.print("target and draft are the same file, so no draft token should be rejected")
    if comparison.same_text:
        notes.print("every run produced the target's own text")
    elif task.repeats:
        notes.print("some runs differ from the target's own text: larger batches round differently here")


def _comparison_json(comparison: Comparison, task: Task, verdict: str | None) -> dict[str, Any]:
    return {
        "seed": task.seed,
        "rule": task.rule,
        "same_file": comparison.same_file,
        "same_text": comparison.same_text,
        "acceptance_rate": comparison.speculative.acceptance_rate,
        "drafted": comparison.speculative.n_drafted,
        "arms": [_arm_json(arm, comparison.speed_up(arm)) for arm in comparison.arms],
        "verdict": verdict,
        "interrupted": comparison.is_interrupted,
    }


def _arm_json(arm: Arm, speed_up: SpeedUp | None) -> dict[str, Any]:
    seconds, interval = Spread.of(arm.seconds), None
    if speed_up is not None and speed_up.low is not None:
        interval = [speed_up.low, speed_up.high]
    return {
        "method": arm.name,
        "tokens_per_second": arm.tokens_per_second,
        "speed_up": None if speed_up is None else speed_up.mean,
        "speed_up_interval": interval,
        "median_seconds": seconds.median,
        "seconds_quartiles": [seconds.low, seconds.high],
        "mean_seconds": statistics.mean(arm.seconds),
        "std_seconds": statistics.stdev(arm.seconds) if len(arm.seconds) > 1 else 0.0,
        "runs": [
            {
                "tokens": run.summary.n_tokens,
                "seconds": run.summary.decode_seconds,
                "prefill_seconds": run.prefill_seconds,
                "acceptance_rate": run.summary.acceptance_rate,
            }
            for run in arm.runs
        ],
    }


# probe


_PROBE_LEGEND = (
    "batch size: tokens evaluated at once; ms at N: with N tokens in the KV cache; relative: to batch size "
    "1; differs by: largest difference of a logit from batch size 1, 0 = bit-identical; ±: half the "
    "interquartile range"
)
_NOISY = 0.25  # half the interquartile range of single tokens, relative to their median
_PROBE_OUTPUT: tuple[Decorator, ...] = (
    click.option("--quick", is_flag=True,
                 help="Measure fewer batch sizes and repeats: takes seconds instead of a minute or two."),
    click.option("--show", is_flag=True, help="Show the stored result of an earlier probe."),
    click.option("--forget", is_flag=True, help="Delete the stored result."),
    shared.JSON_OPTION,
)  # fmt: skip


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec probe --target big.gguf --draft small.gguf
  llamaspec probe --target big.gguf --draft small.gguf --quick --json | jq .break_even_acceptance
""",
)
@model_options
@section("Output", _PROBE_OUTPUT)
def probe(models: ModelChoice, quick: bool, show: bool, forget: bool, as_json: bool) -> None:
    """Measure the cost of evaluating several tokens at once, and store it."""
    runtime.choose_kernels(models.target_options.kernels)  # the kept results of both choices differ
    if forget:
        dropped = store.forget(find_plan_here(models))
        out.say("deleted the stored result" if dropped else "there is no stored result for this pair")
        return
    if show:
        plan, faults = find_plan_here(models), list[str]()
        found = store.stored(plan, Probe, faults.append)
        if found is None:
            reason = faults[0] if faults else "this pair has not been probed yet"
            raise LlamaspecError(f"{reason}; run the probe without --show")
    else:
        plan = find_plan(models)
        with open_models(plan, models) as pair:
            watch = LoadWatch()
            with out.SlowProgress("probing") as progress:
                found = measure(pair, QUICK if quick else FULL, progress)
            if not out.warns_of_load(watch.n_taken(), "these costs are not stored"):
                store.keep_probe(pair, found, lambda fault: out.say(f"warning: {fault}"))
    if as_json:
        click.echo(json.dumps(_probe_json(found)))
    else:
        _show_probe(found)


def _show_probe(found: Probe) -> None:
    console, curve = Console(highlight=False, soft_wrap=True), found.curve
    slowest = max(curve.verify_seconds)
    rows = []
    for row in found.widths:
        first = row.timings[0].median
        rows.append(
            (
                str(row.width),
                *(_milliseconds(timing) for timing in row.timings),
                f"{first / curve.verify_seconds[0]:.2f}",
                f"{row.logit_difference:.2g}",
                Bar(slowest, 0, first, width=16),
            )
        )
    depths = (f"ms at {depth}" for depth in found.depths)
    columns = ("batch size", *depths, "relative", "differs by", "<")
    out.print_table(columns, rows, console)
    console.print(_PROBE_LEGEND)
    console.print(f"computed with {runtime.kernels().describe()}")
    for depth in found.left_out_depths:
        console.print(f"a context of {depth} tokens was left out: processing it would take too long here")
    if not found.left_out_depths and found.identical_widths == {1}:
        console.print("no batch size above 1 gives the bits of batch size 1; llamaspec doctor says why")
    single = found.widths[0].timings[0]
    if single.half > _NOISY * single.median:
        console.print("the machine was busy: single tokens varied too much to trust these costs; probe again")
    out.print_costs(curve, console)


def _probe_json(found: Probe) -> dict[str, Any]:
    curve, seconds = found.curve, round_seconds(found.curve)
    return {
        **asdict(found),
        "identical_widths": sorted(found.identical_widths),
        "saturation_width": saturation_width(curve),
        "best_fixed_length": {str(each): asdict(best_length(seconds, each)) for each in ACCEPTANCES},
        "break_even_acceptance": break_even(seconds),
        "verdict": verdict(curve),
        "kernels": runtime.kernels().level,
    }


def _milliseconds(timing: Spread) -> str:
    """Format a time with its spread, if it was measured more than once."""
    varied = f" ±{timing.half / timing.median:.0%}" if timing.low < timing.high else ""
    return f"{1e3 * timing.median:.2f}{varied}"


# audit


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec audit --target big.gguf --draft small.gguf
  llamaspec audit --target big.gguf --draft small.gguf -t 0 -n 1000 -f prompt.txt --json
""",
)
@shared.prompt_options("The prompt; default: the beginning of a function.")
@model_options
@shared.measured_decoding_options
@shared.JSON_OPTION
def audit(
    prompt: shared.PromptSource, models: ModelChoice, decoding: shared.DecodingOptions, as_json: bool
) -> None:
    """Check that draft tokens do not change the text. Exit code 1 if they do.

    If llamaspec's kernels compute everything, no log-probability may change either, whatever is cached and
    whatever runs at the same time.

    Rules other than coupled draw another text. For them, the audit checks that plain decoding could have
    drawn every token.
    """
    text, plan = prompt.read(AUDIT_PROMPT), plan_with_draft(models, "audit")
    seed = decoding.seed or 0
    with open_models(plan, models, decoding) as pair, out.SlowProgress("auditing") as progress:
        task = task_of(pair, text, decoding, seed)
        why_inexact = pair.call(pair.target.why_inexact)
        found = run_audit(pair, task, pair.length, progress)
    passed = found.is_exact if why_inexact is None else found.is_lossless
    if as_json:
        more = {"passed": passed, "why_inexact": why_inexact}
        click.echo(json.dumps({"seed": seed, "rule": task.rule, **asdict(found), **more}))
    else:
        _show_audit(found, task, why_inexact)
    if not passed:
        sys.exit(1)


def _show_audit(found: Audit, task: Task, why_inexact: str | None) -> None:
    if not found.compares_texts:
        click.echo(f"not compared with plain decoding, because the {task.rule} rule draws another text")
    elif found.first_difference is None:
        click.echo(f"same seed, same text: all {found.n_tokens} tokens are those of plain decoding")
    else:
        click.echo(f"the texts differ from token {found.first_difference} on")
    click.echo(f"replayed one token at a time: {len(found.forks)} forks in {found.n_tokens} tokens")
    for fork in found.forks:
        click.echo(
            f"  token {fork.index}, batch of {fork.width}: {fork.said!r} with draft tokens, {fork.alone!r} "
            f"alone; the two best logits are {fork.logit_gap:.4f} apart"
        )
    for situation, n in found.n_changed.items():
        click.echo(
            f"log-probabilities {situation}: {f'{n} of {found.n_compared} differ' if n else 'the same'}"
        )
    if why_inexact is None:
        fault = "llamaspec's kernels compute everything, so this is a fault; please report it"
        click.echo(_TO_THE_BIT if found.is_exact else fault)
        return
    click.echo(f"the same seed gives the same text up to rounding: {why_inexact}")
    if not found.is_lossless:
        click.echo("larger batches round differently here, and the text changed")
    elif not found.is_exact:
        click.echo(_ROUNDING)
