"""`llamaspec chat`: files, messages of several lines, pipes, and a real terminal."""

from __future__ import annotations

import io
import json
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from chat_models import PLAIN, last, say, session
from command import ENTRY, environment, generate, invoke, naming
from llamaspec import Pair, PromptError
from llamaspec.chat.conversation_files import (
    ConversationFiles,
    keep_last,
    load_conversation,
    load_last,
    save_conversation,
)
from llamaspec.chat.messages import Message
from llamaspec.cli.chat_input import Typed, history_path, line_editing, piped_lines, read_typed
from patience import PATIENCE, until_it_waits

HELLO = Message("user", "hello")

# Files


def test_save_and_load(pair: Pair, tmp_path: Path) -> None:
    chat = session(pair, system="Grüße, „kurz“.")
    say(chat, "one")
    save_conversation(tmp_path / "talk.json", chat.messages)
    content = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
    assert content[0] == {"role": "system", "content": "Grüße, „kurz“."}
    others = [session(pair, system="Something else."), session(pair)]
    for other in others:
        other.replace(load_conversation(tmp_path / "talk.json"))
        assert other.messages == chat.messages
    assert say(others[0], "two") == say(others[1], "two")
    assert others[0].last is not None
    assert others[0].last.seed == 5 + 1
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_a_last_conversation_in_a_folder_that_cannot_be_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMASPEC_CACHE", str(tmp_path / ("x" * 300)))  # fails in the same way, even for root
    with pytest.raises(PromptError, match="cannot read"):
        load_last()


def test_only_the_user_can_read_a_new_conversation(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save_conversation(path, [HELLO])
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)  # the user shares it
    save_conversation(path, [HELLO])
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "content",
    [
        "", "{}x", "3", '{"a": 1}', '["x"]', '[{"role": "user"}]', '[{"role": "cat", "content": "x"}]',
        '[{"role": "user", "content": ["x"]}]', '[{"role": "user", "content": "\\ud800"}]',
    ],
)  # fmt: skip
def test_files_that_hold_no_conversation(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(PromptError, match="is not a conversation"):
        load_conversation(path)


def test_strange_files_are_not_overwritten(tmp_path: Path) -> None:
    files = ConversationFiles()
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(PromptError, match="exists"):
        files.writable(str(tmp_path / "other.json"))
    files.load(str(tmp_path / "other.json"))
    files.save(files.writable(str(tmp_path / "other.json")), [HELLO])
    assert load_conversation(tmp_path / "other.json") == (HELLO,)
    with pytest.raises(PromptError, match="there is no folder"):
        files.writable(str(tmp_path / "none" / "x.json"))


# What is typed


@pytest.mark.parametrize(
    ("lines", "typed"),
    [
        (["hello"], Typed("hello", False)),
        (["/stats"], Typed("/stats", True)),
        ([" /stats"], Typed(" /stats", False)),
        (["one\\", "two\\", "three"], Typed("one\ntwo\nthree", False)),
        (["one\\"], Typed("one", False)),
        (['"""', "one", "", "two", '"""'], Typed("one\n\ntwo", False)),
        (['"""one', 'two"""'], Typed("one\ntwo", False)),
        (['"""one"""'], Typed("one", False)),
        (['"""', "/stats", '"""'], Typed("/stats", False)),
        (['"""', "one"], Typed("one", False)),
        (["/stats\\", "x"], Typed("/stats\nx", False)),
        (["/stats\none\\\n"], Typed("/stats\none\\", False)),
    ],
)
def test_messages_of_several_lines(lines: list[str], typed: Typed) -> None:
    assert read_typed(reader(lines)) == typed


@pytest.mark.parametrize(
    "content",
    ["one\r\ntwo €\n".encode(), "\ufeffone\r\ntwo €".encode(), "one\r\ntwo €\r\n".encode("utf-16")],
)
def test_lines_of_a_pipe_from_windows(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """The byte order mark was a part of the first message, and UTF-16 was refused."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    read_line = piped_lines()
    assert [read_line(""), read_line("")] == ["one", "two €"]
    with pytest.raises(EOFError):
        read_line("")


@pytest.mark.parametrize("first", ['"""', "one\\"])
def test_ctrl_c_within_several_lines_takes_them_back(first: str) -> None:
    left = iter([first])

    def read_line(_prompt: str) -> str:
        for line in left:
            return line
        raise KeyboardInterrupt

    assert read_typed(read_line) == Typed("", False)


def reader(lines: list[str]) -> Callable[[str], str]:
    left = iter(lines)

    def read_line(_prompt: str) -> str:
        for line in left:
            return line
        raise EOFError

    return read_line


# Through the entry point


def options(models: list[Path]) -> list[str]:
    more = ["--n-ctx", "1024", "--seed", "5", "-n", "20", "-t", "1", "-k", "3"]
    return ["chat", *map(str, naming(models)), *more]


@pytest.mark.parametrize("leave", ["/exit", "/bye"])
def test_a_pipe(pair: Pair, talker: list[Path], tmp_path: Path, leave: str) -> None:
    chat = session(pair)
    answers = [say(chat, "one"), say(chat, "two\nthree")]
    save = tmp_path / "talk.json"
    stdin = f"one\n\ntwo\\\nthree\n/stats full\n{leave}\nfour\n".encode()
    piped = invoke(*options(talker), "--save", save, stdin=stdin)
    assert piped.code == 0
    assert piped.stdout == "".join(f"{answer}\n" for answer in answers)
    assert f"{last(chat)[1]} of them cached" in piped.stderr
    n_prompt, _, n_written = last(chat)
    n_cached, n_read = chat.totals.n_cached, chat.totals.n_prompt_tokens
    assert 0 < n_cached < n_read
    assert piped.stderr.splitlines()[-1] == (
        f"conversation: {n_prompt + n_written} of 1024 tokens; in 2 answers {n_cached} of {n_read} prompt "
        f"tokens were cached ({n_cached / n_read:.0%})"
    )
    assert load_conversation(save) == chat.messages
    # Only the chat's own file is overwritten.
    assert "exists" in invoke(*options(talker), "--save", save, stdin=b"x\n").stderr
    again = invoke(*options(talker), "--load", save, "--save", save, stdin=b"five\n")
    assert again.stdout == load_conversation(save)[-1].text + "\n"
    assert load_conversation(save)[:-1] == (*chat.messages, Message("user", "five"))


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        ([], b"/nonsense\n", "there is no command /nonsense; see /help"),
        ([], b"/save\n", "/save needs a file"),
        ([], b"/load none.json\n", "cannot read the conversation none.json"),
        ([], b"/clear all\n", "/reset takes no argument"),
        ([], b"/re\n", "/re may be /regenerate or /reset; see /help"),
        ([], b"/stats all\n", "use /stats or /stats full"),
        ([], b"/regen\n", "no answer to regenerate"),
        ([], b"/continue\n", "no answer to continue"),
        ([], b"/edit\n", "needs a terminal"),
        ([], b"/set colour red\n", "there is no setting colour; choose one of temperature"),
        ([], b"/set temperature hot\n", "temperature cannot be hot"),
        ([], b"/set temperature -1\n", "temperature cannot be -1"),
        ([], b"/set max-tokens 0\n", "max-tokens cannot be 0"),
        ([], b"caf\xe9\n", "the message is not UTF-8: byte 3 is 0xe9"),
        (["--load", "none.json"], b"", "cannot read the conversation none.json"),
        (["--save", "none/talk.json"], b"", "there is no folder none"),
        (["--chat-template", "none.jinja"], b"", "cannot read the chat template none.jinja"),
    ],
)
def test_faults_end_a_pipe(talker: list[Path], arguments: list[str], stdin: bytes, says: str) -> None:
    answer = invoke(*options(talker), *arguments, stdin=stdin)
    assert answer.code == 1
    assert answer.stdout == ""
    assert len(answer.complaints) == 1
    assert says in answer.complaints[0]


def test_settings_between_answers(pair: Pair, talker: list[Path]) -> None:
    stdin = b"/set max-tokens 7\n/set seed 11\n/set --top-k 0\none\n/set\n"
    answer = invoke(*options(talker), stdin=stdin)
    shown = dict(line.split() for line in answer.stderr.splitlines() if len(line.split()) == 2)
    assert {name: shown[name] for name in ("max-tokens", "seed", "top-k", "top-p")} == {
        "max-tokens": "7", "seed": "11", "top-k": "off", "top-p": "0.95",
    }  # fmt: skip
    chain = ["-n", "7", "--seed", "11", "--top-k", "0"]
    assert answer.stdout == invoke(*options(talker), *chain, stdin=b"one\n").stdout
    assert answer.stdout != invoke(*options(talker), "-n", "7", stdin=b"one\n").stdout


def test_an_answer_is_as_long_as_the_context_allows(talker: list[Path]) -> None:
    arguments = ["--n-ctx", "600", "--seed", "5", "--stats"]
    answer = invoke("chat", *naming(talker), *arguments, stdin=b"one\n")
    assert "the context is full" in answer.stderr
    assert "conversation: 600 of 600 tokens" in answer.stderr


def test_going_on_in_a_pipe(talker: list[Path], own_cache: None) -> None:
    """A chat from a pipe replaces the last conversation only if it resumes it."""
    assert "there is no last conversation" in invoke(*options(talker), "--resume", stdin=b"x\n").stderr
    invoke(*options(talker), stdin=b"x\n")
    assert "there is no last conversation" in invoke(*options(talker), "--resume", stdin=b"x\n").stderr
    keep_last([HELLO, Message("assistant", "yes")])
    answer = invoke(*options(talker), "--resume", "-n", "9", stdin=b"/continue\n")
    assert load_last() == (HELLO, Message("assistant", "yes" + answer.stdout.removesuffix("\n")))
    both = invoke(*options(talker), "--resume", "--load", "x.json", stdin=b"")
    assert (both.code, "drop one" in both.stderr) == (2, True)


def test_c_is_the_context_as_everywhere(talker: list[Path], own_cache: None) -> None:
    keep_last([HELLO, Message("assistant", "yes")])
    chat = ["chat", *naming(talker), "--seed", "5", "-n", "2"]
    sized = invoke(*chat, "-c", "600", stdin=b"one\n/stats\n").stderr
    assert "of 600 tokens" in sized
    assert "the last conversation" not in sized
    for wrong, says in (
        (["-c", "x"], "not a valid integer"),
        (["-c", "0"], "n-ctx must be from 2"),
        (["-c"], "requires an argument"),
    ):
        answer = invoke(*chat, *wrong, stdin=b"")
        assert (answer.code, len(answer.complaints), says in answer.stderr) == (2, 1, True)


def test_an_own_template(talker: list[Path], tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(PLAIN)
    arguments = ["hi", "-n", "5", "--json", "--chat", "--chat-template", str(tmp_path / "own.jinja")]
    answer = generate(*arguments, models=talker[1:])
    assert answer.code == 0
    assert answer.json["prompt_tokens"] > len("hi") + 8
    refused = generate("hi", "--system", "x", models=talker)
    assert (refused.code, "need --chat" in refused.stderr) == (2, True)


def test_the_embedded_pair(demo_files: tuple[Path, Path]) -> None:
    """`llamaspec chat` alone used to fail, because the embedded pair had no template."""
    options = ["--threads", "1", "--seed", "1", "-t", "0", "-n", "8"]
    answer = invoke("chat", *options, stdin=b"import os\n")
    assert answer.code == 0
    assert "only continues Python code" in answer.stderr
    generated = invoke("generate", "import os\n", *options, "--no-stats")
    assert answer.stdout == generated.stdout  # the template joins messages by newlines


# A person at a terminal


@pytest.fixture
def spawn(talker: list[Path], tmp_path: Path) -> Iterator[Callable[..., pexpect.spawn]]:
    children = []

    def start(*more: str, n_tokens: int = 20, **others: str) -> pexpect.spawn:
        cache = str(tmp_path / "cache")
        own = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path), "LLAMASPEC_CACHE": cache}
        env = environment({**own, "TERM": "dumb", **others})
        arguments = [*ENTRY[1:], *options(talker), "-n", str(n_tokens), "--n-ctx", "8192", *more]
        child = pexpect.spawn(
            ENTRY[0],
            arguments,
            env=env,
            timeout=PATIENCE,
            encoding="utf-8",
            dimensions=(24, 200),
            cwd=tmp_path,
        )
        children.append(child)
        child.expect("/help lists the commands")
        child.expect("> ")
        return child

    yield start
    for child in children:
        child.close(force=True)


def test_the_first_history_of_a_person_is_theirs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "none" / "yet"))
    with line_editing():
        pass
    assert stat.S_IMODE(history_path().stat().st_mode) == 0o600


def test_pasted_lines_are_one_message(spawn: Callable[..., pexpect.spawn], tmp_path: Path) -> None:
    child = spawn("--save", "talk.json", TERM="xterm")
    child.send("\x1b[200~one\rtwo\r/exit\r\x1b[201~\r")
    child.expect("stopped after 20 tokens")
    child.expect("> ")
    messages = load_conversation(tmp_path / "talk.json")
    assert [message.text for message in messages if message.role == "user"] == ["one\ntwo\n/exit"]


def test_the_last_conversation_is_resumed(spawn: Callable[..., pexpect.spawn], tmp_path: Path) -> None:
    send(spawn("--no-keep"), "one")
    kept = tmp_path / "cache" / "last_chat.json"
    assert not kept.exists()
    child = spawn()
    send(child, "one")
    assert kept.stat().st_mode & 0o777 == 0o600
    before = load_conversation(kept)
    child.kill(9)
    child = spawn("--resume")
    send(child, "two")
    after = load_conversation(kept)
    assert [message.text for message in after if message.role == "user"] == ["one", "two"]
    assert after[:2] == before


def test_a_message_is_edited(spawn: Callable[..., pexpect.spawn], pair: Pair, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\ngrep -q two "$1" && echo three > "$1"\n')
    editor.chmod(0o755)
    child = spawn("--save", "talk.json", EDITOR=str(editor))
    assert "there is no message yet" in send(child, "/edit")
    send(child, "one")
    send(child, "two")
    send(child, "/edit")
    chat = session(pair)
    say(chat, "one")
    say(chat, "three")
    assert load_conversation(tmp_path / "talk.json") == chat.messages
    assert "the editor failed" in send(child, "/edit")  # grep finds no "two" any more


def send(child: pexpect.spawn, line: str) -> str:
    """Type a line, and return what is shown until the next prompt."""
    child.sendline(line)
    child.expect_exact(line)
    child.expect("> ")
    shown: str = child.before
    return shown.replace("\r\n", "\n").strip("\n")


def test_a_person_talks(spawn: Callable[..., pexpect.spawn], pair: Pair) -> None:
    chat = session(pair)
    child = spawn()
    shown = send(child, "one")
    assert shown.startswith(say(chat, "one").strip("\n"))
    assert "stopped after 20 tokens" in shown
    send(child, "two")
    say(chat, "two")
    assert f"{last(chat)[1]} of them cached" in send(child, "/stats full")
    assert send(child, "/regenerate").startswith("".join(chat.regenerate()).strip("\n"))
    assert "saved to talk.json" in send(child, "/save talk.json")
    assert "conversation cleared" in send(child, "/reset")
    assert "no answer yet" in send(child, "/stats")
    shown = send(child, "/load talk.json")
    assert "resuming talk.json: 4 messages" in shown
    assert "You: two" in shown
    assert "You: one" not in shown  # only the last exchange
    send(child, "/set temperature 0.25")
    assert send(child, "/set temperature") == "temperature        0.25"
    assert "there is no setting what" in send(child, "/set what")
    assert "there is no command /what" in send(child, "/what")
    assert "/continue          continue the last" in send(child, "/help")
    child.sendline('"""')
    child.expect(r"\.\.\. ")
    child.sendline("three")
    child.expect(r"\.\.\. ")
    child.sendline('four"""')
    child.expect(r"stopped after 20 tokens[^\n]*\n")
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_ctrl_c(spawn: Callable[..., pexpect.spawn], tmp_path: Path) -> None:
    """Ctrl-C stops an answer and keeps its text; at the prompt nothing is lost, the history included."""
    child = spawn("--save", "talk.json", n_tokens=8000)
    child.sendline("tell me a story")
    child.expect("tell me a story\r\n")
    child.expect(r"[^\s]{2}")  # the answer has begun
    child.sendintr()
    child.expect(r"\n> ")  # the answer may contain a >
    messages = load_conversation(tmp_path / "talk.json")
    assert [message.role for message in messages] == ["user", "assistant"]
    assert len(messages[1].text) > 0
    assert "stopped by an interrupt" in send(child, "/stats")
    child.sendline("line one\\")
    child.expect(r"\.\.\. ")
    until_it_waits(child.pid)
    child.sendintr()
    child.expect("> ")  # the unfinished message is discarded
    until_it_waits(child.pid)
    child.sendintr()
    child.expect("Ctrl-D leaves\r\n")
    child.expect("> ")
    assert "stopped by an interrupt" in send(child, "/stats")  # the conversation is still there
    child.sendline("/exit")
    child.expect(pexpect.EOF)
    assert "Traceback" not in child.before
    child.close()
    assert child.exitstatus == 0
    child = spawn()
    child.send("\x10\x10\x10\x10\x10")  # Ctrl-P five times: up in the history
    child.expect("tell me a story")
