"""Measure what it costs to serve several models: loading one, and switching between two.

\b
    python scripts/switching.py --target one.gguf --other two.gguf --llama-server llama/bin/llama-server

Loading: the time to the first token of a request to a model that is not loaded, minus that of the same
request while it is loaded. With --llama-server, the same of a server that is started for the request: from
the start of its process to the first token, minus the time of the same request to the running server.

Switching: requests to one model and then to the other, and the same requests in alternation. The ratio is the
time of the former to that of the latter: 1 = switching costs nothing.

Nothing drafts, and no two prompts begin alike, so nothing is cached. Tables go to stderr, one JSON object to
stdout.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import click

from llamaspec.cli.output import print_table, stderr_console
from llamaspec.errors import LlamaspecError
from llamaspec.llama.options import ModelOptions
from llamaspec.measure.served_arms import PLAIN, Server, ServerCommand, own_arms, peer_arms, serving
from llamaspec.measure.tasks import read_tasks
from llamaspec.measure.turns import in_turn
from llamaspec.plan import DraftPlan, ModelFile

GROUP = "chat and code"  # of the tasks of `llamaspec bench`
OWN = "llamaspec"
NAMES = ("one", "two")  # of the models in requests
ALONE, SWITCHING = "alone", "switching"
CONTEXT = 4096  # tokens of each request
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=FILE, required=True, help="The model whose loading is measured.")
@click.option("--other", type=FILE, required=True, help="The model with which it takes turns.")
@click.option("--llama-server", metavar="PROGRAM", help="Also measure how long this llama-server starts.")
@click.option("--threads", type=COUNT, help="Threads of every server. Default: each server chooses.")
@click.option(
    "--requests", type=COUNT, default=6, show_default=True, help="Requests to each model in a turn."
)
@click.option("--max-tokens", "-n", type=COUNT, default=64, show_default=True, help="Tokens of an answer.")
@click.option("--turns", "-r", type=COUNT, default=5, show_default=True)
def main(
    target: Path,
    other: Path,
    llama_server: str | None,
    threads: int | None,
    requests: int,
    max_tokens: int,
    turns: int,
) -> None:
    """Measure loading and switching, and print both."""
    given = [f"--target={name}={path}" for name, path in zip(NAMES, (target, other), strict=True)]
    given += ["--n-ctx", str(CONTEXT)] + ([] if threads is None else ["--threads", str(threads)])
    own = next(arm for arm in own_arms(given, (), None) if arm.name == PLAIN)
    peers: list[ServerCommand] = []
    if llama_server is not None:
        options = ModelOptions(n_ctx=CONTEXT, threads=threads)
        peers = [*peer_arms(llama_server, DraftPlan(ModelFile(target, options)), ["none"])]
    bodies = Bodies(max_tokens)
    with serving([own]) as servers:
        loads = [*run_loads(servers[PLAIN], peers, bodies, turns)]
        switches = [*run_switches(servers[PLAIN], bodies, requests, turns)]
    for rows in (loads, switches):
        print_table([*rows[0]], ([f"{cell:.2f}" for cell in row.values()] for row in rows), stderr_console())
    added = {name: statistics.median(row[name] for row in loads) for name in loads[0]}
    ratio = statistics.median(row[ALONE] / row[SWITCHING] for row in switches)
    click.echo(f"loading adds {spoken(added)}; ratio of switching {ratio:.3f}", err=True)
    found = {"loads": loads, "loading": added, "switches": switches, "ratio": ratio}
    click.echo(json.dumps({"target": target.name, "other": other.name, **found}))


class Bodies:
    """Bodies of requests. A number begins each prompt, so that none of them is cached."""

    def __init__(self, max_tokens: int) -> None:
        self._fields = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        self._prompts = [prompt for task in read_tasks(names=[GROUP]) for prompt in task.prompts]
        self._numbers = count(100_000)  # all have as many digits, and so as many tokens

    def make(self, prompt: int, model: str) -> dict[str, Any]:
        """Make a request to a model with one of the prompts."""
        text = f"{next(self._numbers)}. {self._prompts[prompt % len(self._prompts)]}"
        return {**self._fields, "model": model, "messages": [{"role": "user", "content": text}]}


def run_loads(
    server: Server, peers: Sequence[ServerCommand], bodies: Bodies, n_turns: int
) -> Iterator[dict[str, float]]:
    """Yield the seconds that loading adds in each server, turn by turn."""
    names = [OWN, *(peer.name for peer in peers)]
    for turn in range(n_turns):
        added = dict.fromkeys(names, 0.0)
        for name in in_turn(names, turn):
            if name == OWN:
                unload = {"model": NAMES[0], "keep_alive": 0, "stream": False}
                server.client.post("/api/chat", json=unload).raise_for_status()
                added[name] = added_seconds(server, bodies, time.perf_counter())
            else:
                begin = time.perf_counter()
                with serving(peers) as started:
                    added[name] = added_seconds(started[name], bodies, begin)
        click.echo(f"{turn + 1}/{n_turns} loading adds {spoken(added)}", err=True)
        yield added


def added_seconds(server: Server, bodies: Bodies, begin: float) -> float:
    """Return the seconds from `begin` to the first token of a request, minus those of the next request."""
    before = time.perf_counter() - begin
    cold, warm = (server.ask(bodies.make(0, NAMES[0])).first_seconds for _ in range(2))
    return before + cold - warm


def run_switches(server: Server, bodies: Bodies, n_requests: int, n_turns: int) -> Iterator[dict[str, float]]:
    """Yield the seconds of the same requests, model by model and in alternation. Turn -1 loads the models."""
    orders = {
        ALONE: [(i, name) for name in NAMES for i in range(n_requests)],
        SWITCHING: [(i, name) for i in range(n_requests) for name in NAMES],
    }
    for turn in range(-1, n_turns):
        took = dict.fromkeys(orders, 0.0)
        for order in in_turn([*orders], turn):
            took[order] = sum(server.ask(bodies.make(i, name)).seconds for i, name in orders[order])
        if turn >= 0:
            click.echo(f"{turn + 1}/{n_turns} {spoken(took)}", err=True)
            yield took


def spoken(seconds: dict[str, float]) -> str:
    """Return seconds by name as text."""
    return ", ".join(f"{each:.2f} s ({name})" for name, each in seconds.items())


if __name__ == "__main__":
    try:
        main()
    except LlamaspecError as error:
        sys.exit(f"switching.py: {error}")
