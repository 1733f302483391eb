"""`llamaspec compare`: target alone, draft alone, and both together, on one prompt."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from llamaspec.cli.decoding_options import DecodingOptions, decoding_options, make_policy
from llamaspec.cli.model_options import ModelChoice, find_files, model_options
from llamaspec.cli.opening import open_files
from llamaspec.cli.option_groups import GroupedCommand, option_group
from llamaspec.cli.prompt import PromptSource, prompt_options
from llamaspec.cli.terminal import SlowProgress, stderr_console
from llamaspec.errors import PairError
from llamaspec.measure.compare import Arm, Comparison, Spread, Task, run_compare
from llamaspec.measure.store import keep_prior

PREDICTABLE_PROMPT = 8 * "    self.assertEqual(result, expected)\n"


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What only `compare` can be asked for."""

    num_runs: int


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec compare
  llamaspec compare --target llama-70b.Q4.gguf --draft llama-8b.Q4.gguf -t 0 -r 3
  llamaspec compare --target big.gguf --draft ngram -f report.txt
  llamaspec compare --target big.gguf --draft big.gguf       sanity check: every draft token is accepted
""",
)
@prompt_options("The prompt; default: a very predictable text.")
@option_group(
    "output",
    CompareOptions,
    [click.option("--num-runs", "-r", type=click.IntRange(min=1), default=5, show_default=True,
                  help="Runs of each arm.")],
)  # fmt: skip
@model_options
@decoding_options
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout, with every run.")
def compare(
    source: PromptSource,
    output: CompareOptions,
    models: ModelChoice,
    decoding: DecodingOptions,
    as_json: bool,
) -> None:
    """Measure target alone, draft alone and both together on one prompt."""
    text = source.read(PREDICTABLE_PROMPT)
    files = find_files(models)
    if not files.drafts:
        raise PairError("compare needs a draft; name it with --draft, or look it up with --draft ngram")
    with open_files(files, models) as pair, SlowProgress("comparing") as progress:
        prompt = pair.target.vocabulary.tokenize(text)
        seed = decoding.seed_or_random()
        task = Task(prompt, decoding.sampling, seed, decoding.max_tokens, decoding.rule)
        policy = make_policy(pair, decoding)
        comparison = run_compare(pair, task, output.num_runs, policy, progress)
        keep_prior(pair, policy)
    if as_json:
        click.echo(json.dumps(_as_json(comparison, task)))
    else:
        _show(comparison, task)


def _show(comparison: Comparison, task: Task) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("method", "runs", "seconds", "tokens/s", "speed-up"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for arm in comparison.arms:
        seconds, speed_up = Spread.of(arm.seconds), comparison.speed_up(arm)
        table.add_row(
            arm.name,
            str(len(arm.runs)),
            f"{seconds.median:.3f} ± {seconds.half:.3f}",
            f"{arm.tokens_per_second:.1f}",
            "" if speed_up is None else _speed_up(speed_up, is_plain=arm is comparison.target),
        )
    Console().print(table)
    notes = stderr_console()
    notes.print("medians ± half of the distance between the quartiles; speed-ups are run against run")
    rate = comparison.speculative.acceptance_rate
    if comparison.speculative.n_drafted == 0:
        click.echo("no draft tokens were made: the difference is noise")
    elif rate is None:
        click.echo("no draft tokens were verified")
    else:
        click.echo(f"acceptance: {rate:.1%} of the verified draft tokens")
    if comparison.same_file:
        notes.print("target and draft are the same file: this is the sanity check, none should be rejected")
    if comparison.same_text:
        notes.print("the text is the target's own in every run")
    elif task.repeats:
        notes.print(
            "in some run the text differs from the target's own: here a wider batch rounds differently"
        )


def _speed_up(speed_up: Spread, *, is_plain: bool) -> str:
    return "1.00x" if is_plain else f"{speed_up.median:.2f}x ± {speed_up.half:.2f}"


def _as_json(comparison: Comparison, task: Task) -> dict[str, Any]:
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
        "speed_up": speed_up.median if speed_up is not None else None,
        "speed_up_quartiles": [speed_up.low, speed_up.high] if speed_up is not None else None,
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
