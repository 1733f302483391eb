"""The arms of the benchmark: servers in processes of their own, and their answers as a client sees them.

llamaspec's servers start from a checkout, so two versions of llamaspec can be arms of one run.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from llamaspec.errors import LlamaspecError
from llamaspec.plan import DraftPlan

PLAIN, AUTO, BEFORE, PEER = "plain", "auto", "before: auto", "llama-server"
PEER_PLAIN = f"{PEER}, none"  # without a draft: the baseline
PEER_BEST = f"{PEER}, best of each prompt"  # of several types, chosen afterwards
READY_SECONDS = 900.0  # enough to load a large model from a disk
HEALTH_SECONDS = 10.0  # a server that is loading lets clients wait
END_SECONDS = 20.0
_KEYS = ("LLAMASPEC_API_KEY", "LLAMA_API_KEY")  # with one, a server refuses requests without a key
_ENTRY = (  # sets the program's name in messages
    "import sys; sys.path.insert(0, {!r}); sys.argv[0] = 'llamaspec'; "
    "from llamaspec.__main__ import main; main()"
)
_PLAINLY = ["--no-draft", "--no-ngram", "-k", "0"]  # -k 0: a schema's forced tokens are not drafted either
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The command that starts a server, without its port, and environment variables to set."""

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def own_arms(
    options: Sequence[str], also: Sequence[str], against: Path | None, n_parallel: int = 1
) -> Iterator[ServerCommand]:
    """Yield llamaspec without drafts, with `options` of `serve`, with each of `also` added, and `against`."""
    here = Path(__file__).resolve().parents[2]
    ways = [(PLAIN, here, _PLAINLY), (AUTO, here, [])]
    ways += [(more, here, shlex.split(more)) for more in also]
    if against is not None:
        if not (against / "llamaspec" / "__main__.py").is_file():
            raise LlamaspecError(f"{against} has no llamaspec; name the root of a checkout with --against")
        ways.append((BEFORE, against.resolve(), []))
    for name, folder, more in ways:
        kept = _without_draft(options) if "--draft" in more else options
        command = (sys.executable, "-c", _ENTRY.format(str(folder)), "serve", *kept)
        paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}  # nothing from the working directory
        fixed = ("--parallel", str(n_parallel), "--request-timeout", "0", "--grace", "1")
        yield ServerCommand(name, (*command, *fixed, *more), environment)


def _without_draft(options: Sequence[str]) -> list[str]:
    """Return options of `serve` without the choice of a draft."""
    before = ("", *options)  # each option's predecessor
    return [word for word, last in zip(options, before, strict=False) if "--draft" not in (word, last)]


PEER_TYPES = {  # llama-server's speculation type for each kind of draft with hidden rows
    "eagle3": "draft-eagle3", "dflash": "draft-dflash", "dspark": "draft-dspark", "dflash2": "draft-dflash",
}  # fmt: skip


def peer_arms(
    program: str, plan: DraftPlan, types: Sequence[str] = (), n_parallel: int = 1
) -> Iterator[ServerCommand]:
    """Yield llama-server without drafts, and with each speculation type, by default the usual ones.

    It gets the same files. Everything else keeps llama-server's defaults, as people run it, such as a cache
    of earlier prompts in memory (--cache-ram).
    """
    heads = None if plan.has_own_heads else plan.heads
    draft = [part for file in (plan.draft, heads) if file is not None for part in ("-md", str(file.path))]
    if plan.hidden_draft is not None:
        drafting = [PEER_TYPES[plan.hidden_draft.kind]]
    else:
        drafting = ["draft-mtp"] if plan.heads is not None else ["draft-simple"] if draft else []
    options = plan.target.options
    settings = {
        "-c": options.n_ctx,
        "-t": options.threads,
        "-ngl": options.gpu_layers,
        "-fa": options.flash_attention,
        "-ctk": options.cache_type_k,
        "-ctv": options.cache_type_v,
    }
    command = [program, "-m", str(plan.target.path), "-np", str(n_parallel)]
    command += [str(part) for item in settings.items() if item[1] is not None for part in item]
    for kind in dict.fromkeys(("none", *(types or (*drafting, "ngram-simple", "ngram-mod")))):
        if kind.startswith("draft-") and not drafting:
            raise LlamaspecError(f"--spec-types {kind} needs a --draft that is a model; leave it out")
        chosen = [] if kind == "none" else ["--spec-type", kind]
        yield ServerCommand(
            f"{PEER}, {kind}", (*command, *chosen, *(draft if kind.startswith("draft-") else []))
        )


def program_version(program: str) -> str | None:
    """Return the version that llama-server reports; None if it reports none."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (done.stdout + done.stderr).splitlines()
    return next((line.removeprefix("version: ") for line in lines if line.startswith("version")), None)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one server to one request, measured at the client."""

    text: str  # reasoning included
    reply: str  # without reasoning
    n_prompt_tokens: int
    n_tokens: int
    seconds: float  # from the request to the end of the stream
    first_seconds: float  # to the first text
    n_drafted: int | None = None  # as the server reports
    n_accepted: int | None = None


class RefusedError(LlamaspecError):
    """A server refused a request, such as one that is too long for its context."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    name: str
    client: httpx.Client

    def ask(self, body: Mapping[str, Any]) -> Answer:
        """Send a chat request and read the whole stream.

        Raise RefusedError if the server refuses the request, LlamaspecError if the server has ended.
        """
        reasoning, reply, first = "", "", None
        usage: Mapping[str, Any] = {}
        timings: Mapping[str, Any] = {}
        begin = time.perf_counter()
        try:
            with self.client.stream(
                "POST", "/v1/chat/completions", json={"model": "any", **body, **_STREAM}
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise RefusedError(f"{self.name} refused it: {_reason(response.read())}")
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RefusedError(f"{self.name} ended it: {event['error']}")
                    delta = (event.get("choices") or [{}])[0].get("delta") or {}
                    new, new_reply = delta.get("reasoning_content") or "", delta.get("content") or ""
                    if first is None and (new or new_reply):
                        first = time.perf_counter() - begin
                    reasoning, reply = reasoning + new, reply + new_reply
                    usage, timings = event.get("usage") or usage, event.get("timings") or timings
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise LlamaspecError(
                f"the server of {self.name!r} ended: {reason}; check whether memory is short"
            ) from error
        seconds = time.perf_counter() - begin
        return Answer(
            text=reasoning + reply,
            reply=reply,
            n_prompt_tokens=usage.get("prompt_tokens", 0),
            n_tokens=usage.get("completion_tokens", 0),
            seconds=seconds,
            first_seconds=seconds if first is None else first,
            n_drafted=timings.get("draft_n"),
            n_accepted=timings.get("draft_n_accepted"),
        )


@contextmanager
def serving(commands: Sequence[ServerCommand]) -> Iterator[dict[str, Server]]:
    """Run the servers until the block ends; raise LlamaspecError if one of them does not start."""
    with ExitStack() as stack:
        yield {each.name: Server(each.name, stack.enter_context(_running(each))) for each in commands}


@contextmanager
def _running(command: ServerCommand) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in _KEYS}
    with tempfile.TemporaryFile() as log, ExitStack() as stack:
        try:
            process = subprocess.Popen(
                [*command.words, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment, **command.environment},
                start_new_session=True,  # Ctrl-C at the terminal must not reach the server
            )
        except OSError as error:
            raise LlamaspecError(f"cannot start {command.words[0]}: {error.strerror}") from error
        stack.callback(_end, process)
        url = f"http://127.0.0.1:{port}"
        one_each = httpx.Limits(max_keepalive_connections=0)  # a server may close an idle one at any time
        client = httpx.Client(base_url=url, timeout=None, limits=one_each, trust_env=False)
        _await_ready(command.name, stack.enter_context(client), process, log)
        yield client


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_ready(name: str, client: httpx.Client, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
            reason = last.removeprefix("llamaspec: ") or f"exit code {process.returncode}"
            raise LlamaspecError(f"the server of {name!r} did not start: {reason}")
        try:
            if client.get("/health", timeout=HEALTH_SECONDS).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise LlamaspecError(
        f"the server of {name!r} is not ready after {READY_SECONDS:.0f} s; use a smaller model"
    )


def _reason(body: bytes) -> str:
    """Return the error message of a response."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")
