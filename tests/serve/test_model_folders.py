"""Which files of a folder a server offers, under which names, and what it says of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamaspec import open_pair
from llamaspec.cli.model_options import ModelChoice, ModelChoices
from llamaspec.cli.offered_models import served_models
from llamaspec.cli.output import OTHER_DRAFT
from llamaspec.cli.served_models import Serving
from llamaspec.llama.file_facts import Kind
from llamaspec.opening import Drafting
from llamaspec.serve import ServeSettings
from llamaspec.serve.app import open_socket
from llamaspec.values import Copying
from model_store import ModelStore
from odd_files import WHOLE, write_odd_files
from serving import Served, said, serve
from shelf import OPTIONS
from tiny_models import without_tensors

TEXT = "/v1/completions"
PAIRED = replace(WHOLE, width=128, n_heads=4, n_kv_heads=4, n_layers=4, n_ffn=384)
SMALL = {"width": 32, "n_heads": 2, "n_kv_heads": 2, "n_ffn": 64}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of models; a hub's cache and a list that are empty, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("llamaspec.serve.models.SCAN_SECONDS", 0.0)
    monkeypatch.setenv("LLAMASPEC_CONFIG", str(tmp_path))
    monkeypatch.setenv("LLAMASPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the server says outside its log."""
    found: list[str] = []
    monkeypatch.setattr("llamaspec.cli.offered_models.say", found.append)
    return found


@contextmanager
def serving_folder(folder: Path, draft: str | None = None, **settings: Any) -> Iterator[Served]:
    """Serve a folder in this process."""
    choice = ModelChoice("", draft, False, Copying.OFF, False, OPTIONS, OPTIONS)
    config, log = ServeSettings(port=0, memory_bytes=1 << 40, **settings), list[str]()
    serving = Serving(Drafting(draft_length=2), parallel=2)
    models = served_models(ModelChoices(choice, draft, ()), folder, serving, config, log.append)
    try:
        with serve(models, open_socket(config), log) as server:
            yield server
    finally:
        models.close()


def ask(server: Served, model: str) -> Any:
    return server.post(TEXT, {"prompt": "Hello", "seed": 1, "max_tokens": 8, "model": model})


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def alone(path: Path) -> str:
    with open_pair(path, ngram=False, target_options=OPTIONS) as pair:
        return said(pair, "Hello", 1, 8)


def names(server: Served) -> list[str]:
    return [each["id"] for each in server.client.get("/v1/models").json()["data"]]


def test_files_that_generate_no_text_are_not_offered(folder: Path, store: ModelStore) -> None:
    """All of them were, each answered 500, and each made the server unload a good model first."""
    odd = write_odd_files(folder, store)
    (folder / "good.gguf").symlink_to(store.path("llama", WHOLE))
    with serving_folder(folder, max_models=1) as server:
        assert names(server) == ["good"]
        expected = text(ask(server, "good"))
        for name, kind in odd.items():
            answer = ask(server, name)
            reason = f"is {kind.value}" if isinstance(kind, Kind) else kind
            if kind is Kind.EMBEDDING:
                reason = "does not say how the rows of a text become one"
            assert answer.status_code == 400
            assert f"model: {name} {reason}" in answer.json()["error"]["message"]
            assert str(folder.parent) not in answer.text
        assert [model.name for model in server.models.loaded] == ["good"]
        assert text(ask(server, "good")) == expected
    assert not any("unloaded" in line for line in server.log)


def test_damage_that_only_a_trial_finds_unloads_no_good_model(
    folder: Path, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "good.gguf").symlink_to(store.path("llama", WHOLE))
    without_tensors(store.path("llama", WHOLE), folder / "bad.gguf", "blk.1.ffn_up")
    with serving_folder(folder, max_models=1) as server:
        text(ask(server, "good"))
        monkeypatch.setenv("LLAMASPEC_TRUST_FILES", "0")
        answer = ask(server, "bad")
        assert (answer.status_code, "bad cannot be loaded" in answer.text) == (400, True)
        assert str(folder) not in answer.text
        assert [model.name for model in server.models.loaded] == ["good"]
    assert any(f"{folder / 'bad.gguf'}" in line for line in server.log)


def test_one_name_of_several_files(folder: Path, store: ModelStore, tmp_path: Path, lines: list[str]) -> None:
    """All but one were not offered, and nobody was told."""
    places = {
        "models/x": folder / "x.gguf",
        "more/x": folder / "more" / "x.gguf",
        "acme/x": tmp_path / "hub/models--acme--x-GGUF/snapshots/1/x.gguf",
        "other/a-GGUF/x": tmp_path / "hub/models--other--a-GGUF/snapshots/1/x.gguf",
        "other/b-GGUF/x": tmp_path / "hub/models--other--b-GGUF/snapshots/1/x.gguf",
        "y": folder / "y.gguf",
    }
    for seed, path in enumerate(places.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(store.path("llama", replace(WHOLE, seed=seed)))
    (folder / "again.gguf").symlink_to(folder / "y.gguf")  # the same file
    places["again"] = places.pop("y")
    with serving_folder(folder) as server:
        assert sorted(names(server)) == sorted(places)
        for name in ("more/x", "other/b-GGUF/x", "again"):
            assert text(ask(server, name)) == alone(places[name])
        assert ask(server, "hf.co/acme/x-GGUF").json()["model"] == "acme/x"
        refused = ask(server, "x")
        assert refused.status_code == 404
        assert all(name in refused.text for name in places if name.endswith("/x"))
    (line,) = lines
    assert line.startswith("several models are called x; these are offered as ")
    assert all(name in line for name in places if name.endswith("/x"))


def test_a_name_of_two_quantizations(folder: Path, store: ModelStore) -> None:
    """It was not found, as if there were none."""
    for seed, name in enumerate(("x-Q4_0", "x-Q8_0", "y")):
        (folder / f"{name}.gguf").symlink_to(store.path("llama", replace(WHOLE, seed=seed)))
    with serving_folder(folder) as server:
        refused = ask(server, "x:latest")
        assert refused.status_code == 404
        told = refused.json()["error"]["message"]
        assert told == "model: means several models: x-Q4_0, x-Q8_0; name one of them"


def test_a_file_that_moves_is_found_again(folder: Path, store: ModelStore) -> None:
    """Its requests failed until the server was started again."""
    (folder / "x.gguf").symlink_to(store.path("llama", WHOLE))
    with serving_folder(folder) as server:
        expected = text(ask(server, "x"))
        (folder / "better").mkdir()
        (folder / "x.gguf").rename(folder / "better" / "x.gguf")
        assert names(server) == ["x"]
        assert server.client.get("/api/ps").json()["models"][0]["name"] == "x:latest"
        server.post("/api/generate", {"model": "x", "keep_alive": 0})
        assert server.post("/api/show", {"model": "x"}).json()["model_info"]["llama.context_length"] == 512
        assert text(ask(server, "x")) == expected


def test_a_source_that_was_found_while_the_model_was_loaded(
    folder: Path, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used at the next load, even if the server looks for no new models before."""
    (folder / "x.gguf").symlink_to(store.path("llama", WHOLE))
    with serving_folder(folder) as server:
        text(ask(server, "x"))
        (folder / "x.gguf").rename(folder / "x-.gguf")
        (folder / "x").mkdir()
        (folder / "x" / "x.gguf").symlink_to(store.path("llama", replace(WHOLE, seed=9)))
        names(server)
        monkeypatch.setattr("llamaspec.serve.models.SCAN_SECONDS", 1e9)
        server.post("/api/generate", {"model": "x", "keep_alive": 0})
        assert text(ask(server, "x")) == alone(folder / "x" / "x.gguf")


def test_a_draft_that_arrives_later(folder: Path, store: ModelStore, tmp_path: Path) -> None:
    """It was used only after the server had been started again."""
    target, draft = store.path("llama", WHOLE), folder / "small.gguf"
    entries = {"mine": {"path": str(target), "draft": "small"}, "small": {"path": str(draft)}}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(entries))

    def drafts(server: Served) -> int:
        text(ask(server, "mine"))
        return len(server.client.get("/props?model=mine").json()["drafts"])

    with serving_folder(folder) as server:
        assert drafts(server) == 0
        draft.symlink_to(store.path("llama", WHOLE.draft()))
        server.post("/api/generate", {"model": "mine", "keep_alive": 0})
        assert drafts(server) == 1


def test_requests_at_the_same_time_wait_for_the_same_look(
    folder: Path, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request for a model that had just arrived was refused."""
    monkeypatch.setattr("llamaspec.serve.models.SCAN_SECONDS", 1e9)
    (folder / "old.gguf").symlink_to(store.path("llama", WHOLE))
    with serving_folder(folder) as server:
        models, gate, n_looks = server.models, threading.Event(), 0
        find = models._find_sources

        def slowly() -> Any:
            nonlocal n_looks
            n_looks += 1
            gate.wait()
            return find()

        models._find_sources = slowly
        (folder / "new.gguf").symlink_to(store.path("llama", replace(WHOLE, seed=1)))
        answers: list[Any] = []
        clients = [threading.Thread(target=lambda: answers.append(ask(server, "new"))) for _ in range(2)]
        for client in clients:
            client.start()
        threading.Timer(0.3, gate.set).start()
        for client in clients:
            client.join()
    assert ([answer.status_code for answer in answers], n_looks) == ([200, 200], 1)


def test_models_that_fit_are_a_pair(
    folder: Path, store: ModelStore, tmp_path: Path, lines: list[str]
) -> None:
    """Both were offered as models that have nothing to do with each other."""
    big, small = store.path("llama", PAIRED), store.path("llama", PAIRED.draft(n_layers=1, **SMALL))
    (folder / "big.gguf").symlink_to(big)
    (folder / "small.gguf").symlink_to(small)

    expected = {path.stem: alone(path) for path in sorted(folder.iterdir())}

    def drafts(server: Served, name: str) -> int:
        assert text(ask(server, name)) == expected.get(name, expected["big"])
        return len(server.client.get(f"/props?model={name}").json()["drafts"])

    with serving_folder(folder) as server:
        assert (names(server), drafts(server, "big"), drafts(server, "small")) == (["big", "small"], 1, 0)
    assert lines == [f"paired, because their tokens and sizes fit: big with small; {OTHER_DRAFT}"]
    with serving_folder(folder, draft="none") as server:
        assert drafts(server, "big") == 0
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"mine": {"path": str(folder / "big.gguf")}}))
    with serving_folder(folder) as server:
        assert drafts(server, "mine") == 0
    assert len(lines) == 1


def test_a_draft_beside_a_model_that_cannot_be_loaded(
    folder: Path, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a trial finds what is wrong with it, and the target answers without."""
    (folder / "big.gguf").symlink_to(store.path("llama", PAIRED))
    draft = store.path("llama", PAIRED.draft(n_layers=1, **SMALL))
    without_tensors(draft, folder / "small.gguf", "blk.0.ffn_up")
    told: list[str] = []
    monkeypatch.setattr("llamaspec.cli.served_models.say", told.append)
    monkeypatch.setenv("LLAMASPEC_TRUST_FILES", "0")
    with serving_folder(folder) as server:
        assert text(ask(server, "big")) == alone(folder / "big.gguf")
    (line,) = [line for line in told if "draft" in line]
    assert line.startswith("continuing without the draft: ")
