"""Measure whether what a server has learnt in unusual times slows it down afterwards.

\b
    python scripts/serve_after.py --target big.gguf --draft small.gguf --after depth
    python scripts/serve_after.py --target big.gguf --draft small.gguf --after load
    python scripts/serve_after.py --target big.gguf --draft small.gguf --after start --requests 6

Two servers start with nothing learnt. One of them has a past: a conversation behind a long prompt (`depth`),
or two minutes beside a process that keeps a core busy (`load`). Then both answer the same short requests, in
turns. The ratio is the time of the other server to that of the one with a past: 1 = the past does not matter.

After `start`, each request starts both servers anew; one of them has no drafts. The ratio is the time without
drafts to that with them: what the first request pays, or gains, while nothing is known.

A table goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click

from llamaspec.cli.output import print_table, stderr_console
from llamaspec.measure.served_arms import Server, ServerCommand, own_arms, serving
from llamaspec.measure.tasks import read_task_file, read_tasks
from llamaspec.measure.turns import in_turn

GROUP = "chat and code"  # of the tasks of `llamaspec bench`
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
CHARACTERS = 4  # of a token, roughly
BUSY = "while True: pass"
PAST, FRESH = "with a past", "fresh"
DRAFTS, NONE = "with drafts", "without"


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=FILE, required=True)
@click.option("--draft", type=FILE)
@click.option("--after", type=click.Choice(["depth", "load", "start"]), required=True)
@click.option("--tokens", type=int, default=8000, show_default=True, help="Tokens of the long prompt.")
@click.option("--seconds", type=float, default=120.0, show_default=True, help="Time beside the busy process.")
@click.option("--rounds", type=int, default=300, show_default=True, help="Tokens after it that do not count.")
@click.option("--requests", type=int, default=10, show_default=True, help="Short requests that count.")
@click.option("--max-tokens", "-n", type=int, default=64, show_default=True, help="Tokens of an answer.")
def main(
    target: Path,
    draft: Path | None,
    after: str,
    tokens: int,
    seconds: float,
    rounds: int,
    requests: int,
    max_tokens: int,
) -> None:
    """Measure the servers and print how they compare."""
    given = ["--target", str(target), "--n-ctx", str(tokens + 4096), "--no-ngram"]
    given += [] if draft is None else ["--draft", str(draft)]
    arms = {each.name: each for each in own_arms(given, (), None)}
    fields = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    prompts = cycle(prompt for task in read_tasks(names=[GROUP]) for prompt in task.prompts)
    rows = []
    with ExitStack() as stack:
        if after == "start":
            names = [DRAFTS, NONE]
            for number, prompt in enumerate(islice(prompts, requests)):
                took = {}
                for name in in_turn(names, number):
                    with starting(arms["auto" if name == DRAFTS else "plain"], name) as server:
                        took[name] = ask(server, prompt, fields)
                rows.append(reported(number, requests, names, took))
        else:
            names = [PAST, FRESH]
            servers = {name: stack.enter_context(starting(arms["auto"], name)) for name in names}
            if after == "depth":
                have_long_conversation(servers[PAST], tokens, fields)
            else:
                work_beside_another(servers[PAST], seconds, prompts, fields)
                for server in servers.values():  # both have as many rounds before the requests that count
                    for prompt in islice(prompts, -(-rounds // max_tokens)):
                        ask(server, prompt, fields)
            for number, prompt in enumerate(islice(prompts, requests)):
                took = {name: ask(servers[name], prompt, fields) for name in in_turn(names, number)}
                rows.append(reported(number, requests, names, took))
    ratio = sum(other for _, other in rows) / sum(first for first, _ in rows)
    print_table(names, ([f"{each:.2f}" for each in row] for row in rows), stderr_console())
    click.echo(f"ratio {ratio:.3f}", err=True)
    click.echo(json.dumps({"target": target.name, "after": after, "seconds": rows, "ratio": ratio}))


@contextmanager
def starting(arm: ServerCommand, name: str) -> Iterator[Server]:
    """Run a server that starts with nothing learnt."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**arm.environment, "LLAMASPEC_CACHE": folder}
        with serving([replace(arm, name=name, environment=environment)]) as servers:
            yield servers[name]


def reported(number: int, n_all: int, names: list[str], took: dict[str, float]) -> tuple[float, float]:
    """Say how long a request took, and return both times in the order of the names."""
    first, second = (took[name] for name in names)
    click.echo(f"{number + 1}/{n_all} {names[0]} {first:.2f} s, {names[1]} {second:.2f} s", err=True)
    return first, second


def ask(server: Server, prompt: str, fields: dict[str, Any]) -> float:
    """Send a request of its own; return its seconds."""
    return server.ask({**fields, "messages": [{"role": "user", "content": prompt}]}).seconds


def have_long_conversation(server: Server, n_tokens: int, fields: dict[str, Any]) -> None:
    """Ask three questions behind a long prompt."""
    files = "\n\n".join(read_task_file().files.values())
    text = "".join(islice(cycle(files), n_tokens * CHARACTERS))
    messages = [{"role": "system", "content": f"Answer questions about these files:\n{text}"}]
    for question in ("What are they for?", "Name one thing that you would test first.", "What is missing?"):
        messages.append({"role": "user", "content": question})
        answer = server.ask({**fields, "messages": messages})
        click.echo(f"a prompt of {answer.n_prompt_tokens} tokens: {answer.seconds:.1f} s", err=True)
        messages.append({"role": "assistant", "content": answer.reply or "…"})


def work_beside_another(server: Server, seconds: float, prompts: Any, fields: dict[str, Any]) -> None:
    """Answer requests while another process keeps a core busy."""
    with subprocess.Popen([sys.executable, "-c", BUSY]) as other:
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                took = ask(server, next(prompts), fields)
                click.echo(f"beside a busy process: {took:.2f} s", err=True)
        finally:
            other.kill()


if __name__ == "__main__":
    main()
