"""The log of the server: one line for each event, as text or as JSON."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from starlette.types import Scope

from llamaspec.errors import LlamaspecError, printable
from llamaspec.measure.verdict import gain_in_words
from llamaspec.serve import address_of
from llamaspec.serve.http_errors import RequestError, as_request_error

MODEL = "llamaspec.model"  # key of a request's scope: the name of its model
WORK = "llamaspec.work"  # key of a request's scope: a function that returns figures for the log
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNKNOWN = "unknown"  # in place of a method, path or address from the client, which may contain its key
Write = Callable[[str], object]


class ServerLog:
    """Writes lines to `write`. They never contain text from clients."""

    def __init__(self, write: Write, form: Literal["text", "json"] = "text") -> None:
        self._write, self._form = write, form

    def line(self, message: str, fields: Mapping[str, Any] | None = None) -> None:
        """Write one line, whatever the message contains.

        In a JSON log the line has the time and `fields`; without fields, the message.
        """
        line = printable(message)
        if self._form == "json":
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            line = json.dumps({"time": now, **({"message": line} if fields is None else fields)})
        with suppress(OSError, ValueError):  # a log that nobody can read any more ends no request
            self._write(line)

    def fault(self, error: Exception) -> None:
        """Log an error that is the server's own, in one line; for a bug, with its place in the code."""
        is_own = as_request_error(error).status == HTTPStatus.INTERNAL_SERVER_ERROR
        if not is_own or isinstance(error, RequestError):
            return
        if isinstance(error, LlamaspecError):
            self.line(f"error: {error}")
            return
        # The message may contain text from the client.
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.name}, {Path(place.filename).name} line {place.lineno}"
        self.line(f"internal error: {type(error).__name__} in {where}; please report it")


def response_line(
    scope: Scope, status: int, seconds: float, known_paths: Set[str]
) -> tuple[str, dict[str, Any]]:
    """Return the log line of a response as text, and as fields for a JSON log."""
    host = str((scope.get("client") or ("-",))[0]).partition("%")[0]  # "%" begins text after an address
    client = host if address_of(host) is not None else UNKNOWN
    method = scope["method"] if scope["method"] in METHODS else UNKNOWN
    path = scope["path"] if scope["path"] in known_paths else UNKNOWN
    text = f"{client} {method} {path} {status} {seconds:.3f} s"
    fields = {"client": client, "method": method, "path": path, "status": status}
    fields["seconds"] = round(seconds, 6)
    if MODEL in scope:
        text, fields = f"{text} {scope[MODEL]}", fields | {"model": scope[MODEL]}
    if WORK in scope:
        work = scope.pop(WORK)()  # a connection that stays open keeps its latest scope, and so the model
        text, fields = f"{text}: {_in_words(work)}", fields | work
    return text, fields


def _in_words(work: Mapping[str, Any]) -> str:
    """Return the work of a request as text."""
    if "texts" in work:
        end = ", cancelled" if work["cancelled"] else ""
        n = work["texts"]
        return f"{n} text{'s' if n != 1 else ''}, {work['prompt_tokens']} tokens{end}"
    parts = [f"{work['prompt_tokens']} prompt tokens ({work['cached_tokens']} cached)"]
    parts.append(f"{work['generated_tokens']} generated")
    if (speed := work["tokens_per_second"]) is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if (speedup := work["speedup_estimate"]) is not None:
        parts.append(gain_in_words(speedup, digits=2))
    if (fault := work["draft_fault"]) is not None:
        parts.append(f"the draft model failed and is no longer used ({fault})")
    if work["cancelled"] or work["failed"]:
        parts.append("cancelled" if work["cancelled"] else "ended by an error")
    return ", ".join(parts)
