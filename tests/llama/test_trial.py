"""New files are tried in a child process; every failure becomes one error."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import pytest

from command import run
from fuzz_gguf import Entry, Parts, put_together, take_apart
from llamaspec import LlamaModel, ModelFileError, ModelOptions, demo_draft, open_pair
from llamaspec.errors import MemoryFullError, PairError
from llamaspec.llama import trial, trial_child
from llamaspec.llama.child import Outcome, run_child
from llamaspec.llama.embedding_model import EmbeddingModel
from llamaspec.values import Rows, TokenArray
from model_store import ModelStore
from patience import PATIENCE
from tiny_hidden import DraftRecipe
from tiny_models import EMBEDDER_WRITERS, Recipe, truncated
from tiny_vocabulary import sentencepiece_vocabulary

CPU = ModelOptions(threads=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enable trials, with an empty cache folder."""
    monkeypatch.delenv(trial.TRUST)
    monkeypatch.setenv("LLAMASPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The child processes that were started."""
    started: list[subprocess.Popen[bytes]] = []

    popen = subprocess.Popen

    def counted(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **settings))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", counted)
    return started


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that would be tried; no child process is started."""
    paths: list[Path] = []
    monkeypatch.setattr(trial, "_try", lambda files, *_, **_options: paths.extend(files))
    monkeypatch.setattr(trial, "check_outcome", lambda *_: None)
    return paths


def open_and_close(path: Path) -> None:
    LlamaModel(path, CPU).close()


def changed(source: Path, path: Path, change: Callable[[Parts], None]) -> Path:
    """Write a copy with other metadata."""
    parts = take_apart(source)
    change(parts)
    path.write_bytes(put_together(parts))
    return path


def setting(key: str, value: Any) -> Callable[[Parts], None]:
    """Return a change that sets an entry."""

    def change(parts: Parts) -> None:
        name = key.encode()
        for entry in parts.entries:
            if entry.key == name:
                entry.value = value
                return
        kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
        parts.entries.append(Entry(name, int(kind), value))

    return change


# When a file is tried


def test_a_file_is_tried_once(store: ModelStore, cache: Path, trials: list[subprocess.Popen[bytes]]) -> None:
    for _ in range(3):
        open_and_close(store.path())
    assert len(trials) == 1
    assert [record.stat().st_mode & 0o77 for record in (cache / "tried").parent.glob("tried")] == [0]


def test_models_that_make_vectors_pass(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were refused, because they generate no text."""
    evaluated = []
    evaluate = EmbeddingModel.evaluate

    def noted(model: EmbeddingModel, texts: Sequence[TokenArray]) -> Rows:
        evaluated.append(model.pooling)
        return evaluate(model, texts)

    monkeypatch.setattr(EmbeddingModel, "evaluate", noted)
    for kind in EMBEDDER_WRITERS:
        trial_child.use_file(store.path(kind), 0, reads_weights=True)
        trial_child.use_file(store.path(kind), 0, reads_weights=False)
    assert sorted(evaluated) == ["cls", "last", "mean", "mean", "rank", "rank"]


def test_a_copy_is_not_tried_again_but_a_changed_file_is(
    store: ModelStore, tmp_path: Path, tried: list[Path]
) -> None:
    path, copy = store.path(), tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    trial.ensure_tried(path)
    trial.ensure_tried(copy)
    assert tried == [path]
    os.utime(copy, ns=(1, 1))
    trial.ensure_tried(copy)
    assert tried == [path, copy]


def test_a_new_version_tries_a_file_again(
    store: ModelStore, tried: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.ensure_tried(store.path())
    monkeypatch.setattr(trial, "version", lambda name: "99.0" if name == "llamaspec" else version(name))
    trial.ensure_tried(store.path())
    assert len(tried) == 2


def test_a_later_part_of_a_split_file_counts(
    split_files: list[Path], tmp_path: Path, tried: list[Path]
) -> None:
    parts = [Path(shutil.copy(part, tmp_path)) for part in split_files]
    trial.ensure_tried(parts[0])
    trial.ensure_tried(parts[0])
    assert len(tried) == 1
    os.utime(parts[-1], ns=(1, 1))
    trial.ensure_tried(parts[0])
    assert len(tried) == 2


@pytest.mark.parametrize("value", ["1", "yes"])
def test_files_may_be_trusted(
    store: ModelStore, tried: list[Path], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(trial.TRUST, value)
    trial.ensure_tried(store.path())
    assert tried == []


def test_the_embedded_files_are_trusted(demo_files: tuple[Path, Path], tried: list[Path]) -> None:
    trial.ensure_tried(demo_draft())
    assert tried == []


def test_a_cache_folder_that_cannot_be_searched(
    target_file: Path, tried: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run by root made such a folder, and from then on every command ended with "Permission denied".

    Tests may run as root, who may search everything; a name that is too long fails in the same place.
    """
    monkeypatch.setenv("LLAMASPEC_CACHE", str(target_file.parent / ("x" * 300)))
    trial.ensure_tried(target_file)
    assert tried == [target_file]


# Damaged files


def _twice(parts: Parts) -> None:
    tokens = next(entry for entry in parts.entries if entry.key == b"tokenizer.ggml.tokens")
    tokens.value[7] = tokens.value[8]


def _no_bytes(parts: Parts) -> None:
    tokens = next(entry for entry in parts.entries if entry.key == b"tokenizer.ggml.tokens")
    tokens.value = [b"w" + value if value.startswith(b"<0x") else value for value in tokens.value]


FATAL = {"tokens twice": _twice, "no layers": setting("llama.block_count", 0)}


def test_metadata_is_checked_before_llama_cpp_opens_the_file(
    store: ModelStore, tmp_path: Path, trials: list[subprocess.Popen[bytes]]
) -> None:
    path = changed(store.path(), tmp_path / "bad.gguf", _twice)
    with pytest.raises(ModelFileError) as raised:
        open_and_close(path)
    reason = "1 of its 288 tokens are duplicates"
    assert str(raised.value) == f"{path} is damaged: {reason}; download or convert it again"
    assert trials == []


@pytest.mark.parametrize("fault", FATAL)
def test_a_crash_of_llama_cpp_ends_only_the_child(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Our own checks are off, as for damage that they miss."""
    monkeypatch.setattr(trial, "check_metadata", lambda _path: None)
    path = changed(store.path(), tmp_path / "bad.gguf", FATAL[fault])
    with pytest.raises(ModelFileError, match=r"bad.gguf crashes llama.cpp \(SIG[A-Z]*\): .*; download"):
        open_and_close(path)


@pytest.mark.skipif(sys.platform == "win32", reason="it has no limit of processor time")
def test_an_endless_evaluation_is_ended_soon(store: ModelStore, tmp_path: Path) -> None:
    """llama.cpp evaluates positions without dimensions for ever."""
    change = setting("lfm2.rope.dimension_count", 0)
    path = changed(store.path("lfm2"), tmp_path / "bad.gguf", change)
    before = os.times()
    with pytest.raises(ModelFileError, match=r"bad.gguf keeps llama.cpp busy without end"):
        open_and_close(path)
    assert os.times().children_user - before.children_user < trial.CPU_SECONDS / 2


def _large(path: Path) -> Path:
    """Append zeros that take no room on the disk."""
    os.truncate(path, trial.LARGE_BYTES + 1)
    return path


def test_the_tensors_of_a_large_file_are_not_read(store: ModelStore, tmp_path: Path) -> None:
    """The file lacks a layer: llama.cpp would refuse it as soon as it looked for tensors."""
    path = changed(store.path(), tmp_path / "lacks.gguf", setting("llama.block_count", 100))
    with pytest.raises(ModelFileError, match=r"tensor .* not found"):
        trial.ensure_tried(path)
    trial.ensure_tried(_large(path))


def test_the_vocabulary_of_a_large_file_is_tried(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "check_metadata", lambda _path: None)
    path = changed(store.path(), tmp_path / "bad.gguf", _twice)
    with pytest.raises(ModelFileError, match=r"crashes llama\.cpp"):
        trial.ensure_tried(_large(path))


def test_a_large_file_works(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(store.path().read_bytes())
    open_and_close(_large(path))


def test_sentencepiece_without_bytes(store: ModelStore, tmp_path: Path) -> None:
    source = store.path("llama", Recipe(vocabulary=sentencepiece_vocabulary()))
    with pytest.raises(ModelFileError, match=r"bad\.gguf"):
        open_and_close(changed(source, tmp_path / "bad.gguf", _no_bytes))


def test_refusals_have_the_usual_message(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"llama.cpp cannot load .*cut.gguf: .*; download"):
        open_and_close(truncated(store.path(), tmp_path / "cut.gguf"))


def test_a_refusal_may_have_any_length(store: ModelStore, tmp_path: Path) -> None:
    """Once, a long one filled the pipe, and the trial timed out."""

    def change(parts: Parts) -> None:
        parts.entries[0].value = b"x" * 200_000

    with pytest.raises(ModelFileError, match="xxx") as raised:
        open_and_close(changed(store.path(), tmp_path / "bad.gguf", change))
    assert len(str(raised.value)) < 1000


def test_a_file_that_needs_too_much_memory(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("the system does not bound memory")
    monkeypatch.setattr(trial, "SPARE_BYTES", 1 << 20)
    with pytest.raises(ModelFileError, match="needs more memory than a file of its size should"):
        open_and_close(store.path())


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the child never answer."""
    (tmp_path / "hangs.py").write_text("import time\n\n\ndef main():\n    time.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        "llamaspec.llama.child.run_child", lambda _module, *settings: run_child("hangs", *settings)
    )


@pytest.mark.usefixtures("hanging")
def test_a_trial_that_never_ends(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, trials: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(trial, "WALL_SECONDS", 0.3)
    with pytest.raises(ModelFileError, match="busy without end"):
        open_and_close(store.path())
    assert trials[0].returncode == -signal.SIGKILL


@pytest.mark.usefixtures("hanging")
def test_ctrl_c_ends_a_trial_at_once(store: ModelStore, trials: list[subprocess.Popen[bytes]]) -> None:
    def interrupt(_fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LlamaModel(store.path(), CPU, interrupt)
    assert trials[0].returncode == -signal.SIGKILL


ENDLESS = """
import sys, time
sys.path[:] = sys.argv.pop().split("\\n")
from llamaspec.llama import trial_child
trial_child.use_file = lambda *_, **_options: time.sleep(600)
trial_child.main()
"""


def test_a_trial_ends_with_its_parent() -> None:
    """Also if the parent was killed: its end of the pipe closes."""
    command = [sys.executable, "-c", ENDLESS, "100", str(1 << 40), "0", "1", "x", "\n".join(sys.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(PATIENCE) == 1


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (b"", 1, "exit code 1"),
        (b"[" * 10_000, 0, "failed"),
        (b"[1]", 0, "failed"),
        (b"", -signal.SIGSEGV, "SIGSEGV"),
        (b"", -60, "signal 60"),
        (b'["memory", ""]', 0, "needs more memory"),
        (b'["PairError", "of another kind"]', 0, "^of another kind$"),
        (b"", -signal.SIGXCPU, "busy without end"),
    ],
)
def test_every_failure_of_a_trial_is_one_error(answer: bytes, code: int, says: str) -> None:
    with pytest.raises(ModelFileError, match=says):
        trial.check_outcome(Path("x.gguf"), Outcome(code, answer))


def test_failures_that_are_not_the_fault_of_the_file() -> None:
    with pytest.raises(MemoryFullError, match="no room"):
        trial.check_outcome(Path("x.gguf"), Outcome(0, b'["MemoryFullError", "no room"]'))
    with pytest.raises(KeyboardInterrupt):
        trial.check_outcome(Path("x.gguf"), Outcome(-signal.SIGINT, b""))
    trial.check_outcome(Path("x.gguf"), Outcome(0, b'["", ""]'))


# A draft that reads hidden rows, with its target


def test_a_pair_is_tried_once(store: ModelStore, tried: list[Path]) -> None:
    target, draft = store.path("llama"), store.draft(DraftRecipe())
    for _ in range(2):
        open_pair(target, draft, target_options=CPU).close()
    assert tried == [target, draft, target, draft]


def test_pairs_that_work(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so that nothing but the pair is evaluated."""
    monkeypatch.setenv(trial.TRUST, "1")
    for recipe in (DraftRecipe(kind="dspark"), DraftRecipe(kind="eagle3")):
        trial_child.use_pair(store.path("llama"), store.draft(recipe), 0)
    trial_child.use_pair(store.path("gemma4"), store.path("gemma4-assistant"), 0)


def test_a_crash_of_a_pair_ends_only_the_child(store: ModelStore) -> None:
    """llama.cpp aborts for a target whose layers cannot be read. Our own check is left out."""
    target, draft = store.path("gemma3"), store.draft(DraftRecipe())
    with pytest.raises(PairError) as raised:
        trial.ensure_pair_tried(target, draft)
    cause = "crashes llama.cpp (SIGABRT): it was made for another target; name its own target, or set"
    assert str(raised.value).startswith(f"{draft}, drafting for {target}, {cause}")


# Through the commands


def test_commands_try_files(store: ModelStore, tmp_path: Path) -> None:
    bad = changed(store.path(), tmp_path / "bad.gguf", _twice)
    env = {trial.TRUST: "0", "LLAMASPEC_CACHE": str(tmp_path / "cache")}
    commands: list[list[str | Path]] = [
        ["generate", "x", "--target", bad],
        ["doctor", "--target", store.path(), "--draft", bad],
    ]
    for command in commands:
        answer = run(*command, "--threads", "1", env=env)
        assert answer.code == 1
        assert "Traceback" not in answer.stderr
        assert "bad.gguf" in answer.stdout + answer.stderr
