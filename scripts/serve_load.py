"""Drive `llamaspec serve` and llama.cpp's `llama-server` with the same requests, in turns.

\b
    python scripts/serve_load.py --target big.gguf --draft small.gguf
    python scripts/serve_load.py --target big-q4_0.gguf --target big-f16.gguf --draft small.gguf \\
        --llama-cpp llama/bin                               # docs/benchmarks.md says how to build it
    python scripts/serve_load.py --target big.gguf --draft small.gguf --keys 12

Every arm is a server of its own over the same files; only one of them has work at a time. Clients ask one
request after the other and stream the answers, all of which have `--max-tokens`. No two requests to a server
begin alike, so that every prompt is read. Arms are interleaved turn by turn, because machines drift; ratios
are medians over turns. A table goes to stderr, the last line of stdout is one JSON object.

With --keys an editor asks for a completion after each of so many keys, with nobody beside and beside a
chat that goes on: what is timed is a completion of 30 tokens, from the request to its end. With --agents it
is timed again beside so many agents, which ask one long prompt after the other until the last key: of these
the time to the first text is told, too.
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
import httpx
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

AUTO, BASE = "llamaspec", "llamaspec, no draft"  # all ratios are to the latter
PEER = "llama-server"  # what its arms begin with
PROMPTS = Path(__file__).with_name("prompts.yaml")
READY_SECONDS = 180.0
END_SECONDS = 30.0
FILE, COUNT = click.Path(exists=True, dir_okay=False, path_type=Path), click.IntRange(min=1)
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


@dataclass(frozen=True, slots=True)
class Load:
    """What one arm made of one load in one turn."""

    target: str
    arm: str
    n_clients: int
    temperature: float
    turn: int
    n_tokens: int
    seconds: float
    first_seconds: float  # median, from the request to its first text
    gap_p50: float  # seconds between two arrivals of text
    gap_p99: float
    draft_length: float  # draft tokens in a round of one text

    @property
    def speed(self) -> float:
        """Tokens per second of all clients together."""
        return self.n_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm at one load: medians over the turns."""

    target: str
    temperature: float
    n_clients: int
    arm: str
    speed: float  # tokens per second of all clients together
    to_base: float | None  # turn by turn, next to llamaspec without a draft
    to_peer: float | None  # turn by turn, next to the arm of llama-server that is fastest at this load
    first_seconds: float
    gap_p50: float
    gap_p99: float
    draft_length: float


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", "targets", type=FILE, multiple=True, required=True, help="May be repeated.")
@click.option("--draft", type=FILE, required=True)
@click.option("--llama-cpp", type=Path, metavar="DIR", help="Also llama-server, from this folder.")
@click.option(
    "--n-max",
    "n_maxes",
    type=COUNT,
    multiple=True,
    default=(1, 2, 3, 4),
    show_default=True,
    help="Draft tokens of llama-server.",
)
@click.option("--clients", "-c", type=COUNT, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--temperature", "-t", "temperatures", type=float, multiple=True, default=(0.0, 1.0))
@click.option(
    "--max-tokens", "-n", type=click.IntRange(2), default=64, show_default=True, help="Of an answer."
)
@click.option("--requests", type=COUNT, default=2, show_default=True, help="Of each client and turn.")
@click.option("--turns", "-r", type=COUNT, default=3, show_default=True)
@click.option("--threads", type=COUNT, help="Of every server; default: what each chooses.")
@click.option("--keys", type=COUNT, help="Completions of an editor at /infill, in place of the loads.")
@click.option("--agents", type=COUNT, help="Beside the editor of --keys.")
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
    keys: int | None,
    agents: int | None,
) -> None:
    """Measure the arms and print how they compare."""
    peer = None if llama_cpp is None else llama_cpp / PEER
    if peer is not None and not peer.is_file():
        raise click.UsageError(f"{llama_cpp} has no {PEER}")
    if keys is not None:
        commands = [
            command
            for target in targets
            for command in _commands(target, draft, peer, n_maxes[:1] if agents else (), threads, 4)
        ]
        print(json.dumps({"completions": [asdict(each) for each in _completed(commands, keys, agents)]}))
        return
    cases = [
        Case(n, temperature, turn, requests, max_tokens)
        for turn in range(turns)
        for temperature in temperatures
        for n in clients
    ]
    loads = [load for target in targets for load in _measured(target, draft, peer, n_maxes, threads, cases)]
    found = figures(loads)
    Console(stderr=True, width=130).print(table(found))
    click.echo(conclusion(found), err=True)
    told = {"figures": [asdict(each) for each in found], "loads": [asdict(load) for load in loads]}
    print(json.dumps({"draft": draft.name, **told}))


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
            Arm(name, stack.enter_context(serving(command)))
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
def serving(command: list[str]) -> Iterator[str]:
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


@dataclass(frozen=True, slots=True)
class Completions:
    """What an editor waited for, in seconds."""

    arm: str
    target: str
    n_chats: int  # beside
    n_agents: int
    first: float  # with nothing in the KV cache
    p50: float  # of the following keys
    longest: float
    gap_p50: float | None  # between two arrivals of the chat's text, while the editor asks
    gap_max: float | None
    agent_p50: float | None  # an agent's time to the first text
    agent_max: float | None
    n_agent_requests: int


def _completed(
    commands: Iterable[tuple[str, list[str]]], n_keys: int, n_agents: int | None
) -> Iterator[Completions]:
    for name, command in commands:
        with serving(command) as url:
            for n_chats, n_beside in ((0, 0), (1, 0), *([(0, n_agents)] if n_agents else [])):
                first, *rest, gaps, firsts = asyncio.run(_typed(url, n_keys, n_chats, n_beside))
                found = Completions(
                    name,
                    Path(command[command.index("--target" if "--target" in command else "-m") + 1]).name,
                    n_chats,
                    n_beside,
                    first,
                    statistics.median(rest),
                    max(rest),
                    float(np.quantile(gaps, 0.5)) if gaps else None,
                    max(gaps, default=None),
                    statistics.median(firsts) if firsts else None,
                    max(firsts, default=None),
                    len(firsts),
                )
                click.echo(found, err=True)
                yield found


async def _typed(url: str, n_keys: int, n_chats: int, n_agents: int) -> tuple[Any, ...]:
    """Seconds of each completion, the gaps in the text of a chat beside, and what agents waited for text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    prefix, suffix = "".join(lines[20:60]), "".join(lines[60:68])
    body: dict[str, Any] = {
        "input_suffix": f"\n{suffix}",
        "n_predict": 30,
        "ignore_eos": True,
        "temperature": 0,
    }
    body["input_prefix"] = f"# {n_chats} {n_agents}\n{prefix}"  # nothing of the last turn is cached
    chat = {"prompt": "Once upon a time", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        chatting = asyncio.create_task(_gaps(client, chat)) if n_chats else None
        is_typed = asyncio.Event()
        agents = [asyncio.create_task(_works(client, number, is_typed)) for number in range(n_agents)]
        if chatting is not None or agents:
            await asyncio.sleep(3)  # they are at work
        seconds: list[float] = []
        for n in range(n_keys):
            typed = "    n_words = " + "len(text.split())"[:n]
            start = time.perf_counter()
            answer = await client.post("/infill", json={**body, "prompt": typed})
            seconds.append(time.perf_counter() - start)
            if answer.status_code != httpx.codes.OK:
                raise click.ClickException(answer.text)
        gaps: list[float] = []
        if chatting is not None:
            chatting.cancel()
            gaps = await chatting
        is_typed.set()
        firsts = [each for own in await asyncio.gather(*agents) for each in own]
    return (*seconds, gaps, firsts)


async def _works(client: httpx.AsyncClient, number: int, is_typed: asyncio.Event) -> list[float]:
    """Ask one long prompt after the other, each unlike those before; seconds to the first text of each."""
    text = Path(__file__).read_text(encoding="utf-8")[:4000]
    body: dict[str, Any] = {"max_tokens": 32, "stream": True, "ignore_eos": True, "temperature": 0}
    firsts: list[float] = []
    while not is_typed.is_set():
        answer = await _ask(client, {**body, "prompt": f"# {number}.{len(firsts)}\n{text}"})
        firsts += [each - answer.begin for each in answer.times[:1]]
    return firsts


async def _gaps(client: httpx.AsyncClient, body: dict[str, Any]) -> list[float]:
    """Between two arrivals of text, until it is cancelled."""
    answer = _Answer(time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer.times.append(time.perf_counter())
    except asyncio.CancelledError:
        pass
    return answer.gaps()


def figures(loads: Iterable[Load]) -> list[Figures]:
    """The medians of every arm at every load."""
    groups: dict[tuple[str, float, int], dict[str, list[Load]]] = {}
    for load in loads:
        group = groups.setdefault((load.target, load.temperature, load.n_clients), {})
        group.setdefault(load.arm, []).append(load)
    found: list[Figures] = []
    for (target, temperature, n_clients), arms in sorted(groups.items()):
        speeds = {arm: _median(own, "speed") for arm, own in arms.items()}
        peer = max((arm for arm in arms if arm.startswith(PEER)), key=speeds.__getitem__, default=None)
        found += [
            Figures(
                target=target,
                temperature=temperature,
                n_clients=n_clients,
                arm=arm,
                speed=speeds[arm],
                to_base=_ratio(own, arms.get(BASE, ())),
                to_peer=None if peer is None else _ratio(own, arms[peer]),
                **{
                    name: _median(own, name)
                    for name in ("first_seconds", "gap_p50", "gap_p99", "draft_length")
                },
            )
            for arm, own in sorted(arms.items())
        ]
    return found


def conclusion(found: Sequence[Figures]) -> str:
    """One sentence: what automatic length is worth where it is worth least, and what becomes of K."""
    own = [each for each in found if each.arm == AUTO]
    if not own:
        return f"Nothing was measured of {AUTO}."
    says: list[str] = []
    for other, name in (("no draft", "to_base"), (f"the best arm of {PEER}", "to_peer")):
        known = [each for each in own if getattr(each, name) is not None]
        if known:
            worst = min(known, key=lambda each: float(getattr(each, name)))
            says.append(f"at least {getattr(worst, name):.2f} times as fast as {other} ({_where(worst)})")
    few, many = min(each.n_clients for each in own), max(each.n_clients for each in own)
    lengths = [statistics.mean(each.draft_length for each in own if each.n_clients == n) for n in (few, many)]
    says.append(f"K {lengths[0]:.1f} with {_clients(few)}, {lengths[1]:.1f} with {_clients(many)}")
    return f"Automatic length: {'; '.join(says)}."


def table(found: Sequence[Figures]) -> Table:
    """All figures, for a person."""
    shown = Table(box=None, pad_edge=False, title=f"tokens per second of all clients; ratio to {BASE!r}")
    titles = ("target", "temperature", "clients", "arm", "tokens/s", "ratio", "first ms", "p50 ms", "p99 ms")
    for title in (*titles, "K"):
        shown.add_column(title, justify="left" if title in ("target", "arm") else "right")
    for each in found:
        shown.add_row(
            each.target,
            f"{each.temperature:g}",
            str(each.n_clients),
            each.arm,
            f"{each.speed:.1f}",
            "" if each.to_base is None else f"{each.to_base:.3f}",
            *(f"{1e3 * seconds:.1f}" for seconds in (each.first_seconds, each.gap_p50, each.gap_p99)),
            f"{each.draft_length:.2f}",
        )
    return shown


def _median(loads: Sequence[Load], name: str) -> float:
    return float(statistics.median(getattr(load, name) for load in loads))


def _ratio(own: Sequence[Load], others: Sequence[Load]) -> float | None:
    """The median over the turns that both have."""
    speeds = {load.turn: load.speed for load in others}
    ratios = [load.speed / speeds[load.turn] for load in own if load.turn in speeds]
    return statistics.median(ratios) if ratios else None


def _where(found: Figures) -> str:
    return f"{Path(found.target).stem}, temperature {found.temperature:g}, {_clients(found.n_clients)}"


def _clients(n: int) -> str:
    return f"{n} client" + "s" * (n > 1)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"serve_load.py: {error}")
