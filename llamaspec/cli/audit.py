"""`llamaspec audit`: check on this machine, with these files, that drafting does not change the text."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from llamaspec.cli.decoding_options import DecodingOptions, decoding_options, make_policy
from llamaspec.cli.model_options import ModelChoice, find_files, model_options
from llamaspec.cli.opening import open_files
from llamaspec.cli.option_groups import GroupedCommand
from llamaspec.cli.prompt import PromptSource, prompt_options
from llamaspec.cli.terminal import SlowProgress
from llamaspec.errors import PairError
from llamaspec.measure.audit import WIDEST, Audit, run_audit
from llamaspec.measure.compare import Task

DEFAULT_PROMPT = "def read_lines(path):\n"
DEFAULT_SEED = 0


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec audit --target big.gguf --draft small.gguf
  llamaspec audit --target big.gguf --draft small.gguf -t 0 -n 1000 -f prompt.txt --json
""",
)
@prompt_options("The prompt; default: the beginning of a function.")
@model_options
@decoding_options
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def audit(source: PromptSource, models: ModelChoice, decoding: DecodingOptions, as_json: bool) -> None:
    """Check that the text with draft tokens is the text without. Exit code 1 where it is not.

    Other rules than coupled draw another text; there every token is checked to be possible.
    """
    text = source.read(DEFAULT_PROMPT)
    files = find_files(models)
    if not files.drafts:
        raise PairError("audit needs a draft; name it with --draft, or look it up with --draft ngram")
    seed = DEFAULT_SEED if decoding.seed is None else decoding.seed
    with open_files(files, models) as pair, SlowProgress("auditing") as progress:
        prompt = pair.target.vocabulary.tokenize(text)
        task = Task(prompt, decoding.sampling, seed, decoding.max_tokens, decoding.rule)
        found = run_audit(pair, task, make_policy(pair, decoding), progress)
    if as_json:
        told = {"seed": seed, "rule": task.rule, **asdict(found), "identical_widths": found.identical_widths}
        click.echo(json.dumps(told))
    else:
        _show(found, task)
    if not found.is_lossless:
        sys.exit(1)


def _show(found: Audit, task: Task) -> None:
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
    click.echo(f"widths up to {WIDEST} that are bit-identical with width 1 here: {widths}")
    if found.forks:
        click.echo("a batch of several positions is rounded differently on this machine; --exact avoids that")
