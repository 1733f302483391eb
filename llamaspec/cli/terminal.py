"""What reaches people: text on stdout, and on stderr messages and progress bars while they wait.

Text of models, files and hubs reaches a terminal with its control characters escaped: it could set the title
and the clipboard, move the cursor, or forge a line. To a pipe or a file text goes unchanged.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from llamaspec.errors import printable

PATIENCE_SECONDS = 2.0  # what is faster needs no bar


def say(message: str) -> None:
    """One line on stderr, whatever the message contains."""
    click.echo(f"llamaspec: {printable(message)}", err=True)


def write_text(text: str, colour: str | None = None) -> None:
    """Generated text on stdout, at once: as it is, or on a terminal escaped and in a colour."""
    if sys.stdout.isatty():
        shown = printable(text, keep="\n\t")
        click.echo(click.style(shown, fg=colour) if colour is not None else shown, nl=False)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding, errors="replace"))
    sys.stdout.buffer.flush()


class Thoughts:
    """What a model thinks, on stderr: dim, and apart from its answer.

    Parameters
    ----------
    is_shown : bool
        Else only that it thinks is told, and only to a person.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._is_open = False

    def add(self, text: str) -> None:
        """More of it."""
        is_terminal = sys.stderr.isatty()
        if not self._is_shown:
            if self._is_open or not is_terminal:
                return
            text = "thinking …"
        self._is_open = True
        shown = printable(text, keep="\n\t")
        click.echo(click.style(shown, dim=True) if is_terminal else shown, nl=False, err=True)

    def end(self) -> None:
        """The answer begins, or ends."""
        if self._is_open:
            click.echo(err=True)
        self._is_open = False


def stderr_console() -> Console:
    """A console on stderr; colour only on a terminal, NO_COLOR honoured."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


class SlowProgress:
    """A progress bar that appears, on a terminal, when the work takes longer than two seconds.

    Use as a context manager; call it with the finished fraction, 0 to 1. Work whose first part alone takes
    long says nothing for a while, so a timer shows the bar, too.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._start = time.monotonic()
        self._fraction = 0.0
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._lock = threading.Lock()
        self._timer = threading.Timer(PATIENCE_SECONDS, self._show)
        self._timer.daemon = True

    def __call__(self, fraction: float) -> None:
        """Show how much is done; the bar goes away when all is."""
        self._fraction = fraction
        self._show()

    def part(self, done: int, total: int) -> None:
        """The same, told as parts done of a total."""
        self(done / total)

    def __enter__(self) -> SlowProgress:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._fraction = 1.0
        self._show()

    def _show(self) -> None:
        with self._lock:
            self._show_alone()

    def _show_alone(self) -> None:
        if self._fraction >= 1:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None
            return
        is_slow = time.monotonic() - self._start >= PATIENCE_SECONDS
        if self._progress is None and is_slow and (console := stderr_console()).is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task(self._label, total=1.0)
            self._progress.start()
        if self._progress is not None:
            self._progress.update(self._task, completed=self._fraction)
