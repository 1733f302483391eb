"""The `llamaspec` command: its subcommands, and the one place where an error becomes one line."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

from llamaspec.app.audit import audit
from llamaspec.app.chat import chat
from llamaspec.app.compare import compare
from llamaspec.app.doctor import doctor
from llamaspec.app.generate import generate
from llamaspec.app.models import models
from llamaspec.app.probe import probe
from llamaspec.errors import LlamaspecError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class _Commands(click.Group):
    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            message = error.format_message().replace("\n", " ").rstrip(".")
            command = (
                error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "llamaspec"
            )
            _fail(f"{message}; {command} -h shows what is possible", EXIT_USAGE)
        except (LlamaspecError, ValueError) as error:
            _fail(str(error))
        except OSError as error:  # a full disk, a terminal that went away; closed pipes are click's
            _fail(f"{error.strerror or error}; check where the output goes")
        except MemoryError:
            _fail("no memory left; use a smaller --n-ctx or a smaller model")
        except click.Abort:  # what click makes of Ctrl-C, after it has ended the line
            sys.exit(EXIT_INTERRUPTED)


def _fail(message: str, code: int = EXIT_ERROR) -> NoReturn:
    click.echo(f"llamaspec: {message}", err=True)
    sys.exit(code)


@click.group(cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llamaspec")
def main() -> None:
    """Make a large GGUF model answer faster without changing what it says.

    A small draft model guesses the next tokens, the large target model judges all guesses at once.

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
main.add_command(compare)
main.add_command(audit)
main.add_command(doctor)
main.add_command(probe)
main.add_command(models)
