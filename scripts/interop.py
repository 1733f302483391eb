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
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import click
import httpx
from rich.console import Console
from rich.table import Table

from interop_parts.checks import ASKED, SCHEMA
from interop_parts.packages import NotInstalledError, Package, install
from interop_parts.recorded import recorded
from interop_parts.relay import Exchange, Relay
from interop_parts.servers import Script, call, real_server, scripted_server

ROOT = Path(__file__).resolve().parents[1]
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
TASK = "Create a file named hello.txt that contains only the word hello."
THOUGHT = "<think>\nI do it.\n</think>\n\n"
COMMAND = "echo hello > hello.txt"
MODEL = "any"
WHOLE = 'greet.py\n```\ndef greet():\n    print("hello")\n```\n'
DIFF = 'greet.py\n```\n<<<<<<< SEARCH\n    print("hi")\n=======\n    print("hello")\n>>>>>>> REPLACE\n```\n'
State = Literal["ok", "answered", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """What came of one check."""

    check: str
    state: State
    reason: str = ""


@dataclass
class Trial:
    """Where one client runs."""

    relay: Relay
    script: Script | None  # None: a real model
    installed: Path  # with the client's program
    folder: Path
    seconds: float
    exchanges: list[Exchange] = field(default_factory=list)  # of the last command

    @property
    def api(self) -> str:
        """The URL that OpenAI's clients want."""
        return f"{self.relay.url}/v1"

    def begin(self, answers: Sequence[str] | None, *, with_tools: bool = True) -> None:
        """The answers to come, where they are not a model's own."""
        if self.script is not None:
            self.script.begin(answers, with_tools=with_tools)

    def fresh(self) -> Path:
        """An empty folder to work in."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "home").mkdir(parents=True)
        work = self.folder / "work"
        work.mkdir()
        return work

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None) -> tuple[int | None, str]:
        """The exit code, None if it was too slow, and the output of a command in the folder of this trial."""
        home = str(self.folder / "home")
        variables = {
            "PATH": f"{self.installed / 'bin'}:{os.environ['PATH']}",
            "HOME": home,
            "XDG_CONFIG_HOME": home,
            "XDG_DATA_HOME": home,
            "XDG_CACHE_HOME": home,
            "XDG_STATE_HOME": home,
            "NO_PROXY": "127.0.0.1",
            "OPENAI_API_KEY": "none",
            "OPENAI_API_BASE": self.api,
            "OPENAI_BASE_URL": self.api,
            "PYTHONPATH": str(ROOT / "scripts"),
            "TERM": "dumb",
            "CI": "1",
            **(env or {}),
        }
        self.relay.exchanges.clear()
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.folder / "work",
            env=variables,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        code: int | None = None
        try:
            output, _ = process.communicate(timeout=self.seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        self.exchanges = self.relay.exchanges.copy()
        return code, output

    def task(
        self,
        check: str,
        is_done: Callable[[str], bool],
        *command: str | Path,
        answers: Sequence[str] | None = None,
        with_tools: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run an agent and judge its effect; `is_done` is handed the output.

        `answers`: what a script says, `with_tools` only to requests that offer tools.
        """
        self.begin(answers, with_tools=with_tools)
        code, output = self.run(*command, env=env)
        asked = [each for each in self.exchanges if each.path.startswith("/v1/")]
        wrong = next((each for each in asked if each.status not in (None, httpx.codes.OK)), None)
        how = "streamed" if any(each.is_stream for each in asked) else "whole"
        told = f"{len(asked)} requests, {how}"
        told += "" if code is not None else f", stopped after {self.seconds:g} s"
        if wrong is not None:
            said = wrong.answer[:200].decode(errors="replace")
            return Result(check, "failed", f"{wrong.path}: {wrong.status} {said}")
        if not any(each.request for each in asked):
            return Result(check, "failed", f"it asked nothing; exit code {code}: {output.strip()[-200:]}")
        if not any(each.is_whole for each in asked if each.request):
            return Result(check, "failed", f"{told}, before an answer ended")
        if any(each.leaks for each in asked):
            return Result(check, "failed", f"{told}: marks of a call are text of an answer")
        if self.script is not None and answers is not None and not is_done(output):
            return Result(check, "failed", f"{told}: not done; {output.strip()[-200:]}")
        return Result(check, "ok" if is_done(output) else "answered", told)


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
        yield trial.task(check, is_right, *ask, *more, answers=[answer], with_tools=False, env=env)


def claude_code(trial: Trial) -> Iterator[Result]:
    """Requests written from its documentation; nothing is installed."""
    trial.begin(None)
    with httpx.Client(base_url=trial.relay.url, timeout=trial.seconds, trust_env=False) as http:
        for request in recorded("claude-code"):
            answer = http.post(request.path, json=request.body, headers=request.headers)
            is_fine = answer.status_code == httpx.codes.OK and "event: error" not in answer.text
            yield Result(request.about, "ok" if is_fine else "failed", "" if is_fine else answer.text[:200])


def aider(trial: Trial) -> Iterator[Result]:
    """Edits a file, in both formats of edits."""
    ask = ["aider", "--model", f"openai/{MODEL}", "--yes-always", "--no-git", "--no-check-update"]
    ask += ["--no-show-model-warnings", "--no-show-release-notes", "--no-pretty", "--map-tokens", "0"]
    ask += ["--analytics-disable", "--no-detect-urls", "--no-suggest-shell-commands"]
    ask += ["--message", 'Print "hello" instead of "hi".', "greet.py"]
    for form, stream in (("whole", "--stream"), ("whole", "--no-stream"), ("diff", "--stream")):
        file = trial.fresh() / "greet.py"
        file.write_text('def greet():\n    print("hi")\n')
        yield trial.task(
            f"edits a file: {form}, {stream.lstrip('-')}",
            lambda _, file=file: 'print("hello")' in file.read_text(),  # type: ignore[misc]
            *[*ask, "--edit-format", form, stream],
            answers=[WHOLE if form == "whole" else DIFF],
            with_tools=False,
        )


def mini_swe_agent(trial: Trial) -> Iterator[Result]:
    """Runs commands in a shell, which it asks for with a tool."""
    file = trial.fresh() / "hello.txt"
    ask = [
        "mini",
        "-y",
        "--exit-immediately",
        "-m",
        f"openai/{MODEL}",
        "-l",
        "0",
        "-c",
        "mini.yaml",
        "-t",
        TASK,
    ]
    last = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    answers = [call("bash", command=COMMAND), call("bash", command=last)]
    more = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    more["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
    yield trial.task("runs a command", lambda _: is_hello(file), *ask, answers=answers, env=more)


def codex(trial: Trial) -> Iterator[Result]:
    """Runs commands in a shell, over /v1/responses."""
    file = trial.fresh() / "hello.txt"
    config = trial.folder / "home" / "config.toml"
    provider = f'{{name = "llamaspec", base_url = "{trial.api}", wire_api = "responses"}}'
    told = f'model = "{MODEL}"\nmodel_provider = "llamaspec"\nmodel_providers.llamaspec = {provider}\n'
    config.write_text(told + 'approval_policy = "never"\nsandbox_mode = "workspace-write"\n')
    answers = [THOUGHT + call("exec_command", cmd=COMMAND), "Done."]
    ask = ["codex", "exec", "--skip-git-repo-check", TASK]
    home = str(config.parent)
    yield trial.task(
        "runs a command", lambda _: is_hello(file), *ask, answers=answers, env={"CODEX_HOME": home}
    )


def opencode(trial: Trial) -> Iterator[Result]:
    """Writes a file with a tool, over /v1/chat/completions."""
    file = trial.fresh() / "hello.txt"
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": trial.api}, "models": {MODEL: {}}}
    config = {"provider": {"llamaspec": provider}, "model": f"llamaspec/{MODEL}", "permission": "allow"}
    (file.parent / "opencode.json").write_text(json.dumps(config))
    answers = [THOUGHT + call("write", filePath=str(file), content="hello\n"), "Done."]
    more = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    ask = ["opencode", "run", TASK]
    yield trial.task("writes a file", lambda _: is_hello(file), *ask, answers=answers, env=more)


def continue_cli(trial: Trial) -> Iterator[Result]:
    """Writes a file with a tool, over /v1/chat/completions."""
    file = trial.fresh() / "hello.txt"
    model = {"name": MODEL, "provider": "openai", "model": MODEL, "apiBase": trial.api, "apiKey": "none"}
    config = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
    (file.parent / "config.yaml").write_text(json.dumps(config))
    ask = ("cn", "-p", TASK, "--auto", "--config", file.parent / "config.yaml")
    answers = [call("Write", filepath=str(file), content="hello\n"), "Done."]
    more = {"CONTINUE_TELEMETRY_ENABLED": "0"}
    yield trial.task("writes a file", lambda _: is_hello(file), *ask, answers=answers, env=more)


def is_hello(file: Path) -> bool:
    return file.is_file() and file.read_text(errors="replace").strip() == "hello"


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
                (record / f"{name}.json").write_text(json.dumps(told, indent=1))
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
