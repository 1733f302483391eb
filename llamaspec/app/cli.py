"""The `llamaspec` command: its subcommands, and the one place where an error becomes one line."""

from __future__ import annotations

import sys
from typing import Any

import click

from llamaspec.app.compare import compare
from llamaspec.app.generate import generate
from llamaspec.errors import LlamaspecError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (LlamaspecError, ValueError) as error:
            click.echo(f"llamaspec: {error}", err=True)
        except MemoryError:
            click.echo("llamaspec: no memory left; use a smaller --n-ctx or a smaller model", err=True)
        except KeyboardInterrupt:
            click.echo("", err=True)
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_ERROR)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
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
main.add_command(compare)
