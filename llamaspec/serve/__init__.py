"""The HTTP server. `ServeSettings` is here so that parsing the command line does not import starlette."""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass, field
from typing import Literal

MAX_PARALLEL = 16  # the maximum number of sequences that a draft model evaluates at once


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The options of `llamaspec serve` that concern HTTP and the queue.

    Raises
    ------
    ValueError
        A key cannot be sent in a header, or other machines could reach the server without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8080  # 0 = any free port
    parallel: int = 4  # maximum number of sequences that run at once
    max_queue: int = 64  # maximum number of waiting sequences
    keys: tuple[str, ...] = field(default=(), repr=False)
    shared_key: str | None = field(default=None, repr=False)  # one of them, whose prefixes serve all keys
    no_auth: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names of this server, besides its addresses
    alias: str | None = None  # the model's name in responses
    request_timeout: float | None = 600.0  # seconds
    grace_seconds: float = 30.0  # that running requests have to finish when the server stops
    keep_alive_seconds: float = 4.0  # without an event before a stream gets a comment
    idle_seconds: float | None = 600.0  # after which a model that nobody uses is unloaded; None = never
    max_models: int | None = None  # loaded at once; None = as many as memory allows
    memory_bytes: int | None = None  # for all loaded models; None = no limit
    log_format: Literal["text", "json"] = "text"
    body_bytes: int = 8 << 20  # maximum size of a body without base64
    base64_bytes: int = 24 << 20  # that images and files in a body may have besides
    body_seconds: float = 30.0  # within which a body must arrive
    header_seconds: float = 10.0  # within which a header must arrive, after the connection or the last answer
    write_seconds: float = 30.0  # within which a client must take a part of its answer
    max_connections: int = 1024  # above it, a new connection takes the place of the one that is idle longest

    def __post_init__(self) -> None:
        if not all(key.isascii() and key.isprintable() and key.strip() for key in self.keys):
            raise ValueError("an API key must be printable ASCII and not empty")
        if not self.is_local and not self.keys and not self.no_auth:
            raise ValueError(
                f"--host {self.host} is open to other machines; give --api-key, or --no-auth to allow that"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        address = address_of(self.host)
        return self.host == "localhost" if address is None else address.is_loopback

    def knows_host(self, name: str) -> bool:
        """Whether a request may name this host: an address, or a name of this server.

        An address is always right: only a name can resolve to this machine for the web page of a stranger.
        """
        is_own = _plain(name) in map(_plain, ("localhost", self.host))
        return is_own or self.is_allowed_host(name) or address_of(name.strip("[]")) is not None

    def is_allowed_host(self, name: str) -> bool:
        """Whether this is one of the names of the server besides its addresses, such as a proxy's."""
        return _plain(name) in map(_plain, self.allowed_hosts)

    def knows_key(self, given: str) -> bool:
        """Whether a key is valid. Takes the same time however many characters are right."""
        return sum(secrets.compare_digest(given.encode(), key.encode()) for key in self.keys) > 0


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address that is written as a host; None if the host is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _plain(name: str) -> str:
    """Return a host name for comparison: without case and final dot."""
    return name.lower().removesuffix(".")
