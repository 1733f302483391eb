"""Print text, messages, tables, progress and statistics.

Control characters in text from models, files and hubs are escaped on a terminal, where they could set the
title or the clipboard, move the cursor, or forge a line. Pipes and files get the text unchanged.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from llamaspec.engine.completion import Completion, StopReason
from llamaspec.errors import (
    ContextFullError,
    LlamaspecError,
    MemoryFullError,
    NoTemplateError,
    PairError,
    SystemPromptError,
    TemplateError,
    printable,
)
from llamaspec.length.cost_curve import CostCurve
from llamaspec.measure.verdict import (
    ACCEPTANCES,
    best_length,
    gain_in_words,
    in_words,
    round_seconds,
    verdict,
)
from llamaspec.values import COPIES

Detail = Literal["short", "full"]
PATIENCE_SECONDS = 2.0  # before progress is shown
LINE_SECONDS = 10.0  # between two lines of progress if stderr is not a terminal
REFRESH_SECONDS = 0.1  # between two updates of a bar
NOTABLE = 0.1  # seconds; shorter delays are not mentioned
_ENDS = {
    StopReason.END: "at end of text",
    StopReason.LIMIT: "at --max-tokens",
    StopReason.STOP: "at a stop string",
    StopReason.CONTEXT: "at the end of the context",
    StopReason.CONSTRAINT: "by the constraint",
    StopReason.INTERRUPT: "by an interrupt",
}

# Options that help with an error; the first matching class counts.
_REMEDIES: tuple[tuple[type[LlamaspecError], tuple[str, ...]], ...] = (
    (NoTemplateError, ("--target", "--chat-template")),
    (SystemPromptError, ("--system",)),
    (TemplateError, ("--chat-template",)),
    (ContextFullError, ("--n-ctx",)),
    (MemoryFullError, ("--n-ctx", "--gpu-layers")),
    (PairError, ("--draft",)),
)

# After a pair that nobody has named.
OTHER_DRAFT = "for another draft: llamaspec models add NAME FILE --draft FILE; for none: --draft none"


def say(message: str) -> None:
    """Print one line on stderr. If nobody can read it any more, nothing happens."""
    with suppress(OSError, ValueError):  # the other end of a pipe, or stderr itself, may be closed
        click.echo(f"llamaspec: {printable(message)}", err=True)


def warns_of_load(n_taken: float, consequence: str) -> bool:
    """Warn if other programs used too much while something was measured; return whether they did."""
    from llamaspec.measure.machine import load_in_words  # not needed by other completions

    if (load := load_in_words(n_taken)) is None:
        return False
    say(f"warning: {load}, so {consequence}; stop them and repeat the measurement")
    return True


def message_of(error: LlamaspecError) -> str:
    """Return an error in one line, with the options that help."""
    options = options_of(error)
    return f"{error} ({', '.join(options)})" if options else str(error)


def options_of(error: LlamaspecError) -> tuple[str, ...]:
    """Return the options that help with an error; none if the message already names one."""
    options = next((options for kind, options in _REMEDIES if isinstance(error, kind)), ())
    return () if any(option in str(error) for option in options) else options


def write_text(text: str, colour: str | None = None, wrap: Callable[[str], str] = str) -> None:
    """Write generated text to stdout and flush; on a terminal it is escaped, wrapped, and may be coloured."""
    if sys.stdout.isatty():
        shown = wrap(printable(text, keep="\n\t"))
        click.echo(click.style(shown, fg=colour) if colour is not None else shown, nl=False)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding, errors="replace"))
    sys.stdout.buffer.flush()


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], console: Console | None = None
) -> None:
    """Print a table. A "<" before a column's title aligns it to the left."""
    table = Table(box=None, pad_edge=False)
    for title in columns:
        justify: Literal["left", "right"] = "left" if title.startswith("<") else "right"
        table.add_column(title.lstrip("<"), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    (console or Console(highlight=False)).print(table)


def stderr_console() -> Console:
    """Return a console on stderr, with colour only on a terminal and without NO_COLOR."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


class Thoughts:
    """Shows reasoning on stderr. If it is hidden, a terminal shows only "thinking …"."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._is_open = False

    def add(self, text: str) -> None:
        """Show more reasoning."""
        is_terminal = sys.stderr.isatty()
        if not self._is_shown:
            if self._is_open or not is_terminal:
                return
            text = "thinking …"
        self._is_open = True
        shown = printable(text, keep="\n\t")
        click.echo(click.style(shown, dim=True) if is_terminal else shown, nl=False, err=True)

    def end(self) -> None:
        """End the line of reasoning, because the answer begins or ends."""
        if self._is_open:
            click.echo(err=True)
        self._is_open = False


class SlowProgress:
    """A progress bar that appears after two seconds; plain lines if stderr is not a terminal.

    Use as a context manager. Call it with the finished fraction, 0 to 1; at 1 the bar disappears.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._fraction = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __call__(self, fraction: float) -> None:
        """Update the bar."""
        self._fraction = fraction
        if fraction >= 1:
            self._end()

    def part(self, done: int, total: int) -> None:
        """Update the bar from a number of parts done and their total."""
        self(done / total)

    def __enter__(self) -> SlowProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _show(self) -> None:
        if self._is_over.wait(PATIENCE_SECONDS):
            return
        console = stderr_console()
        if not console.is_terminal:
            is_over = False
            while not is_over:
                done = f": {self._fraction:.0%}" if self._fraction else ""
                say(f"{self._label}{done} ...")
                is_over = self._is_over.wait(LINE_SECONDS)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(self._label, total=None)  # without a total, the bar pulses
            while not self._is_over.wait(REFRESH_SECONDS):
                bar.update(task, completed=self._fraction, total=1.0 if self._fraction else None)


def check_writable(path: Path, what: str) -> None:
    """Raise a LlamaspecError if the file cannot be written."""
    existing = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(existing, os.W_OK):
        raise LlamaspecError(f"cannot write the {what} {path}; name a file in a writable folder")


# Statistics


def statistics_lines(
    completion: Completion, seed: int, detail: Detail, *, is_plain: bool = False
) -> list[str]:
    """Return the statistics of a completion; `full` adds all figures and times.

    `is_plain` means that no draft tokens were asked for.
    """
    summary = completion.summary
    speed = f"{summary.n_tokens} token{_plural(summary.n_tokens)} in {summary.decode_seconds:.2f} s"
    if summary.tokens_per_second:
        speed += f", {summary.tokens_per_second:.1f} tokens/s"
    gain = summary.speed_up
    n_dropped = summary.n_drafted - summary.n_verified
    dropped = f", {n_dropped} not verified" if n_dropped and summary.n_verified else ""
    ended = f"stopped {_ENDS[completion.stop_reason]}, seed {seed}"
    drafts = "" if is_plain else "no draft token was proposed"
    if summary.n_verified:
        sources = {round_.source for round_ in completion.rounds if round_.n_verified}
        copied = "copied " if sources <= COPIES else ""
        drafts = f"{summary.n_accepted} of {summary.n_verified} {copied}draft tokens accepted"
    elif summary.n_drafted:
        drafts = f"{summary.n_drafted} draft token{_plural(summary.n_drafted)} proposed, none verified"
    if detail == "short":
        if gain is not None:
            speed += f": {gain_in_words(gain)}"
        parts = [f"{drafts}{dropped}", f"prompt processed in {completion.prefill_seconds:.2f} s", ended]
        return [speed, "; ".join(filter(None, parts)), *_unused_draft(completion)]
    cached = f", {completion.n_cached} of them cached," if completion.n_cached else ""
    n_prompt = completion.n_prompt_tokens
    prompt = f"{n_prompt} token{_plural(n_prompt)}{cached} in {completion.prefill_seconds:.2f} s"
    lines = [f"{speed} (prompt: {prompt}), {ended}"]
    if gain is not None and summary.plain_seconds:
        lines.append(
            f"{gain_in_words(gain, digits=2)}: a round without draft tokens takes "
            f"{1e3 * summary.plain_seconds:.1f} ms"
        )
    if summary.acceptance_rate is not None:
        drafts += (
            f" ({summary.acceptance_rate:.0%}){dropped}, {summary.mean_tokens_per_round:.2f} tokens per round"
        )
    lines += [drafts] if drafts else []
    if summary.decode_seconds > 0:
        times = {
            "draft": summary.draft_seconds,
            "verify": summary.verify_seconds,
            "overhead": summary.overhead_seconds,
        }
        if completion.mask_seconds:
            times["constraint (included above)"] = completion.mask_seconds
        shares = (f"{name} {seconds / summary.decode_seconds:.1%}" for name, seconds in times.items())
        lines.append("time: " + ", ".join(shares))
    return [*lines, *_unused_draft(completion)]


def _plural(n: int) -> str:
    return "" if n == 1 else "s"


def _unused_draft(completion: Completion) -> list[str]:
    unused = completion.unused_draft
    if completion.draft_fault is not None:
        return [f"the draft model failed and is no longer used: {printable(completion.draft_fault)}"]
    if unused is None or unused.reading_seconds < NOTABLE:
        return []
    reading, saved = unused
    return [
        f"the draft model was not used: it would have taken {reading:.1f} s to process the prompt, "
        f"and saved about {saved:.1f} s"
    ]


def print_costs(curve: CostCurve, console: Console, known: str | None = None) -> None:
    """Print the conclusions from a cost curve, with which `probe` and `--explain` end.

    The last line is `known`, a verdict on the pair, or the verdict of the curve if that is None.
    """
    for sentence in in_words(curve):
        console.print(sentence)
    if curve.draft_step_seconds:
        best = [(acceptance, best_length(round_seconds(curve), acceptance)) for acceptance in ACCEPTANCES]
        if any(each.n_guesses for _, each in best):
            rates = [(f"{acceptance:.2f}", str(b.n_guesses), f"{b.speed_up:.2f}x") for acceptance, b in best]
            print_table(("<acceptance", "best draft length", "predicted speed-up"), rates, console)
        known = known or verdict(curve)
    if known is not None:
        console.print(known)
