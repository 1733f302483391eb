"""Send requests to several models of which the server's memory holds two, and check texts and memory.

\b
    python scripts/serve_several.py --target a.gguf --target b.gguf --target c.gguf --target d.gguf

Each text must be that of the model alone. After each seventh of the requests all models are unloaded. The
first seventh warms up; then memory and mapped files must not grow by more than 5 % from the first half to
the second, where the least values count. One JSON object goes to stdout. The exit code is 1 if something
was wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click
import httpx
import psutil

from llamaspec import ModelOptions, open_pair
from llamaspec.llama.file_facts import needed_bytes
from llamaspec.measure.served_arms import PLAIN, Server, own_arms, serving

PROMPT = "Hello"
CONTEXT = 512  # tokens
N_SEEDS = 5
PARTS = 7  # of the requests; after each of them all models are unloaded
GROWTH = 1.05
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Memory(NamedTuple):
    """What a server without a loaded model holds."""

    n_bytes: int
    n_maps: int


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", "targets", type=FILE, multiple=True, required=True, help="May be repeated.")
@click.option("--requests", type=click.IntRange(min=8), default=1000, show_default=True)
@click.option("--clients", type=click.IntRange(min=1), default=6, show_default=True)
@click.option("--max-tokens", "-n", type=click.IntRange(min=1), default=12, show_default=True)
def main(targets: Sequence[Path], requests: int, clients: int, max_tokens: int) -> None:
    """Run the requests and report what was wrong."""
    names = {f"m{i}": path for i, path in enumerate(targets)}
    expected = {name: texts_alone(path, max_tokens) for name, path in names.items()}
    click.echo(f"{len(names)} models were asked alone", err=True)
    largest = sorted(needed_bytes(path, ModelOptions(n_ctx=CONTEXT)) for path in targets)[-2:]
    options = [f"--target={name}={path}" for name, path in names.items()]
    with running(*options, "--memory-limit", str(1.02 * sum(largest) / 2**30)) as server:
        flaws: list[str] = []
        most_loaded = 0

        def send(number: int) -> None:
            nonlocal most_loaded
            name, seed = [*names][number * 7 // 5 % len(names)], number % N_SEEDS
            try:
                text = said(server, name, seed, max_tokens)
                most_loaded = max(most_loaded, len(server.client.get("/api/ps").json()["models"]))
            except (httpx.HTTPError, LookupError, ValueError) as error:
                text = f"{type(error).__name__}: {error}"
            if text != expected[name][seed]:
                flaws.append(f"{name}, seed {seed}: {text!r} instead of {expected[name][seed]!r}")

        samples = []
        with ThreadPoolExecutor(clients) as threads:
            for part in range(PARTS):
                numbers = range(part * requests // PARTS, (part + 1) * requests // PARTS)
                list(threads.map(send, numbers))
                samples.append(memory_without_models(server, names))
                click.echo(f"{numbers.stop}/{requests} {samples[-1]}", err=True)
    half = PARTS // 2
    for name, (_, *values) in zip(Memory._fields, zip(*samples, strict=True), strict=True):  # _: warming up
        before, after = min(values[:half]), min(values[half:])
        if after > GROWTH * before:
            flaws.append(f"{name} grew from {before} to {after}")
    found = {"requests": requests, "most_loaded": most_loaded, "memory": samples}
    click.echo(json.dumps({**found, "flaws": flaws[:20]}))
    sys.exit(bool(flaws))


@contextmanager
def running(*options: str) -> Iterator[Server]:
    """Run a server without drafts."""
    given = [*options, "--n-ctx", str(CONTEXT), "--threads", "1", "--cache-ram", "16"]
    (arm,) = (each for each in own_arms(given, (), None, n_parallel=2) if each.name == PLAIN)
    with serving([arm]) as servers:
        yield servers[PLAIN]


def texts_alone(target: Path, max_tokens: int) -> list[str]:
    """Return the text of a model for each seed, without a server."""
    with open_pair(target, ngram=False, target_options=ModelOptions(n_ctx=CONTEXT, threads=1)) as pair:
        streams = (pair.stream(PROMPT, seed=seed, max_tokens=max_tokens) for seed in range(N_SEEDS))
        return [stream.run().text for stream in streams]


def said(server: Server, name: str, seed: int, max_tokens: int) -> str:
    """Return what a model says."""
    body = {"model": name, "prompt": PROMPT, "seed": seed, "max_tokens": max_tokens}
    answer = server.client.post("/v1/completions", json=body).raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def memory_without_models(server: Server, names: Iterable[str]) -> Memory:
    """Unload all models and return what the server holds then."""
    for name in names:
        unload = {"model": name, "keep_alive": 0, "stream": False}
        server.client.post("/api/chat", json=unload).raise_for_status()
    (process,) = (each for each in psutil.Process().children() if "serve" in each.cmdline())
    return Memory(process.memory_info().rss, len(process.memory_maps(grouped=False)))


if __name__ == "__main__":
    main()
