"""`llamaspec worker`: lend this machine's devices to a target on another machine."""

from __future__ import annotations

from pathlib import Path

import click

from llamaspec.cli.option_groups import Command, Decorator
from llamaspec.cli.parameters import DEVICE_NAMES
from llamaspec.cli.terminal import say
from llamaspec.errors import WorkerError
from llamaspec.files import cache_folder
from llamaspec.llama.devices import find_devices
from llamaspec.llama.rpc import PORT, serve_worker

_OPTIONS: tuple[Decorator, ...] = (
    click.option("--host", default="127.0.0.1", show_default=True,
                 help="Address of this machine to listen on."),
    click.option("--port", type=click.IntRange(1, 65535), default=PORT, show_default=True, help="Port."),
    click.option("--threads", type=click.IntRange(1, 512),
                 help="Threads of a CPU; default: its physical cores."),
    click.option("--device", type=DEVICE_NAMES,
                 help="What to compute on, names with commas between them; default: all GPUs, else the CPU."),
    click.option("--cache", is_flag=True,
                 help="Keep weights in the cache folder, so that a client sends them once."),
)  # fmt: skip


def _with_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(
    epilog="""\b
Examples:
  llamaspec worker --host 10.0.0.7                       on the machine that computes
  llamaspec generate --target big.gguf --draft small.gguf --rpc 10.0.0.7:50052 "Once"
""",
)
@_with_options
def worker(host: str, port: int, threads: int | None, device: tuple[str, ...] | None, *, cache: bool) -> None:
    """Compute layers for a target on another machine, given there as --rpc HOST:PORT.

    There is no password and no encryption: whoever reaches the port can use this machine and read what is
    computed. Listen on private networks only. One client at a time.
    """
    found = find_devices()
    if device is None:
        device = tuple(each.name for each in found if each.is_gpu) or ("CPU",)
    unknown = [name for name in device if name not in {each.name for each in found}]
    if unknown or not device:
        known = ", ".join(each.name for each in found)
        raise click.UsageError(f"no device {', '.join(unknown) or 'given'}; there is {known}")
    folder = _folder() if cache else None
    told = (
        f"a worker on {host}:{port}, computing on {', '.join(device)}; whoever reaches it can use it: "
        f"private networks only; Ctrl-C ends it"
    )
    serve_worker(
        host, port, threads, [each for each in found if each.name in device], folder, lambda: say(told)
    )


def _folder() -> Path:
    folder = cache_folder() / "worker"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise WorkerError(f"cannot make {folder}: {error.strerror}; set LLAMASPEC_CACHE elsewhere") from error
    return folder
