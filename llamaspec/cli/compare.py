"""The command `compare`: the target alone, the draft alone and both together."""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click

from llamaspec.chat.template import NoTemplateError
from llamaspec.cli import options as shared
from llamaspec.cli import output as out
from llamaspec.cli.grouped import GroupedCommand, Integer
from llamaspec.cli.model_options import ModelChoice, find_plan, learning, model_options
from llamaspec.errors import PairError
from llamaspec.measure.bench import read_tasks
from llamaspec.measure.compare import Arm, Comparison, Task, run_compare
from llamaspec.measure.probe import Spread
from llamaspec.measure.reasons import pair_verdict
from llamaspec.pair import Pair
from llamaspec.plan import DraftPlan

PREDICTABLE_PROMPT = 8 * "    self.assertEqual(result, expected)\n"
_ORDINARY = ("ask", "write code", "explain")  # tasks of the benchmark


def plan_with_draft(models: ModelChoice, command: str) -> DraftPlan:
    """What was chosen; a PairError if nothing drafts."""
    plan = find_plan(models)
    if plan.is_plain:
        raise PairError(f"{command} needs a draft; name it with --draft, or drop --no-ngram")
    return plan


def task_of(pair: Pair, text: bytes, decoding: shared.DecodingOptions, seed: int) -> Task:
    """The prompt, and how to continue it."""
    prompt = pair.target.vocabulary.tokenize(text)
    return Task(prompt, decoding.sampling, seed, decoding.max_tokens, decoding.rule)


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
@shared.prompt_options("The prompt; default: several of the benchmark's, in turn.")
@click.option("--num-runs", "-r", type=Integer(min=1), default=5, show_default=True,
              help="Runs of each method.")  # fmt: skip
@model_options
@shared.decoding_options
@shared.JSON_OPTION
def compare(
    source: shared.PromptSource,
    models: ModelChoice,
    decoding: shared.DecodingOptions,
    num_runs: int,
    as_json: bool,
) -> None:
    """Compare the target alone, the draft alone and both together."""
    text = source.read() if source.is_named else None
    plan = plan_with_draft(models, "compare")
    with (
        learning(plan, models, decoding, quiet=True) as (pair, policy),
        out.SlowProgress("comparing") as progress,
    ):
        if text is None and models.is_embedded:
            text = PREDICTABLE_PROMPT.encode()
        seed = decoding.seed_or_random()
        tasks = (
            _ordinary_tasks(pair, decoding, seed) if text is None else [task_of(pair, text, decoding, seed)]
        )
        comparison = run_compare(pair, tasks, num_runs, policy, progress)
    kept = pair_verdict(plan)
    if as_json:
        click.echo(json.dumps({**_comparison_json(comparison, tasks[0]), "verdict": kept}))
        return
    _show_comparison(comparison, tasks[0])
    if kept is not None:
        out.say(f"so far, {kept}")


def _ordinary_tasks(pair: Pair, decoding: shared.DecodingOptions, seed: int) -> list[Task]:
    """Prompts as people ask them, in the model's chat template if it has one."""
    prompts = [prompt.encode() for task in read_tasks(names=_ORDINARY) for prompt in task.prompts]
    tasks = [task_of(pair, prompt, decoding, seed) for prompt in prompts]
    with suppress(NoTemplateError):
        turns = [
            shared.ChatOptions(None, None).first_turn(pair, each, parse_special=False) for each in prompts
        ]
        tasks = [replace(task, prompt=turn) for task, turn in zip(tasks, turns, strict=True)]
    return [task for task in tasks if len(task.prompt) + task.max_tokens < pair.target.context_size] or tasks[
        :1
    ]


def _show_comparison(comparison: Comparison, task: Task) -> None:
    rows = []
    for arm in comparison.arms:
        seconds, speed_up = Spread.of(arm.seconds), comparison.speed_up(arm)
        told = f"{seconds.median:.3f} ± {seconds.half:.3f}"
        ratio = "" if speed_up is None else f"{speed_up.mean:.2f}x"
        if speed_up is not None and speed_up.low is not None:
            ratio += f" ({speed_up.low:.2f} to {speed_up.high:.2f})"
        ratio = "1.00x" if arm is comparison.target else ratio
        rows.append((arm.name, str(len(arm.runs)), told, f"{arm.tokens_per_second:.1f}", ratio))
    out.print_table(("<method", "runs", "seconds", "tokens/s", "speed-up"), rows)
    notes = out.stderr_console()
    notes.print(
        "seconds: median ± half the interquartile range; speed-up: mean over the runs, each against the "
        "target's beside it (95 % interval of the next measurement)"
    )
    rate = comparison.speculative.acceptance_rate
    if comparison.speculative.n_drafted == 0:
        click.echo("nothing was drafted, so any difference is noise")
    elif rate is None:
        click.echo("no draft tokens were verified")
    else:
        click.echo(f"acceptance: {rate:.1%} of the verified draft tokens")
    if comparison.same_file:
        notes.print("target and draft are the same file: in this sanity check nothing should be rejected")
    if comparison.same_text:
        notes.print("every run produced the target's own text")
    elif task.repeats:
        notes.print("some runs differ from the target's own text: larger batches round differently here")


def _comparison_json(comparison: Comparison, task: Task) -> dict[str, Any]:
    return {
        "seed": task.seed,
        "rule": task.rule,
        "same_file": comparison.same_file,
        "same_text": comparison.same_text,
        "acceptance_rate": comparison.speculative.acceptance_rate,
        "drafted": comparison.speculative.n_drafted,
        "arms": [_arm_json(comparison, arm) for arm in comparison.arms],
    }


def _arm_json(comparison: Comparison, arm: Arm) -> dict[str, Any]:
    seconds, speed_up = Spread.of(arm.seconds), comparison.speed_up(arm)
    return {
        "method": arm.name,
        "tokens_per_second": arm.tokens_per_second,
        "speed_up": speed_up.mean if speed_up is not None else None,
        "speed_up_interval": None
        if speed_up is None or speed_up.low is None
        else [speed_up.low, speed_up.high],
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
