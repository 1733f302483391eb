"""`llamaspec models`: what is known by name, what of it is here, and how to get the rest.

`downloads` is imported where it is used: every command would start a fifth of a second later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from llamaspec.app.catalog import Entry, add_own, own_list, read_catalog, remove_own
from llamaspec.app.names import find_model, find_remote, is_path
from llamaspec.app.stored import find_here, remove
from llamaspec.errors import ModelFileError


@click.group(no_args_is_help=False)
def models() -> None:
    """Models and pairs by name: fetched once, then used without a network."""


@models.command(
    "list",
    epilog="""\b
Examples:
  llamaspec models list
  llamaspec models list --json | jq -r '.[] | select(.memory_gb == 16) | .name'
""",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def list_models(as_json: bool) -> None:
    """Show all names. Those with a draft can be given to --pair."""
    entries = sorted(read_catalog().entries.values(), key=lambda entry: (entry.memory_gb or 0, entry.name))
    if as_json:
        click.echo(json.dumps([_as_json(entry) for entry in entries]))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "for memory", "size", "draft", "licence", "here"):
        is_number = title in ("for memory", "size")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=title != "licence")
    for entry in entries:
        table.add_row(
            entry.name,
            f"{entry.memory_gb} GB" if entry.memory_gb else "",
            _size(entry),
            entry.draft or "",
            entry.licence or "",
            "yes" if _path_here(entry) is not None else "",
        )
    Console(highlight=False).print(table)


@models.command(
    epilog="""\b
Examples:
  llamaspec models show qwen3-14b
"""
)
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def show(name: str, as_json: bool) -> None:
    """Show what is known of a model."""
    entry = read_catalog().find(name)
    if as_json:
        click.echo(json.dumps(_as_json(entry)))
        return
    table = Table("", Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
    for key, value in _as_json(entry).items():
        if value not in (None, {}, False):
            for shown in map(_as_line, value.items()) if isinstance(value, dict) else [str(value)]:
                table.add_row(key.replace("_", " "), shown)
                key = ""
    Console(highlight=False, soft_wrap=True).print(table)


@models.command(
    epilog="""\b
Examples:
  llamaspec models pull qwen3-14b                             the model and its draft
  llamaspec models pull qwen3-14b:Q8_0 --no-draft
  llamaspec models pull hf:Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf
"""
)
@click.argument("called", metavar="NAME|hf:OWNER/REPO:FILE", nargs=-1, required=True)
@click.option("--no-draft", is_flag=True, help="Leave out the drafts.")
def pull(called: tuple[str, ...], no_draft: bool) -> None:
    """Fetch models and their drafts. What was cut off goes on where it stopped."""
    from llamaspec.app import downloads

    wanted = list(called)
    if not no_draft:
        drafts = (read_catalog().draft_of(name) for name in called)
        wanted += [draft for draft in drafts if draft is not None]
    for name in dict.fromkeys(wanted):
        remote = find_remote(name)
        if remote is None:
            click.echo(f"llamaspec: {name} lies on this machine already", err=True)
            continue
        click.echo(find_here(remote) or downloads.fetch(remote))


@models.command(
    epilog="""\b
Examples:
  llama-cli -m "$(llamaspec models path qwen3-14b)"
"""
)
@click.argument("called", metavar="NAME|hf:OWNER/REPO:FILE")
def path(called: str) -> None:
    """Print where a model lies on this machine; nothing is fetched."""
    remote = find_remote(called)
    here = find_model(called) if remote is None else find_here(remote)
    if here is None:
        raise ModelFileError(f"{called} is not on this machine; run `llamaspec models pull {called}`")
    click.echo(here)


@models.command(
    "remove",
    epilog="""\b
Examples:
  llamaspec models remove qwen3-14b
  llamaspec models remove my-model          your own entry; a file of yours is never deleted
""",
)
@click.argument("called", metavar="NAME|hf:OWNER/REPO:FILE")
def remove_model(called: str) -> None:
    """Delete what was fetched of a model, and the entry if it is your own."""
    remote = find_remote(called)
    freed = 0 if remote is None else remove(remote)
    dropped = remove_own(called)
    if not freed and not dropped:
        raise ModelFileError(f"nothing of {called} is on this machine; `llamaspec models list` shows what is")
    done = ([f"freed {freed / 1e9:.2f} GB"] if freed else []) + (["dropped your entry"] if dropped else [])
    click.echo(f"llamaspec: {' and '.join(done)}", err=True)


@models.command(
    epilog="""\b
Examples:
  llamaspec models add big ~/models/big-70b.Q4_K_M.gguf --draft small
  llamaspec models add small hf:owner/small-GGUF:small-Q8_0.gguf
"""
)
@click.argument("name")
@click.argument("called", metavar="FILE|hf:OWNER/REPO:FILE")
@click.option("--draft", metavar="NAME", help="The model that guesses for it, by name.")
@click.option("--notes", metavar="TEXT")
def add(name: str, called: str, draft: str | None, notes: str | None) -> None:
    """Give a model a name of your own."""
    if ":" in name or is_path(name):
        raise click.UsageError(f"{name} cannot be a name: it looks like a file or an address")
    if draft is not None:
        read_catalog().find(draft)
    entry = _own_entry(name, called)
    written = add_own(Entry(**{**asdict(entry), "draft": draft, "notes": notes}))
    click.echo(f"llamaspec: wrote {written}", err=True)


def _own_entry(name: str, called: str) -> Entry:
    remote = None if is_path(called) else find_remote(called)
    if remote is None:
        file = Path(called).expanduser().absolute()
        if not file.exists():
            raise ModelFileError(f"no such model file: {called}; check the path")
        return Entry(name, path=str(file))
    known = {"file": remote.file, "bytes": remote.n_bytes, "sha256": remote.sha256}
    kept = {key: value for key, value in known.items() if value is not None}
    return Entry(name, repo=remote.repo, default="default", quantizations={"default": kept})


def _as_line(quantization: tuple[str, Mapping[str, Any]]) -> str:
    name, known = quantization
    size = f", {known['bytes'] / 1e9:.1f} GB" if "bytes" in known else ""
    return f"{name}: {known['file']}{size}"


def _as_json(entry: Entry) -> dict[str, Any]:
    here = _path_here(entry)
    listed = str(own_list()) if entry.is_own else None
    return {**asdict(entry), "listed_in": listed, "here": str(here) if here is not None else None}


def _path_here(entry: Entry) -> Path | None:
    if entry.path is not None:
        own = Path(entry.path).expanduser()
        return own if own.exists() else None
    return find_here(entry.file())


def _size(entry: Entry) -> str:
    if entry.path is not None:
        file = Path(entry.path).expanduser()
        n_bytes = file.stat().st_size if file.exists() else None
    else:
        n_bytes = entry.file().n_bytes
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes else ""
