"""Bad input gives one line with the fault and the remedy, an exit code other than 0, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import ENTRY, Answer, answer_of, invoke, naming, run
from model_store import ModelStore
from tiny_models import truncated

LATIN = "caf\xe9".encode("latin-1")


def assert_refused(answer: Answer, says: str, code: int) -> None:
    assert answer.code == code, answer
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    assert len(answer.complaints) == 1, answer.stderr
    line = answer.complaints[0]
    assert line.startswith("llamaspec: ")
    assert says in line
    assert any(remedy in line for remedy in ("; ", " must ", "give the prompt once")), line


@pytest.fixture(scope="module")
def files(store: ModelStore, target_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return files by the names in the tables below."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.gguf").write_text("# not a model\n" * 100)
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes(LATIN)
    (folder / "long.txt").write_text("x" * 600)
    return {
        "GOOD": target_file,
        "MISSING": folder / "missing.gguf",
        "FOLDER": folder,
        "TEXT": folder / "text.gguf",
        "CUT": truncated(target_file, folder / "cut.gguf"),
        "EMPTY_PROMPT": folder / "empty.txt",
        "LATIN_PROMPT": folder / "latin.txt",
        "LONG_PROMPT": folder / "long.txt",
        "NAME_TOO_LONG": folder / ("n" * 300),
    }


MODEL_FILES = [
    ("MISSING", "no such model file"),
    ("FOLDER", "is a directory; name the .gguf file inside it"),
    ("TEXT", "is not a GGUF file; convert the model"),
    ("CUT", "cannot load"),
]


@pytest.mark.parametrize("place", ["target", "draft"])
@pytest.mark.parametrize(("name", "says"), MODEL_FILES)
def test_model_files(files: dict[str, Path], place: str, name: str, says: str) -> None:
    models = [files[name], files["GOOD"]] if place == "target" else [files["GOOD"], files[name]]
    answer = invoke("generate", *naming(models), "-p", "x")
    assert_refused(answer, says, 1)
    assert str(files[name]) in answer.stderr


PROMPTS: list[tuple[list[str], bytes, str]] = [
    ([""], b"", "the prompt is empty; give some text"),
    (["-f", "EMPTY_PROMPT"], b"", "the prompt is empty; give some text"),
    ([], b"", "the prompt is empty; give some text"),
    (["-f", "MISSING"], b"", "missing.gguf: No such file or directory"),
    (["-f", "FOLDER"], b"", "Is a directory"),
    (["-f", "NAME_TOO_LONG"], b"", "File name too long"),
    (["-f", "LATIN_PROMPT"], b"", "the prompt is not UTF-8: byte 3 is 0xe9; convert it first"),
    ([], LATIN, "the prompt is not UTF-8: byte 3 is 0xe9; convert it first"),
    (["-f", "LONG_PROMPT"], b"", "601 tokens, which leaves no room in a context of 512; shorten it"),
    (["x" * 511], b"", "512 tokens, which leaves no room in a context of 512; shorten it"),
]


@pytest.mark.parametrize(("arguments", "stdin", "says"), PROMPTS)
def test_prompts(files: dict[str, Path], arguments: list[str], stdin: bytes, says: str) -> None:
    named = [files.get(part, part) for part in arguments]
    models = naming([files["GOOD"], files["GOOD"]])
    assert_refused(invoke("generate", *models, *named, stdin=stdin), says, 1)


def test_copies_that_are_asked_for_and_forbidden() -> None:
    answer = invoke("generate", "--draft", "ngram", "--no-ngram", "x")
    assert_refused(answer, "--draft ngram and --no-ngram contradict each other; drop one", 2)
    plain = invoke("generate", "--draft", "ngram", "--no-ngram", "--no-draft", "-n", "2", "x")
    assert plain.code == 0, "as the plain server of a benchmark is started"


def test_a_second_draft() -> None:
    answer = invoke("generate", "--draft", "a.gguf", "-md", "b.gguf", "x")
    assert_refused(answer, "a target has one draft; drop all but one --draft", 2)


@pytest.mark.parametrize("arguments", [["x", "-p", "y"], ["-p", "x", "-f", "LONG_PROMPT"]])
def test_two_prompts(arguments: list[str]) -> None:
    assert_refused(invoke("generate", *arguments), "give the prompt once", 2)


def test_a_prompt_that_just_fits(files: dict[str, Path]) -> None:
    answer = invoke("generate", *naming([files["GOOD"]] * 2), "x" * 510, "--json")
    assert (answer.json["stop_reason"], len(answer.json["tokens"])) == ("context", 1)


def test_latin_1_as_an_argument(files: dict[str, Path]) -> None:
    answer = run("generate", *naming([files["GOOD"]] * 2), "caf\udce9")
    assert_refused(answer, "the prompt is not UTF-8: byte 3 is 0xe9; convert it first", 1)


def test_no_stdin_at_all(files: dict[str, Path]) -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *ENTRY, "generate", *naming([files["GOOD"]] * 2)]
    assert_refused(answer_of(command), "the prompt is empty", 1)


VALUES = [
    # Refused by the values, also in the Python interface.
    (["-t", "nan"], "temperature must be >= 0, got nan", 2),
    (["--top-p", "0"], "top-p must be in (0, 1], got 0.0", 2),
    (["--n-ctx", str(2**32 + 512)], "n-ctx must be from 2 to", 2),
    (["--n-ctx", "1000000000"], "--n-ctx", 1),
    (["--draft-ctx", "0"], "n-ctx must be from 2 to", 2),
    (["--draft-threads", "0"], "threads must be from 1 to 512, got 0", 2),
    (["--stop", ""], "a stop string must not be empty", 2),
    (["--exact", "--flash-attn", "off", "-ngl", "0"], "--exact is impossible: ", 1),
    # Refused by the command line.
    (["-n", "0"], "Invalid value for '--max-tokens' / '-n'", 2),
    (["--top-k", "-1"], "'--top-k': must be an integer ≥ 0", 2),
    (["--min-p", "nan"], "'--min-p': must be a number from 0 to 1", 2),
    (["--kernels", "avx2"], "Invalid value for '--kernels'", 2),
    (["--no-such-option"], "No such option", 2),
]


@pytest.mark.parametrize(("arguments", "says", "code"), VALUES)
def test_options_out_of_range(files: dict[str, Path], arguments: list[str], says: str, code: int) -> None:
    models = naming([files["GOOD"], files["GOOD"]])
    assert_refused(invoke("generate", *models, "-p", "x", *arguments), says, code)


@pytest.mark.parametrize("option", ["--top-k", "--min-p"])
def test_zero_switches_a_filter_off(files: dict[str, Path], option: str) -> None:
    assert invoke("generate", *naming([files["GOOD"]]), "-n", "2", option, "0", "x").code == 0


NAMING_FILES = [
    ("generate", "--json-schema", "JSON schema"),
    ("generate", "--grammar", "grammar"),
    ("generate", "--prediction", "prediction"),
    ("generate", "--timeline", "timeline"),
    ("generate", "--file", "prompt file"),
    ("generate", "--chat-template", "chat template"),
    ("chat", "--chat-template", "chat template"),
    ("chat", "--load", "conversation"),
    ("serve", "--chat-template", "chat template"),
    ("serve", "--api-key-file", "key file"),
    ("bench", "--tasks", "tasks"),
    ("bench", "--share", "report"),
]


@pytest.mark.parametrize(("command", "option", "kind"), NAMING_FILES)
def test_files_are_checked_before_models(
    files: dict[str, Path], command: str, option: str, kind: str
) -> None:
    """A wrong file used to be noticed only after minutes of loading."""
    answer = invoke(command, "--target", files["MISSING"], option, files["FOLDER"])
    assert_refused(answer, kind, 1)
    assert files["FOLDER"].name in answer.stderr


@pytest.mark.parametrize(
    ("name", "says"), [("MISSING", "no such model file"), ("TEXT", "is not a GGUF file")]
)
def test_drafts_are_checked_before_targets(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    """A misspelt draft used to be noticed only after the target was loaded."""
    monkeypatch.setattr("llamaspec.cli.model_options.open_plan", None)  # nothing may be loaded
    assert_refused(invoke("generate", *naming([files["GOOD"], files[name]]), "x"), says, 1)


INVALID = [
    ("generate", "--json-schema", '{"type": "foo"}', "Invalid type: foo; correct it"),
    ("generate", "--grammar", "start: foo", 'unknown name: "foo"; correct it'),
    ("generate", "--chat-template", "{{ foo", "the chat template is not valid: unexpected end"),
    ("chat", "--chat-template", "{{ foo", "the chat template is not valid: unexpected end"),
    ("serve", "--chat-template", "{{ foo", "the chat template is not valid: unexpected end"),
    ("bench", "--tasks", "[3]", "is not a file of tasks"),
]


@pytest.mark.parametrize(("command", "option", "content", "says"), INVALID)
def test_contents_are_checked_before_models(
    files: dict[str, Path], tmp_path: Path, command: str, option: str, content: str, says: str
) -> None:
    (tmp_path / "invalid").write_text(content)
    answer = invoke(command, "--target", files["MISSING"], option, tmp_path / "invalid")
    assert_refused(answer, says, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["genrate", "x"], "No such command 'genrate'. Did you mean 'generate'?; see `llamaspec -h`"),
        (["other"], "No such command 'other'; see `llamaspec -h`"),
        (["bench", "--repeats", "0"], "'-r': must be an integer ≥ 1; see"),
        (["generate", "-k", "few"], "'-k': must be auto or an integer from 0 to 64; see"),
        (["serve", "--grace", "nan"], "'--grace': must be a number ≥ 0; see"),
        (["serve", "-c"], "Option '-c' requires an argument; see `llamaspec serve -h`"),
        (["ps"], "ask the server which models are loaded: curl http://HOST:PORT/api/ps; see"),
        (["run", "--system", "x"], "name the model to run, such as qwen3-14b; see `llamaspec run -h`"),
        (["run", "big", "--pair", "small"], "big is the model to run; drop --pair; see"),
        (["run", "-m", "small", "big"], "big is the model to run; drop --target; see"),
        (["models", "show"], "Missing argument 'NAME'; see `llamaspec models show -h`"),
    ],
)
def test_command_lines_that_mean_nothing(arguments: list[str], says: str) -> None:
    assert_refused(invoke(*arguments), says, 2)
