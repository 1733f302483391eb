"""A server on this machine with the part of the hub's protocol that downloads need. It can misbehave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

BIG, SMALL = "acme/big-GGUF/big-Q8_0.gguf", "acme/small-GGUF/small-Q8_0.gguf"
LARGE = "acme/large-GGUF/large.gguf"  # huggingface-hub writes 10 MiB at a time
LARGE_ADDRESS = "hf:acme/large-GGUF:large.gguf"
ADDRESS = "hf:acme/big-GGUF:big-Q8_0.gguf"
OWN_LIST = """
big:
  repo: acme/big-GGUF
  pattern: big-{quantization}.gguf
  default: Q8_0
  draft: small
small:
  repo: acme/small-GGUF
  default: Q8_0
  quantizations: {Q8_0: {file: small-Q8_0.gguf}}
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The files of a server, its faults, and counts of its requests."""

    files: dict[str, bytes]  # "owner/name/file" -> content
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)  # repository -> status, error code
    hashes: dict[str, str] = field(default_factory=dict)  # file -> a false hash
    sizes: dict[str, int] = field(default_factory=dict)  # file -> a false size
    drops: int = 0  # connections to cut in the middle of a file
    stalls: bool = False  # stop in the middle of a file, and keep the connection open
    ranges: list[str] = field(default_factory=list)  # requested ranges, in order
    authorizations: list[str | None] = field(default_factory=list)
    headers: dict[str, str | None] = field(default_factory=dict)  # false headers; None = no such header
    elsewhere: str = ""  # URL of the server that has the content; this server redirects to it
    elsewhere_with_content: str = ""  # the same, but only GET requests are redirected
    next_commits: list[str] = field(default_factory=list)  # false commits, one for each request
    extra_bytes: int = 0  # sent after the content
    listing: bytes = b""  # a false list of files
    listing_status: int = 200
    n_listings: int = 0  # requests for the list of files
    n_sent: int = 0  # bytes of content
    n_requests: int = 0
    commit: str = COMMIT  # of the main branch
    url: str = ""

    def tag(self, file: str) -> str:
        """Return the hash of a file that the server sends."""
        return self.hashes.get(file) or hashlib.sha256(self.files[file]).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve until the block ends."""
    end = Event()  # also of stalled transfers

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, with_content: bool) -> None:
            if self.path.startswith("/api/models/"):
                self._list(self.path.removeprefix("/api/models/"))
                return
            repo, resolves, file = self.path[1:].partition("/resolve/")
            name = f"{repo}/{file.partition('/')[2]}"  # without the branch or the commit
            if resolves:  # the library also sends other requests
                hub.n_requests += 1
                hub.authorizations.append(self.headers["Authorization"])
            if repo in hub.refusals:
                self._refuse(*hub.refusals[repo])
            elif not any(known.startswith(f"{repo}/") for known in hub.files):
                self._refuse(401, "RepoNotFound")
            elif name not in hub.files:
                self._refuse(404, "EntryNotFound")
            else:
                self._send(name, with_content)

        def _list(self, repo: str) -> None:
            named = [name.removeprefix(f"{repo}/") for name in hub.files if name.startswith(f"{repo}/")]
            listed = {"id": repo, "siblings": [{"rfilename": name} for name in named]}
            content = hub.listing or json.dumps(listed).encode()
            hub.n_listings += 1
            self.send_response(hub.listing_status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(OSError):  # the client has read enough
                self.wfile.write(content)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, name: str, with_content: bool) -> None:
            content, asked = hub.files[name], self.headers["Range"]
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if asked:
                hub.ranges.append(asked)
            if asked and start >= len(content):
                self._refuse(416, "")
                return
            elsewhere = hub.elsewhere or (hub.elsewhere_with_content if with_content else "")
            headers: dict[str, str | None] = {
                "X-Repo-Commit": hub.next_commits.pop(0) if hub.next_commits else hub.commit,
                "ETag": f'"{hub.tag(name)}"',
                "X-Linked-Etag": f'"{hub.tag(name)}"',
                "X-Linked-Size": str(hub.sizes.get(name, len(content))),
                "Content-Length": str(len(content) - start + hub.extra_bytes),
                **({"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if asked else {}),
                **({"Location": f"{elsewhere}{self.path}", "Content-Length": "0"} if elsewhere else {}),
                **hub.headers,
            }
            self.send_response(302 if elsewhere else 206 if asked else 200)
            for header, value in headers.items():
                if value is not None:
                    self.send_header(header, value)
            self.end_headers()
            if with_content and not elsewhere:
                with suppress(OSError):  # the client has left
                    self._write(content[start:])

        def _write(self, content: bytes) -> None:
            if hub.drops or hub.stalls:
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                if hub.stalls:
                    end.wait()
                hub.drops -= bool(hub.drops)
                self.close_connection = True
            else:
                n_left = hub.extra_bytes
                hub.n_sent += len(content)  # before the client can read them
                self.wfile.write(content + bytes(min(n_left, 1 << 16)))  # in one write
                for _ in range(1 << 16, n_left, 1 << 16):
                    hub.n_sent += 1 << 16
                    self.wfile.write(bytes(1 << 16))

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Ignore errors: in some tests the client leaves."""

    server = Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)  # polls often, to end soon
    thread.start()
    try:
        yield hub
    finally:
        end.set()
        server.shutdown()
        server.server_close()
        thread.join()
