"""`llamaspec generate`: a prompt in, text on stdout as it becomes certain, statistics on stderr."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import click

from llamaspec.app.chat_options import chat_options, first_turn
from llamaspec.app.explain import explain
from llamaspec.app.opening import open_choice
from llamaspec.app.options import ModelChoice, model_options, sampling_from, sampling_options
from llamaspec.app.pair import Pair
from llamaspec.app.policy import keep_experience, make_policy
from llamaspec.app.prompt import read_prompt
from llamaspec.app.report import completion_json, statistics_lines
from llamaspec.app.terminal import SlowProgress, stderr_console
from llamaspec.app.timeline import write_timeline
from llamaspec.engine.generate import Piece, StopReason, TextStream
from llamaspec.errors import PromptError
from llamaspec.rules.auto_length import AutoLength

EXIT_INTERRUPTED = 130


@click.command(
    epilog="""\b
Examples:
  llamaspec generate "def quicksort(items):"
  llamaspec generate --target llama-70b.Q4.gguf --draft llama-8b.Q4.gguf -p "Dear editor,"
  llamaspec generate -f prompt.txt -t 0 -n 512 --show-drafts
  llamaspec generate --chat --target big-instruct.gguf --system "Be brief." "Why is the sky blue?"
  git diff | llamaspec generate --target big.gguf --draft small.gguf --json | jq .statistics
"""
)
@click.argument("prompt", required=False)
@click.option("--prompt", "-p", "prompt_option", metavar="TEXT", help="The prompt.")
@click.option("--file", "-f", metavar="PATH", help="Read the prompt from a file, byte for byte; - is stdin.")
@click.option("--chat", is_flag=True, help="Take the prompt as a message, and answer by the chat template.")
@chat_options
@model_options
@click.option("--no-draft", is_flag=True, help="Plain decoding, to compare with.")
@sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated.")
@click.option("--show-drafts", is_flag=True, help="Colour the accepted guesses in the text.")
@click.option(
    "--stats/--no-stats", default=True, show_default=True, help="A few lines of statistics on stderr."
)
@click.option("--explain", is_flag=True, help="Say on stderr why guesses were made, and what they brought.")
@click.option("--timeline", metavar="FILE", help="Write a page that shows every round, for a browser.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout instead of the text.")
def generate(prompt: str | None, prompt_option: str | None, file: str | None, **options: Any) -> None:
    """Continue PROMPT. Without --target the small embedded pair answers."""
    if (options["system"] or options["chat_template"]) and not options["chat"]:
        raise PromptError("--system and --chat-template need --chat; without it the text is just continued")
    choice = ModelChoice.from_options(options)
    sampling = sampling_from(options)
    seed = options["seed"] if options["seed"] is not None else secrets.randbits(32)
    text = read_prompt(prompt, prompt_option, file)
    with open_choice(choice, with_draft=not options["no_draft"]) as pair:
        policy = make_policy(pair, options)
        with SlowProgress("reading the prompt") as progress:
            stream = pair.stream(
                first_turn(pair, text, options) if options["chat"] else text,
                sampling=sampling,
                seed=seed,
                max_tokens=options["max_tokens"],
                stops=options["stop"],
                rule=options["rule"],
                policy=policy,
                on_prefill=progress.part,
            )
            interrupted = _consume(stream, options["as_json"], options["show_drafts"])
        _report(pair, stream, seed, options)
        keep_experience(pair, policy)
        if options["explain"] and isinstance(policy, AutoLength):
            explain(policy.explain(), stderr_console())
        elif options["explain"]:
            click.echo(
                f"llamaspec: the number of guesses was fixed by you: {options['draft_length']}", err=True
            )
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)


def _consume(stream: TextStream, silent: bool, show_drafts: bool) -> bool:
    """Write the text as it comes; answers whether the person interrupted."""
    coloured = show_drafts and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    try:
        for piece in stream:
            if not silent:
                click.echo(_styled(piece) if coloured else piece.text, nl=False, color=coloured or None)
    except KeyboardInterrupt:
        return True
    return False


def _styled(piece: Piece) -> str:
    return "".join(click.style(span.text, fg="green") if span.drafted else span.text for span in piece.spans)


def _report(pair: Pair, stream: TextStream, seed: int, options: dict[str, Any]) -> None:
    completion = stream.completion
    if options["timeline"]:
        summary = statistics_lines(completion, seed)[0]
        write_timeline(Path(options["timeline"]), completion, pair.target.vocabulary, summary)
    if options["as_json"]:
        click.echo(json.dumps(completion_json(completion, pair, seed, options["rule"])))
        return
    click.echo()
    if completion.stop_reason is StopReason.CONTEXT:
        click.echo("llamaspec: the context is full; pass a larger --n-ctx for more", err=True)
    if options["stats"]:
        for line in statistics_lines(completion, seed):
            click.echo(line, err=True)
