"""Agents, each with its settings and its task; `Trial.task` says what came of it.

A real model of few parameters gets short instructions and few tools: an agent's own are thousands of tokens,
which such a model neither reads in time nor follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from interop_parts.relay import Change
from interop_parts.servers import N_CTX, call, cut
from interop_parts.trial import MODEL, Command, Result, Trial

TASK = "Create a file named hello.txt that contains only the word hello."
THOUGHT = "<think>\nI do it.\n</think>\n\n"
COMMAND = "echo hello > hello.txt"
WHOLE = 'greet.py\n```\ndef greet():\n    print("hello")\n```\n'
DIFF = 'greet.py\n```\n<<<<<<< SEARCH\n    print("hi")\n=======\n    print("hello")\n>>>>>>> REPLACE\n```\n'
BRIEF = "You are a coding agent. Do what the user asks by calling {}. Say in a sentence when it is done."
LONG = "one two three four. " * 1200  # some 6,000 tokens
CUT = "goes on after an answer that was cut"
COMPACTS = "shortens a conversation that is too long"
AFTER_TOO_LONG = "goes on after a request that was too long"


def aider(trial: Trial) -> Iterator[Result]:
    """Edits a file, in both formats of edits. A cut answer is sent back as the beginning of the next one."""
    ask = ["aider", "--model", f"openai/{MODEL}", "--yes-always", "--no-git", "--no-check-update"]
    ask += ["--no-show-model-warnings", "--no-show-release-notes", "--no-pretty", "--map-tokens", "0"]
    ask += ["--analytics-disable", "--no-detect-urls", "--no-suggest-shell-commands"]
    ask += ["--message", 'Print "hello" instead of "hi".', "greet.py"]
    known = {"mode": "chat", "litellm_provider": "openai", "supports_assistant_prefill": True}

    def edit(
        check: str,
        *turns: Command,
        answers: Sequence[str],
        changes: Sequence[Change] = (),
        overflows: bool = False,
    ) -> Result:
        file = trial.fresh() / "greet.py"
        file.write_text('def greet():\n    print("hi")\n')
        file.with_name("long.py").write_text(f"# {LONG}\n" * 3)
        file.with_name("known.json").write_text(json.dumps({f"openai/{MODEL}": known}))
        return trial.task(
            check,
            lambda _: 'print("hello")' in file.read_text(),
            *[[*ask, *turn] for turn in turns],
            answers=answers,
            with_tools=False,
            changes=changes,
            overflows=overflows,
        )

    for form, stream in (("whole", "--stream"), ("whole", "--no-stream"), ("diff", "--stream")):
        check = f"edits a file: {form}, {stream.lstrip('-')}"
        yield edit(check, ["--edit-format", form, stream], answers=[WHOLE if form == "whole" else DIFF])
    begun = cut(WHOLE)
    turn = ["--edit-format", "whole", "--model-metadata-file", "known.json"]
    yield edit(CUT, turn, answers=[begun, WHOLE[len(begun) :]], changes=[Change(max_tokens=8)])
    if trial.script is not None:
        yield edit(AFTER_TOO_LONG, ["long.py"], [], answers=[WHOLE], overflows=True)


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
    yield trial.task("runs a command", lambda _: is_hello(file), ask, answers=answers, env=more)


def codex(trial: Trial) -> Iterator[Result]:
    """Runs commands in a shell, over /v1/responses. A cut answer ends its turn; the next one goes on."""
    written = call("exec_command", cmd=COMMAND)
    ask = ["codex", "exec", "--skip-git-repo-check"]
    again = ["codex", "exec", "resume", "--skip-git-repo-check", "--last"]
    file, env = _codex_folder(trial)
    answers = [THOUGHT + written, "Done."]
    yield trial.task("runs a command", lambda _: is_hello(file), [*ask, TASK], answers=answers, env=env)
    file, env = _codex_folder(trial)
    answers, turns = [cut(written), written, "Done."], [[*ask, TASK], [*again, "Go on."]]
    yield trial.task(
        CUT, lambda _: is_hello(file), *turns, answers=answers, changes=_cut_call("exec_command"), env=env
    )
    if trial.script is not None:
        _, env = _codex_folder(trial)
        more = LONG[: len(LONG) // 2]  # it stays when the conversation is shortened
        answers, turns = [written, LONG, "Done."], [[*ask, TASK], [*again, more], [*again, "And now?"]]
        yield trial.task(COMPACTS, _says_done, *turns, answers=answers, overflows=True, env=env)


def _codex_folder(trial: Trial) -> tuple[Path, dict[str, str]]:
    """The file to write, and the variables of the environment."""
    file, home = trial.fresh() / "hello.txt", trial.folder / "home"
    provider = f'{{name = "llamaspec", base_url = "{trial.api}", wire_api = "responses"}}'
    told = f'model = "{MODEL}"\nmodel_provider = "llamaspec"\nmodel_providers.llamaspec = {provider}\n'
    told += 'approval_policy = "never"\nsandbox_mode = "workspace-write"\n'
    told += (
        f"model_auto_compact_token_limit = {2 * N_CTX}\n"  # so that only the server's error makes it shorten
    )
    if trial.script is None:
        (home / "brief.md").write_text(BRIEF.format("exec_command"))
        told += f'model_instructions_file = "{home / "brief.md"}"\nweb_search = "disabled"\n'
        parts = ("apps_instructions", "permissions_instructions", "environment_context")
        told += "".join(f"include_{part} = false\n" for part in parts)
        told += "skills.include_instructions = false\nskills.bundled.enabled = false\n"
        told += "".join(f"features.{name} = false\n" for name in ("goals", "apps", "plugins", "view_image"))
        told += "agents.enabled = false\n"
    (home / "config.toml").write_text(told)
    return file, {"CODEX_HOME": str(home)}


def opencode(trial: Trial) -> Iterator[Result]:
    """Writes a file with a tool, over /v1/chat/completions."""
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": trial.api}, "models": {MODEL: {}}}
    config: dict[str, Any] = {"provider": {"llamaspec": provider}, "model": f"llamaspec/{MODEL}"}
    config["permission"] = "allow"
    if trial.script is None:
        tools = {"*": False, "write": True, "bash": True, "invalid": True}  # "invalid" stands for a cut call
        config["agent"] = {"build": {"prompt": BRIEF.format("write"), "tools": tools}}
    more = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    ask, again = ["opencode", "run"], ["opencode", "run", "--continue"]

    def file() -> Path:
        work = trial.fresh()
        (work / "opencode.json").write_text(json.dumps(config))
        return work / "hello.txt"

    written = call("write", filePath=str(trial.folder / "work" / "hello.txt"), content="hello\n")
    yield from _write_twice(trial, file, [*ask, TASK], "write", THOUGHT + written, more)
    if trial.script is not None:
        file()
        answers, turns = [written, LONG, "Done."], [[*ask, TASK], [*again, LONG], [*again, "And now?"]]
        yield trial.task(COMPACTS, _says_done, *turns, answers=answers, overflows=True, env=more)


def continue_cli(trial: Trial) -> Iterator[Result]:
    """Writes a file with a tool, over /v1/chat/completions."""
    model = {"name": MODEL, "provider": "openai", "model": MODEL, "apiBase": trial.api, "apiKey": "none"}
    config = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
    place = trial.folder / "work" / "config.yaml"

    def file() -> Path:
        work = trial.fresh()
        place.write_text(json.dumps(config))
        return work / "hello.txt"

    written = call("Write", filepath=str(place.with_name("hello.txt")), content="hello\n")
    ask = ["cn", "-p", TASK, "--auto", "--config", str(place)]
    env = {"CONTINUE_TELEMETRY_ENABLED": "0"}
    yield from _write_twice(trial, file, ask, "Write", written, env)
    if trial.script is not None:
        file()
        turns = [["cn", "-p", said, "--resume", *ask[3:]] for said in (LONG * 3, "And now?")]
        answers = [written, "Done."]
        yield trial.task(AFTER_TOO_LONG, _says_done, ask, *turns, answers=answers, overflows=True, env=env)


def _write_twice(
    trial: Trial, fresh: Callable[[], Path], ask: Command, tool: str, answer: str, env: Mapping[str, str]
) -> Iterator[Result]:
    """The task at once, and with a first call that is cut; `fresh` makes the folder and names the file."""
    for check, first in (("writes a file", []), (CUT, [cut(answer)])):
        file = fresh()
        yield trial.task(
            check,
            lambda _, file=file: is_hello(file),  # type: ignore[misc]
            ask,
            answers=[*first, answer, "Done."],
            changes=_cut_call(tool) if first else (),
            env=env,
        )


def _cut_call(tool: str) -> list[Change]:
    """A call is cut, and the next answer is one, too."""
    return [Change(tool, max_tokens=24), Change(tool)]


def _says_done(output: str) -> bool:
    return "Done." in output


def is_hello(file: Path) -> bool:
    return file.is_file() and file.read_text(errors="replace").strip() == "hello"
