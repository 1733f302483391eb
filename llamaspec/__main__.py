"""The `llamaspec` command and `python -m llamaspec`. Ctrl-C ends it at any moment without a traceback."""

import os

try:
    from llamaspec.cli.signals import (
        EXIT_INTERRUPTED,
        end_the_process_on_interrupt,
        leave_the_terminal_as_found,
        let_interrupts_raise,
    )

    end_the_process_on_interrupt()
except KeyboardInterrupt:
    os._exit(130)  # at once: a second one would find Python cleaning up


def main() -> None:
    """Run the command line."""
    try:
        try:
            leave_the_terminal_as_found()
            from llamaspec.cli.main import main as commands

            let_interrupts_raise()
            commands()
        finally:
            end_the_process_on_interrupt()
    except KeyboardInterrupt:  # between two handlers
        os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
