"""Models by name: the list that comes with llamaspec, and the user's own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from click.shell_completion import ShellComplete
from huggingface_hub import constants

from command import ENTRY, Answer, environment, invoke, naming, python, said
from hub_server import ADDRESS
from llamaspec.catalog import Catalog, Entry, add_own, read_catalog
from llamaspec.cli.main import main
from llamaspec.cli.output import OTHER_DRAFT
from llamaspec.errors import ModelFileError, printable
from llamaspec.hub import RemoteFile
from llamaspec.llama import resources
from llamaspec.llama.hidden_draft_file import ONE_HEAD
from llamaspec.llama.vocabulary import MAX_SIZE_DIFFERENCE
from llamaspec.measure.recommend import Room, choices
from model_store import ModelStore
from tiny_models import Recipe

QUANTIZATION = "big: {{repo: a/b, default: q, quantizations: {{q: {}}}}}"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("generate", "--target", "bigg", "x"), "did you mean big"),
        (("generate", "--pair", "qwen3-14c", "x"), "did you mean qwen3-14b"),
        (("generate", "--pair", "small", "x"), "hf:acme/small-GGUF:small-Q8_0.gguf is not on this machine"),
        (("generate", "--target", "hf:acme", "x"), "write hf:owner/repo:file.gguf"),
        (("generate", "-hf", "acme", "x"), "write hf:owner/repo:file.gguf"),
        (("generate", "--target", "small:Q4_0", "x"), "small has no quantization Q4_0"),
        (("models", "show", "nobody"), "`llamaspec models list`"),
        (("models", "remove", "qwen3-14b"), "nothing of qwen3-14b is on this machine"),
        (("models", "add", "mine", "missing.gguf"), "no such model file"),
        (("models", "add", "mine", ADDRESS, "--draft", "nobody"), "no model is called nobody"),
    ],
)
def test_names_that_mean_nothing(
    own_list: Path, arguments: tuple[str, ...], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_list.parent / "hub"))
    assert part in said(invoke(*arguments))


@pytest.mark.usefixtures("cache")
def test_a_pair_and_a_target_are_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = invoke("generate", "--pair", "big", "--target", "small", "x")
    assert answer.code == 2
    assert "drop --target" in answer.stderr
    monkeypatch.setenv("LLAMASPEC_TARGET", "missing.gguf")  # the command line overrides it
    assert invoke("generate", "--pair", "big", "-n", "2", "--threads", "1", "x").code == 0


@pytest.mark.parametrize(
    ("words", "begun", "names"),
    [
        (["generate", "--pair"], "b", ["big"]),
        (["generate", "--pair"], "sm", []),  # it has no draft
        (["serve", "--target"], "sm", ["small"]),
        (["chat", "--draft"], "sm", ["small"]),
        (["models", "show"], "sm", ["small"]),
        (["serve", "--target"], "models/", []),  # a path
    ],
)
def test_the_shell_completes_names_of_models(
    own_list: Path, words: list[str], begun: str, names: list[str]
) -> None:
    found = ShellComplete(main, {}, "llamaspec", "_LLAMASPEC_COMPLETE").get_completions(words, begun)
    assert [each.value for each in found if each.type == "plain"] == names
    assert any(each.type == "file" for each in found) == (words[-1] != "--pair")


def test_options_of_a_model_hold_where_the_command_line_gives_none(
    demo_files: tuple[Path, Path], own_list: Path
) -> None:
    path, template = str(demo_files[0]), own_list.parent / "short.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}:")
    options = {"temperature": 0, "n_ctx": 64, "chat_template": str(template)}
    own_list.write_text(json.dumps({"mine": {"path": path, "options": options}}))

    def generated(*arguments: str) -> dict[str, Any]:
        common = ("--threads", "1", "--seed", "3", "-n", "12", "--json", "--no-draft")
        found: dict[str, Any] = invoke("generate", *common, *arguments, "def f(").json
        return found

    greedy, hot = generated("--target", path, "-t", "0"), generated("--target", path, "--temp", "2")
    assert generated("--pair", "mine")["text"] == generated("--target", "mine")["text"] == greedy["text"]
    assert generated("--target", "mine", "--temp", "2")["text"] == hot["text"] != greedy["text"]
    assert 12 < len(generated("--target", "mine", "-n", "-1")["tokens"]) < 64
    assert json.loads(invoke("models", "show", "mine", "--json").stdout)["options"] == options
    assert "n_ctx: 64" in invoke("models", "show", "mine").stdout
    assert generated("--target", "mine", "--chat")["prompt_tokens"] < 16


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("big: [", "this is not plain YAML"),
        ("big: {licence: MIT}", "it needs a path, or a repo"),
        ("big: {colour: red}", "big: colour: unexpected keyword argument"),
        (
            "big: {repo: a, default: q, pattern: x.gguf}",
            "big: big has no usable file: a repository is named owner/name, got a,",
        ),
        ("big: {repo: a/b, default: q}", "big: big has no quantization q, choose one of "),
        ("big: {repo: a/b, default: q, pattern: 'x{size}.gguf'}", "no braces but {quantization}"),
        ("big: {path: x.gguf, memory_gb: much}", "big: memory_gb: input should be a valid integer"),
        (QUANTIZATION.format("{bytes: 3}"), "big: quantizations.q.file: field required"),
    ],
)
def test_a_list_that_cannot_be_read(own_list: Path, text: str, part: str) -> None:
    own_list.write_text(text)
    for arguments in (["list"], ["add", "mine", ADDRESS]):
        line = said(invoke("models", *arguments))
        assert part in line
        assert str(own_list) in line
        assert "; fix" in line
    assert own_list.read_text() == text


# Names of one's own


@pytest.mark.usefixtures("cache")
def test_names_come_and_go(target_file: Path) -> None:
    assert invoke("models", "add", "mine", target_file, "--draft", "small", "--notes", "fast").code == 0
    assert invoke("models", "add", "theirs", ADDRESS).code == 0
    shown = invoke("models", "show", "mine", "--json").json
    assert (shown["here"], shown["draft"], shown["notes"]) == (str(target_file), "small", "fast")
    assert invoke("models", "path", "mine").stdout.strip() == str(target_file)
    told = invoke("show", "mine").stdout
    assert (told.replace("\n", "").count(str(target_file)), "own" in told) == (1, False)
    answer = invoke("generate", "--pair", "mine", "-n", "4", "--threads", "1", "--json", "x")
    assert answer.json["draft"].endswith("small-Q8_0.gguf")
    assert "freed" not in invoke("rm", "mine").stderr
    assert target_file.exists()
    invoke("models", "pull", "theirs")
    gone = invoke("models", "remove", "theirs").stderr
    assert "freed" in gone
    assert "removed your entry" in gone
    names = [entry["name"] for entry in json.loads(invoke("list", "--json").stdout)]
    assert "big" in names
    assert not {"mine", "theirs"} & {*names}


@pytest.mark.usefixtures("cache")
def test_run_fetches_a_pair_and_opens_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    options = ("--chat-template", template, "--threads", "1", "-n", "8", "--seed", "1", "--stats")

    def chat(*arguments: str | Path) -> Answer:
        answer = invoke(*arguments, stdin=b"def f(self):\n")
        assert answer.code == 0, answer
        return answer

    fetched = chat("run", "big", *options)
    assert fetched.stderr.count("fetching hf:acme/") == 2
    assert fetched.stdout.strip()
    plain = chat("chat", "--target", "big", *options)
    assert (plain.stdout, plain.stderr.count("fetching")) == (fetched.stdout, 0)
    monkeypatch.setenv("LLAMASPEC_TARGET", "missing.gguf")
    assert chat("run", *options, "big").stdout == fetched.stdout
    assert chat("run", *options, "big", "def", "f(self):").stdout == fetched.stdout
    assert said(invoke("run", *options, "big", " ")) == "llamaspec: the message is empty; drop it for a chat"
    assert "the message is not UTF-8" in said(invoke("run", *options, "big", "caf\udce9"))


@pytest.mark.usefixtures("cache")
def test_pull_is_a_command_of_its_own() -> None:
    paths = invoke("pull", "big").stdout
    assert len(paths.splitlines()) == 2
    assert invoke("models", "pull", "big").stdout == paths


def test_a_folder_does_not_hide_a_model(
    own_list: Path, target_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "models", "new"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert invoke("models", "add", "mine", target_file).code == 0
    assert "it has no quantizations" in invoke("generate", "--target", "mine:Q4_0", "x").stderr
    options = ("-n", "2", "--threads", "1", "--no-stats", "x")
    assert invoke("generate", "--target", "mine", *options).code == 0
    assert "models; it is a folder" in said(invoke("generate", "--target", "models", "x"))


def test_a_file_that_is_gone_cannot_be_pulled(own_list: Path, target_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(target_file.read_bytes())
    invoke("models", "add", "mine", path)
    for name in ("mine", path):
        assert invoke("models", "pull", name).stdout == f"{path}\n"
    path.unlink()
    for name in ("mine", path):
        assert f"no such model file: {path}" in said(invoke("models", "pull", name))


@pytest.mark.usefixtures("own_list")
def test_a_name_must_not_look_like_a_file() -> None:
    answer = invoke("models", "add", "mine.gguf", ADDRESS)
    assert answer.code == 2
    assert "cannot be a name" in answer.stderr


def test_a_list_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in the way").write_text("")
    monkeypatch.setenv("LLAMASPEC_CONFIG", str(tmp_path / "in the way"))
    assert "set LLAMASPEC_CONFIG to a folder of yours" in said(invoke("models", "add", "mine", ADDRESS))


def test_a_file_needs_neither_the_list_nor_the_hub(target_file: Path, draft_file: Path) -> None:
    """Commands that name files do not import what reads lists and uses the network."""
    code = (
        "import sys; from llamaspec.cli.main import main\n"
        "try: main()\n"
        "finally: print({'yaml', 'huggingface_hub', 'httpx2', 'httpx'} & set(sys.modules))"
    )
    answer = python(code, "generate", *naming([target_file, draft_file]), "-n", "1", "--no-stats", "x")
    assert answer.stdout.splitlines()[-1] == "set()", answer


def test_a_name_is_not_taken_twice(own_list: Path, target_file: Path) -> None:
    before = own_list.read_text()
    for name, whose in (("big", "your own list"), ("qwen3-14b", "the list that comes with llamaspec")):
        line = said(invoke("models", "add", name, target_file))
        assert f"{name} is already in {whose}" in line
        assert "--force" in line
    assert own_list.read_text() == before
    assert invoke("models", "add", "qwen3-14b", target_file, "--force").code == 0
    assert invoke("models", "path", "qwen3-14b").stdout.strip() == str(target_file)


def test_only_a_model_gets_a_name(own_list: Path, tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    assert "is not a GGUF file" in said(invoke("models", "add", "mine", tmp_path / "page.gguf"))
    assert "mine" not in own_list.read_text()


def test_another_name_for_a_model(own_list: Path, target_file: Path) -> None:
    invoke("models", "add", "mine", target_file)
    invoke("models", "add", "yours", "mine")
    invoke("models", "add", "little", "small:Q8_0")
    assert invoke("models", "path", "yours").stdout.strip() == str(target_file)
    entry = json.loads(invoke("models", "show", "little", "--json").stdout)
    assert entry["quantizations"] == {"default": {"file": "small-Q8_0.gguf"}}


def test_sizes_of_a_model_are_shown_in_gb(own_list: Path) -> None:
    shown = [" ".join(line.split()) for line in invoke("models", "show", "qwen3-14b").stdout.splitlines()]
    assert "KV cache of 8192 tokens 1.3 GB" in shown
    assert "recommended memory 16 GB" in shown


def test_drafts_that_are_in_no_list_are_named(own_list: Path) -> None:
    own_list.write_text(
        "mine: {path: x.gguf, draft: nobody}\nother: {path: y.gguf, draft: 'qwen3-0.6b:Q8_0'}"
    )
    answer = invoke("models", "list")
    assert answer.stderr.splitlines() == ["llamaspec: mine has the draft nobody, which is in no list"]


def test_a_draft_may_be_a_file(own_list: Path, target_file: Path, draft_file: Path) -> None:
    """It was said not to exist."""
    assert invoke("models", "add", "mine", target_file, "--draft", draft_file).code == 0
    assert read_catalog().draft_of("mine") == str(draft_file)
    assert "in no list" not in invoke("list").stderr
    assert "no such model file" in said(
        invoke("models", "add", "yours", target_file, "--draft", "./none.gguf")
    )


def test_a_folder_is_listed_with_its_pairs(
    own_list: Path, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMASPEC_MODELS_DIR", str(tmp_path))
    (tmp_path / "tiny.gguf").symlink_to(store.path("llama", Recipe(width=32)))
    (tmp_path / "large.gguf").symlink_to(store.path("llama", Recipe(width=128, n_ffn=384, n_layers=4)))
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere")

    def drafts() -> dict[str, str | None]:
        return {entry["name"]: entry["draft"] for entry in json.loads(invoke("list", "--json").stdout)}

    found = drafts()
    assert (found["large"], found["tiny"], "gone" in found) == ("tiny", None, False)
    assert OTHER_DRAFT in invoke("list").stderr
    add_own(Entry("mine", path=str(tmp_path / "large.gguf")))
    found = drafts()
    assert (found["mine"], "large" in found) == (None, False)


@pytest.mark.parametrize("columns", ["40", "80"])
def test_the_list_has_a_line_for_each_model(
    own_list: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """Names are never broken, because people copy them."""
    monkeypatch.setenv("COLUMNS", columns)
    lines = invoke("models", "list").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines[1:]} == {*read_catalog().entries}


def test_a_list_keeps_what_it_says(own_list: Path, target_file: Path) -> None:
    entries = read_catalog().entries
    invoke("models", "add", "mine", target_file)
    invoke("models", "remove", "mine")
    assert read_catalog().entries == entries
    assert [path.name for path in own_list.parent.iterdir()] == ["models.yaml"]


# Names and lists that mean harm


@pytest.fixture
def snapshots(own_list: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the hub's cache with one state of acme/big-GGUF, and a file beside the cache."""
    folder = own_list.parent / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    (folder / "models--acme--big-GGUF" / "snapshots" / "state").mkdir(parents=True)
    (own_list.parent / "victim.gguf").write_bytes(b"mine")
    return folder


NAMES_THAT_LEAD_OUT = ("{folder}/victim.gguf", "x/../../../../../victim.gguf")


@pytest.mark.parametrize("name", NAMES_THAT_LEAD_OUT)
@pytest.mark.parametrize(
    "entry",
    [
        "evil: {{repo: acme/big-GGUF, default: q, quantizations: {{q: {{file: '{name}'}}}}}}",
        "evil: {{repo: acme/big-GGUF, default: q, pattern: '{name}'}}",
        "evil: {{repo: '../..', default: q, pattern: x.gguf}}",
    ],
)
def test_no_list_leads_out_of_the_cache(snapshots: Path, own_list: Path, entry: str, name: str) -> None:
    own_list.write_text(entry.format(name=name.format(folder=snapshots.parent)))
    assert "is invalid" in said(invoke("models", "remove", "evil"))
    assert (snapshots.parent / "victim.gguf").read_bytes() == b"mine"


def test_no_quantization_leads_out_of_the_cache(snapshots: Path, own_list: Path) -> None:
    own_list.write_text("evil: {repo: acme/big-GGUF, default: q, pattern: 'x/{quantization}.gguf'}")
    line = said(invoke("models", "remove", "evil:../../../../../victim"))
    assert "evil has no usable file" in line
    assert (snapshots.parent / "victim.gguf").exists()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: " + 3000 * "[", "is nested too deeply"),
        ("a: {path: x.gguf, memory_gb: 1" + 400 * "0" + "}", "memory_gb must be from 1 to 1048575"),
        ("a: {path: x.gguf, cache_mb: -5}", "cache_mb must be from 1 to 1073741823, got -5"),
        (QUANTIZATION.format("{file: x.gguf, bytes: 1" + 5000 * "0" + "}"), "is invalid"),
        ("? [a, b]\n: {path: x.gguf}", "this is not plain YAML"),
        ('a: {path: "x\\0.gguf"}', "no file has the path 'x\\x00.gguf'"),
        ('"a\\e]0;t\\a": 3', "a\\x1b]0;t\\x07 must be a mapping"),
        ("a: !!python/object/apply:os.getcwd []", "this is not plain YAML"),
        ("a: {path: x.gguf, is_own: true}", "is_own is not a field"),
        ("#" * (1 << 20) + "\na: {path: x.gguf}", "larger than"),
    ],
)
def test_a_list_that_means_harm(own_list: Path, text: str, part: str) -> None:
    own_list.write_text(text)
    line = said(invoke("models", "list"))
    assert part in line
    assert len(line) < 500


def test_a_list_that_is_no_file(own_list: Path) -> None:
    own_list.unlink()
    os.mkfifo(own_list)
    assert "not a regular file" in said(invoke("models", "list"))


def test_a_home_folder_that_nobody_has(own_list: Path) -> None:
    own_list.write_text("mine: {path: ~nouser/x.gguf}")
    line = said(invoke("generate", "--target", "mine", "x"))
    assert "there is no home folder ~nouser" in line
    assert "there is no home folder ~nouser" in said(invoke("models", "add", "my", "~nouser/x.gguf"))
    assert "mine" in invoke("models", "list").stdout
    assert json.loads(invoke("models", "show", "mine", "--json").stdout)["here"] is None


def test_a_name_too_long_for_a_file(own_list: Path) -> None:
    assert "no file and no model is called aaa" in said(invoke("models", "path", 5000 * "a"))


def test_a_terminal_gets_no_control_characters(own_list: Path) -> None:
    """Text of the list sets no colour or title, starts no line, and is not taken for rich's markup."""
    entry = {"path": "x.gguf", "licence": "\x1b[31m[red]M", "notes": "one\ntwo\u202e", "draft": "\x07nobody"}
    own_list.write_text(json.dumps({"na\x1b]0;t\x07me": entry}))
    for arguments in (["list"], ["show", "na\x1b]0;t\x07me"], ["path", "\x1b[2Jx"], ["remove", "\x1b[2Jx"]):
        answer = invoke("models", *arguments)
        said_in_all = answer.stdout + answer.stderr
        assert printable(said_in_all.replace("\n", "")) == said_in_all.replace("\n", "")
    shown = invoke("models", "show", "na\x1b]0;t\x07me").stdout
    assert "\\x1b[31m[red]M" in shown
    assert "one\\ntwo\\u202e" in shown
    assert "na\\x1b]0;t\\x07me" in invoke("models", "list").stdout


def test_a_path_is_escaped_on_a_terminal_and_untouched_in_a_pipe(own_list: Path, target_file: Path) -> None:
    model = own_list.parent / "mo\x1b[2Jdel.gguf"
    model.symlink_to(target_file)
    invoke("models", "add", "mine", model)
    assert invoke("models", "path", "mine").stdout == f"{model}\n"
    master, terminal = os.openpty()
    command = [*ENTRY, "models", "path", "mine"]
    subprocess.run(
        command, stdout=terminal, env=environment({"LLAMASPEC_CONFIG": str(own_list.parent)}), check=True
    )
    shown = os.read(master, 10_000).decode()
    assert "mo\\x1b[2Jdel.gguf" in shown
    assert "\x1b[2J" not in shown


# The list that comes with llamaspec


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setenv("LLAMASPEC_CONFIG", str(tmp_path))
    return read_catalog()


def test_every_entry_is_complete(catalog: Catalog) -> None:
    assert {8, 16, 32, 64, 128} <= {entry.memory_gb for entry in catalog.entries.values()}
    library = next((Path(llama_cpp.__file__).parent / "lib").glob("libllama.*")).read_bytes()
    for entry in catalog.entries.values():
        file = entry.file()
        assert entry.licence
        assert entry.draft is not None or entry.heads is not None or entry.name.endswith("-mtp")
        assert entry.checked in (("hash", "listed") if file.sha256 else ("name",))
        assert file.n_bytes
        assert f"{entry.architecture}\0".encode() in library, "llama.cpp has no such architecture"
        assert not entry.heads or entry.architecture in ONE_HEAD
        if entry.draft is not None:
            draft = catalog.find(entry.draft)
            assert entry.memory_gb
            assert file.n_bytes > 3 * (draft.file().n_bytes or file.n_bytes)
            assert abs((entry.vocabulary or 0) - (draft.vocabulary or 0)) <= MAX_SIZE_DIFFERENCE


def test_every_target_leaves_a_fifth_of_its_memory_to_others(catalog: Catalog) -> None:
    found = choices(catalog, Room(1 << 50))
    assert {choice.name for choice in found} == {
        name for name, entry in catalog.entries.items() if entry.memory_gb
    }
    for choice in found:
        assert catalog.find(choice.name).cache_mb
        assert choice.needed_bytes < 0.8e9 * choice.memory_gb


@pytest.mark.usefixtures("own_list")
def test_a_pair_is_recommended_for_another_machine() -> None:
    answer = invoke("models", "recommend", "--memory", "8GB")
    told = " ".join(answer.stdout.split())
    assert "machine 8.0 GB of memory pair qwen3.5-4b, with its own prediction heads needs 3.6 GB" in told
    assert "run llamaspec chat --pair qwen3.5-4b also fit gemma-4-e4b (draft gemma-4-e4b-mtp);" in told
    for memory, name in (
        ("16", "qwen3.5-9b"),
        ("25", "qwen3.8-27b"),
        ("32 gb", "qwen3.8-27b"),
        ("128GB", "qwen3.5-122b-a10b"),
    ):
        assert f"pair {name}," in " ".join(invoke("models", "recommend", "--memory", memory).stdout.split())
    assert "no listed pair fits into 2.0 GB" in said(invoke("models", "recommend", "--memory", "2"))
    for memory in ("much", "0", "-3GB", "1e9"):
        answer = invoke("models", "recommend", "--memory", memory)
        assert answer.code == 2
        assert "is not a size; write it like 32GB" in answer.stderr


@pytest.mark.usefixtures("own_list")
def test_a_pair_is_recommended_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "total_bytes", lambda: 17 * 10**9)
    told = invoke("models", "recommend", "--json").json
    assert (told["pairs"][0]["memory_gb"], told["pairs"][0]["name"]) == (16, "qwen3.5-9b")
    assert told["run"] == "llamaspec chat --pair qwen3.5-9b"
    assert f"{resources.default_threads()} cores" in " ".join(invoke("models", "recommend").stdout.split())


def test_drafts_are_found_by_name_address_and_file(catalog: Catalog) -> None:
    for target in (
        "qwen3-32b",
        "qwen3-32b:Q8_0",
        "hf:someone/Qwen3-32B-GGUF:Qwen3-32B-Q5_K_M.gguf",
        "/models/Qwen3-32B-Q4_K_M.gguf",
    ):
        assert catalog.draft_of(target) == "qwen3-0.6b"
    assert catalog.draft_of("/models/else.gguf") is None


def test_quantizations_that_are_not_listed_follow_the_pattern(catalog: Catalog) -> None:
    assert catalog.find("qwen3-32b").file("q8_0") == RemoteFile("Qwen/Qwen3-32B-GGUF", "Qwen3-32B-Q8_0.gguf")
    coder = catalog.find("qwen2.5-coder-7b")
    assert coder.file("Q8_0").file == "qwen2.5-coder-7b-instruct-q8_0.gguf"
    with pytest.raises(ModelFileError, match="it has no quantizations"):
        Entry("mine", path="x.gguf").file("q8_0")
