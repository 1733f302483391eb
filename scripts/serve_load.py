"""Drive `llamaspec serve` and llama.cpp's `llama-server` with the same requests, in turns.

    python scripts/serve_load.py --target big.gguf --draft small.gguf --keep loads.jsonl --plot loads.png
    python scripts/serve_load.py --target big-q4_0.gguf --target big-f16.gguf --draft small.gguf \\
        --llama-cpp llama/bin                               # scripts/llama_cpp_arms.py says how to build it

Every arm is a server of its own over the same files; only one of them has work at a time. Clients ask one
request after the other and stream the answers, all of which have `--max-tokens`. No two requests to a server
begin alike, so that every prompt is read. Arms are interleaved turn by turn, because machines drift; ratios
are medians over turns. A table goes to stderr, the last line of stdout is one JSON object; `load_figures.py`
draws what was kept.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
import httpx
import numpy as np
import yaml
from rich.console import Console

from help_text import help_text
from load_figures import AUTO, BASE, PEER, Load, check_picture, conclusion, draw, figures, table

PROMPTS = Path(__file__).with_name("prompts.yaml")
READY_SECONDS = 180.0
END_SECONDS = 30.0
TOGETHER_SECONDS = 0.001  # events closer than this arrive together: one program sends a round as several


class Arm(NamedTuple):
    """A server."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Case:
    """What every arm is asked in one turn."""

    n_clients: int
    temperature: float
    turn: int
    n_requests: int  # of each client
    max_tokens: int

    def prompts(self, texts: Sequence[str]) -> list[list[tuple[str, int]]]:
        """For each client its prompts and their seeds; all begin differently."""
        first = [self.turn, round(100 * self.temperature), self.n_clients]
        return [
            [
                (
                    f"# {'.'.join(map(str, [*first, number]))}\n{texts[number % len(texts)]}",
                    1000 * self.turn + number,
                )
                for number in range(client * self.n_requests, (client + 1) * self.n_requests)
            ]
            for client in range(self.n_clients)
        ]


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--target",
    "targets",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    required=True,
    help="May be repeated: one after the other.",
)
@click.option("--draft", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option(
    "--llama-cpp",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also llama-server, from this folder.",
)
@click.option(
    "--n-max",
    "n_maxes",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 2, 3, 4),
    show_default=True,
    help="Draft tokens of llama-server.",
)
@click.option(
    "--clients", "-c", type=click.IntRange(min=1), multiple=True, default=(1, 2, 4, 8), show_default=True
)
@click.option(
    "--temperature",
    "-t",
    "temperatures",
    type=click.FloatRange(min=0.0),
    multiple=True,
    default=(0.0, 1.0),
    show_default=True,
)
@click.option(
    "--max-tokens", "-n", type=click.IntRange(min=2), default=64, show_default=True, help="Of each answer."
)
@click.option(
    "--requests", type=click.IntRange(min=1), default=2, show_default=True, help="Of each client and turn."
)
@click.option("--turns", "-r", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Of every server; default: what each chooses.")
@click.option(
    "--keep",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Append every load to this file as it is measured, one JSON object a line.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw tokens per second and K by the number of clients, as .png or .svg.",
)
def main(
    targets: Sequence[Path],
    draft: Path,
    llama_cpp: Path | None,
    n_maxes: Sequence[int],
    clients: Sequence[int],
    temperatures: Sequence[float],
    max_tokens: int,
    requests: int,
    turns: int,
    threads: int | None,
    keep: Path | None,
    plot: Path | None,
) -> None:
    """Measure the arms and print how they compare."""
    if plot is not None:
        check_picture(plot)
    peer = None if llama_cpp is None else llama_cpp / PEER
    if peer is not None and not peer.is_file():
        raise click.UsageError(f"{llama_cpp} has no {PEER}")
    cases = [
        Case(n, temperature, turn, requests, max_tokens)
        for turn in range(turns)
        for temperature in temperatures
        for n in clients
    ]
    loads: list[Load] = []
    for target in targets:
        for load in _measured(target, draft, peer, n_maxes, threads, cases):
            loads.append(load)
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(load)) + "\n")
    found = figures(loads)
    Console(stderr=True, width=130).print(table(found))
    click.echo(conclusion(found), err=True)
    if plot is not None:
        draw(found, plot)
    print(json.dumps({"draft": draft.name, "figures": [asdict(each) for each in found]}))


def _measured(
    target: Path,
    draft: Path,
    peer: Path | None,
    n_maxes: Sequence[int],
    threads: int | None,
    cases: Sequence[Case],
) -> Iterator[Load]:
    """Every arm at every load, with one target."""
    texts = [entry["text"] for entry in yaml.safe_load(PROMPTS.read_text(encoding="utf-8"))]
    n_parallel = max(case.n_clients for case in cases)
    with ExitStack() as stack:
        arms = [
            Arm(name, stack.enter_context(_serving(command)))
            for name, command in _commands(target, draft, peer, n_maxes, threads, n_parallel)
        ]
        warm_up = Case(2, 0.0, -1, cases[0].n_requests, cases[0].max_tokens)
        for arm in arms:  # also what the automatic length learns first
            _measure(target, arm, warm_up, texts)
        for done, case in enumerate(cases):
            shift = done % len(arms)
            for arm in [*arms[shift:], *arms[:shift]]:
                yield _measure(target, arm, case, texts)
            click.echo(f"{target.name}: {done + 1}/{len(cases)}", err=True)


def _commands(
    target: Path,
    draft: Path,
    peer: Path | None,
    n_maxes: Sequence[int],
    threads: int | None,
    n_parallel: int,
) -> Iterator[tuple[str, list[str]]]:
    """The arms, each with what starts its server."""
    more = [] if threads is None else ["--threads", str(threads)]
    own = [sys.executable, "-m", "llamaspec", "serve", "--target", str(target), *more]
    own += ["--parallel", str(n_parallel)]
    yield AUTO, [*own, "--draft", str(draft)]
    yield BASE, own
    if peer is None:
        return
    size = ["-np", str(n_parallel), "-c", str(4096), "-kvu"]
    plain = [str(peer), "-m", str(target), *size, "--no-webui", *more]
    yield f"{PEER}, no draft", plain
    for n_max in n_maxes:
        drafting = ["--spec-type", "draft-simple", "-md", str(draft), "--spec-draft-n-max", str(n_max)]
        yield f"{PEER} n_max={n_max}", [*plain, *drafting]


@contextmanager
def _serving(command: list[str]) -> Iterator[str]:
    """Run a server until the block ends; gives its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=log) as process,
    ):
        try:
            _await_ready(url, process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_ready(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise click.ClickException(f"{process.args!r} ended with {process.returncode}: {last}")
        try:
            if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise click.ClickException(f"no server answers at {url}")


def _measure(target: Path, arm: Arm, case: Case, texts: Sequence[str]) -> Load:
    body: dict[str, Any] = {"temperature": case.temperature, "max_tokens": case.max_tokens, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    prompts = case.prompts(texts)
    begin = time.perf_counter()
    try:
        answers = asyncio.run(_all(arm.url, body, prompts))
    except httpx.HTTPError as error:
        raise click.ClickException(f"{arm.name}: {error!r}") from error
    seconds = time.perf_counter() - begin
    gaps = [gap for answer in answers for gap in answer.gaps()]
    if not gaps:
        raise click.ClickException(f"{arm.name}: no answer came in two parts; ask for more --max-tokens")
    n_rounds = sum(answer.n_rounds for answer in answers)
    return Load(
        target=target.name,
        arm=arm.name,
        n_clients=case.n_clients,
        temperature=case.temperature,
        turn=case.turn,
        n_tokens=sum(answer.n_tokens for answer in answers),
        seconds=seconds,
        first_seconds=statistics.median(a.times[0] - a.begin for a in answers if a.times),
        gap_p50=float(np.quantile(gaps, 0.5)),
        gap_p99=float(np.quantile(gaps, 0.99)),
        draft_length=sum(answer.n_drafted for answer in answers) / max(n_rounds, 1),
    )


@dataclass(slots=True)
class _Answer:
    begin: float
    times: list[float] = field(default_factory=list)  # of events with text
    n_tokens: int = 0
    n_drafted: int = 0
    n_rounds: int = 0

    def gaps(self) -> list[float]:
        """Seconds between two arrivals of text."""
        apart = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        return [gap for gap in apart if gap >= TOGETHER_SECONDS] or apart

    def note(self, timings: dict[str, Any]) -> None:
        """What the server says of its drafts; llama-server tells no rounds, but each makes one more token."""
        self.n_drafted = timings.get("draft_n", 0)
        n_own = timings.get("predicted_n", 0) - timings.get("draft_n_accepted", 0)
        self.n_rounds = timings.get("rounds", n_own)


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
            if "error" in event:
                raise click.ClickException(f"{event['error']}")
            if any(choice.get("text") for choice in event.get("choices", ())):
                answer.times.append(time.perf_counter())
            if event.get("usage"):
                answer.n_tokens = event["usage"]["completion_tokens"]
            if event.get("timings"):
                answer.note(event["timings"])
    return answer


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"serve_load.py: {error}")
