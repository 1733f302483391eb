"""The command: options that it refuses, how it stops, and `--cache-dir`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from command import ENTRY, environment, invoke
from llamaspec import Pair
from llamaspec.errors import LlamaspecError
from llamaspec.serve import ServeSettings, app
from model_store import ModelStore
from patience import PATIENCE, until
from rpc_workers import needs_rpc, running_worker
from serving import Gate, parse_events, process, served
from tiny_models import Recipe

LONG = {"prompt": "def f(", "max_tokens": 400, "seed": 1, "stream": True}
HELD = """
import threading
from llamaspec.__main__ import main
from llamaspec.llama.model import LlamaModel
from llamaspec.serve.request_queue import RequestQueue

evaluate, submit, stop = LlamaModel.evaluate, RequestQueue.submit, RequestQueue.stop
is_asked, is_stopping, evaluated = threading.Event(), threading.Event(), []

def held(*args):
    if is_asked.is_set():
        evaluated.append(1)
        len(evaluated) > 20 and is_stopping.wait()
    return evaluate(*args)

LlamaModel.evaluate = held
RequestQueue.submit = lambda *args: (is_asked.set(), submit(*args))[1]
RequestQueue.stop = lambda *args: (is_stopping.set(), stop(*args))[1]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_answers_end(demo_files: tuple[Path, Path], number: signal.Signals) -> None:
    """This server holds the answer until the signal has arrived."""
    with (
        process(entry=[sys.executable, "-c", HELD]) as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE) as answer,
    ):
        lines = answer.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        server.popen.send_signal(number)
        events = parse_events("\n\n".join([first, *lines]))
        assert server.ended() == 0
    assert events[-1][1] == "[DONE]"
    assert events[-2][1]["choices"][0]["finish_reason"] == "length"
    until(lambda: server.lines[-1] == "llamaspec: stopped")
    assert any("llama 8.52M Q8_0, draft: llama 4.51M Q8_0;" in line for line in server.lines)
    assert any("stopping: 1 running, up to 30 s to finish" in line for line in server.lines)
    assert not any("Traceback" in line for line in server.lines)


def test_new_requests_are_refused_while_the_server_stops(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, new connections were refused by the system, and kept ones were dropped.

    Running sequences finish; waiting ones get an error.
    """
    gate = Gate(demo, monkeypatch)
    body = {**LONG, "stream": False, "max_tokens": 4}

    def ask() -> int:
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).status_code

    with served(demo, parallel=1) as server, ThreadPoolExecutor(3) as clients:
        assert server.client.get("/health").status_code == 200
        running = clients.submit(ask)
        until(lambda: server.n_running() == 1)
        waiting = clients.submit(ask)
        until(lambda: server.service.queue.sequences()[1] == 1)
        stopping = clients.submit(server.stop)
        assert waiting.result() == 503
        assert [server.post("/v1/completions", body).status_code, ask()] == [503, 503]
        assert server.client.get("/health").json() == {"status": "stopping"}
        gate.open()
        assert running.result() == 200
        stopping.result()


def test_a_request_that_is_not_complete_does_not_delay_the_end(
    demo: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, the server waited for its body, ten seconds longer than the grace time."""
    monkeypatch.setattr(app, "FINAL_SECONDS", int(PATIENCE))
    with served(demo, body_seconds=PATIENCE) as server:
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port), PATIENCE) as client:
            client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            until(lambda: server.n_connections() == 1)
            begin = monotonic()
            server.stop()
            assert monotonic() - begin < PATIENCE / 2


def test_after_the_grace_time_answers_end_with_an_error(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(demo, monkeypatch)
    with (
        served(demo, grace_seconds=0.0) as server,
        ThreadPoolExecutor(1) as clients,
        server.client.stream("POST", "/v1/completions", json=LONG) as answer,
    ):
        until(lambda: server.n_running() == 1)
        stopping = clients.submit(server.stop)
        until(lambda: server.n_running() == 0)
        gate.open()
        events = parse_events("\n\n".join(answer.iter_lines()))
        stopping.result()
    assert events[-1][1]["error"]["code"] == "server_stopping"
    assert any(line.endswith("ended by an error") for line in server.log)


def test_keys_of_the_command(demo_files: tuple[Path, Path], tmp_path: Path) -> None:
    """Other users of the machine see those on the command line, so that it is warned about."""
    file = tmp_path / "keys"
    file.write_text("\ufefffrom-file\n\n", encoding="utf-8")  # as an editor on Windows saves it
    env, body = (
        {"LLAMASPEC_API_KEY": "from-env", "LLAMASPEC_SHARED_KEY": "shared"},
        {"prompt": "def f(x):", "max_tokens": 1},
    )
    with process("--api-key-file", str(file), env=env) as server:
        answers = [
            httpx.post(
                f"{server.url}/v1/completions", json=body, headers={"X-Api-Key": key}, timeout=PATIENCE
            )
            for key in ("other", "from-env", "shared", "from-file")
        ]
        assert not any("warning" in line for line in server.lines)
    assert [answer.status_code for answer in answers] == [401, 200, 200, 200]
    details = [answer.json()["usage"]["prompt_tokens_details"] for answer in answers[1:]]
    assert [each["cached_tokens"] > 0 for each in details] == [False, False, True]
    answer = invoke("serve", "--api-key", "k", "--shared-key", "s", "--host", "no.such.host.invalid")
    assert "--api-key-file" in answer.stderr
    assert "LLAMASPEC_SHARED_KEY" in answer.stderr


@needs_rpc
def test_the_loss_of_a_worker_ends_the_server(demo_files: tuple[Path, Path]) -> None:
    """It could not answer any more; a supervisor can start it again."""
    with running_worker() as worker, process("--rpc", worker.address) as server:
        request = {**LONG, "stream": False, "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=request, timeout=PATIENCE).status_code == 200
        worker.kill()
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{server.url}/v1/completions", json=request, timeout=PATIENCE)
        assert server.ended() == 1
        until(lambda: server.lines[-1].endswith("run this again"))
    assert not any("Traceback" in line for line in server.lines)


def test_a_second_server_is_refused_while_the_first_one_loads() -> None:
    with app.open_socket(ServeSettings(port=0)) as first:
        port = int(first.getsockname()[1])
        with pytest.raises(LlamaspecError, match=f"port {port}: address already in use; give another"):
            app.open_socket(ServeSettings(port=port))


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--host", "0.0.0.0"], 2, "--no-auth"),
        (["--host", "no.such.host.invalid", "--no-auth"], 1, "give another --host"),
        (["--parallel", "99"], 2, "parallel"),
        (["--api-key-file", "/nonexistent"], 1, "/nonexistent"),
        (["--chat-template", "/nonexistent"], 1, "/nonexistent"),
        (["--request-timeout", "-1"], 2, "request-timeout"),
        (["--port", "65536"], 2, "--port"),
        (["--max-queue", "-1"], 2, "--max-queue"),
        (["--grace", "-0.1"], 2, "--grace"),
    ],
)
def test_options_that_are_refused(
    demo_files: tuple[Path, Path], arguments: list[str], code: int, told: str
) -> None:
    answer = invoke("serve", "--port", "0", "--threads", "1", *arguments)
    assert answer.code == code
    assert told in answer.stderr.splitlines()[-1]


PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return "
ASKED = {"prompt": PROMPT, "max_tokens": 24, "seed": 5, "temperature": 0.8}


def asked(*options: str) -> tuple[str, int, int, list[str]]:
    """Return the text, its prompt tokens, how many were cached, and the lines that the server wrote.

    The saved prefixes have been read before the request.
    """
    with process(*options) as server:
        until(lambda: any("prefixes" in line or "damaged" in line for line in server.lines))
        answer: Any = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=PATIENCE).json()
        server.popen.send_signal(signal.SIGTERM)
        assert server.ended() == 0
        until(lambda: server.lines[-1] == "llamaspec: stopped")
    usage = answer["usage"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert not any("Traceback" in line for line in server.lines)
    return answer["choices"][0]["text"], usage["prompt_tokens"], n_cached, server.lines


OFTEN = """
from llamaspec.__main__ import main
from llamaspec.llama import prefix_folder

prefix_folder.SAVE_SECONDS = 0.1
main()
"""


def test_a_server_that_is_killed_keeps_its_prefixes(demo_files: tuple[Path, Path], tmp_path: Path) -> None:
    """It saved nothing before its end. A damaged file costs only what it held, and one line."""
    folder = tmp_path / "prefixes"
    with process("--cache-dir", str(folder), entry=[sys.executable, "-c", OFTEN]) as server:
        answer: Any = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=PATIENCE).json()
        until(lambda: len([*folder.glob("*/*.prefix")]) == 2)  # of the target and the draft
        server.popen.kill()
    text = answer["choices"][0]["text"]
    again, n_prompt, n_cached, lines = asked("--cache-dir", str(folder))
    assert (again, n_cached) == (text, n_prompt - 1)
    assert any("tokens of prefixes" in line for line in lines)
    for file in folder.glob("*/*.prefix"):
        os.truncate(file, file.stat().st_size // 2)
    again, _, n_cached, lines = asked("--cache-dir", str(folder))
    assert (again, n_cached) == (text, 0)
    assert [line.endswith("and 1 other: damaged") for line in lines if "damaged" in line] == [True]


SAVING = """
import asyncio, sys, time
from pathlib import Path
from llamaspec.__main__ import main
from llamaspec.llama.prefix_file import NodeFile

folder = Path(sys.argv[sys.argv.index("--cache-dir") + 1])

def held(place, function):
    def wait(*args):
        print(place, file=sys.stderr, flush=True)
        while not (folder / place).exists():
            time.sleep(.01)
        return function(*args)
    return wait

asyncio.BaseEventLoop.close = held("ending", asyncio.BaseEventLoop.close)
NodeFile.write = held("saving", NodeFile.write)
main()
"""


def test_a_second_signal_does_not_cut_the_saving_off(demo_files: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    with process("--cache-dir", str(folder), entry=[sys.executable, "-c", SAVING]) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=PATIENCE).status_code == 200
        server.popen.send_signal(signal.SIGTERM)
        for place in ("ending", "saving"):
            until(lambda place=place: place in server.lines)  # type: ignore[misc]
            server.popen.send_signal(signal.SIGINT)
            (folder / place).touch()
        assert server.ended() == 0
        until(lambda: server.lines[-1] == "llamaspec: stopped")
    assert len(list(folder.glob("*/*.prefix"))) == 2


def test_a_server_whose_log_nobody_reads(demo_files: tuple[Path, Path], tmp_path: Path) -> None:
    """Once, connections were closed after an answer, and nothing was saved at the end."""
    folder = tmp_path / "prefixes"
    command = [*ENTRY, "serve", "--port", "0", "--threads", "1", "--cache-dir", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as server:
        assert server.stderr is not None
        url = next(line.split()[-1] for line in server.stderr if "served at" in line)
        server.stderr.close()
        with httpx.Client(base_url=url, timeout=PATIENCE, transport=httpx.HTTPTransport(retries=9)) as client:
            answers = [client.post("/v1/completions", json=ASKED) for _ in range(3)]
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    assert [answer.status_code for answer in answers] == [200] * 3
    assert list(folder.glob("*/*.prefix"))


@pytest.mark.skipif(sys.platform != "linux", reason="what happens depends on the system")
def test_a_model_file_that_is_shortened_leaves_a_line(store: ModelStore, tmp_path: Path) -> None:
    """It ended the server without a word. The file is mapped, so nothing can be done about the end."""
    path = tmp_path / "model.gguf"
    shutil.copy(store.path("llama", Recipe(n_layers=8, width=256, n_ffn=1024)), path)
    with process("--target", str(path)) as server:
        os.truncate(path, 4096)
        body = {"prompt": "one", "max_tokens": 40}
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        assert server.ended() == -signal.SIGBUS
    assert any("Bus error" in line for line in server.lines)
