"""The `llamaspec` command and `python -m llamaspec`. Ctrl-C ends it at any moment without a traceback."""

try:
    from llamaspec.cli.signals import (
        EXIT_INTERRUPTED,
        end_the_process_on_interrupt,
        interrupts_end_the_process,
        leave_the_terminal_as_found,
    )
except KeyboardInterrupt:
    raise SystemExit(130) from None


def main() -> None:
    """Run the command line."""
    try:
        with interrupts_end_the_process():
            leave_the_terminal_as_found()
            from llamaspec.cli.main import main as commands
        commands()
    except KeyboardInterrupt:  # between two handlers
        end_the_process_on_interrupt()  # at a second one
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        end_the_process_on_interrupt()


if __name__ == "__main__":
    main()
