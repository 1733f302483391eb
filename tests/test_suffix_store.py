"""Texts that are kept between runs: privately, of one model alone, and whatever lies there is survived."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from command import environment, invoke
from fakes import tokens
from llamaspec import FixedLength, ModelOptions, NoDrafter, open_pair
from llamaspec.drafters.ngram import PastTexts
from llamaspec.suffix_store import SuffixStore, folder, forget_texts, kept_texts
from llamaspec.values import Source
from model_store import ModelStore
from patience import PATIENCE
from tiny_models import Recipe

TEXTS = [tokens(1, 2, 3, 4, 5, 6), tokens(7, 8, 9, 10, 11)]
CPU = ModelOptions(threads=1, gpu_layers=0)


@pytest.fixture
def kept(target_file: Path, own_cache: None) -> SuffixStore:
    return SuffixStore.of(target_file)


def test_what_is_kept_is_found_again(kept: SuffixStore) -> None:
    assert kept.read()[0].texts == ()
    kept.add(TEXTS)
    past, fault = kept.read()
    assert fault is None
    assert [text.tolist() for text in past.texts] == [text.tolist() for text in TEXTS]
    assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.path.parent.stat().st_mode) == 0o700


def test_what_another_process_keeps_stays(kept: SuffixStore) -> None:
    kept.add(TEXTS[:1])
    kept.add(TEXTS[1:])
    kept.add([])
    assert len(kept.read()[0].texts) == 2
    assert {path.suffix for path in kept.path.parent.iterdir()} <= {".texts", ".lock"}


ADD = """
import sys
from pathlib import Path
import numpy as np
from llamaspec.suffix_store import SuffixStore
for i in range(20):
    SuffixStore(Path(sys.argv[1])).add([np.array([int(sys.argv[2]), i] * 5, np.int32)])
"""


def test_two_processes_that_keep_texts_at_once_lose_none(kept: SuffixStore) -> None:
    """Without a lock the later of two that read the same file overwrote the other's text."""
    adding = [
        subprocess.Popen([sys.executable, "-c", ADD, str(kept.path), str(n)], env=environment())
        for n in range(3)
    ]
    assert [process.wait(PATIENCE) for process in adding] == [0, 0, 0]
    assert len(kept.read()[0].texts) == 60


def test_no_model_sees_the_texts_of_another(store: ModelStore, own_cache: None) -> None:
    files = [store.path("llama", Recipe(dtype="q8_0", seed=seed)) for seed in (0, 1)]
    one, other = (SuffixStore.of(file) for file in files)
    one.add(TEXTS)
    assert other.read()[0].texts == ()
    assert one.path != other.path


DAMAGED = {
    "empty": b"",
    "short": b"llamaspec texts 1\n",
    "of another version": b"llamaspec texts 9\n" + bytes(64),
    "not its checksum": b"llamaspec texts 1\n" + bytes(64),
}


@pytest.mark.parametrize("content", list(DAMAGED.values()), ids=list(DAMAGED))
def test_a_damaged_file_counts_as_none(kept: SuffixStore, content: bytes) -> None:
    kept.path.parent.mkdir(parents=True)
    kept.path.write_bytes(content)
    past, fault = kept.read()
    assert past.texts == ()
    assert fault is not None
    assert "counts as empty" in fault
    assert "\n" not in fault
    kept.add(TEXTS)
    assert len(kept.read()[0].texts) == 2


def test_every_changed_byte_is_noticed(kept: SuffixStore) -> None:
    kept.add(TEXTS)
    content = kept.path.read_bytes()
    for i in range(len(content)):
        kept.path.write_bytes(content[:i] + bytes([content[i] ^ 0x81]) + content[i + 1 :])
        assert kept.read()[1] is not None


def test_a_folder_in_its_place_is_survived(kept: SuffixStore) -> None:
    kept.path.mkdir(parents=True)
    assert "counts as empty" in str(kept.read()[1])
    with pytest.raises(OSError):
        kept.add(TEXTS)


def test_one_command_empties_it(kept: SuffixStore) -> None:
    kept.add(TEXTS)
    assert (kept_texts().n_models, kept_texts().n_bytes) == (1, kept.path.stat().st_size)
    answer = invoke("doctor", "--forget-texts")
    assert answer.code == 0
    assert "forgotten" in answer.stderr
    assert not list(folder().iterdir())
    assert "no texts were kept" in invoke("doctor", "--forget-texts").stderr
    assert forget_texts().n_models == 0


def generating(target: Path) -> list[str]:
    return ["generate", "--target", str(target), "-p", "the end of", "--json"]


# -- in texts -----------------------------------------------------------------------------------------------


def test_a_second_text_copies_the_first(store: ModelStore) -> None:
    """The same tokens, and hardly a round of the second without them."""
    target = store.path("llama", Recipe(dtype="q8_0"))
    past = PastTexts()
    with open_pair(target, ngram=True, past=past, target_options=CPU) as pair:
        assert pair.sources == {Source.NGRAM, Source.STORE}
        plain = pair.stream("the end of", drafter=NoDrafter(), seed=3, max_tokens=60).run()
        assert past.texts == ()  # nobody looked it up
        first, second = (
            pair.stream("the end of", policy=FixedLength(6), seed=3, max_tokens=60).run() for _ in range(2)
        )
        assert first.tokens == second.tokens == plain.tokens
        assert len(past.texts) == 1
        assert second.summary.n_rounds <= 60 / 7 + 8 < first.summary.n_rounds
        copied = sum(r.n_accepted for r in second.rounds if r.source is Source.STORE)
        assert copied > 40


def test_a_run_finds_what_the_one_before_kept(target_file: Path, own_cache: None) -> None:
    common = [*generating(target_file), "--draft", "ngram", "-n", "60", "-k", "6", "--seed", "3"]
    runs = [invoke(*common, "--past-texts").json for _ in range(2)]
    assert runs[0]["text"] == runs[1]["text"]
    assert runs[1]["statistics"]["accepted"] > runs[0]["statistics"]["accepted"] + 20
    silent = invoke(*common).json
    assert silent["statistics"]["accepted"] == runs[0]["statistics"]["accepted"]
    found = invoke("doctor", "--target", target_file, "--draft", "ngram").stdout
    assert "past texts" in found
    assert "--forget-texts" in found


def test_without_leave_nothing_is_kept(target_file: Path, own_cache: None) -> None:
    common = [*generating(target_file), "-n", "20", "--seed", "3"]
    invoke(*common, "--no-draft")
    invoke(*common, "--draft", "ngram")
    assert not folder().exists()


def test_a_damaged_file_is_told_in_one_line(target_file: Path, kept: SuffixStore) -> None:
    kept.path.parent.mkdir(parents=True)
    kept.path.write_bytes(b"nonsense")
    answer = invoke(
        "generate",
        "--target",
        target_file,
        "--draft",
        "ngram",
        "--past-texts",
        "-p",
        "x",
        "-n",
        "8",
        "--json",
    )
    assert [line for line in answer.complaints if "counts as empty" in line] == answer.complaints
    assert len(answer.complaints) == 1
    assert kept.read()[1] is None  # written anew


def test_tokens_that_the_model_lacks_are_no_draft(target_file: Path, kept: SuffixStore) -> None:
    kept.add([np.full(40, 1 << 20, np.int32)])
    answer = invoke(
        "generate",
        "--target",
        target_file,
        "--draft",
        "ngram",
        "--past-texts",
        "-p",
        "x",
        "-n",
        "8",
        "--json",
    )
    assert answer.code == 0
