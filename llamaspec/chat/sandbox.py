"""The process that renders chat templates, which are programs by strangers in model files.

Jinja's sandbox keeps a template away from files and from the interpreter, and the operating system limits the
time and memory of the process. So a template can at worst end that process. One that breaks out of Jinja's
sandbox finds no variables of the environment, and can open and write no file. This file is both sides:
imported, it starts the process on first use and exchanges lines of JSON with it; run as a script, it is the
process and imports nothing from llamaspec. Templates get the environment of Hugging Face's transformers.
tests/chat/test_hostile_templates.py attacks the process.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

MEMORY_BYTES = 1 << 30  # of the process
MAX_CHARACTERS = 1 << 24  # of a rendered text
_LONGEST_REASON = 500
_COMMAND = (sys.executable, "-I", "-S")  # without site-packages it starts faster
_NEEDED = ("jinja2", "markupsafe")
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")  # variables that Python needs to start, and the time
# Python and Jinja import modules and read files on first use. After this, the process opens no more.
_WARM_UP = "{{ strftime_now('%c %Z') }}{{ lipsum(1) }}{{ 'a' | urlize | tojson }}{{ 1 / 0 }}"


class RenderError(Exception):
    """A template cannot be compiled or rendered; the message is one line."""


class RenderTimeError(RenderError):
    """The process ended: the template takes too much time or memory."""


class TemplateProcess:
    """Compiles and renders templates in another process. Threads may share it; their requests take turns."""

    def __init__(self, cpu_seconds: float = 2.0) -> None:
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()

    def check(self, source: str) -> None:
        """Compile a template; RenderError if it is not valid."""
        self._ask({"source": source})

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Render a template; RenderError if it refuses, fails, or takes too much time or memory."""
        return self._ask({"source": source, "variables": variables})

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._end()

    def _ask(self, request: dict[str, Any]) -> str:
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            process = self._running()
            try:
                answer = self._exchange(process, line)
            except BaseException:  # after Ctrl-C the next request must not get the answer to this one
                self._end()
                raise
            if not answer:
                process.wait()
                self._end()
                raise RenderTimeError(
                    f"it runs for more than {self._cpu_seconds:g} seconds"
                    if process.returncode == -signal.SIGPROF
                    else "it crashes the renderer"
                )
            found: dict[str, str] = json.loads(answer)
            if "fatal" in found:
                self._end()
        if "text" in found:
            return found["text"]
        raise RenderError(found.get("failure") or found["fatal"])

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
        """Return the answer to a request; empty if the process died."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
        answer = process.stdout.readline()
        return answer if answer.endswith(b"\n") else b""

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and (self._process.poll() is not None or self._pid != os.getpid()):
            self._end()
        if self._process is None:
            self._pid = os.getpid()
            self._process = subprocess.Popen(
                [*_COMMAND, __file__, str(self._cpu_seconds), *map(_folder_of, _NEEDED)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                start_new_session=True,  # so that Ctrl-C at a terminal does not reach it
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
            process.returncode = 0  # after a fork the process is the parent's
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # unsent data
                assert pipe is not None
                pipe.close()


def _folder_of(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parents[1])


PROCESS = TemplateProcess()
atexit.register(PROCESS.close)

# The process itself.


def main(cpu_seconds: str, *paths: str) -> None:
    """Answer each line of JSON on stdin with a line on stdout; `paths` are folders to import from."""
    sys.path[:0] = paths
    _limit_memory()
    respond({"source": _WARM_UP, "variables": {}})  # does not count as time of a template
    _limit_files()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(cpu_seconds))  # ends the process, even inside C code
        try:
            answer = json.dumps(respond(json.loads(line)))
        except MemoryError:
            answer = json.dumps({"fatal": "it needs too much memory"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


def respond(request: dict[str, Any]) -> dict[str, str]:
    """Compile a template, {"source"}, or render it, {"source", "variables"}: {"text"} or {"failure"}."""
    import jinja2

    # A template raises its own refusals, Jinja's errors, and Python's errors in its expressions.
    failures = (
        jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
        SyntaxError, RecursionError, AssertionError, StopIteration, OSError,
    )  # fmt: skip
    try:
        template = _compile(request["source"])
        if "variables" not in request:
            return {"text": ""}
        # Rendered in pieces, so that an endless text stops at the limit before it fills the memory.
        pieces: list[str] = []
        n_characters = 0
        helpers = {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        for piece in template.generate({**request["variables"], **helpers}):
            pieces.append(piece)
            n_characters += len(piece)
            if n_characters > MAX_CHARACTERS:
                return {"failure": f"it writes more than {MAX_CHARACTERS} characters"}
        return {"text": "".join(pieces)}
    except failures as error:
        return {"failure": _line(error)}


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    return _environment().from_string(source)


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012 - Jinja requires a set

        def parse(self, parser: Parser) -> list[nodes.Node]:
            """Return the statements between the tags."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own filter escapes for HTML
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(reason: object = "", *_: object) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(str(reason) or "it gives no reason")


def _line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it recurses without end"
    reason = " ".join(str(error)[: 4 * _LONGEST_REASON].split())[:_LONGEST_REASON]
    return reason.rstrip(".") or type(error).__name__


def _limit_memory() -> None:
    import resource  # Windows has no such module

    _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    with suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _limit_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # stdin, stdout and stderr are open
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
