"""The relay between llama.cpp and a worker, with workers that break at every place where one can."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from llamaspec.errors import WorkerError
from llamaspec.llama import relay
from llamaspec.llama.relay import Relay
from local_worker import free_port

HELLO, ALLOC, BASE, SET, GET, HASH = 14, 0, 3, 6, 8, 7  # commands
GREETING = struct.pack("<Q4B24x", 28, 7, 0, 0, 0)
Play = Callable[[socket.socket], None]


@contextmanager
def worker(play: Play) -> Iterator[str]:
    """Something that listens, and plays its part to the first who comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                client, _ = server.accept()
                with client:
                    play(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
    thread.join()


def receive(end: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = end.recv(n - len(data))
        assert part
        data += part
    return data


def request(end: socket.socket) -> tuple[int, bytes]:
    """What llama.cpp's worker reads first of each message."""
    command, n = struct.unpack("<BQ", receive(end, 9))
    return command, receive(end, n)


def greet(end: socket.socket) -> None:
    assert request(end) == (HELLO, bytes(24))
    end.sendall(GREETING)


def ask(client: socket.socket, command: int, content: bytes, n: int) -> bytes:
    """An answer of n bytes, as llama.cpp's client insists on it."""
    client.sendall(struct.pack("<BQ", command, len(content)) + content)
    assert struct.unpack("<Q", receive(client, 8)) == (n,)
    return receive(client, n)


def get(n: int) -> bytes:
    """The content of a request for n bytes of a tensor."""
    return bytes(300) + struct.pack("<QQ", 0, n)


@contextmanager
def talking(play: Play) -> Iterator[tuple[Relay, socket.socket]]:
    """A relay to such a worker, and a client of it."""

    def whole(end: socket.socket) -> None:
        greet(end)
        play(end)

    with worker(whole) as address:
        between = Relay(address)
        host, port = between.endpoint.split(":")
        try:
            with socket.create_connection((host, int(port))) as client:
                yield between, client
        finally:
            between.close()


def test_messages_pass_in_both_directions() -> None:
    weights = bytes(range(256)) * 10_000  # more than is passed on at once

    def play(end: socket.socket) -> None:
        assert request(end) == (SET, weights)
        assert request(end) == (GET, get(len(weights)))
        end.sendall(struct.pack("<Q", len(weights)) + weights)
        assert request(end)[0] == GET
        end.sendall(struct.pack("<Q", 0))

    with talking(play) as (between, client):
        assert between.protocol == (7, 0)
        assert ask(client, HELLO, bytes([1] * 24), 28) == GREETING[8:]  # no transport but TCP
        client.sendall(struct.pack("<BQ", SET, len(weights)) + weights)
        assert ask(client, GET, get(len(weights)), len(weights)) == weights
        assert ask(client, GET, get(0), 0) == b""
        between.check()


def test_a_second_connection_of_llama_cpp_goes_to_the_same_worker() -> None:
    def play(end: socket.socket) -> None:
        for answer in (b"\1" * 16, b"\2" * 16):
            assert request(end)[0] == ALLOC
            end.sendall(struct.pack("<Q", 16) + answer)

    with talking(play) as (between, client):
        assert ask(client, ALLOC, bytes(12), 16) == b"\1" * 16
        client.close()
        host, port = between.endpoint.split(":")
        with socket.create_connection((host, int(port))) as again:
            assert ask(again, ALLOC, bytes(12), 16) == b"\2" * 16


def nothing(end: socket.socket) -> None:
    request(end)


def part_of_an_answer(end: socket.socket) -> None:
    request(end)
    end.sendall(struct.pack("<Q", 3_000_000) + b"\7" * 1000)


def another_size(end: socket.socket) -> None:
    request(end)
    end.sendall(struct.pack("<Q", 5) + b"\7" * 5)
    with suppress(OSError):
        end.recv(1)


@pytest.mark.parametrize(
    ("play", "fault"),
    [
        (lambda end: None, "it closed the connection"),
        (nothing, "it closed the connection"),
        (part_of_an_answer, "it closed the connection"),
        (another_size, "it answered with 5 bytes in place of 3000000"),
    ],
)
def test_a_worker_that_is_lost_is_an_error_and_llama_cpp_gets_its_answers(play: Play, fault: str) -> None:
    """Answers of the right size, at once and from then on: else its client ends the process."""
    with talking(play) as (between, client):
        assert len(ask(client, GET, get(3_000_000), 3_000_000)) == 3_000_000
        with pytest.raises(WorkerError, match=f"{between.address} was lost: ({fault}); start it"):
            between.check()
        assert ask(client, ALLOC, bytes(12), 16) == bytes(16)  # there is no such buffer
        assert ask(client, BASE, bytes(8), 8) != bytes(8)  # ggml asserts that it is not null
        assert ask(client, HASH, bytes(316), 1) == b"\1"  # nothing needs to be sent
        client.sendall(struct.pack("<BQ", SET, 2_000_000) + bytes(2_000_000))
        assert ask(client, HELLO, bytes(24), 28) == GREETING[8:]


def test_nobody_listens() -> None:
    port = free_port()
    with pytest.raises(WorkerError, match=f"no worker can be reached at 127.0.0.1:{port}: .*refused.*--port"):
        Relay(f"127.0.0.1:{port}")


def test_a_name_that_is_none() -> None:
    with pytest.raises(WorkerError, match=r"no worker can be reached at nobody\.invalid:1: "):
        Relay("nobody.invalid:1")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack("<Q", 3) + bytes(28)])
def test_another_server_is_no_worker(said: bytes) -> None:
    def play(end: socket.socket) -> None:
        request(end)
        end.sendall(said)

    with worker(play) as address, pytest.raises(WorkerError, match="does not answer as a worker does"):
        Relay(address)


def test_a_worker_that_has_a_client_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CONNECT_SECONDS", 0.1)
    over = threading.Event()

    def play(end: socket.socket) -> None:
        over.wait()

    with worker(play) as address:
        with pytest.raises(WorkerError, match="is busy with another client, or is no worker"):
            Relay(address)
        over.set()


def test_no_thread_of_it_keeps_a_program_from_ending() -> None:
    over = threading.Event()

    def play(end: socket.socket) -> None:
        over.wait()

    with talking(play) as (between, _):
        threads = [each for each in threading.enumerate() if each.name == f"rpc {between.address}"]
        assert [each.daemon for each in threads] == [True, True]
        over.set()


def test_a_worker_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine acknowledges all that is sent, so TCP is content."""
    monkeypatch.setattr(relay, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(relay, "ANSWER_SECONDS", 0.1)
    over = threading.Event()

    def play(end: socket.socket) -> None:
        over.wait()

    with talking(play) as (between, client):
        assert ask(client, ALLOC, bytes(12), 16) == bytes(16)
        with pytest.raises(
            WorkerError, match=f"{between.address} was lost: it has been silent for .*; start"
        ):
            between.check()
        over.set()


def test_a_machine_that_vanishes_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of Linux, 21 seconds after the link of a worker's machine had gone down."""
    monkeypatch.setattr(relay, "LOOK_SECONDS", 0.01)
    facts = [(0, 0, 100)]
    monkeypatch.setattr(relay, "_facts", lambda worker: relay.Facts(*facts[-1]))
    over = threading.Event()

    def play(end: socket.socket) -> None:
        assert request(end)[0] == ALLOC
        facts.append((6, 0, 21_000))
        over.wait()

    with talking(play) as (between, client):
        assert ask(client, ALLOC, bytes(12), 16) == bytes(16)
        with pytest.raises(WorkerError, match=f"{between.address} was lost: its machine does not answer"):
            between.check()
        over.set()


@pytest.mark.parametrize(
    ("retransmits", "probes", "last_ack_ms", "is_gone"),
    [
        (0, 0, 600_000, False),  # all is acknowledged, nothing is due: keepalive looks after it
        (0, 1, 30_000, False),  # a worker that computes and does not read: probes are answered
        (1, 0, 30_000, False),  # a packet was lost
        (3, 0, 2_000, False),  # many were
        (6, 0, 21_000, True),
        (0, 3, 90_000, True),
    ],
)
def test_who_has_vanished(retransmits: int, probes: int, last_ack_ms: int, is_gone: bool) -> None:
    assert relay.Facts(retransmits, probes, last_ack_ms).has_vanished == is_gone
