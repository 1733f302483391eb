"""Renders chat templates, which are programs of strangers, in a process of its own.

The one idea: Jinja's sandbox keeps a template from reaching anything, and the operating system bounds its
time and memory, whatever it does with them. So this is run as a script (`chat/template_process.py`), reads
requests as lines of JSON and answers with lines; it imports nothing of llamaspec. The environment is that of
Hugging Face's transformers, for which templates are written. tests/chat/test_hostile_templates.py attacks it.
"""

from __future__ import annotations

import functools
import json
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

MEMORY_BYTES = 1 << 30  # of the process
MAX_CHARACTERS = 1 << 24  # of a rendered text
_LONGEST_REASON = 500


def main(cpu_seconds: str, *paths: str) -> None:
    """Answer requests until there are no more, with modules from these folders."""
    sys.path[:0] = paths
    _limit_memory()
    _environment()  # imports Jinja, which is no template's affair
    serve(sys.stdin.buffer, sys.stdout.buffer, float(cpu_seconds))


def serve(requests: BinaryIO, answers: BinaryIO, cpu_seconds: float) -> None:
    """Answer each line of JSON with another, or end where one takes longer."""
    import signal

    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # then the process ends, also in the middle of C
        try:
            answer = json.dumps(respond(json.loads(line)))
        except MemoryError:
            answer = json.dumps({"fatal": "it needs too much memory"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer.encode() + b"\n")
        answers.flush()


def respond(request: dict[str, Any]) -> dict[str, str]:
    """Compile a template, {"source"}, or render it, {"source", "variables"}.

    Returns
    -------
    dict
        {"text"}, or {"failure"}: why not, in one line. After {"fatal"} nothing else should be asked.
    """
    import jinja2

    # What a template can raise: its own refusals, Jinja's errors, and Python's in the expressions it contains
    # or in the code that Jinja makes of it.
    failures = (
        jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
        SyntaxError,
        RecursionError, AssertionError, StopIteration, OSError,
    )  # fmt: skip
    try:
        template = _compile(request["source"])
        if "variables" not in request:
            return {"text": ""}
        # In pieces, so that a text without end stops at the limit and not at the memory's.
        pieces: list[str] = []
        n_characters = 0
        for piece in template.generate(
            **request["variables"],
            raise_exception=_refuse,
            strftime_now=lambda form: datetime.now().strftime(form),
        ):
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
        """`{% generation %}` marks the assistant's words for training; here it only passes them through."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja wants it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            """The statements between the tags, as if these were not there."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes for HTML
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(reason: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(reason)


def _line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    reason = " ".join(str(error)[: 4 * _LONGEST_REASON].split())[:_LONGEST_REASON]
    return reason.rstrip(".") or type(error).__name__


def _limit_memory() -> None:
    import resource  # not on every platform

    _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (OSError, ValueError):  # macOS has no such limit
        return


if __name__ == "__main__":
    main(*sys.argv[1:])
