"""Where the prompt of `llamaspec generate` comes from."""

from __future__ import annotations

from pathlib import Path

import pexpect
import pytest

from command import ENTRY, PROMPT, environment, expected, generate, invoke, naming
from patience import PATIENCE, until_it_waits


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        ([PROMPT], b""),
        (["-p", PROMPT], b""),
        (["-f", "PROMPT_FILE"], b""),
        ([], PROMPT.encode()),
        (["-"], PROMPT.encode()),
        (["-f", "-"], PROMPT.encode()),
        # A pipe is read only if no prompt is given.
        ([PROMPT], b"something else"),
    ],
)
def test_places_of_the_prompt(models: list[Path], tmp_path: Path, arguments: list[str], stdin: bytes) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode())
    arguments = [str(file) if part == "PROMPT_FILE" else part for part in arguments]
    answer = generate(*arguments, "--seed", "3", "-n", "12", "--json", models=models, stdin=stdin)
    assert answer.code == 0
    right = expected(models, 3, 12)
    assert (answer.json["text"], answer.json["prompt_tokens"]) == (right.text, right.n_prompt_tokens)


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        *((each.encode(), each) for each in ("x\n\n", "x\r\n", "é€\n", " x ")),
        ("\ufeffx".encode(), "x"),
        ("é€\r\n".encode("utf-16"), "é€\r\n"),  # as PowerShell's > writes it
        ("\ufeffé€".encode("utf-16-be"), "é€"),
    ],
)
def test_a_prompt_is_taken_byte_for_byte(
    models: list[Path], tmp_path: Path, content: bytes, prompt: str
) -> None:
    """The newline at the end belongs to the prompt, from a file or a pipe; a byte order mark does not."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(content)
    right = expected(models, 3, 4, prompt=prompt)
    for arguments, stdin in ((["-f", str(file)], b""), (["-"], content)):
        answer = generate(*arguments, "--seed", "3", "-n", "4", "--json", models=models, stdin=stdin)
        assert answer.json["prompt_tokens"] == right.n_prompt_tokens
        assert answer.json["tokens"] == list(right.tokens)


def test_a_prompt_that_begins_with_a_dash(models: list[Path]) -> None:
    answer = generate("-n", "3", "--seed", "3", "--json", "--", "-x", models=models)
    assert answer.json["tokens"] == list(expected(models, 3, 3, prompt="-x").tokens)


def test_a_terminal_is_asked_for_the_prompt(models: list[Path]) -> None:
    arguments = [*ENTRY[1:], "generate", *map(str, naming(models)), "-n", "8", "--seed", "3", "--no-stats"]
    child = pexpect.spawn(ENTRY[0], arguments, env=environment(), timeout=PATIENCE)
    child.expect("Prompt")
    child.sendline("the end")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_ctrl_c_instead_of_a_prompt(models: list[Path]) -> None:
    arguments = [*ENTRY[1:], "generate", *map(str, naming(models))]
    child = pexpect.spawn(ENTRY[0], arguments, env=environment(), timeout=PATIENCE)
    child.expect("Prompt: ")
    until_it_waits(child.pid)
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert b"Traceback" not in child.before


def test_several_words_and_the_names_of_peers(models: list[Path]) -> None:
    target, draft = models
    common = ["--threads", "1", "--seed", "5", "-n", "8", "-k", "2", "--json"]
    ours = invoke("generate", "--target", target, "--draft", draft, *common, "hello world").json
    theirs = invoke("generate", "-m", target, "-md", draft, *common, "hello", "world").json
    assert theirs["text"] == ours["text"]
    assert theirs["draft"] == ours["draft"] == str(draft)
