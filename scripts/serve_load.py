"""Drive `llamaspec serve` and llama.cpp's `llama-server` with the same requests, in turns.

    python scripts/serve_load.py --target big.gguf --draft small.gguf
    python scripts/serve_load.py --target big.gguf --draft small.gguf --llama-server llama/bin/llama-server

Every arm is a server of its own over the same files, or a field of the request; only one of them has work
at a time. Clients ask one request after the other, each its own prompts, and stream the answers. Arms are
interleaved turn by turn, because machines drift; ratios are medians over turns. A table goes to stderr, the
last line of stdout is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import yaml
from rich.console import Console
from rich.table import Table

PROMPTS = Path(__file__).with_name("prompts.yaml")
BASE = "llamaspec, no draft"  # what all ratios are to
READY_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Arm:
    """Where requests go, and what they say besides."""

    name: str
    url: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """What one arm made of one load."""

    arm: str
    n_clients: int
    temperature: float
    turn: int
    n_tokens: int
    seconds: float
    first_seconds: float  # median, from the request to its first text
    gap_p50: float  # seconds between two events with text
    gap_p99: float
    draft_length: float | None  # draft tokens per round; None where the server does not tell

    @property
    def speed(self) -> float:
        """Tokens per second of all clients together."""
        return self.n_tokens / self.seconds


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--draft", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--llama-server", type=click.Path(exists=True, path_type=Path), help="llama.cpp's program.")
@click.option("--n-max", "n_maxes", type=int, multiple=True, default=(1, 2, 3, 4), show_default=True)
@click.option("--clients", "-c", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--temperature", "-t", "temperatures", type=float, multiple=True, default=(0.0, 1.0))
@click.option("--max-tokens", "-n", type=int, default=64, show_default=True, help="Of each answer.")
@click.option("--requests", type=int, default=2, show_default=True, help="Of each client and turn.")
@click.option("--turns", "-r", type=int, default=3, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draft tokens by load.")
def main(
    target: Path,
    draft: Path,
    llama_server: Path | None,
    n_maxes: Sequence[int],
    clients: Sequence[int],
    temperatures: Sequence[float],
    max_tokens: int,
    requests: int,
    turns: int,
    plot: Path | None,
) -> None:
    """Measure the arms and print how they compare."""
    texts = [entry["text"] for entry in yaml.safe_load(PROMPTS.read_text())]
    loads: list[Load] = []
    with ExitStack() as stack:
        arms = list(_arms(stack, target, draft, llama_server, n_maxes, max(clients)))
        for arm in arms:  # warm-up: also what the automatic length learns first
            _measure(arm, texts, 2, 0.0, 0, requests, max_tokens)
        cases = [(t, n, turn) for turn in range(turns) for t in temperatures for n in clients]
        for done, (temperature, n_clients, turn) in enumerate(cases):
            shift = done % len(arms)
            loads += [
                _measure(arm, texts, n_clients, temperature, turn, requests, max_tokens)
                for arm in [*arms[shift:], *arms[:shift]]
            ]
            click.echo(f"{done + 1}/{len(cases)}", err=True)
    _show(loads)
    if plot is not None:
        _plot(loads, plot)
    print(json.dumps({"target": target.name, "draft": draft.name, "loads": [asdict(load) for load in loads]}))


def _arms(
    stack: ExitStack,
    target: Path,
    draft: Path,
    llama_server: Path | None,
    n_maxes: Sequence[int],
    n_parallel: int,
) -> Iterator[Arm]:
    own = [sys.executable, "-m", "llamaspec", "serve", "--target", str(target), "--draft", str(draft)]
    url = stack.enter_context(_serving([*own, "--parallel", str(n_parallel)]))
    yield Arm("llamaspec", url)
    yield Arm(BASE, url, {"speculative": {"enabled": False}})
    if llama_server is None:
        return
    context = str(4096)
    peer = [str(llama_server), "-m", str(target), "-np", str(n_parallel), "-c", context, "-kvu", "--no-webui"]
    yield Arm("llama-server, no draft", stack.enter_context(_serving(peer)))
    for n_max in n_maxes:
        drafting = ["--spec-type", "draft-simple", "-md", str(draft), "--spec-draft-n-max", str(n_max)]
        yield Arm(f"llama-server n_max={n_max}", stack.enter_context(_serving([*peer, *drafting])))


@contextmanager
def _serving(command: list[str]) -> Iterator[str]:
    """Run a server until the block ends; gives its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            _await_ready(url, process)
            yield url
        finally:
            process.terminate()


def _await_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise click.ClickException(f"{process.args!r} ended with {process.returncode}")
        try:
            if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise click.ClickException(f"no server answers at {url}")


def _measure(
    arm: Arm, texts: list[str], n_clients: int, temperature: float, turn: int, requests: int, max_tokens: int
) -> Load:
    body = {"temperature": temperature, "max_tokens": max_tokens, "stream": True, **arm.fields}
    body["stream_options"] = {"include_usage": True}
    prompts = [
        [(texts[(client * requests + i) % len(texts)], 1000 * turn + i) for i in range(requests)]
        for client in range(n_clients)
    ]
    begin = time.perf_counter()
    answers = asyncio.run(_all(arm.url, body, prompts))
    seconds = time.perf_counter() - begin
    gaps = sorted(b - a for answer in answers for a, b in zip(answer.times, answer.times[1:], strict=False))
    n_rounds = sum(answer.n_rounds for answer in answers)
    return Load(
        arm=arm.name,
        n_clients=n_clients,
        temperature=temperature,
        turn=turn,
        n_tokens=sum(answer.n_tokens for answer in answers),
        seconds=seconds,
        first_seconds=statistics.median(a.times[0] - a.begin for a in answers if a.times),
        gap_p50=_quantile(gaps, 0.5),
        gap_p99=_quantile(gaps, 0.99),
        draft_length=sum(answer.n_drafted for answer in answers) / n_rounds if n_rounds else None,
    )


def _quantile(ascending: Sequence[float], q: float) -> float:
    return ascending[min(int(q * len(ascending)), len(ascending) - 1)] if ascending else math.nan


@dataclass(slots=True)
class _Answer:
    begin: float
    times: list[float] = field(default_factory=list)  # of events with text
    n_tokens: int = 0
    n_drafted: int = 0
    n_rounds: int = 0


async def _all(url: str, body: dict[str, Any], prompts: list[list[tuple[str, int]]]) -> list[_Answer]:
    alone = httpx.Limits(max_keepalive_connections=0)  # llama-server ends a connection when it likes
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=alone) as client:
        answers = await asyncio.gather(*(_client(client, body, own) for own in prompts))
    return [answer for own in answers for answer in own]


async def _client(
    client: httpx.AsyncClient, body: dict[str, Any], prompts: list[tuple[str, int]]
) -> list[_Answer]:
    return [await _ask(client, {**body, "prompt": prompt, "seed": seed}) for prompt, seed in prompts]


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> _Answer:
    answer = _Answer(time.perf_counter())
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise click.ClickException((await response.aread()).decode(errors="replace"))
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if any(choice.get("text") for choice in event.get("choices", ())):
                answer.times.append(time.perf_counter())
            if event.get("usage"):
                answer.n_tokens = event["usage"]["completion_tokens"]
            timings = event.get("timings") or {}
            answer.n_drafted = timings.get("draft_n", answer.n_drafted)
            answer.n_rounds = timings.get("rounds", answer.n_rounds)
    return answer


def _show(loads: list[Load]) -> None:
    speeds = {(load.arm, load.n_clients, load.temperature, load.turn): load.speed for load in loads}
    table = Table(box=None, pad_edge=False, title=f"tokens per second of all clients; ratios to {BASE!r}")
    for title in ("temperature", "clients", "arm", "tokens/s", "ratio", "first ms", "p50 ms", "p99 ms", "K"):
        table.add_column(title, justify="left" if title == "arm" else "right")
    groups: dict[tuple[float, int, str], list[Load]] = {}
    for load in loads:
        groups.setdefault((load.temperature, load.n_clients, load.arm), []).append(load)
    for (temperature, n_clients, arm), own in sorted(groups.items()):
        ratios = [load.speed / speeds[BASE, n_clients, temperature, load.turn] for load in own]
        lengths = [load.draft_length for load in own if load.draft_length is not None]
        table.add_row(
            f"{temperature:g}",
            str(n_clients),
            arm,
            f"{statistics.median(load.speed for load in own):.1f}",
            f"{statistics.median(ratios):.3f}",
            *(
                f"{1000 * statistics.median(getattr(load, name) for load in own):.1f}"
                for name in ("first_seconds", "gap_p50", "gap_p99")
            ),
            f"{statistics.median(lengths):.2f}" if lengths else "",
        )
    Console(stderr=True, width=110).print(table)


def _plot(loads: list[Load], path: Path) -> None:
    """Draft tokens per round by the number of clients, a line for each temperature."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for temperature in sorted({load.temperature for load in loads}):
        own = [load for load in loads if load.arm == "llamaspec" and load.temperature == temperature]
        n_clients = sorted({load.n_clients for load in own})
        lengths = [
            statistics.median(x.draft_length or 0.0 for x in own if x.n_clients == n) for n in n_clients
        ]
        axes.plot(n_clients, lengths, marker="o", label=f"temperature {temperature:g}")
    axes.set(xlabel="clients", ylabel="draft tokens per round", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
