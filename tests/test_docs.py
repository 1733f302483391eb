"""The documentation: its commands and programs run, its links work, its table of curves is right.

Blocks marked `sh` contain commands; the blocks marked `python` of a page are one program. They run in a
folder where the names of files on the pages are links to the embedded pair, or small texts. A command that
needs more is only parsed.
"""

from __future__ import annotations

import json
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import pytest

from command import ENTRY, environment, invoke
from llamaspec.cli.main import main
from llamaspec.length.cost_curve import CostCurve
from llamaspec.measure.verdict import best_length, break_even, round_seconds
from patience import PATIENCE
from rpc_workers import free_port
from tiny_models import MEAN, Recipe, write_bert
from tiny_vocabulary import WORD_PIECE

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

TARGETS = ("big.gguf", "a.gguf", "b.gguf", "big-instruct.gguf", "coder-1.5b-F16.gguf", "qwen3.5-27b.gguf")
DRAFTS = ("small.gguf", "middle.gguf", "other-family.gguf", "small-instruct.gguf", "coder-0.5b-Q4_0.gguf")
TEXTS = ("prompt.txt", "task.txt", "code.py", "notes.md", "main.py", "corpus.txt")
SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'
ONLY_PARSED = {  # part of a command: why it is not run
    "--rpc": "other machines",
    "worker": "other machines",
    "--pair": "the hub",
    "hf:": "the hub",
    "llamaspec pull": "the hub",
    "llamaspec run": "the hub",
    "models pull": "the hub",
    "--draft mtp": "a target with prediction heads",
    "eagle3": "a draft that reads hidden states",
    "--llama-server": "llama-server",
    "--against": "another checkout",
}
OTHER_PROGRAMS = {
    *("aider", "claude", "cmake", "docker", "eval", "export", "git", "make", "mini", "pip", "pipx", "python"),
    *("uv", "CMAKE_ARGS", "_LLAMASPEC_COMPLETE", "systemctl", "journalctl", "launchctl"),
}  # fmt: skip
SHELL = {"|", ">", "<", "&", "&&", ";"}  # words of a line that only a shell understands
SHORTER = {  # options that make a command end soon
    "generate": "-n 24",
    "compare": "-n 8 -r 1",
    "audit": "-n 8",
    "probe": "--quick",
    "bench": "-n 4 --task ask -r 1",
}
ADAPTED = {
    "--keep 32768": "--keep 4096",  # of the 8,192 tokens that the embedded pair has
    "curl ": "curl --fail ",
    "~/models": "models",
}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines() if line]


class Reader:
    """Runs the commands and the program of a page in a folder with the files that it names."""

    def __init__(self, folder: Path, demo_files: tuple[Path, Path]) -> None:
        self.folder = folder
        for names, file in zip((TARGETS, DRAFTS), demo_files, strict=True):
            for name in names:
                (folder / name).symlink_to(file)
        (folder / "models").mkdir()
        (folder / "models" / "some.gguf").symlink_to(demo_files[0])
        write_bert(folder / "nomic-embed.gguf", Recipe(vocabulary=WORD_PIECE), MEAN)
        for name in TEXTS:
            (folder / name).write_text("def f(a, b):\n    return a\n" * 20)
        (folder / "person.json").write_text(SCHEMA)
        (folder / "bin").mkdir()
        command = folder / "bin" / "llamaspec"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(ENTRY)} "$@"\n')
        command.chmod(0o755)
        self.env = environment({
            "PATH": f"{folder / 'bin'}:{environment()['PATH']}",
            "PYTHONPATH": str(ROOT),
            "LLAMASPEC_CONFIG": str(folder),
            "LLAMASPEC_CACHE": str(folder / "cache"),
            "NO_PROXY": "127.0.0.1",
        })  # fmt: skip
        self.port = str(free_port())
        self.servers = ExitStack()

    def read(self, page: Path) -> None:
        """Run everything on a page; a server runs until the next one starts, or the page ends."""
        with self.servers:
            for line in commands(page):
                self.type(line)
            servers = [line for line in commands(page) if line.startswith("llamaspec serve --target big")]
            if servers:  # the program is a client of the server with which the page begins
                self.type(servers[0])
            self.run("python", "\n".join(blocks(page, "python")), sys.executable, "-c")

    def type(self, line: str) -> None:
        """Run or parse one command."""
        words = shlex.split(line, comments=True)
        if not words:
            return
        if words[0] not in ("llamaspec", "curl"):
            assert words[0].partition("=")[0] in OTHER_PROGRAMS, line
        elif any(part in line for part in ONLY_PARSED):
            parse(words)
        elif words[1] == "serve":
            self.servers.close()
            self.servers.enter_context(self.serving(words))
        else:
            for part, options in SHORTER.items():
                line = line.replace(f"llamaspec {part} ", f"llamaspec {part} {options} ")
            if words[0] == "llamaspec" and not {*words} & SHELL:
                answer = invoke(*shlex.split(self.adapted(line), comments=True)[1:], stdin=b"Hello\n")
                assert answer.code == 0, f"{line}\n{answer}"
            else:
                self.run(line, line, "bash", "-euo", "pipefail", "-c")

    def adapted(self, text: str) -> str:
        for written, meant in {**ADAPTED, ":8080": f":{self.port}"}.items():
            text = text.replace(written, meant)
        return text

    def run(self, shown: str, text: str, *program: str) -> None:
        text = self.adapted(text)
        done = subprocess.run(
            [*program, text], cwd=self.folder, env=self.env, input="Hello\n",
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, f"{shown}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, f"{shown}\n{done.stderr}"

    @contextmanager
    def serving(self, words: list[str]) -> Iterator[None]:
        server = subprocess.Popen(
            [self.folder / "bin" / "llamaspec", *(ADAPTED.get(word, word) for word in words[1:]),
             "--port", self.port],
            cwd=self.folder, env=self.env, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert server.stderr is not None
        try:
            said = []
            for line in server.stderr:
                said.append(line)
                if "served at" in line:
                    break
            else:
                raise AssertionError("".join(said))
            yield
        finally:
            server.kill()
            server.communicate()


def parse(words: list[str]) -> None:
    """Let click read a command, without running it."""
    command: click.Command = main
    context = click.Context(main, **main.context_settings)  # `-h` among them, which a command keeps
    while isinstance(command, click.Group):
        words = words[1:]
        found = command.get_command(context, words[0])
        assert found is not None, words
        command = found
    command.make_context(words[0], words[1:], parent=context)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_what_a_page_says_works(
    page: Path, demo_files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, demo_files)
    for name in ("LLAMASPEC_CONFIG", "LLAMASPEC_CACHE"):  # for commands in this process
        monkeypatch.setenv(name, reader.env[name])
    reader.read(page)


@pytest.mark.parametrize("page", DOCS, ids=page_name)
def test_every_command_stands_in_a_block_that_is_run(page: Path) -> None:
    outside = re.sub(BLOCK, "", page.read_text())
    assert re.findall(r"^ {4}(?:llamaspec|curl|make|python|pip) .*", outside, re.MULTILINE) == []


@pytest.mark.parametrize("page", PROSE, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in LINK.findall(re.sub(BLOCK, "", page.read_text())):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert page not in DOCS or page.parent in target.parents, f"{file} is not part of the site"
        if anchor:
            assert anchor in map(slug, HEADING.findall(target.read_text())), f"{file}#{anchor}"


def slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_table_of_curves_is_what_its_curves_say() -> None:
    text = (ROOT / "docs" / "choosing-a-draft.md").read_text()
    table = text.partition("| machine and weights |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table
    for line in table:
        _, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        curve = {1: 1.0} | {
            width: float(cell) for width, cell in zip((2, 4, 8, 16), cells, strict=False) if cell
        }
        seconds = round_seconds(CostCurve(tuple(curve), tuple(curve.values()), 1 / 20))
        least = break_even(seconds)
        assert least is not None
        assert [f"{least:.2f}", f"{best_length(seconds, 0.7).speed_up:.2f}"] == cells[4:], line


# Services and the image


def check_serves(command: list[str]) -> None:
    """Raise if `llamaspec serve` would refuse the options of a command."""
    program, subcommand, *options = command
    assert (Path(program).name, subcommand) == ("llamaspec", "serve")
    serve = main.get_command(click.Context(main), subcommand)
    assert serve is not None
    context = click.Context(main, **main.context_settings)  # `-h` among them, which a command keeps
    serve.make_context(subcommand, options, parent=context).close()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
@pytest.mark.parametrize("manager", ["--user", "--system"])
def test_systemd_takes_the_unit(tmp_path: Path, manager: str) -> None:
    (text,) = blocks(ROOT / "docs" / "server.md", "ini")
    start = re.search(r"^ExecStart=(.*)", text, re.MULTILINE)
    assert start is not None
    check_serves(shlex.split(start[1]))
    unit = tmp_path / "llamaspec.service"
    unit.write_text(text.replace("%h/.local/bin/llamaspec", sys.executable))
    command = ["systemd-analyze", manager, "verify", str(unit)]
    env = {**environment(), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=env)
    complaints = [line for line in done.stderr.splitlines() if "llamaspec.service" in line]
    assert (done.returncode, complaints) == (0, [])


def test_the_property_list_starts_the_server() -> None:
    (text,) = blocks(ROOT / "docs" / "server.md", "xml")
    service = plistlib.loads(text.encode())
    check_serves(service["ProgramArguments"])
    assert service["KeepAlive"] == {"SuccessfulExit": False}
    assert service["ExitTimeOut"] > 30  # seconds of --grace


def test_the_image_has_what_it_copies_and_starts() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    for line in re.findall(r"^COPY (?!--from)(.*)", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    started = json.loads(re.findall(r"^ENTRYPOINT (.*)", text, re.MULTILINE)[-1])
    check_serves([*started, "--models-dir", "/models"])
    (healthy,) = re.findall(r"CMD (\[.*\])", text)
    python, option, code = json.loads(healthy)
    assert (python, option) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
