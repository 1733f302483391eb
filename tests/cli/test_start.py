"""Before and after a command: Ctrl-C gives no traceback, and help does not load llama.cpp."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

import llamaspec
from command import ENTRY, Answer, answer_of, invoke, python
from llamaspec import LlamaModel, ModelOptions, public
from llamaspec.cli.main import SUBCOMMANDS
from llamaspec.cli.main import main as group
from llamaspec.kernels import KernelLibrary, Kernels
from llamaspec.llama import runtime
from llamaspec.measure.findings import llama_cpp_misfit

MOST_MODULES = 76  # packages included
MAIN = "\nimport runpy; runpy.run_module('llamaspec', run_name='__main__', alter_sys=True)"
WHILE_LOADING = """
import signal, sys
def interrupt(event, arguments):
    if event == "import" and arguments[0] == "{module}":
        signal.raise_signal(signal.SIGINT)
sys.addaudithook(interrupt)
"""
AT_THE_END = "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT)"
BETWEEN_HANDLERS = """
from llamaspec.cli import main
def interrupted():
    raise KeyboardInterrupt
main.main = interrupted
"""
IGNORED = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
MODULES = "import atexit, sys; atexit.register(lambda: print(*sys.modules))"
LOADED = (
    "import atexit, sys; atexit.register(lambda: print({'numpy', 'llama_cpp', 'rich'} & set(sys.modules)))"
)


def started(code: str, *arguments: str) -> Answer:
    """Run `python -m llamaspec` after other code."""
    return python(code + MAIN, *arguments)


@pytest.mark.parametrize("module", ["llamaspec.cli.signals", "click", "llama_cpp"])
def test_ctrl_c_while_modules_are_loaded(module: str) -> None:
    """It used to print a traceback of 20 lines."""
    assert started(WHILE_LOADING.format(module=module), "generate", "-h") == Answer(130, "", "")


GENERATE = ("generate", "--threads", "1", "-n", "3", "--verbose", "x")
ALL = "<&- >&- 2>&-"


@pytest.mark.parametrize(
    ("closed", "arguments"),
    [(">&-", GENERATE), ("2>&-", GENERATE), (ALL, GENERATE), (ALL, ("models", "list"))],
)
def test_streams_may_be_closed(
    own_list: Path, target_file: Path, arguments: tuple[str, ...], closed: str
) -> None:
    """A shell closes them with `>&-`; programs without a console have none."""
    invoke("models", "add", "mine", target_file)
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *ENTRY, *arguments]
    folder = str(own_list.parent)
    answer = answer_of(command, env={"LLAMASPEC_CONFIG": folder, "LLAMASPEC_CACHE": folder})
    assert answer.code == 0, answer
    assert bool(answer.stdout) == (closed == "2>&-")


def test_llama_cpp_s_log_needs_no_stderr(target_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(runtime.log, "verbose", True)
    with LlamaModel(target_file, ModelOptions(threads=1)) as model:
        assert model.vocabulary_size == 288


def test_ctrl_c_between_two_handlers() -> None:
    assert started(BETWEEN_HANDLERS) == Answer(130, "", "")


def test_ctrl_c_when_all_is_done() -> None:
    answer = started(AT_THE_END, "--version")
    assert (answer.code, answer.stderr) == (130, "")
    assert llamaspec.__version__ in answer.stdout


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    """`nohup` ignores it, and so do background jobs of scripts."""
    answer = started(f"{WHILE_LOADING.format(module='click')}{IGNORED}\n{AT_THE_END}", "-h")
    assert (answer.code, answer.stderr) == (0, "")


OTHER_LLAMA_CPP = Kernels(reason="this is ggml 0.26", is_misfit=True)


@pytest.mark.parametrize("command", [["generate", "-n", "1", "x"], ["serve"], ["serve", "--models-dir"]])
def test_another_llama_cpp_is_no_secret(
    target_file: Path, own_list: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Once, only `doctor` told of a release that switched the kernels off."""
    monkeypatch.setattr(KernelLibrary, "facts", OTHER_LLAMA_CPP)
    monkeypatch.setattr("llamaspec.serve.app.Server.run", lambda self, sockets: self._ready())
    more: list[str | Path] = [target_file.parent] if command[-1] == "--models-dir" else []
    more += ["--port", "0"] if command[0] == "serve" else []
    answer = invoke(*command, *more, "--threads", "1")
    assert answer.code == 0, answer
    start = "llamaspec: warning: llama.cpp's kernels only: this is ggml 0.26; pip install 'llama-cpp-python"
    assert [line.startswith(start) for line in answer.stderr.splitlines() if "0.26" in line] == [True]


@pytest.mark.parametrize(
    ("kernels", "choice"),
    [
        (OTHER_LLAMA_CPP, "off"),
        (Kernels(reason="LLAMASPEC_KERNELS is off"), "auto"),
        (Kernels(reason="llamaspec's are for Linux on x86-64 and arm64 processors"), "auto"),
        (Kernels("avx2", 1), "auto"),
    ],
)
def test_kernels_that_nobody_can_expect_get_no_warning(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels, choice: str
) -> None:
    monkeypatch.setattr(KernelLibrary, "facts", kernels)
    assert llama_cpp_misfit(ModelOptions(kernels=choice)) is None


def test_help_loads_little() -> None:
    answer = started(LOADED, "-h")
    assert answer.stdout.splitlines()[-1] == "set()"


UNUSED = (  # what a pair of two ordinary models does not need
    "llama.heads", "llama.block_draft", "llama.row_contexts", "llama.hidden_rows", "llama.hidden_draft_file",
    "llama.recurrent", "llama.child", "llama.file_facts", "drafters.hidden", "drafters.block",
    "drafters.common_vocabulary", "drafters.earlier", "sampling.constraint", "sampling.schemas",
    "measure.probe", "measure.turns", "chat", "serve",
)  # fmt: skip


def test_a_completion_loads_only_what_it_uses() -> None:
    answer = started(MODULES, "generate", "--threads", "1", "-n", "3", "x")
    assert answer.code == 0, answer
    names = answer.stdout.splitlines()[-1].split()
    assert not {"asyncio", "filelock", *(f"llamaspec.{name}" for name in UNUSED)} & {*names}
    assert "llamaspec.llama.kv_cache" in names
    assert sum(name.startswith("llamaspec") for name in names) <= MOST_MODULES


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_list_says_what_the_commands_say(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    assert command.get_short_help_str(1000) == SUBCOMMANDS[name][1]


def test_a_shell_completes_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"_LLAMASPEC_COMPLETE": "bash_complete", "COMP_WORDS": "llamaspec d", "COMP_CWORD": "1"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert invoke().stdout.split() == ["plain,doctor"]


def test_the_package_has_the_names_that_it_promises() -> None:
    for name in public.__all__:
        assert getattr(llamaspec, name) is not None
    assert {*public.__all__} < {*dir(llamaspec)}
    with pytest.raises(AttributeError):
        llamaspec.no_such_name  # type: ignore[attr-defined] # noqa: B018
