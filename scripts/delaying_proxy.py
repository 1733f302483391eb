"""Stands before a TCP server and delays everything in both directions, as a distance would.

    python scripts/delaying_proxy.py 127.0.0.1:50052 --delay 10     # prints the port that it listens on

The delay is that of one direction. Bytes on their way do not wait for each other: throughput stays.
`tc qdisc add dev ... netem delay` does the same, as root, in a kernel that has it (CONFIG_NET_SCH_NETEM);
where it is missing, tc says "Specified qdisc kind is unknown".
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import click

from help_text import help_text


@click.command(epilog=help_text(__doc__), context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("server", metavar="HOST:PORT")
@click.option("--delay", type=float, default=10.0, show_default=True, help="Milliseconds, each way.")
def main(server: str, delay: float) -> None:
    """Pass connections on to a server, later."""
    asyncio.run(_listen(server, delay / 1e3))


async def _listen(server: str, seconds: float) -> None:
    host, _, port = server.rpartition(":")

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_delay(reader, far_writer, seconds), _delay(far_reader, writer, seconds))

    listening = await asyncio.start_server(join, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


async def _delay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Pass on what comes, each piece `seconds` after it came."""
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        data = b"?"
        while data:
            due, data = await on_the_way.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            writer.write(data)
            await writer.drain()
        writer.close()

    delivering = asyncio.create_task(deliver())
    data = b"?"
    with suppress(OSError):
        while data:
            data = await reader.read(1 << 16)
            await on_the_way.put((time.monotonic() + seconds, data))
    if data:
        await on_the_way.put((time.monotonic() + seconds, b""))
    with suppress(OSError):
        await delivering


if __name__ == "__main__":
    main()
