"""The checks of each agent: its settings, its task, and the answers of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from interop_parts.server import N_CTX, call, cut
from interop_parts.trial import MODEL, Command, Result, Trial

TASK = "Create a file named hello.txt that contains only the word hello."
THOUGHT = "<think>\nI do it.\n</think>\n\n"
COMMAND = "echo hello > hello.txt"
WHOLE = 'greet.py\n```\ndef greet():\n    print("hello")\n```\n'
DIFF = 'greet.py\n```\n<<<<<<< SEARCH\n    print("hi")\n=======\n    print("hello")\n>>>>>>> REPLACE\n```\n'
LONG = "one two three four. " * 1200  # about 6,000 tokens
CUT = "continues after a cut answer"
COMPACTS = "shortens a conversation that is too long"
AFTER_TOO_LONG = "continues after a request that was too long"


def aider(trial: Trial) -> Iterator[Result]:
    """Check edits in both edit formats. Aider sends a cut answer back as the beginning of the next one."""
    ask = ["aider", "--model", f"openai/{MODEL}", "--yes-always", "--no-git", "--no-check-update"]
    ask += ["--no-show-model-warnings", "--no-show-release-notes", "--no-pretty", "--map-tokens", "0"]
    ask += ["--analytics-disable", "--no-detect-urls", "--no-suggest-shell-commands"]
    ask += ["--message", 'Print "hello" instead of "hi".', "greet.py"]
    known = {"mode": "chat", "litellm_provider": "openai", "supports_assistant_prefill": True}
    files = {"work/greet.py": 'def greet():\n    print("hi")\n', "work/long.py": f"# {LONG}\n" * 3}
    files["work/known.json"] = json.dumps({f"openai/{MODEL}": known})
    edited = trial.folder / "work" / "greet.py"

    def edit(check: str, *turns: Command, answers: Sequence[str], overflows: bool = False) -> Result:
        return trial.task(
            check, [[*ask, *turn] for turn in turns],
            answers, files, with_tools=False, overflows=overflows,
            is_done=lambda _: 'print("hello")' in edited.read_text(),
        )  # fmt: skip

    for form, stream in (("whole", "--stream"), ("whole", "--no-stream"), ("diff", "--stream")):
        check = f"edits a file: {form}, {stream.lstrip('-')}"
        yield edit(check, ["--edit-format", form, stream], answers=[WHOLE if form == "whole" else DIFF])
    begun = cut(WHOLE)
    turn = ["--edit-format", "whole", "--model-metadata-file", "known.json"]
    yield edit(CUT, turn, answers=[begun, WHOLE[len(begun) :]])
    yield edit(AFTER_TOO_LONG, ["long.py"], [], answers=[WHOLE], overflows=True)


def mini_swe_agent(trial: Trial) -> Iterator[Result]:
    """Check commands in a shell, run by a tool call."""
    ask = ["mini", "-y", "--exit-immediately", "-m", f"openai/{MODEL}"]
    ask += ["-l", "0", "-c", "mini.yaml", "-t", TASK]
    last = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    answers = [call("bash", command=COMMAND), call("bash", command=last)]
    env = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # fetch nothing
    yield trial.task("runs a command", [ask], answers, env=env)


def codex(trial: Trial) -> Iterator[Result]:
    """Check commands in a shell over /v1/responses. A cut answer ends a turn; the next turn continues."""
    written = call("exec_command", cmd=COMMAND)
    ask = ["codex", "exec", "--skip-git-repo-check"]
    again = ["codex", "exec", "resume", "--skip-git-repo-check", "--last"]
    files, env = _codex_files(trial), {"CODEX_HOME": str(trial.folder / "home")}
    yield trial.task("runs a command", [[*ask, TASK]], [THOUGHT + written, "Done."], files, env=env)
    answers, turns = [cut(written), written, "Done."], [[*ask, TASK], [*again, "Go on."]]
    yield trial.task(CUT, turns, answers, files, env=env)
    more = LONG[: len(LONG) // 2]  # Codex keeps it when it shortens the conversation
    answers, turns = [written, LONG, "Done."], [[*ask, TASK], [*again, more], [*again, "And now?"]]
    yield trial.task(COMPACTS, turns, answers, files, overflows=True, is_done=_says_done, env=env)


def _codex_files(trial: Trial) -> dict[str, str]:
    provider = f'{{name = "llamaspec", base_url = "{trial.api}", wire_api = "responses"}}'
    config = f'model = "{MODEL}"\nmodel_provider = "llamaspec"\nmodel_providers.llamaspec = {provider}\n'
    config += 'approval_policy = "never"\nsandbox_mode = "workspace-write"\n'
    # Only the server's error makes Codex shorten the conversation.
    config += f"model_auto_compact_token_limit = {2 * N_CTX}\n"
    return {"home/config.toml": config}


def opencode(trial: Trial) -> Iterator[Result]:
    """Check that a tool call over /v1/chat/completions writes a file."""
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": trial.api}, "models": {MODEL: {}}}
    config: dict[str, Any] = {"provider": {"llamaspec": provider}, "model": f"llamaspec/{MODEL}"}
    config["permission"] = "allow"
    files = {"work/opencode.json": json.dumps(config)}
    env = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    ask, again = ["opencode", "run"], ["opencode", "run", "--continue"]
    written = call("write", filePath=str(trial.hello), content="hello\n")
    yield trial.task("writes a file", [[*ask, TASK]], [THOUGHT + written, "Done."], files, env=env)
    yield trial.task(CUT, [[*ask, TASK]], [cut(written), written, "Done."], files, env=env)
    answers, turns = [written, LONG, "Done."], [[*ask, TASK], [*again, LONG], [*again, "And now?"]]
    yield trial.task(COMPACTS, turns, answers, files, overflows=True, is_done=_says_done, env=env)


def continue_cli(trial: Trial) -> Iterator[Result]:
    """Check that a tool call over /v1/chat/completions writes a file."""
    model = {"name": MODEL, "provider": "openai", "model": MODEL, "apiBase": trial.api, "apiKey": "none"}
    config = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]}
    files, env = {"work/config.yaml": json.dumps(config)}, {"CONTINUE_TELEMETRY_ENABLED": "0"}
    written = call("Write", filepath=str(trial.hello), content="hello\n")
    options = ["--auto", "--config", "config.yaml"]
    ask = ["cn", "-p", TASK, *options]
    yield trial.task("writes a file", [ask], [written, "Done."], files, env=env)
    yield trial.task(CUT, [ask], [cut(written), written, "Done."], files, env=env)
    turns = [ask, *(["cn", "-p", said, "--resume", *options] for said in (LONG * 3, "And now?"))]
    yield trial.task(
        AFTER_TOO_LONG, turns, [written, "Done."], files, overflows=True, is_done=_says_done, env=env
    )


def _says_done(output: str) -> bool:
    return "Done." in output
