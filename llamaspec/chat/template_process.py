"""The process that renders chat templates: begun when first needed, and again after a template killed it.

One for the whole program, a request at a time: a usual one takes a millisecond. What a template does there
ends with that process at worst, so whatever it tries becomes one line (`chat/template_worker.py`).
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamaspec.chat import template_worker

_COMMAND = (sys.executable, "-I", "-S")  # begins faster without what the environment adds
_NEEDED = ("jinja2", "markupsafe")


class RenderError(Exception):
    """A template cannot be compiled or rendered; the message is one line of the template's making."""


class TemplateProcess:
    """Compiles and renders templates elsewhere; from any thread.

    Parameters
    ----------
    cpu_seconds : float
        What one request may compute; counted while it computes, so a busy machine makes no difference.
    """

    def __init__(self, cpu_seconds: float = 2.0) -> None:
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()

    def check(self, source: str) -> None:
        """Compile a template.

        Raises
        ------
        RenderError
            It is not valid.
        """
        self._ask({"source": source})

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Render a template; the variables are what JSON can say.

        Raises
        ------
        RenderError
            It refuses, fails, or takes more time or memory than it may.
        """
        return self._ask({"source": source, "variables": variables})

    def close(self) -> None:
        """End the process; the next request begins another."""
        with self._lock:
            self._end()

    def _ask(self, request: dict[str, Any]) -> str:
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            process = self._running()
            try:
                answer = self._exchange(process, line)
            except BaseException:  # Ctrl-C: the answer to this request must not become that to the next
                self._end()
                raise
            if not answer:
                process.wait()
                self._end()
                raise RenderError(self._cause_of_death(process.returncode))
            found: dict[str, str] = json.loads(answer)
            if "fatal" in found:
                self._end()
        if "text" in found:
            return found["text"]
        raise RenderError(found.get("failure") or found["fatal"])

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        answer = process.stdout.readline()
        return answer if answer.endswith(b"\n") else b""

    def _cause_of_death(self, code: int) -> str:
        if code == -signal.SIGPROF:
            return f"it computes for more than {self._cpu_seconds:g} seconds"
        return "it crashes what renders it"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and (self._process.poll() is not None or self._pid != os.getpid()):
            self._end()
        if self._process is None:
            self._pid = os.getpid()
            self._process = subprocess.Popen(
                [*_COMMAND, template_worker.__file__, str(self._cpu_seconds), *map(_folder_of, _NEEDED)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at a terminal is for this process
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._pid == os.getpid():
            process.kill()
            process.wait()
        else:
            process.returncode = 0  # after a fork it is the parent's
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was not sent yet cannot be
                assert pipe is not None
                pipe.close()


def _folder_of(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parents[1])


PROCESS = TemplateProcess()
atexit.register(PROCESS.close)
