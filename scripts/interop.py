"""Install agents and clients that people have, drive each against the server, and say which of them work.

\b
    python scripts/interop.py                              # the embedded pair; what agents are told is given
    python scripts/interop.py --only codex --only aider
    python scripts/interop.py --target coder.gguf --draft small.gguf     # a real model writes all answers

Everything is on this machine's loopback and bounded in time. Clients are installed once, in the versions
named here, into `--folder`; each works in an empty folder with an empty home. Without a target the text of an
agent's answers is given beforehand, and all else is real: the client, its requests, how they are read and
checked, how calls are parsed and sent, what the client does with them. With a target, agents run what the
model writes: do that only where nothing can be lost.

A check is "ok" if the answer or the effect on disk is right, "answered" if all requests had status 200
but a real model did not do its task, else "failed". A table goes to stderr; with `--json` the last line of
stdout is one JSON object. The exit code is 1 if something failed. `make test` runs the SDKs and `llm`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from interop_parts.agents import aider, codex, continue_cli, mini_swe_agent, opencode
from interop_parts.packages import NotInstalledError, Package, install
from interop_parts.server import Exchange, Script, scripted_server
from interop_parts.trial import Result, Trial

ROOT = Path(__file__).resolve().parents[1]
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Client(NamedTuple):
    """A client: what is installed, and what drives it."""

    package: Package
    drive: Callable[[Trial], Iterator[Result]]


def langchain(trial: Trial) -> Iterator[Result]:
    """Each check says itself what went wrong."""
    trial.begin(None)
    checks = Path(__file__).with_name("interop_parts") / "langchain_checks.py"
    code, output = trial.run("python", checks, trial.url)
    told = [json.loads(line) for line in output.splitlines() if line.startswith('{"check"')]
    for each in told:
        yield Result(each["check"], "failed" if each["wrong"] else "ok", each["wrong"])
    if code or not told:
        yield Result("to the end", "failed", f"exit code {code}: {output.strip()[-200:]}")


CLIENTS = {
    "langchain": Client(Package("pip", "langchain-openai", "1.7.4"), langchain),
    "aider": Client(Package("pip", "aider-chat", "0.86.2", newest_python=(3, 12)), aider),
    "mini-swe-agent": Client(Package("pip", "mini-swe-agent", "2.4.6"), mini_swe_agent),
    "codex": Client(Package("npm", "@openai/codex", "0.169.0"), codex),
    "opencode": Client(Package("npm", "opencode-ai", "1.18.33"), opencode),
    "continue": Client(Package("npm", "@continuedev/cli", "1.5.47"), continue_cli),
}


def results_of(client: Client, trial: Trial) -> Iterator[Result]:
    """What came of one client; a result each time it is known."""
    try:
        trial.installed = install(client.package, trial.installed)
    except NotInstalledError as error:
        yield Result("install", "skipped", str(error))
        return
    yield from client.drive(trial)


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=FILE, help="A model that follows instructions; default: the embedded pair.")
@click.option("--draft", type=FILE)
@click.option(
    "--n-ctx", type=click.IntRange(min=1024), default=24576, show_default=True, help="With --target."
)
@click.option("--only", "names", type=click.Choice(list(CLIENTS)), multiple=True, help="May be repeated.")
@click.option("--folder", type=Path, default=ROOT / "build" / "interop", help="Where clients are installed.")
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=240.0, show_default=True, help="Of one check."
)
@click.option(
    "--record", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Write requests there."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(
    target: Path | None,
    draft: Path | None,
    n_ctx: int,
    names: Sequence[str],
    folder: Path,
    seconds: float,
    record: Path | None,
    as_json: bool,
) -> None:
    script, exchanges, found = Script(), list[Exchange](), dict[str, list[Result]]()
    table = Table("client", "version", "checked", "result", "reason")
    models = {"target": target, "draft": draft, "template": None, "n_ctx": n_ctx} if target else {}
    with (
        scripted_server(script, exchanges, **models) as url,  # type: ignore[arg-type]
        tempfile.TemporaryDirectory(prefix="interop-", ignore_cleanup_errors=True) as work,
    ):
        for name in names or CLIENTS:
            client, found[name] = CLIENTS[name], []
            trial = Trial(url, exchanges, script, target is not None, folder.resolve(), Path(work), seconds)
            for result in results_of(client, trial):
                print(f"{name}: {result.check}: {result.state} {result.reason}", file=sys.stderr)
                found[name].append(result)
                table.add_row(name, client.package.version, result.check, result.state, result.reason)
                if record is not None:
                    told = [
                        {"path": each.path, "body": json.loads(each.request or b"null")} for each in exchanges
                    ]
                    (record / f"{name}, {result.check}.json").write_text(json.dumps(told, indent=1))
    Console(stderr=True).print(table)
    if as_json:
        print(json.dumps({name: [asdict(result) for result in results] for name, results in found.items()}))
    sys.exit(any(result.state == "failed" for results in found.values() for result in results))


if __name__ == "__main__":
    main()
