"""Stands between llama.cpp and one RPC worker, so that a worker that is lost is an error and not an abort.

llama.cpp's client ends the process when its connection breaks (RPC_STATUS_ASSERT in ggml-rpc.cpp) and waits
for ever for a machine that is silent. So it is given a connection to this thread, which passes everything on
and knows where each message ends. Once the worker is gone, the client gets answers of the right size that
mean nothing, and whoever uses them asks `check` first. tests/llama/test_relay.py.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from io import BufferedReader
from typing import NamedTuple, NoReturn, cast

from llamaspec.errors import WorkerError

_CHUNK = 1 << 20  # bytes that are passed on at once
CONNECT_SECONDS = 5.0  # for the connection, and again for each answer while it is made
SILENT_SECONDS = 20  # after which a machine that does not even acknowledge is gone
ANSWER_SECONDS = 900.0  # after which a worker hangs; it may read parts of a prompt, slowly
LOOK_SECONDS = 5.0  # between two looks at a connection
_CLOSED = "it closed the connection"
_HEAD = struct.Struct("<BQ")  # the command, bytes of its request
_SIZE = struct.Struct("<Q")
_TCP_INFO = struct.Struct("=2xBB52xI")  # of linux/tcp.h: tcpi_retransmits, tcpi_probes, tcpi_last_ack_recv
_CAPABILITIES = bytes(24)  # of the transport: none but TCP

# Commands of ggml-rpc.cpp that are answered, and what a lost worker answers: a size that fits no request of
# its own, a buffer that could not be had, an address that is never read.
_ALLOC_BUFFER, _GET_TENSOR, _HELLO, _DEVICE_COUNT = 0, 8, 14, 15
_ANSWERS = {
    _ALLOC_BUFFER: _SIZE.pack(0) * 2,
    1: _SIZE.pack(128),  # GET_ALIGNMENT
    2: _SIZE.pack(1 << 40),  # GET_MAX_SIZE
    3: _SIZE.pack(1 << 20),  # BUFFER_GET_BASE
    7: b"\1",  # SET_TENSOR_HASH: it has these weights, they need not be sent
    9: b"\1",  # COPY_TENSOR
    11: _SIZE.pack(1 << 30) * 2,  # GET_DEVICE_MEMORY
    13: _SIZE.pack(0),  # GET_ALLOC_SIZE
    _DEVICE_COUNT: struct.pack("<I", 0),
}


class Facts(NamedTuple):
    """What Linux knows of a connection.

    TCP_USER_TIMEOUT, which would end it, looks at the age of what was sent alone: it also ends a connection
    whose other end acknowledges, but computes and reads nothing meanwhile, as a worker with a long prompt.
    """

    retransmits: int  # of the same data, in a row
    probes: int  # whether there is room to send, without an answer
    last_ack_ms: int  # since the other end was heard of

    @property
    def has_vanished(self) -> bool:
        """Whether data on its way there is repeated in vain; where none is, keepalive tells."""
        return max(self.retransmits, self.probes) >= 2 and self.last_ack_ms > SILENT_SECONDS * 1000


class Relay:
    """A connection to one worker; `close` it.

    Parameters
    ----------
    address : str
        HOST:PORT.

    Raises
    ------
    WorkerError
        Nobody answers there, or not as a worker that is free does.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._fault: str | None = None
        self._waiting: float | None = None  # for the worker, since then
        self._closed = threading.Event()
        self._worker = _connected(address)
        self._answers = _reader(self._worker)
        try:
            self.protocol = self._greet()  # major and minor version
            self._listener = _listening()
        except BaseException:
            self._answers.close()
            self._worker.close()
            raise
        self._worker.settimeout(None)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"  # what llama.cpp is told
        self._hello = struct.pack("<BBBx", *self.protocol, 0) + _CAPABILITIES
        for work in (self._serve, self._watch):
            threading.Thread(target=work, name=f"rpc {address}", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether answers mean nothing any more."""
        return self._fault is not None

    def check(self) -> None:
        """Raise WorkerError if the worker is lost: then nothing that came from it may be used."""
        if self._fault is not None:
            raise WorkerError(
                f"the worker {self.address} was lost: {self._fault}; start it and run this again"
            )

    def close(self) -> None:
        """Let the worker go; once llama.cpp has freed what lay there. More than once is allowed."""
        self._closed.set()
        for end in (self._listener, self._worker):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread
            end.close()

    def _greet(self) -> tuple[int, int]:
        """The handshake, which a worker answers once it has no other client: what protocol it speaks."""
        try:
            self._worker.sendall(_HEAD.pack(_HELLO, len(_CAPABILITIES)) + _CAPABILITIES)
            answer = self._answers.read(_SIZE.size + 4 + len(_CAPABILITIES))
        except TimeoutError:
            self._refuse(
                "is busy with another client, or is no worker", "a worker serves one client at a time"
            )
        except OSError as error:
            self._refuse(f"broke the connection ({_reason(error)})", "start it anew")
        if len(answer) < 12 or _SIZE.unpack_from(answer)[0] != 4 + len(_CAPABILITIES):
            self._refuse(
                "does not answer as a worker does", "check the port, and the version of llama.cpp there"
            )
        return answer[8], answer[9]

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise WorkerError(f"{self.address} {what}; {remedy}")

    def _serve(self) -> None:
        """Answer llama.cpp's connections, of which it makes one after the other."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                self._answers.close()
                return
            with client, _reader(client) as requests, suppress(OSError):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._talk(client, requests)

    def _talk(self, client: socket.socket, requests: BufferedReader) -> None:
        while len(head := requests.read(_HEAD.size)) == _HEAD.size:
            command, n = _HEAD.unpack(head)
            if command == _HELLO:
                requests.read(n)
                client.sendall(_SIZE.pack(len(self._hello)) + self._hello)
                continue
            end = b""  # of the request
            while n:
                part = requests.read(min(n, _CHUNK))
                if not part:
                    return
                self._send(head + part if head else part)
                n, head, end = n - len(part), b"", (end + part[-8:])[-8:]
            if head:
                self._send(head)
            if command in _ANSWERS or command == _GET_TENSOR:
                size = _SIZE.unpack(end)[0] if command == _GET_TENSOR else len(_ANSWERS[command])
                self._answer(client, command, size)

    def _answer(self, client: socket.socket, command: int, size: int) -> None:
        """Pass on the worker's answer, or finish it where the worker cannot."""
        head = _SIZE.pack(size)
        if not self.is_lost and (said := self._receive(_SIZE.size)) != head and not self.is_lost:
            self._lose(f"it answered with {_SIZE.unpack(said)[0]} bytes in place of {size}")
        n = size
        while n:
            part = self._receive(min(n, _CHUNK))
            if not part:
                part = _ANSWERS.get(command, b"") if n == size else b""
                part = part or bytes(min(n, _CHUNK))
            client.sendall(head + part)
            n, head = n - len(part), b""
        if head:
            client.sendall(head)

    def _send(self, data: bytes) -> None:
        if not self.is_lost:
            self._waiting = time.monotonic()
            try:
                self._worker.sendall(data)
            except OSError as error:
                self._lose(_reason(error))
            self._waiting = None

    def _receive(self, n: int) -> bytes:
        """The next `n` bytes from the worker; none of them where it is lost."""
        if self.is_lost:
            return b""
        self._waiting = time.monotonic()
        try:
            data: bytes = self._answers.read(n)
        except (OSError, ValueError) as error:  # ValueError: closed by another thread
            self._lose(_reason(error))
            return b""
        finally:
            self._waiting = None
        if len(data) < n:
            self._lose(_CLOSED)
            return b""
        return data

    def _watch(self) -> None:
        """Lose a worker whose machine has vanished, or that hangs."""
        while not self._closed.wait(LOOK_SECONDS) and not self.is_lost:
            since, facts = self._waiting, _facts(self._worker)
            if since is not None and time.monotonic() - since > ANSWER_SECONDS:
                self._lose(f"it has been silent for {ANSWER_SECONDS / 60:.0f} minutes")
            elif facts is not None and facts.has_vanished:
                self._lose("its machine does not answer")

    def _lose(self, fault: str) -> None:
        self._fault = self._fault or fault  # the first tells what happened
        with suppress(OSError):
            self._worker.shutdown(socket.SHUT_RDWR)


def _connected(address: str) -> socket.socket:
    """A connection on which a machine that vanishes is noticed."""
    host, _, port = address.rpartition(":")
    try:
        worker = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    except OSError as error:
        raise WorkerError(
            f"no worker can be reached at {address}: {_reason(error)}; "
            f"start one there with `llamaspec worker --host ADDRESS --port {port}`"
        ) from error
    worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    worker.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (  # not every system has all of them
        ("TCP_KEEPIDLE", SILENT_SECONDS // 4),
        ("TCP_KEEPALIVE", SILENT_SECONDS // 4),  # macOS
        ("TCP_KEEPINTVL", SILENT_SECONDS // 4),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            worker.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return worker


def _facts(worker: socket.socket) -> Facts | None:
    """What is known; None where the system does not tell, and TCP gives up by itself after some minutes."""
    if sys.platform != "linux":
        return None
    try:
        return Facts._make(
            _TCP_INFO.unpack(worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        )
    except OSError:  # closed
        return None


def _reader(end: socket.socket) -> BufferedReader:
    return cast(BufferedReader, end.makefile("rb", _CHUNK))


def _listening() -> socket.socket:
    """A port that no relay of this process has had: llama.cpp remembers what it found behind each."""
    while True:
        listener = socket.create_server(("127.0.0.1", 0), backlog=8)
        port = listener.getsockname()[1]
        if port not in _had:
            _had.add(port)
            return listener
        listener.close()


_had: set[int] = set()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return _CLOSED
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
