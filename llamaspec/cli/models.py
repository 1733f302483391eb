"""`llamaspec models`: list, fetch, name and remove models and pairs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from llamaspec.catalog import (
    CACHE_TOKENS,
    Entry,
    Quantization,
    add_own,
    find_remote,
    locate_model,
    own_list,
    read_catalog,
    remove_own,
)  # fmt: skip
from llamaspec.cli.model_options import complete_names, fetched_model
from llamaspec.cli.option_groups import Group
from llamaspec.cli.options import JSON_OPTION
from llamaspec.cli.output import OTHER_DRAFT, print_table, say
from llamaspec.errors import ModelFileError, printable
from llamaspec.files import expanded, model_stem
from llamaspec.folder import fitting_drafts, model_files, text_facts
from llamaspec.hub import find_here, is_address, is_path, remove
from llamaspec.llama import resources
from llamaspec.llama.gguf_file import check_gguf
from llamaspec.llama.hidden_draft_file import heads_in_file
from llamaspec.measure.machine import look_at_machine
from llamaspec.measure.recommend import Choice, Room, choices, expectation, rooms_of
from llamaspec.plan import draft_here
from llamaspec.values import MTP

_SIZES = {  # sizes that `show` prints in GB: label, and units in a GB
    "cache_mb": (f"KV cache of {CACHE_TOKENS} tokens", 1000),
    "memory_gb": ("recommended memory", 1),
}
_WIDE = 1000  # columns: a narrow terminal wraps lines, but breaks no name into two cells
_OTHERS = 6  # pairs listed after the recommended one


@click.group(cls=Group)
def models() -> None:
    """List, fetch and name models and pairs. Once fetched, a model needs no network."""


@models.command(
    "list",
    epilog="""\b
Examples:
  llamaspec models list
  llamaspec models list --models-dir ~/models       and the files of a folder, as the server pairs them
  llamaspec models list --json | jq -r '.[] | select(.memory_gb == 16) | .name'
""",
)
@click.option("--models-dir", "folder", type=click.Path(path_type=Path), metavar="DIR",
              envvar="LLAMASPEC_MODELS_DIR", help="Also list the GGUF files in this folder.")  # fmt: skip
@JSON_OPTION
def list_models(folder: Path | None, as_json: bool) -> None:
    """List all names. Those with a draft can be given to --pair."""
    catalog = read_catalog()
    entries = sorted(catalog.entries.values(), key=lambda entry: (entry.memory_gb or 0, entry.name))
    for entry in entries:
        draft = entry.draft
        if draft and not is_path(draft) and not is_address(draft) and catalog.named(draft) is None:
            say(f"{entry.name} has the draft {draft}, which is in no list")
    in_folder = [] if folder is None else _entries_in(folder, {_path_here(entry) for entry in entries})
    if any(entry.draft for entry in in_folder):
        say(f"drafts of files in {folder} are paired by their tokens and sizes; {OTHER_DRAFT}")
    entries += in_folder
    if as_json:
        click.echo(json.dumps([_as_json(entry) for entry in entries]))
        return
    rows = [[_cell(text) for text in _columns(entry)] for entry in entries]
    whole_lines = Console(highlight=False, width=_WIDE)
    print_table(("<name", "for memory", "size", "<draft", "<here"), rows, whole_lines)


def _entries_in(folder: Path, listed: Set[Path | None]) -> list[Entry]:
    """Return entries for the models of a folder that no list names, with their drafts as in the server."""
    files = [path for path in model_files(folder) if text_facts(path) is not None]
    drafts = fitting_drafts(files)
    return [
        Entry(model_stem(path.name), path=str(path.absolute()), draft=_draft_beside(path, drafts.get(path)))
        for path in files
        if path.absolute() not in listed
    ]


def _draft_beside(path: Path, draft: Path | None) -> str | None:
    """Return the name of the draft beside a model; None if another one is known for it."""
    return None if draft is None or draft_here(path, path) is not None else model_stem(draft.name)


class _Memory(click.ParamType):  # type: ignore[type-arg]
    """Memory of a machine, such as 32GB; a bare number is in GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(?:GB?)?", value, re.IGNORECASE | re.ASCII)
        if found is None or not float(found[1]):
            self.fail(f"{printable(value)!r} is not a size; write it like 32GB", param, ctx)
        return round(float(found[1]) * 1e9)


@models.command(
    epilog="""\b
Examples:
  llamaspec models recommend
  llamaspec models recommend --memory 32GB
"""
)
@click.option("--memory", type=_Memory(), metavar="SIZE", help="Memory of another machine, such as 32GB.")
@JSON_OPTION
def recommend(memory: int | None, as_json: bool) -> None:
    """Recommend a pair for this machine. Nothing is fetched."""
    machine = look_at_machine() if memory is None else None
    rooms = [Room(memory or 0)] if machine is None else rooms_of(machine, resources.total_bytes())
    catalog = read_catalog()
    room, found = next(((room, some) for room in rooms if (some := choices(catalog, room))), (rooms[-1], []))
    where = f"{room.n_bytes / 1e9:.1f} GB"
    if not found:
        raise ModelFileError(
            f"no listed pair fits into {where}; `llamaspec generate` runs the embedded pair anywhere"
        )
    (best, *others), drafts = found, expectation(machine)
    run, probe = (f"llamaspec {command} --pair {best.name}" for command in ("chat", "probe"))
    if as_json:
        found_json = {
            "memory_bytes": room.n_bytes,
            "on_gpu": room.is_gpu,
            "run": run,
            "probe": probe,
            "drafts": drafts,
        }
        found_json["pairs"] = [{**asdict(choice), "needed_bytes": choice.needed_bytes} for choice in found]
        click.echo(json.dumps(found_json))
        return
    computing = ""
    if machine is not None:
        devices = ", ".join(device.description for device in machine.devices)
        computing = f"; {devices}; {machine.n_physical} cores"
    rows = (
        ("machine", f"{where} {'of GPU memory' if room.is_gpu else 'of memory'}{computing}"),
        ("pair", f"{best.name}, {_drafted(best)}"),
        ("needs", f"{best.needed_bytes / 1e9:.1f} GB: {best.weights_bytes / 1e9:.1f} of weights, "
                  f"{best.cache_bytes / 1e9:.1f} of KV cache for {CACHE_TOKENS} tokens"),
        ("drafts", f"{drafts}; find out with: {probe}"),
        ("note", best.notes or ""),
        ("run", run),
        ("also fit", "; ".join(f"{other.name} ({_drafted(other)})" for other in others[:_OTHERS])),
    )  # fmt: skip
    _print_details([(label, text) for label, text in rows if text], Console(highlight=False))


def _drafted(choice: Choice) -> str:
    if choice.draft == MTP:
        return "with its own prediction heads"
    return "copies of earlier text" if choice.draft is None else f"draft {choice.draft}"


@models.command(
    epilog="""\b
Examples:
  llamaspec models show qwen3-14b
"""
)
@click.argument("name", shell_complete=complete_names)
@JSON_OPTION
def show(name: str, as_json: bool) -> None:
    """Show the details of a model."""
    entry = read_catalog().find(name)
    if as_json:
        click.echo(json.dumps(_as_json(entry)))
        return
    found, rows = _as_json(entry), list[tuple[str, str]]()
    del found["is_own"]  # it has "listed in"
    if entry.path is not None and found["here"] is not None:
        del found["path"]
    for key, value in found.items():
        label = key.replace("_", " ")
        if key in _SIZES and value:
            label, per_gb = _SIZES[key]
            rows.append((label, f"{value / per_gb:.1f}".removesuffix(".0") + " GB"))
        elif isinstance(value, dict | list):
            as_line = _as_line if key == "quantizations" else "{0[0]}: {0[1]}".format
            lines = map(as_line, value.items()) if isinstance(value, dict) else value
            rows += [("" if i else label, line) for i, line in enumerate(lines)]
        elif value not in (None, False):
            rows.append((label, str(value)))
    _print_details(rows, Console(highlight=False, soft_wrap=True))


def _print_details(rows: Sequence[tuple[str, str]], console: Console) -> None:
    table = Table("", Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
    for label, text in rows:
        table.add_row(label, _cell(text))
    console.print(table)


@models.command(
    epilog="""\b
Examples:
  llamaspec models pull qwen3-14b                             the model and its draft
  llamaspec models pull qwen3-14b:Q8_0 --no-draft
  llamaspec models pull hf:Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf
"""
)
@click.argument("called", metavar="NAME|hf:OWNER/REPO:FILE...", nargs=-1, required=True,
                shell_complete=complete_names)  # fmt: skip
@click.option("--no-draft", is_flag=True, help="Fetch no drafts.")
def pull(called: tuple[str, ...], no_draft: bool) -> None:
    """Fetch models and their drafts."""
    wanted = list(called)
    if not no_draft:
        drafts = (read_catalog().draft_of(name) for name in called)
        wanted += [draft for draft in drafts if draft is not None]
    for name in dict.fromkeys(wanted):
        path = fetched_model(name)
        check_gguf(path)
        _echo_path(path)


@models.command(
    epilog="""\b
Examples:
  llama-cli -m "$(llamaspec models path qwen3-14b)"
"""
)
@click.argument("called", metavar="NAME|hf:OWNER/REPO:FILE", shell_complete=complete_names)
def path(called: str) -> None:
    """Print the path of a model on this machine. Nothing is fetched."""
    _echo_path(locate_model(called))


@models.command(
    "remove",
    epilog="""\b
Examples:
  llamaspec models remove qwen3-14b
  llamaspec models remove my-model          your own entry; a file of yours is never deleted
""",
)
@click.argument("called", metavar="NAME|hf:OWNER/REPO:FILE", shell_complete=complete_names)
def remove_model(called: str) -> None:
    """Delete a model's fetched files, and its entry if it is your own."""
    remote = find_remote(called, ask=False)
    freed = 0 if remote is None else remove(remote)
    is_listed = not is_path(called) and not is_address(called)
    entry, quantization = (is_listed and read_catalog().meaning(called)) or (None, "")
    dropped = entry is not None and not quantization and remove_own(entry.name)
    if not freed and not dropped:
        raise ModelFileError(
            f"nothing of {printable(called)} is on this machine; `llamaspec models list` shows what is"
        )
    done = ([f"freed {freed / 1e9:.2f} GB"] if freed else []) + (["removed your entry"] if dropped else [])
    say(" and ".join(done))


@models.command(
    epilog="""\b
Examples:
  llamaspec models add big ~/models/big-70b.Q4_K_M.gguf --draft ~/models/small-1b.Q4_0.gguf
  llamaspec models add small hf:owner/small-GGUF:small-Q8_0.gguf
"""
)
@click.argument("name")
@click.argument("called", metavar="FILE|hf:OWNER/REPO:FILE")
@click.option("--draft", metavar="NAME|FILE|hf:OWNER/REPO:FILE", help="Its draft model.")
@click.option("--notes", metavar="TEXT", help="Notes, which `models show` prints.")
@click.option("--force", is_flag=True, help="Replace an existing name.")
def add(name: str, called: str, draft: str | None, notes: str | None, force: bool) -> None:
    """Give a model a name of your own."""
    if ":" in name or is_path(name) or printable(name) != name or not name.strip():
        raise click.UsageError(f"{printable(name)} cannot be a name: it looks like a file or an address")
    catalog = read_catalog()
    if name in catalog.entries and not force:
        whose = "your own list" if catalog.entries[name].is_own else "the list that comes with llamaspec"
        raise ModelFileError(f"{name} is already in {whose}; choose another name, or replace it with --force")
    if draft is not None:
        draft = _as_draft(draft)
    remote = None if is_path(called) else find_remote(called)
    if remote is not None:
        known = Quantization(remote.file, remote.n_bytes, remote.sha256)
        entry = Entry(name, repo=remote.repo, default="default", quantizations={"default": known})
    else:
        file = (expanded(called) if is_path(called) else locate_model(called)).absolute()
        check_gguf(file)
        entry = Entry(name, path=str(file))
    say(f"wrote {add_own(replace(entry, draft=draft, notes=notes))}")


def _as_draft(called: str) -> str:
    """Return a draft as a list names it; ModelFileError if there is no such model."""
    if is_path(called):
        check_gguf(file := expanded(called).absolute())
        return str(file)
    remote = find_remote(called)
    return str(remote) if remote is not None and is_address(called) else called


def _columns(entry: Entry) -> tuple[str, ...]:
    """Return the cells of an entry in `list`."""
    found = _as_json(entry)
    here = found["here"]
    if entry.path is None:
        n_bytes = entry.file().n_bytes
    else:
        n_bytes = None if here is None else Path(here).stat().st_size
    drafts = (
        entry.draft,
        "mtp" if found["has_heads"] else None,
    )
    return (
        entry.name,
        f"{entry.memory_gb} GB" if entry.memory_gb else "",
        f"{n_bytes / 1e9:.1f} GB" if n_bytes else "",
        ", ".join(name for name in drafts if name),
        "yes" if here is not None else "",
    )


def _cell(text: str) -> Text:
    """Return text with control characters escaped and markup disabled."""
    return Text(printable(text))


def _echo_path(path: Path) -> None:
    """Print a path. A pipe gets it unchanged, because with `color` click removes nothing."""
    click.echo(printable(str(path)) if sys.stdout.isatty() else path, color=True)


def _as_line(quantization: tuple[str, dict[str, Any]]) -> str:
    name, known = quantization
    size = f", {known['bytes'] / 1e9:.1f} GB" if "bytes" in known else ""
    return f"{name}: {known['file']}{size}"


def _as_json(entry: Entry) -> dict[str, Any]:
    here = _path_here(entry)
    try:  # a file on this machine counts, not what the list says about it
        has_heads = bool(entry.heads) if here is None else heads_in_file(here).fault is None
    except ModelFileError:
        has_heads = False
    return {
        **asdict(entry),
        **{key: entry.as_listed().get(key, {}) for key in ("quantizations", "options")},
        "listed_in": str(own_list()) if entry.is_own else None,
        "here": str(here) if here is not None else None,
        "has_heads": has_heads,
    }


def _path_here(entry: Entry) -> Path | None:
    """Return the file on this machine, or None; also None for an invalid path, so that others are listed."""
    try:
        path = entry.own_file() if entry.path is not None else find_here(entry.file())
    except ModelFileError:
        return None
    return path if path is not None and path.is_file() else None
