"""Models by name for the commands: what is not here is fetched, with lines and a bar on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from llamaspec.cli.terminal import SlowProgress
from llamaspec.errors import PairError
from llamaspec.hub.cache import partial_bytes
from llamaspec.hub.names import find_draft, resolve_model
from llamaspec.hub.progress import FetchProgress, OnFetch


def fetched_model(name: str) -> Path:
    """The file of a model.

    Raises
    ------
    ModelFileError
        There is no such model, or it cannot be fetched.
    """
    with fetch_report() as report:
        return resolve_model(name, report)


def known_draft(target: str) -> str:
    """The name of the draft for a target.

    Raises
    ------
    PairError
        None is known; says what else can be asked for.
    """
    try:
        return find_draft(target)
    except PairError as error:
        raise PairError(f"{error}, or look it up with --draft ngram") from error


@contextmanager
def fetch_report() -> Iterator[OnFetch]:
    """Show what is fetched; after Ctrl-C also how to go on."""
    report = _FetchReport()
    try:
        yield report
    except KeyboardInterrupt:
        report.interrupted()
        raise
    finally:
        report.end()


class _FetchReport:
    def __init__(self) -> None:
        self._last: FetchProgress | None = None
        self._bar: SlowProgress | None = None

    def __call__(self, progress: FetchProgress) -> None:
        last, self._last = self._last, progress
        if last is None or (last.file, last.activity) != (progress.file, progress.activity):
            self.end()
            self._bar = SlowProgress(f"{progress.activity} {progress.file.file}")
            if progress.activity == "fetching" and (last is None or last.file != progress.file):
                missing = (progress.total_bytes - progress.done_bytes) / 1e9
                click.echo(f"llamaspec: fetching {progress.file}, {missing:.1f} GB", err=True)
        if self._bar is not None:
            self._bar.part(progress.done_bytes, progress.total_bytes)

    def interrupted(self) -> None:
        """Say what is kept."""
        if self._last is not None:
            file = self._last.file
            kept = f"{partial_bytes(file) / 1e9:.2f} GB are kept"
            click.echo(
                f"\nllamaspec: stopped, {kept}; `llamaspec models pull {file}` goes on there", err=True
            )

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None
