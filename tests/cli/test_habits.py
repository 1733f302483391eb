"""Options and variables of llama.cpp and Ollama: taken where they mean the same, otherwise one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from command import invoke
from llamaspec import open_pair
from llamaspec.chat.builtin_templates import builtin_template
from llamaspec.cli import habits
from llamaspec.cli.habits import borrowed_settings, translated
from llamaspec.cli.main import main
from llamaspec.cli.options import CHAT_TEMPLATE
from llamaspec.cli.served_models import _template
from llamaspec.errors import PromptError


def parameters(command: str) -> list[click.Parameter]:
    found = main.get_command(click.Context(main), command)
    assert found is not None
    return found.params


SERVE, GENERATE = ({name for each in parameters(of) for name in each.opts} for of in ("serve", "generate"))
TRANSLATED: list[tuple[set[str], str, str, tuple[str, ...]]] = [
    (SERVE, "-m a -np 2 -fa on -ctk q8_0 -ctv=q8_0", "-m a --parallel 2 --flash-attn on --cache-type-k q8_0 "
     "--cache-type-v q8_0", ()),
    (SERVE, "-fa -m a", "--flash-attn on -m a", ()),
    (SERVE, "-fa", "--flash-attn on", ()),
    (SERVE, "--flash-attn off -t 8 --draft-max 16", "--flash-attn off --threads 8 --draft-length 16", ()),
    (SERVE, "--mlock --no-mmap -b 512 -ub=64 --jinja", "", ("--mlock", "--no-mmap", "-b", "-ub", "--jinja")),
    (SERVE, "--embedding --pooling cls -m a", "-m a", ("--embedding", "--pooling")),
    (SERVE, "--numa distribute -ngld 5 --n-gpu-layers=7", "--draft-gpu-layers 5 --gpu-layers 7", ("--numa",)),
    (GENERATE, "-t 1.5 --n-predict 4 -- -fa --mlock", "-t 1.5 --max-tokens 4 -- -fa --mlock", ()),
    (GENERATE, "--temp 3 -p a=b -sys x", "--temp 3 -p a=b --system x", ()),
    (GENERATE, "-np 2 --stats=full -p=x", "-np 2 --stats=full -p=x", ()),  # not an option there
]  # fmt: skip


@pytest.mark.parametrize(("known", "given", "wanted", "told"), TRANSLATED)
def test_options_of_llama_cpp(
    known: set[str], given: str, wanted: str, told: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert translated(given.split(), known) == wanted.split()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == list(told)
    assert all(" is ignored: " in line for line in lines)


def test_every_translation_is_an_option() -> None:
    assert set(habits._NAMES.values()) <= SERVE | GENERATE
    assert set(habits._VARIABLES.values()) <= {each.name for each in parameters("serve")}


@pytest.mark.parametrize("given", [["-t", "2"], ["-t2"], ["-t=8"], ["-t", "1.6"]])
def test_a_temperature_that_is_a_number_of_threads(given: list[str]) -> None:
    """Once, `-t 2` gave garbage at a temperature of 2."""
    answer = invoke("generate", *given, "-p", "x", "-n", "1")
    assert answer.code == 2
    number = given[-1].lstrip("-t=")
    assert f"use --threads {number}, or --temp {number}" in answer.stderr


VARIABLES: list[tuple[dict[str, str], dict[str, Any], int]] = [
    ({"OLLAMA_HOST": "0.0.0.0", "PATH": "x"}, {"host": "0.0.0.0"}, 1),
    ({"OLLAMA_HOST": "http://[::1]:11434/"}, {"host": "::1", "port": 11434}, 1),
    ({"OLLAMA_HOST": ":9"}, {"port": 9}, 1),
    ({"OLLAMA_KEEP_ALIVE": "5m", "OLLAMA_CONTEXT_LENGTH": "4096"},
     {"keep_alive": "5m", "ctx_per_request": "4096"}, 1),
    ({"LLAMA_ARG_PORT": "9", "LLAMA_ARG_MODEL": "a b.gguf"}, {"port": "9", "target": ["a b.gguf"]}, 1),
    ({"OLLAMA_MODELS": "/m", "OLLAMA_DEBUG": "1", "LLAMA_ARG_MLOCK": "1", "LLAMA_CACHE": "/c"}, {}, 3),
    ({"OLLAMA_HOST": ""}, {}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "wanted", "n_lines"), VARIABLES)
def test_variables_of_llama_server_and_ollama(
    environment: dict[str, str], wanted: dict[str, Any], n_lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert borrowed_settings(environment) == wanted
    assert len(capsys.readouterr().err.splitlines()) == n_lines


def test_a_variable_with_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError, match="OLLAMA_HOST is no address"):
        borrowed_settings({"OLLAMA_HOST": "a:b"})
    monkeypatch.setenv("LLAMA_ARG_PORT", "many")
    answer = invoke("serve")
    assert answer.code == 2
    assert "settings are taken from LLAMA_ARG_PORT" in answer.stderr
    assert "--port" in answer.stderr


def test_chat_templates_by_name(target_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the server, a model without a template has chatml, as in llama-server."""
    chatml = builtin_template("chatml")
    assert CHAT_TEMPLATE.convert("chatml", None, None) == chatml
    with pytest.raises(PromptError, match="cannot read the chat template no-such-name"):
        CHAT_TEMPLATE.convert("no-such-name", None, None)
    with open_pair(target_file) as pair:
        assert _template(pair, None).source == chatml
    assert "has no chat template, so chats have chatml" in capsys.readouterr().err
