"""The log of the server: one line for each event, as text or as JSON."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from llamaspec.errors import LlamaspecError, printable
from llamaspec.serve.errors import RequestError, as_request_error

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
