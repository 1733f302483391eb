"""`--rpc`, the options for devices, and `llamaspec worker`."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from command import ENTRY, environment, expected, invoke, naming, run, said
from rpc_workers import free_port, needs_rpc, running_worker

PROMPT = "def f(self):\n    return "


@needs_rpc
def test_a_worker_that_dies_leaves_the_text_so_far_and_one_line(models: list[Path]) -> None:
    """The text is longer than the pipe's buffer, so it cannot end before the worker is killed."""
    beginning = expected(models, seed=3, n=200).text
    with running_worker() as worker:
        command = ["generate", *naming(models), "--n-ctx", 8192, "-n", 8000, "--seed", 3, "--no-stats"]
        process = subprocess.Popen(
            [*ENTRY, *map(str, command), "--rpc", worker.address, "-p", PROMPT],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            pipesize=4096,
        )
        assert process.stdout is not None
        first = process.stdout.read(100)
        worker.kill()
        rest, complaints = process.communicate()
    written = (first + rest).decode(errors="replace").removesuffix("\n")
    n = min(len(written), len(beginning))
    assert n >= 50
    assert written[:n] == beginning[:n]
    assert process.returncode == 1
    assert "Traceback" not in complaints.decode()
    line = complaints.decode().splitlines()[-1]
    assert line.startswith("llamaspec: a worker was lost")
    assert line.endswith("; start the worker and run this again")


@needs_rpc
def test_a_worker_that_never_answers(models: list[Path]) -> None:
    """A worker that serves another client behaves like this."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line = said(run("generate", *naming(models), "--rpc", address, "x"))
    assert line == (
        f"llamaspec: {address} is busy with another client or is not a worker; "
        f"a worker serves one client at a time"
    )


@needs_rpc
def test_a_worker_that_cannot_be_reached(models: list[Path]) -> None:
    port = free_port()
    line = said(invoke("generate", *naming(models), "--rpc", f"127.0.0.1:{port}", "x"))
    assert line == (
        f"llamaspec: no worker can be reached at 127.0.0.1:{port}: Connection refused; "
        f"start one there with `llamaspec worker --host ADDRESS --port {port}`"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rpc", "here"], "a worker is named as HOST:PORT, got 'here'"),
        (["--rpc", "a:1,b:2", "--rpc", "a:1"], "a worker is named twice; each serves one client at a time"),
        (["--rpc", "a:1", "-ngl", "0"], "workers compute only offloaded layers; drop --gpu-layers 0"),
        (["--tensor-split", "3;1"], "--tensor-split needs numbers such as 3,1, not 3;1"),
        (["--tensor-split", "3/-1"], "shares of tensor-split must be numbers >= 0, got (3.0, -1.0)"),
        (["--tensor-split", "0,0"], "one share of tensor-split must be greater than 0"),
        (["--tensor-split", ",".join("1" * 17)], "tensor-split has at most 16 shares"),
    ],
)
def test_impossible_options_are_refused(arguments: list[str], complaint: str) -> None:
    answer = invoke("generate", *arguments, "x")
    assert answer.code == 2
    assert complaint in answer.stderr


def test_a_device_that_is_not_there(models: list[Path]) -> None:
    line = said(invoke("generate", *naming(models), "--device", "CUDA7", "x"))
    assert "there is no device 'CUDA7'; choose from CPU" in line
    assert line.endswith(", or none")


def test_no_device_is_the_cpu(models: list[Path]) -> None:
    answer = invoke("generate", *naming(models), "--device", "none", "--draft-device", "none",
                    "-n", "9", "--seed", "3", "-p", PROMPT, "--no-stats")  # fmt: skip
    assert answer.code == 0
    assert answer.stdout.removesuffix("\n") == expected(models, seed=3, n=9).text


@needs_rpc
def test_a_worker_where_another_program_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = said(invoke("worker", "--port", str(port)))
    assert line == (
        f"llamaspec: cannot listen on 127.0.0.1:{port}: Address already in use; "
        f"choose another --host or --port"
    )


def test_a_worker_on_devices_that_are_not_there() -> None:
    for device in ("CPU,CUDA7", "none", ""):
        answer = invoke("worker", "--device", device)
        assert answer.code == 2
        assert "; choose from CPU" in answer.stderr
