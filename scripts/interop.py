"""Install the clients that people have, drive each against `llamaspec serve`, and say which of them work.

\b
    python scripts/interop.py                              # the embedded pair; what agents are told is given
    python scripts/interop.py --only codex --only aider
    python scripts/interop.py --target coder.gguf --draft small.gguf     # a real model writes all answers

Everything is on this machine's loopback and bounded in time. Clients are installed once, in the versions
named here, into `--folder`; each works in an empty folder with an empty home. Without a target the text of an
agent's answers is given beforehand, and all else is real: the client, its requests, how they are read and
checked, how calls are parsed and sent, what the client does with them. With a target, agents run what the
model writes: do that only where nothing can be lost.

A check is "ok" where the answer or the effect on disk is right, "answered" where all requests had status 200
but a real model did not do its task, else "failed". A table goes to stderr; with `--json` the last line of
stdout is one JSON object. The exit code is 1 where something failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import httpx
from rich.console import Console
from rich.table import Table

from interop_parts.agents import aider, codex, continue_cli, mini_swe_agent, opencode
from interop_parts.checks import ASKED, SCHEMA
from interop_parts.packages import NotInstalledError, Package, install
from interop_parts.recorded import recorded
from interop_parts.relay import Relay
from interop_parts.servers import Script, real_server, scripted_server
from interop_parts.trial import MODEL, Result, Trial

ROOT = Path(__file__).resolve().parents[1]
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
Drive = Callable[[Trial], Iterator[Result]]


@dataclass(frozen=True)
class Client:
    """A client: what is installed, and what drives it."""

    package: Package | None
    drive: Drive


def sdk(module: str) -> Drive:
    """The checks of a module in `interop_parts/`, each of which says what went wrong."""

    def drive(trial: Trial) -> Iterator[Result]:
        trial.fresh()
        trial.begin(None)
        code, output = trial.run("python", "-m", f"interop_parts.{module}", trial.relay.url)
        told = [json.loads(line) for line in output.splitlines() if line.startswith('{"check"')]
        for each in told:
            yield Result(each["check"], "failed" if each["wrong"] else "ok", each["wrong"] or "")
        if code or not told:
            yield Result("to the end", "failed", f"exit code {code}: {output.strip()[-200:]}")

    return drive


def llm(trial: Trial) -> Iterator[Result]:
    """simonw's `llm`, told of the server in its own file of models."""
    home = trial.fresh()
    model = {"model_id": "llamaspec", "model_name": MODEL, "api_base": trial.api, "supports_schema": True}
    (home / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    ask = ["llm", "-m", "llamaspec", "--no-log", "-o", "max_tokens", "200"]
    shaped = ["--no-stream", "--schema", json.dumps(SCHEMA), ASKED]
    env = {"LLM_USER_PATH": str(home)}
    for check, more, answer, is_right in (
        ("stream", ["Say hello."], "Hello.", bool),
        ("whole", ["--no-stream", "Say hello."], "Hello.", bool),
        ("schema", shaped, '{"a": 20, "b": 22}', lambda said: '"a"' in said),
    ):
        yield trial.task(check, is_right, [*ask, *more], answers=[answer], with_tools=False, env=env)


def claude_code(trial: Trial) -> Iterator[Result]:
    """Requests written from its documentation; nothing is installed."""
    trial.begin(None)
    with httpx.Client(base_url=trial.relay.url, timeout=trial.seconds, trust_env=False) as http:
        for request in recorded("claude-code"):
            answer = http.post(request.path, json=request.body, headers=request.headers)
            is_fine = answer.status_code == httpx.codes.OK and "event: error" not in answer.text
            yield Result(request.about, "ok" if is_fine else "failed", "" if is_fine else answer.text[:200])


CLIENTS = {
    "openai": Client(Package("pip", "openai", "3.57.0"), sdk("openai_checks")),
    "anthropic": Client(Package("pip", "anthropic", "2.14.0"), sdk("anthropic_checks")),
    "langchain": Client(Package("pip", "langchain-openai", "1.7.4"), sdk("langchain_checks")),
    "llm": Client(Package("pip", "llm", "0.36"), llm),
    "claude-code": Client(None, claude_code),
    "aider": Client(Package("pip", "aider-chat", "0.86.2", newest_python=(3, 12)), aider),
    "mini-swe-agent": Client(Package("pip", "mini-swe-agent", "2.4.6"), mini_swe_agent),
    "codex": Client(Package("npm", "@openai/codex", "0.169.0"), codex),
    "opencode": Client(Package("npm", "opencode-ai", "1.18.33"), opencode),
    "continue": Client(Package("npm", "@continuedev/cli", "1.5.47"), continue_cli),
}


def tried(
    name: str, relay: Relay, script: Script | None, folder: Path, seconds: float, record: Path | None
) -> list[Result]:
    """What came of one client."""
    client = CLIENTS[name]
    try:
        installed = folder if client.package is None else install(client.package, folder)
    except NotInstalledError as error:
        return [Result("install", "skipped", str(error))]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="interop-", ignore_cleanup_errors=True) as work:
        for result in client.drive(Trial(relay, script, installed, Path(work), seconds)):
            if record is not None:
                told = [
                    {"path": each.path, "body": json.loads(each.request or b"null")}
                    for each in relay.exchanges
                ]
                (record / f"{name}, {result.check}.json").write_text(json.dumps(told, indent=1))
            print(f"{name}: {result.check}: {result.state} {result.reason}", file=sys.stderr)
            results.append(result)
    return results


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
    found: dict[str, list[Result]] = {}
    script = Script()
    with scripted_server(script) if target is None else real_server(target, draft, n_ctx) as url:
        relay = Relay(url)
        for name in names or CLIENTS:
            found[name] = tried(name, relay, None if target else script, folder.resolve(), seconds, record)
    table = Table("client", "version", "checked", "result", "reason")
    for name, results in found.items():
        package = CLIENTS[name].package
        for result in results:
            version = package.version if package else "recorded"
            table.add_row(name, version, result.check, result.state, result.reason)
    Console(stderr=True).print(table)
    if as_json:
        print(json.dumps({name: [asdict(result) for result in results] for name, results in found.items()}))
    sys.exit(any(result.state == "failed" for results in found.values() for result in results))


if __name__ == "__main__":
    main()
