"""Install coding agents, run each against the server, and report which of them work.

\b
    python scripts/interop.py
    python scripts/interop.py --only codex --only aider

The script installs each agent once, in the version below, into `--folder`, and runs it in an empty folder
with an empty home. The agent talks to a server on this machine, and every check has a time limit. Only the
model is played: the text of its answers is fixed. The rest is real: the agent, its requests, the server's
checks, and the parsing of tool calls.

A check is "ok" if the agent had the right effect on disk, else "failed". A table goes to stderr; with
`--json`, one JSON object goes to stdout. The exit code is 1 if a check failed. `make test` runs the
packages of OpenAI, Anthropic and Ollama, and `llm`. Here, these packages, if they are installed, and the
requests of Open WebUI list, load, use and unload the models of a server with two models.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from interop_parts import several_models
from interop_parts.agents import aider, codex, continue_cli, mini_swe_agent, opencode
from interop_parts.server import Exchange, Script, scripted_server
from interop_parts.several_models import SEVERAL, server_of_two
from interop_parts.trial import Result, Trial

ROOT = Path(__file__).resolve().parents[1]
INSTALL_SECONDS = 600


class Package(NamedTuple):
    """A package of a registry."""

    kind: Literal["pip", "npm"]
    name: str
    version: str
    newest_python: tuple[int, int] | None = None

    @property
    def spec(self) -> str:
        """Return the requirement for pip or npm."""
        return f"{self.name}{'==' if self.kind == 'pip' else '@'}{self.version}"


class NotInstalledError(Exception):
    """An agent cannot be installed on this machine."""


def install(package: Package, folder: Path) -> Path:
    """Install an agent if it is not installed yet; return the folder whose `bin` has its programs."""
    into = folder / package.spec.replace("/", "-")
    done = into / ".installed"
    if done.exists():
        return into
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    if package.kind == "npm":
        if shutil.which("npm") is None:
            raise NotInstalledError("npm is missing; install Node.js")
        _install("npm", "install", "--no-audit", "--no-fund", "--prefix", into, package.spec)
        (into / "bin").symlink_to(into / "node_modules" / ".bin")
    else:
        python = sys.executable
        if package.newest_python is not None and sys.version_info[:2] > package.newest_python:
            name = ".".join(map(str, package.newest_python))
            python = shutil.which(f"python{name}") or ""
            if not python:
                raise NotInstalledError(f"it needs Python {name} or older")
        _install(python, "-m", "venv", into)
        _install(into / "bin" / "pip", "install", "--disable-pip-version-check", package.spec)
    done.touch()
    return into


def _install(*command: str | Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"{Path(command[0]).name} took more than {INSTALL_SECONDS} s") from error
    if done.returncode:
        raise NotInstalledError(done.stderr.strip()[-200:])


class Client(NamedTuple):
    """An agent: its package, and the function that runs its checks."""

    package: Package
    drive: Callable[[Trial], Iterator[Result]]


CLIENTS = {
    "aider": Client(Package("pip", "aider-chat", "0.86.2", newest_python=(3, 12)), aider),
    "mini-swe-agent": Client(Package("pip", "mini-swe-agent", "2.4.6"), mini_swe_agent),
    "codex": Client(Package("npm", "@openai/codex", "0.169.0"), codex),
    "opencode": Client(Package("npm", "opencode-ai", "1.18.33"), opencode),
    "continue": Client(Package("npm", "@continuedev/cli", "1.5.47"), continue_cli),
}


def results_of(client: Client, trial: Trial) -> Iterator[Result]:
    """Install an agent and yield the result of each check as it ends."""
    try:
        trial.installed = install(client.package, trial.installed)
    except NotInstalledError as error:
        yield Result("install", "skipped", str(error))
        return
    yield from client.drive(trial)


@click.command(epilog=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only",
    "names",
    type=click.Choice([*CLIENTS, *SEVERAL]),
    multiple=True,
    help="Run only this client. May be repeated.",
)
@click.option("--folder", type=Path, default=ROOT / "build" / "interop", help="Where agents are installed.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=240.0,
    show_default=True,
    help="Time limit of one check.",
)
@click.option(
    "--record",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Write the agents' requests to this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(
    names: Sequence[str],
    folder: Path,
    seconds: float,
    record: Path | None,
    as_json: bool,
) -> None:
    script, exchanges, found = Script(), list[Exchange](), dict[str, list[Result]]()
    table = Table("agent", "version", "check", "result", "details")
    agents = [name for name in names or CLIENTS if name in CLIENTS]
    with (
        scripted_server(script, exchanges) as url,
        tempfile.TemporaryDirectory(prefix="interop-", ignore_cleanup_errors=True) as work,
    ):
        for name in agents:
            client, found[name] = CLIENTS[name], []
            trial = Trial(url, exchanges, script, folder.resolve(), Path(work), seconds)
            for result in results_of(client, trial):
                print(f"{name}: {result.check}: {result.state} {result.reason}", file=sys.stderr)
                found[name].append(result)
                table.add_row(name, client.package.version, result.check, result.state, result.reason)
                if record is not None:
                    requests = [
                        {"path": each.path, "body": json.loads(each.request or b"null")} for each in exchanges
                    ]
                    (record / f"{name}, {result.check}.json").write_text(json.dumps(requests, indent=1))
    with server_of_two() as url:
        for name in (name for name in names or SEVERAL if name in SEVERAL):
            found[name] = [*several_models.results_of(name, url)]
            for result in found[name]:
                table.add_row(name, "", result.check, result.state, result.reason)
    Console(stderr=True).print(table)
    if as_json:
        print(json.dumps({name: [asdict(result) for result in results] for name, results in found.items()}))
    sys.exit(any(result.state == "failed" for results in found.values() for result in results))


if __name__ == "__main__":
    main()
