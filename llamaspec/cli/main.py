"""The `llamaspec` command: its subcommands, and the one place where an error becomes one line."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import click

from llamaspec.cli.audit import audit
from llamaspec.cli.chat import chat
from llamaspec.cli.compare import compare
from llamaspec.cli.doctor import doctor
from llamaspec.cli.draft import draft
from llamaspec.cli.generate import generate
from llamaspec.cli.messages import message_of
from llamaspec.cli.models import models
from llamaspec.cli.probe import probe
from llamaspec.cli.serve import serve
from llamaspec.cli.terminal import say
from llamaspec.errors import LlamaspecError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
_LATER_SECONDS = 0.01


class _Commands(click.Group):
    def main(self, *args: Any, **extra: Any) -> Any:
        sys.unraisablehook = _keep_interrupts(sys.unraisablehook)
        try:
            return super().main(*args, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            message = error.format_message().replace("\n", " ").rstrip(".")
            command = (
                error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "llamaspec"
            )
            _fail(f"{message}; {command} -h shows what is possible", EXIT_USAGE)
        except LlamaspecError as error:
            _fail(message_of(error))
        except OSError as error:  # a full disk, a terminal that went away; closed pipes are click's
            _fail(f"{error.strerror or error}; check where the output goes")
        except MemoryError:
            _fail("no memory left; use a smaller --n-ctx or a smaller model")
        except click.Abort:  # what click makes of Ctrl-C, after it has ended the line
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:  # noqa: BLE001 - whatever is left is a bug, and is said to be one
            if os.environ.get("LLAMASPEC_DEBUG"):
                traceback.print_exc()
            told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            _fail(f"internal error: {told}; please report it, LLAMASPEC_DEBUG=1 shows where", EXIT_INTERNAL)


def _keep_interrupts(usual: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Let Ctrl-C be met a little later where it comes while nobody can be told.

    Such as in a callback of llama.cpp, or while something is freed: Python would print it and go on.
    """

    def hook(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            later = threading.Timer(_LATER_SECONDS, _thread.interrupt_main)
            later.daemon = True
            later.start()
        else:
            usual(unraisable)

    return hook


def _fail(message: str, code: int = EXIT_ERROR) -> NoReturn:
    say(message)
    sys.exit(code)


@click.group(cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llamaspec")
def main() -> None:
    """Make a large GGUF model answer faster without changing what it says.

    A small draft model proposes the next tokens, the large target model verifies all of them at once.

    \b
    llamaspec generate "def fibonacci(n):"              the embedded pair
    llamaspec generate --target big.gguf --draft small.gguf -p "Once upon a time"
    llamaspec compare --target big.gguf --draft small.gguf
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


main.add_command(generate)
main.add_command(chat)
main.add_command(serve)
main.add_command(compare)
main.add_command(audit)
main.add_command(doctor)
main.add_command(probe)
main.add_command(models)
main.add_command(draft)
