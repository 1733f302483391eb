"""`llamaspec generate`: complete a prompt. Text goes to stdout as it is verified, statistics to stderr."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from llamaspec.cli import options as shared
from llamaspec.cli import output as out
from llamaspec.cli.model_options import ModelChoice, find_plan, model_or_plain_options, reporting
from llamaspec.cli.option_groups import Decorator, GroupedCommand, option_group
from llamaspec.cli.signals import EXIT_INTERRUPTED
from llamaspec.engine.completion import Completion, StopReason
from llamaspec.engine.stream import TextStream
from llamaspec.errors import LlamaspecError, printable
from llamaspec.length.automatic import AutoLength
from llamaspec.llama.weights import Weights
from llamaspec.measure.verdict import pair_verdict
from llamaspec.pair import Pair
from llamaspec.protocols import Constraint, Vocabulary
from llamaspec.values import COPIES, MTP, Round, TokenArray

if TYPE_CHECKING:
    from llamaspec.measure.explain import Reasons
    from llamaspec.measure.machine import LoadWatch

_OPTIONS: tuple[Decorator, ...] = (
    click.option("--special", is_flag=True,
                 help="Parse control tokens in the prompt, such as <|im_end|>."),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be repeated."),
    click.option("--json-schema", type=shared.JSON_SCHEMA, metavar="FILE|TEXT",
                 help="Write JSON that follows this schema."),
    click.option("--grammar", type=shared.GRAMMAR, metavar="FILE|TEXT",
                 help="Write text that follows this grammar, in llguidance's Lark or llama.cpp's GBNF."),
    click.option("--prediction", metavar="FILE",
                 help="File with expected text, such as the file to edit. Draft tokens are copied from it; "
                      "the result stays the same."),
    click.option("--show-drafts", is_flag=True, help="Colour accepted draft tokens."),
    *shared.statistics_options("short", "Statistics on stderr"),
    click.option("--explain", is_flag=True,
                 help="Explain on stderr how much was drafted, why, and with what result."),
    click.option("--timeline", metavar="FILE", help="Write an HTML page that shows every round."),
    click.option("--json", "as_json", is_flag=True,
                 help="Print one line of JSON on stdout instead of the text."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options that only `generate` has."""

    special: bool
    stop: tuple[str, ...]
    json_schema: str | None
    grammar: str | None
    prediction: bytes | None
    show_drafts: bool
    stats: out.Detail | None
    explain: bool
    timeline: str | None
    as_json: bool


def _output(
    *, stats: out.Detail | None, no_stats: bool, prediction: str | None, **given: Any
) -> GenerateOptions:
    expected = None if prediction is None else shared.read_input(Path(prediction), "prediction")
    detail = shared.chosen_detail(stats, no_stats, "short")
    options = GenerateOptions(stats=detail, prediction=expected, **given)
    if "" in options.stop:
        raise ValueError("a stop string must not be empty")
    if options.json_schema is not None and options.grammar is not None:
        raise ValueError("give --json-schema or --grammar, not both")
    return options


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec generate "def quicksort(items):"
  llamaspec generate --target llama-70b.Q4.gguf --draft llama-8b.Q4.gguf -p "Dear editor,"
  llamaspec generate -f prompt.txt -t 0 -n 512 --show-drafts
  llamaspec generate --chat --target big-instruct.gguf --system "Be brief." "Why is the sky blue?"
  llamaspec generate --json-schema person.json "Anna is 31 years old. As JSON: "
  git diff | llamaspec generate --target big.gguf --draft small.gguf --json | jq .statistics
""",
)
@shared.prompt_options("The prompt.", with_argument=True)
@shared.optional_chat_options
@model_or_plain_options
@shared.decoding_options
@option_group("output", _output, _OPTIONS)
def generate(
    prompt: shared.PromptSource,
    conversation: shared.ChatOptions,
    models: ModelChoice,
    decoding: shared.DecodingOptions,
    output: GenerateOptions,
) -> None:
    """Continue PROMPT. Without --target, a small embedded pair is used."""
    if output.timeline is not None:
        out.check_writable(Path(output.timeline), "timeline")
    text = prompt.read()
    seed = decoding.seed_or_random()
    quiet = output.stats is None or output.as_json or output.explain  # which says the same and more
    tokens = cache(partial(_prompt, text=text, conversation=conversation, output=output))
    plan = replace(find_plan(models), longest=lambda target: len(tokens(target)) + decoding.max_tokens)
    with reporting(plan, models, decoding, quiet=quiet) as pair:
        constraint = _constraint(pair, output)
        watch = _load_watch() if output.explain else None
        with out.SlowProgress("processing the prompt") as progress:
            stream = pair.stream(
                tokens(pair.target.weights),
                sampling=decoding.sampling,
                seed=seed,
                max_tokens=decoding.max_tokens,
                stops=output.stop,
                rule=decoding.rule,
                on_prefill=progress.part,
                constraint=constraint,
                prediction=output.prediction,
                scope=None,  # there are no earlier answers
            )
            interrupted = _consume(stream, output, progress)
        completion = stream.completion
        if output.timeline is not None:
            write_timeline(Path(output.timeline), completion, pair.target.vocabulary, seed)
        if output.as_json:
            click.echo(json.dumps(completion_json(completion, pair, seed, decoding.rule)))
        else:
            _report(completion, seed, output, is_plain=not pair.sources or decoding.draft_length == 0)
        if output.explain and isinstance(pair.length, AutoLength):
            from llamaspec.measure.explain import explain

            prior = pair.length.experience()
            depth = completion.n_prompt_tokens + len(completion.tokens) / 2  # cached tokens, on average
            reasons = explain(completion, prior.curve and prior.curve.at(depth))
            print_reasons(reasons, pair_verdict(pair, prior), out.stderr_console())
            assert watch is not None
            out.warns_of_load(watch.n_taken(), "these times and costs are not those of a calm machine")
        elif output.explain:
            out.say(f"nothing to explain: --draft-length fixed the draft length at {decoding.draft_length}")
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)


def _load_watch() -> LoadWatch:
    from llamaspec.measure import machine  # not needed by other completions

    return machine.LoadWatch()


def _prompt(
    target: Weights, *, text: bytes, conversation: shared.ChatOptions, output: GenerateOptions
) -> TokenArray:
    if conversation.chat:
        return conversation.first_turn(target, text, parse_special=output.special)
    return target.vocabulary.tokenize(text, parse_special=output.special)


def _constraint(pair: Pair, output: GenerateOptions) -> Constraint | None:
    if output.json_schema is not None:
        return pair.json_schema(output.json_schema)
    return None if output.grammar is None else pair.grammar(output.grammar)


def _consume(stream: TextStream, output: GenerateOptions, progress: out.SlowProgress) -> bool:
    """Write the text as it arrives; return whether Ctrl-C interrupted it."""
    coloured = output.show_drafts and not os.environ.get("NO_COLOR")
    try:
        for piece in stream:
            progress(1.0)  # a prompt of one token has reported no progress
            for span in piece.spans if not output.as_json else ():
                out.write_text(span.text, colour="green" if coloured and span.drafted else None)
    except KeyboardInterrupt:
        return True
    return False


def _report(completion: Completion, seed: int, output: GenerateOptions, *, is_plain: bool) -> None:
    click.echo()
    is_constrained = output.json_schema is not None or output.grammar is not None
    if completion.stop_reason is StopReason.CONTEXT:
        out.say("the context is full; raise --n-ctx to continue")
    elif completion.stop_reason is StopReason.CONSTRAINT:
        out.say("the text is incomplete: the grammar allows no token of the model here; correct it")
    elif is_constrained and completion.stop_reason is StopReason.LIMIT:
        out.say("the text is incomplete: --max-tokens ended it before the grammar did; raise --max-tokens")
    if output.stats is not None:
        for line in out.statistics_lines(completion, seed, output.stats, is_plain=is_plain):
            click.echo(line, err=True)


def write_timeline(path: Path, completion: Completion, vocabulary: Vocabulary, seed: int) -> None:
    """Write timeline.html with the data of a completion as JSON; no text in it can break the page."""
    conclusion, summary, *_ = out.statistics_lines(completion, seed, "short")
    data = {
        "summary": summary,
        "conclusion": conclusion,
        "prompt": {"n_tokens": completion.n_prompt_tokens, "seconds": completion.prefill_seconds},
        "n_tokens": completion.summary.n_tokens,
        "plain": completion.summary.plain_seconds,
        "rounds": [_round_json(round_, vocabulary) for round_ in completion.rounds],
    }
    template = (files("llamaspec") / "cli" / "timeline.html").read_text(encoding="utf-8")
    page = template.replace("@DATA@", json.dumps(data).replace("<", "\\u003c"))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise LlamaspecError(f"cannot write the timeline {path}: {reason}; name a writable file") from error


def _round_json(round_: Round, vocabulary: Vocabulary) -> dict[str, Any]:
    def text(token: int) -> str:
        return printable(vocabulary.piece(token).decode("utf-8", errors="replace"), keep="\n\t")

    draft = round_.draft
    return {
        "draft": round_.draft_seconds,
        "verify": round_.verify_seconds,
        "rest": round_.overhead_seconds,
        "accepted": round_.n_accepted,
        "verified": round_.n_verified,
        "copied": round_.source in COPIES,
        "drafted": [
            {
                "text": text(token),
                "confidence": round_.confidences[i],
                "kept": i < round_.n_accepted,
            }
            for i, token in enumerate(draft.tokens.tolist())
        ],
        "next": text(round_.next_token),
    }


def completion_json(completion: Completion, pair: Pair, seed: int, rule: str) -> dict[str, Any]:
    """Return what `generate --json` prints. Scripts depend on the names."""
    summary = completion.summary
    draft: str | None = None
    if pair.heads is not None:
        draft = MTP if pair.heads.path == pair.target.path else str(pair.heads.path)
    elif pair.draft is not None:
        draft = str(pair.draft.path)
    return {
        "text": completion.text,
        "tokens": list(completion.tokens),
        "prompt_tokens": completion.n_prompt_tokens,
        "cached_tokens": completion.n_cached,
        "stop_reason": completion.stop_reason.value,
        "seed": seed,
        "rule": rule,
        "target": str(pair.target.path),
        "draft": draft,
        "statistics": {
            "rounds": summary.n_rounds,
            "rounds_without_draft": summary.n_rounds_without_draft,
            "drafted": summary.n_drafted,
            "verified": summary.n_verified,
            "accepted": summary.n_accepted,
            "acceptance_rate": summary.acceptance_rate,
            "accepted_histogram": list(summary.accepted_histogram),
            "mean_tokens_per_round": summary.mean_tokens_per_round,
            "tokens_per_second": summary.tokens_per_second,
            "seconds": {
                "load": pair.load_seconds,
                "prompt": completion.prefill_seconds,
                "draft": summary.draft_seconds,
                "verify": summary.verify_seconds,
                "overhead": summary.overhead_seconds,
                "decode": summary.decode_seconds,
                "constraint": completion.mask_seconds,
            },
            "unused_draft": None if completion.unused_draft is None else completion.unused_draft._asdict(),
            "draft_fault": completion.draft_fault,
        },
    }


def print_reasons(reasons: Reasons, known: str | None, console: Console) -> None:
    """Print draft lengths, acceptance and gain of a completion, then the costs that are known."""
    n_rounds = sum(reasons.lengths.values()) or 1
    lengths = (f"{n_draft} in {n / n_rounds:.0%}" for n_draft, n in reasons.lengths.items())
    console.print(f"draft tokens verified per round: {', '.join(lengths)} of the rounds")
    for origin, (n_accepted, n_verified) in reasons.accepted.items():
        share = f"({n_accepted / n_verified:.0%})"
        console.print(f"{origin}: {n_accepted} of {n_verified} verified draft tokens accepted {share}")
    groups = [
        (f"{low:.1f}-{high:.1f}", f"{sum(outcomes) / len(outcomes):.0%}", f"of {len(outcomes)}")
        for (low, high), outcomes in reasons.bins.items()
        if outcomes
    ]
    if groups:
        out.print_table(("draft's confidence", "accepted", "up to the first rejection"), groups, console)
    console.print(reasons.outcome)
    if reasons.curve is None:
        console.print("costs are unknown, because nothing was timed; run `llamaspec probe`")
    else:
        out.print_costs(reasons.curve, console, known)
