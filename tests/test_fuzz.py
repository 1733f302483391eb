"""Some damaged model files of scripts/fuzz_gguf.py: none may end this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz_gguf import FAULTS, damaged, open_one, put_together, take_apart
from llamaspec.llama import trial
from model_store import ModelStore
from patience import PATIENCE
from tiny_models import WRITERS, Recipe
from tiny_vocabulary import sentencepiece_vocabulary

SEEDS = range(40)  # one file for each seed, of each kind in turn
SCRIPT = Path(__file__).parent.parent / "scripts" / "fuzz_gguf.py"


@pytest.fixture(autouse=True)
def _trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trial.TRUST)
    monkeypatch.setenv("LLAMASPEC_CACHE", str(tmp_path / "cache"))


def bases(store: ModelStore) -> list[Path]:
    """Return sound files of all kinds."""
    kinds = [store.path(kind, Recipe(dtype="q8_0")) for kind in sorted(WRITERS)]
    return [*kinds, store.path("llama", Recipe(vocabulary=sentencepiece_vocabulary()))]


def test_a_sound_file_is_put_together_as_it_was(store: ModelStore) -> None:
    for path in bases(store):
        assert put_together(take_apart(path)) == path.read_bytes()


def test_no_damaged_file_ends_the_process(store: ModelStore, tmp_path: Path) -> None:
    sound, path, outcomes = bases(store), tmp_path / "damaged.gguf", dict[str, int]()
    for seed in SEEDS:
        content, how = damaged(sound[seed % len(sound)], seed)
        path.write_bytes(content)
        outcome, detail = open_one(path)
        assert outcome not in FAULTS, (seed, how, detail)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes["ModelFileError"] > len(SEEDS) / 4
    assert outcomes["works"] > len(SEEDS) / 10


def test_the_script(store: ModelStore, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--count", "3", "--out", tmp_path, store.path()]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["files"] == 3
