"""Load `llamaspec serve` and llama.cpp's `llama-server` with the same clients, in turns.

\b
    python scripts/serve_load.py --target big.gguf --draft small.gguf --llama-server llama/bin/llama-server
    python scripts/serve_load.py --target big.gguf --draft small.gguf --shared -c 2 --requests 4

Each client sends one request after the other. The prompts are those of `llamaspec bench`, and no two begin
alike, so nothing is cached. With --shared, each client has a conversation instead. All conversations begin
with one system prompt of about 1,800 tokens, like those of one program's users. The time runs from the first
request to the end of the last answer. Ratios are to llama-server without a draft in the same turn, or to
llamaspec without drafts if --llama-server is not given.

A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from llamaspec.cli.output import print_table, stderr_console
from llamaspec.errors import LlamaspecError
from llamaspec.llama.options import ModelOptions
from llamaspec.measure.bench import Ask, Message, baseline_of
from llamaspec.measure.served_arms import own_arms, peer_arms, serving
from llamaspec.measure.tasks import read_task_file, read_tasks
from llamaspec.measure.turns import in_turn
from llamaspec.plan import DraftPlan, ModelFile

GROUP = "chat and code"  # of the tasks of `llamaspec bench`
SYSTEM = "You help with this small project. Answer briefly. Its files:"
FILES = ("shelf.py", "timetable.js", "tools.json")  # of the same tasks: about 1,800 tokens
QUESTIONS = (
    "What is `Shelf.available` for?", "When does `lend` raise an error?",
    "Which method needs the date of today, and why?", "Name one thing that you would test first.",
    "What does `formatMinute` return for 125?", "How does `next` choose departures?",
    "What happens if `delay` names a time at which nothing departs?", "Which method would you simplify?",
)  # fmt: skip
CONTEXT = 4096  # tokens of each request
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class Load:
    """Times of one server under the load of a number of clients, in one turn."""

    arm: str
    n_clients: int
    turn: int
    seconds: float  # from the first request to the end of the last answer
    first_seconds: float  # seconds to the first text: median of the requests
    n_tokens: int


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=FILE, required=True)
@click.option("--draft", type=FILE, help="Draft model of llamaspec, and of llama-server with draft-simple.")
@click.option("--llama-server", metavar="PROGRAM", help="Also measure this llama-server.")
@click.option(
    "--spec-type",
    "spec_types",
    multiple=True,
    metavar="TYPE",
    help="Also measure llama-server with this type of drafts. May be repeated.",
)
@click.option("--threads", type=COUNT, help="Threads of every server. Default: each server chooses.")
@click.option("--clients", "-c", type=COUNT, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option(
    "--requests", type=COUNT, default=2, show_default=True, help="Requests of each client in a turn."
)
@click.option("--shared", is_flag=True, help="Conversations that begin with one system prompt.")
@click.option(
    "--max-tokens",
    "-n",
    type=click.IntRange(2, 400),
    default=64,
    show_default=True,
    help="Tokens of every answer.",
)
@click.option("--temperature", "-t", type=float, default=0.0, show_default=True)
@click.option("--turns", "-r", type=COUNT, default=3, show_default=True)
def main(
    target: Path,
    draft: Path | None,
    llama_server: str | None,
    spec_types: Sequence[str],
    threads: int | None,
    clients: Sequence[int],
    requests: int,
    shared: bool,
    max_tokens: int,
    temperature: float,
    turns: int,
) -> None:
    """Measure the servers and print how they compare."""
    n_parallel = max(clients)
    options = ModelOptions(n_ctx=n_parallel * CONTEXT, threads=threads)
    given = ["--target", str(target), "--n-ctx", str(options.n_ctx), "--ctx-per-request", str(CONTEXT)]
    given += [] if draft is None else ["--draft", str(draft)]
    given += [] if threads is None else ["--threads", str(threads)]
    commands = [*own_arms(given, (), None, n_parallel)]
    if llama_server is not None:
        small = None if draft is None else ModelFile(draft, options)
        plan = DraftPlan(ModelFile(target, options), small)
        commands += peer_arms(llama_server, plan, spec_types or ("none",), n_parallel)
    fields = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
    with serving(commands) as servers:
        asks = {server.name: server.ask for server in servers.values()}
        found = compared([*run_loads(asks, clients, requests, turns, fields, shared=shared)])
    columns = [f"<{key}" if isinstance(value, str) else key for key, value in found[0].items()]
    print_table(columns, ([*map(_cell, each.values())] for each in found), stderr_console())
    click.echo(json.dumps({"target": target.name, "draft": draft and draft.name, "found": found}))


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def run_loads(
    asks: Mapping[str, Ask],
    clients: Sequence[int],
    n_requests: int,
    n_turns: int,
    fields: Mapping[str, Any],
    *,
    shared: bool,
) -> Iterator[Load]:
    """Load each server with each number of clients, turn by turn. Turn -1 warms up and is not yielded."""
    for turn in range(-1, n_turns):
        for n_clients in clients if turn >= 0 else clients[:1]:
            label = f"[{turn + 1}.{n_clients}]"  # makes all prompts of a turn new to the servers
            talks = [*conversations(label, n_clients, n_requests, shared=shared)]
            for name in in_turn([*asks], turn):
                load = measured(name, asks[name], talks, fields, turn)
                click.echo(
                    f"{turn + 1}/{n_turns} {n_clients} clients, {name}: {load.seconds:.2f} s", err=True
                )
                if turn >= 0:
                    yield load


@dataclass(frozen=True, slots=True)
class Talk:
    """The questions of one client."""

    questions: Sequence[str]
    system: str | None  # if given, the questions are one conversation


def conversations(label: str, n_clients: int, n_requests: int, *, shared: bool) -> Iterator[Talk]:
    """Yield the questions of each client."""
    if shared:
        files = read_task_file().files
        system = "\n\n".join([f"{label} {SYSTEM}", *(f"{name}:\n{files[name]}" for name in FILES)])
        for i in range(n_clients):
            first = i * n_requests
            yield Talk([QUESTIONS[n % len(QUESTIONS)] for n in range(first, first + n_requests)], system)
        return
    prompts = [prompt for task in read_tasks(names=[GROUP]) for prompt in task.prompts]
    for i in range(n_clients):
        numbers = range(i * n_requests, (i + 1) * n_requests)
        yield Talk([f"{label} {n}. {prompts[n % len(prompts)]}" for n in numbers], None)


def measured(name: str, ask: Ask, talks: Sequence[Talk], fields: Mapping[str, Any], turn: int) -> Load:
    """Run all clients at the same time and measure them."""

    def send(talk: Talk) -> list[tuple[float, int]]:
        """Return the seconds to the first text and the number of tokens of each answer."""
        messages: list[Message] = []
        seen = []
        for question in talk.questions:
            if talk.system is None:
                messages = []
            elif not messages:
                messages = [{"role": "system", "content": talk.system}]
            messages.append({"role": "user", "content": question})
            answer = ask({**fields, "messages": [*messages]})
            messages.append({"role": "assistant", "content": answer.reply or "…"})
            seen.append((answer.first_seconds, answer.n_tokens))
        return seen

    with ThreadPoolExecutor(len(talks)) as clients:
        begin = time.perf_counter()
        seen = [each for talked in clients.map(send, talks) for each in talked]
        seconds = time.perf_counter() - begin
    first_seconds = statistics.median(first for first, _ in seen)
    return Load(name, len(talks), turn, seconds, first_seconds, sum(n for _, n in seen))


def compared(loads: Sequence[Load]) -> list[dict[str, Any]]:
    """Return the medians of each server with each number of clients."""
    groups: dict[tuple[int, str], list[Load]] = {}
    for load in loads:
        groups.setdefault((load.n_clients, load.arm), []).append(load)
    baseline = baseline_of({load.arm for load in loads})
    return [
        {
            "clients": n_clients,
            "server": arm,
            "seconds": statistics.median(load.seconds for load in own),
            "ratio": statistics.median(
                base.seconds / load.seconds
                for load, base in zip(own, groups[n_clients, baseline], strict=True)
            ),
            "first seconds": statistics.median(load.first_seconds for load in own),
            "tokens/s": statistics.median(load.n_tokens / load.seconds for load in own),
        }
        for (n_clients, arm), own in groups.items()
    ]


if __name__ == "__main__":
    try:
        main()
    except LlamaspecError as error:
        sys.exit(f"serve_load.py: {error}")
