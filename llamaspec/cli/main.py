"""The `llamaspec` command: its subcommands, and the one place that turns errors into messages."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, cast

import click

from llamaspec import __version__
from llamaspec.cli.signals import EXIT_INTERRUPTED, interrupts_end_the_process
from llamaspec.errors import LlamaspecError, printable

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERNAL = 70
_LATER_SECONDS = 0.01  # until an interrupt is raised again
_WIDEST_HELP = 1000  # columns; help wraps at the terminal's width if that is less

# The module of each command, imported on first use, and the first line of its help.
SUBCOMMANDS = {
    "audit": ("measure", "Check that draft tokens do not change the text."),
    "bench": ("bench", "Measure whole requests, with drafts and without."),
    "chat": ("chat", "Chat with a model."),
    "compare": ("measure", "Compare the target alone, the draft alone and both together."),
    "doctor": ("doctor", "Check this machine and the models, and suggest fixes."),
    "embed": ("embed", "Write the vector of each TEXT as a line of JSON."),
    "generate": ("generate", "Continue PROMPT."),
    "models": ("models", "List, fetch and name models and pairs."),
    "probe": (
        "measure",
        "Measure the cost of evaluating several tokens at once, and store it.",
    ),
    "pull": ("models", "Fetch models and their drafts."),
    "run": ("chat", "Chat with a model or pair by name, fetching it if needed."),
    "serve": ("serve", "Serve OpenAI-, Anthropic- and Ollama-compatible APIs."),
    "worker": (
        "serve",
        "Compute layers of a target for llamaspec on another machine.",
    ),
}

# Ollama's names of subcommands of `models`; the help does not list them.
ALIASES = {"list": "list", "ls": "list", "show": "show", "rm": "remove"}


class _Commands(click.Group):
    def __init__(self, **settings: Any) -> None:
        names = {name: click.Command(name, short_help=text) for name, (_, text) in SUBCOMMANDS.items()}
        super().__init__(**settings, commands=names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command and return the command."""
        if cmd_name in ALIASES:
            return cast(click.Group, self.get_command(ctx, "models")).get_command(ctx, ALIASES[cmd_name])
        if cmd_name == "ps":
            raise click.UsageError(
                "ask the server which models are loaded: curl http://HOST:PORT/api/ps", ctx
            )
        if cmd_name not in SUBCOMMANDS:
            return super().get_command(ctx, cmd_name)
        with interrupts_end_the_process():
            module = import_module(f"llamaspec.cli.{SUBCOMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in SUBCOMMANDS.items()])

    def main(self, *args: Any, **extra: Any) -> Any:
        _replace_closed_streams()
        sys.unraisablehook = _keep_interrupts(sys.unraisablehook)
        try:
            return super().main(*args, **{**extra, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.message)
        except click.ClickException as error:
            message = error.format_message().replace("\n", " ").rstrip(".")
            context = error.ctx if isinstance(error, click.UsageError) else None
            command = "llamaspec" if context is None else context.command_path
            _fail(f"{message}; see `{command} -h`", EXIT_USAGE)
        except LlamaspecError as error:
            from llamaspec.cli.output import message_of

            _fail(message_of(error))
        except OSError as error:  # a full disk or a closed terminal; click handles closed pipes
            place = "where the output goes" if error.filename is None else os.fsdecode(error.filename)
            _fail(f"{error.strerror or error}; check {place}")
        except MemoryError:
            _fail("no memory left; use a smaller --n-ctx or a smaller model")
        except click.Abort:  # Ctrl-C; click has ended the line
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:  # noqa: BLE001 - anything else is a bug
            if os.environ.get("LLAMASPEC_DEBUG"):
                traceback.print_exc()
            fault = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            _fail(f"internal error: {fault}; please report it, LLAMASPEC_DEBUG=1 shows where", EXIT_INTERNAL)


def _replace_closed_streams() -> None:
    """Replace closed standard streams with the null device, so that no other file takes their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - it stays open


def _keep_interrupts(usual: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Raise Ctrl-C again a little later if it arrives where Python cannot raise it.

    In a callback of llama.cpp or a destructor, Python would print it and continue.
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
    click.echo(f"llamaspec: {printable(message)}", err=True)
    sys.exit(code)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST_HELP},
)
@click.version_option(__version__)
def main() -> None:
    """Make a large GGUF model answer faster without changing what it says.

    A small draft model proposes the next tokens, and the large target model verifies them all at once.

    \b
    llamaspec generate "def fibonacci(n):"              the embedded pair
    llamaspec generate --target big.gguf --draft small.gguf -p "Once upon a time"
    llamaspec compare --target big.gguf --draft small.gguf
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
