"""`llamaspec doctor`: look at the machine and at two models, and say what will go wrong or be slow."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.text import Text

from llamaspec import suffix_store
from llamaspec.cli.messages import options_of
from llamaspec.cli.model_options import ModelChoice, find_files, model_options
from llamaspec.cli.option_groups import GroupedCommand
from llamaspec.cli.terminal import SlowProgress, say
from llamaspec.errors import LlamaspecError, printable
from llamaspec.llama import runtime
from llamaspec.measure.doctor import examine
from llamaspec.measure.findings import OK, PROBLEM, WARNING, Finding

STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
_OPTIONS = {  # by the settings that findings name
    "target.n_ctx": "--n-ctx",
    "draft.n_ctx": "--draft-ctx",
    "target.gpu_layers": "--gpu-layers",
    "target.threads": "--threads",
    "draft.threads": "--draft-threads",
    "target.flash_attention": "--flash-attn",
    "draft.flash_attention": "--flash-attn",
    "target.cache_type_k": "--cache-type-k",
    "target.cache_type_v": "--cache-type-v",
    "draft.cache_type_k": "--draft-cache-type-k",
    "draft.cache_type_v": "--draft-cache-type-v",
    "draft_length": "--draft-length 0",
    "draft": "--draft FILE",
    "heads": "--draft mtp",
    "ngram": "--draft ngram",
    "past_texts": "--forget-texts",
}


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec doctor                                            this machine, with the embedded pair
  llamaspec doctor --target big.gguf --draft small.gguf
  llamaspec doctor --target big.gguf --draft small.gguf --n-ctx 32768 --json
  llamaspec doctor --forget-texts                             delete what --ngram keeps of earlier texts
""",
)
@model_options
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
@click.option(
    "--forget-texts",
    is_flag=True,
    help="Delete the texts that are kept for --ngram, of all models, and do nothing else.",
)
def doctor(models: ModelChoice, as_json: bool, forget_texts: bool) -> None:
    """Find out what will go wrong or be slow here, with remedies. Exit code 1 where there is a problem."""
    if forget_texts:
        _forget_texts()
        return
    runtime.set_verbose(models.verbose)
    if models.is_embedded:
        say("no --target given, using the small embedded pair")
    found = list(examine(find_files(models), lambda role: SlowProgress(f"loading the {role}")))
    counts = {level: sum(finding.level == level for finding in found) for level in STYLES}
    if as_json:
        listed = [_as_json(finding) for finding in found]
        click.echo(json.dumps({"findings": listed, "problems": counts[PROBLEM], "warnings": counts[WARNING]}))
    else:
        _show(found)
    if counts[PROBLEM]:
        sys.exit(1)


def _forget_texts() -> None:
    try:
        dropped = suffix_store.forget_texts()
    except OSError as error:
        raise LlamaspecError(
            f"cannot delete {error.filename}: {error.strerror}; delete it by hand"
        ) from error
    size = f"{dropped.n_bytes / 1e6:.1f} MB forgotten" if dropped.n_models else "no texts were kept"
    click.echo(size, err=True)


def _as_json(finding: Finding) -> dict[str, str | None]:
    text, remedy = _told(finding)
    return {"level": finding.level, "topic": finding.topic, "text": text, "remedy": remedy}


def _told(finding: Finding) -> tuple[str, str | None]:
    """Text and remedy, the last of them with the options that it takes."""
    options = [_OPTIONS[setting] for setting in finding.settings]
    if finding.error is not None:
        options += options_of(finding.error)
    added = f" ({', '.join(options)})" if options else ""
    if finding.remedy is None:
        return finding.text + added, None
    return finding.text, finding.remedy + added


def _show(findings: Sequence[Finding]) -> None:
    """One line for each finding; colour only on a terminal, NO_COLOR honoured."""
    console = Console(highlight=False, soft_wrap=True)
    n_topic = max(len(finding.topic) for finding in findings)
    for finding in findings:
        text, remedy = _told(finding)
        line = Text(f"{finding.level:<7}  ", style=STYLES[finding.level])
        line.append(f"{finding.topic:<{n_topic}}  ", style="default")
        line.append(printable(text), style="default")
        if remedy is not None:
            line.append(f"; {printable(remedy)}", style="default")
        console.print(line)
