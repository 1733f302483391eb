"""`llamaspec doctor`: check this machine and the models."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.text import Text

from llamaspec.cli import options as shared
from llamaspec.cli import output as out
from llamaspec.cli.model_options import ModelChoice, find_plan, model_options
from llamaspec.cli.option_groups import GroupedCommand
from llamaspec.errors import printable
from llamaspec.measure.doctor import examine
from llamaspec.measure.findings import OK, PROBLEM, WARNING, Finding

STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec doctor                                            this machine, with the embedded pair
  llamaspec doctor --target big.gguf --draft small.gguf
  llamaspec doctor --target big.gguf --draft small.gguf --n-ctx 32768 --json
""",
)
@model_options
@shared.JSON_OPTION
def doctor(models: ModelChoice, as_json: bool) -> None:
    """Check this machine and the models, and suggest fixes. Exit code 1 if there is a problem."""
    if models.is_embedded:
        out.say("no --target given, using the small embedded pair")
    found = list(examine(find_plan(models), out.SlowProgress))
    counts = {level: sum(finding.level == level for finding in found) for level in STYLES}
    if as_json:
        listed = []
        for finding in found:
            text, remedy = _worded(finding)
            entry = {"level": finding.level, "topic": finding.topic, "text": text, "remedy": remedy}
            listed.append(entry)
        click.echo(json.dumps({"findings": listed, "problems": counts[PROBLEM], "warnings": counts[WARNING]}))
    else:
        _show_findings(found)
    if counts[PROBLEM]:
        sys.exit(1)


def _worded(finding: Finding) -> tuple[str, str | None]:
    """Return the text and the remedy; for an error, with the options that help."""
    options = () if finding.error is None else out.options_of(finding.error)
    added = f" ({', '.join(options)})" if options else ""
    if finding.remedy is None:
        return finding.text + added, None
    return finding.text, finding.remedy + added


def _show_findings(findings: Sequence[Finding]) -> None:
    """Print one line for each finding; colour only on a terminal and without NO_COLOR."""
    console = Console(highlight=False, soft_wrap=True)
    n_topic = max(len(finding.topic) for finding in findings)
    for finding in findings:
        text, remedy = _worded(finding)
        shown = printable(text if remedy is None else f"{text}; {remedy}")
        line = Text.assemble(
            (f"{finding.level:<7}", STYLES[finding.level]), f"  {finding.topic:<{n_topic}}  ", shown
        )
        console.print(line)
