"""Commands that measure a pair: `llamaspec probe` and `audit`."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.bar import Bar
from rich.console import Console

from llamaspec.cli import options as shared
from llamaspec.cli import output as out
from llamaspec.cli import pictures
from llamaspec.cli.compare import plan_with_draft, task_of
from llamaspec.cli.grouped import Decorator, GroupedCommand, section
from llamaspec.cli.model_options import (
    ModelChoice,
    find_plan,
    find_plan_here,
    model_options,
    open_models,
)
from llamaspec.errors import LlamaspecError, printable
from llamaspec.measure import store as curves
from llamaspec.measure.attention import compare_attention
from llamaspec.measure.compare import Task
from llamaspec.measure.exactness import AUDITED, Audit, run_audit
from llamaspec.measure.probe import FULL, QUICK, Probe, Spread, measure
from llamaspec.measure.reasons import attention_verdicts, conclusions
from llamaspec.pair import Pair

AUDIT_PROMPT = "def read_lines(path):\n"


# probe


_PROBE_LEGEND = (
    "batch size: tokens evaluated at once; relative: time next to batch size 1; max logit difference: "
    "from batch size 1, 0 = bit-identical; ±: half the interquartile range"
)
_PROBE_OUTPUT: tuple[Decorator, ...] = (
    click.option("--quick", is_flag=True, help="Fewer batch sizes and repeats, and no comparison "
                 "of attention: seconds instead of a minute or two."),
    click.option("--show", is_flag=True, help="Show the stored result of an earlier probe."),
    click.option("--forget", is_flag=True, help="Delete the stored result."),
    click.option("--plot", type=click.Path(path_type=Path), metavar="FILE",
                 help="Draw the curve as .png or .svg (needs matplotlib)."),
    click.option("--csv", "as_csv", is_flag=True, help="Print one CSV line per batch size on stdout."),
    shared.JSON_OPTION,
)  # fmt: skip


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec probe --target big.gguf --draft small.gguf
  llamaspec probe --target big.gguf --draft small.gguf --quick --json | jq .break_even_acceptance
  llamaspec probe --target big.gguf --draft small.gguf --plot curve.png
""",
)
@model_options
@section("Output", _PROBE_OUTPUT)
def probe(
    models: ModelChoice,
    quick: bool,
    show: bool,
    forget: bool,
    plot: Path | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Measure the cost of evaluating several tokens at once, and store it."""
    if as_csv and as_json:
        raise click.UsageError("--json and --csv both write to stdout; choose one")
    if plot is not None:
        pictures.check_plot(plot)
    if forget:
        dropped = curves.forget(find_plan_here(models))
        click.echo("forgotten" if dropped else "there was no stored result for this pair", err=True)
        return
    if show:
        plan = find_plan_here(models)
        kept = curves.stored(plan, Probe)
        if kept.value is None:
            reason = kept.fault or "this pair has not been probed yet"
            raise LlamaspecError(f"{reason}; run the probe without --show")
        found = kept.value
    else:
        plan = find_plan(models)
        with open_models(plan, models) as pair:
            found = _measured(pair, quick=quick)
    if plot is not None:
        pictures.draw_probe(found, plot, printable(plan.target.path.stem))
    if as_json:
        click.echo(json.dumps(conclusions(found)))
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        columns = ("width", "depth", "median_seconds", "low_seconds", "high_seconds", "logit_difference")
        writer.writerow(columns)
        for row in found.widths:
            for depth, t in zip(found.depths, row.timings, strict=True):
                writer.writerow([row.width, depth, t.median, t.low, t.high, row.logit_difference])
    else:
        _show_probe(found)


def _measured(pair: Pair, *, quick: bool) -> Probe:
    """Measure, and keep what was found."""
    with out.SlowProgress("probing") as progress:
        found = measure(pair, QUICK if quick else FULL, progress)
    if not quick:
        with out.SlowProgress("comparing attention") as progress:
            found = replace(found, attention=compare_attention(pair, found.depths, progress))
    try:
        curves.store_probe(pair, found)
    except LlamaspecError as error:  # what took minutes is shown even where it cannot be kept
        out.say(f"warning: {error}")
    return found


def _show_probe(found: Probe) -> None:
    console, curve = Console(highlight=False), found.curve
    slowest = max(curve.verify_seconds)
    rows = []
    for row in found.widths:
        first = row.timings[0].median
        rows.append(
            (
                str(row.width),
                *(_milliseconds(timing) for timing in row.timings),
                f"{first / curve.verify_seconds[0]:.2f}",
                f"{1e3 * first / row.width:.2f}",
                f"{row.logit_difference:.2g}",
                Bar(slowest, 0, first, width=16),
            )
        )
    depths = (f"ms ({depth} in KV cache)" for depth in found.depths)
    columns = ("batch size", *depths, "relative", "ms per token", "max logit difference", "<")
    out.print_table(columns, rows, console)
    console.print(_PROBE_LEGEND)
    for depth in found.left_out_depths:
        console.print(f"a context of {depth} tokens was skipped: reading it would take too long here")
    if found.identical_widths == {1}:
        console.print(
            "no batch size above 1 is known to be bit-identical to single tokens here; on a CPU, "
            "--cache-type-v bf16 avoids the kernel that differs in long contexts"
        )
    for sentence in attention_verdicts(found):
        console.print(sentence)
    out.print_costs(curve, console)


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
@shared.decoding_options
@shared.JSON_OPTION
def audit(
    source: shared.PromptSource, models: ModelChoice, decoding: shared.DecodingOptions, as_json: bool
) -> None:
    """Check that the text with draft tokens is the text without. Exit code 1 where it is not.

    Other rules than coupled draw another text; there every token is checked to be possible.
    """
    text, plan = source.read(AUDIT_PROMPT), plan_with_draft(models, "audit")
    seed = decoding.seed or 0
    with open_models(plan, models) as pair, out.SlowProgress("auditing") as progress:
        task = task_of(pair, text, decoding, seed)
        exactness = curves.known_exactness(pair, out.say) if decoding.exact else None
        found = run_audit(pair, task, shared.make_policy(pair, decoding, exactness), progress)
        options = pair.target.options
    if as_json:
        told = {"seed": seed, "rule": task.rule, **asdict(found), "identical_widths": found.identical_widths}
        if exactness is not None:
            told["exact"] = {**asdict(exactness), "cache_type_v": options.cache_type_v}
        click.echo(json.dumps(told))
    else:
        _show_audit(found, task)
        if exactness is not None:
            widths = ", ".join(map(str, exactness.widths))
            parts = "in any parts" if exactness.reads else "in equal parts, and texts share nothing"
            click.echo(
                f"--exact here: {options.cache_type_k} keys, {options.cache_type_v} values; "
                f"widths {widths}; prompts are read {parts}"
            )
    if not (found.is_exact if decoding.exact else found.is_lossless):
        sys.exit(1)


def _show_audit(found: Audit, task: Task) -> None:
    if not found.compares_texts:
        click.echo(
            f"the {task.rule} rule draws another text than plain decoding, by the same law: not compared"
        )
    elif found.first_difference is None:
        click.echo(f"same seed, same text: all {found.n_tokens} tokens are those of plain decoding")
    else:
        click.echo(f"the texts differ from token {found.first_difference} on")
    click.echo(f"replayed one token at a time: {len(found.forks)} forks in {found.n_tokens} tokens")
    for fork in found.forks:
        click.echo(
            f"  token {fork.index}, batch of {fork.width}: {fork.said!r} with draft tokens, {fork.alone!r} "
            f"alone; the two best logits lie {fork.logit_gap:.4f} apart"
        )
    widths = ", ".join(str(width) for width in found.identical_widths) or "none"
    click.echo(f"widths up to {AUDITED} that are bit-identical with width 1 here: {widths}")
    for situation, n in found.n_changed.items():
        click.echo(
            f"log-probabilities {situation}: {f'{n} of {found.n_compared} differ' if n else 'the same'}"
        )
    if found.forks:
        click.echo("a batch of several positions is rounded differently on this machine; --exact avoids that")
