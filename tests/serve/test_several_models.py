"""`llamaspec serve` with several models: which ones it offers, and what it takes from the command line."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from urllib.parse import quote

import httpx
import numpy as np
import psutil
import pytest
import yaml

from chat_models import TALKER, write_chat_model
from command import invoke
from hub_server import Hub
from llamaspec import ModelOptions, open_pair
from llamaspec.cli.model_options import ModelChoice, ModelChoices
from llamaspec.cli.served_models import Served, Serving
from llamaspec.errors import MemoryFullError
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.resources import available_bytes
from llamaspec.opening import Drafting
from llamaspec.values import MTP, Copying
from model_store import ModelStore
from patience import PATIENCE, until
from serving import Process, process, said
from tiny_hidden import DraftRecipe
from tiny_models import Recipe

TEXT = "/v1/completions"


@pytest.fixture
def folder(store: ModelStore, tmp_path: Path) -> Path:
    """A folder with two models, a draft that was made for one of them, and the second part of another one."""
    folder = tmp_path / "models"
    (folder / "more").mkdir(parents=True)
    for name, seed in (
        ("one-Q8_0", 0),
        ("more/two-Q8_0", 1),
        ("one.draft-skip", 2),
        ("big-00002-of-00002", 3),
    ):
        path = store.path("llama", Recipe(seed=seed, dtype="q8_0"))
        (folder / f"{name}.gguf").symlink_to(path)
    return folder


def ask(server: Process, model: str | None) -> httpx.Response:
    body = {"prompt": "Hello", "max_tokens": 8, "seed": 3, "model": model}
    return httpx.post(f"{server.url}{TEXT}", json=body, timeout=PATIENCE)


def names(server: Process) -> list[str]:
    return [each["id"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]]


def served(target: Path, draft: str | None, shared: PrefixStore) -> Served:
    """Return a model of a server with several ones."""
    options = ModelOptions(threads=1, n_ctx=256)
    choice = ModelChoice(str(target), draft, False, Copying.OFF, False, options, options)
    return Served(choice, Serving(Drafting(draft_length=2), parallel=1, store=shared, stays=False))


def alone(path: Path) -> str:
    with open_pair(path, target_options=ModelOptions(threads=1, n_ctx=256)) as pair:
        return said(pair, "Hello", 3, 8)


def test_all_models_in_a_folder(folder: Path) -> None:
    """Names that are not UTF-8 made every list fail, and a pipe without a writer blocked the start."""
    odd = {b"bad\xff-Q8_0.gguf": r"bad\udcff-Q8_0", b"two\nlines-Q8_0.gguf": r"two\nlines-Q8_0"}
    odd = odd if sys.platform == "linux" else {}  # other systems refuse such names
    for name in odd:
        shutil.copy(folder / "one-Q8_0.gguf", folder / os.fsdecode(name))
    os.mkfifo(folder / "pipe.gguf")
    with process("--models-dir", str(folder), "--n-ctx", "256") as server:
        assert sorted(names(server)) == sorted([*odd.values(), "one-Q8_0", "two-Q8_0"])
        for shown in odd.values():
            answer = ask(server, shown)
            assert (answer.status_code, answer.json()["model"]) == (200, shown)
            for path in (f"/v1/models/{quote(shown)}", f"/props?model={quote(shown)}", "/api/ps"):
                assert httpx.get(f"{server.url}{path}").status_code == 200
        answer = ask(server, "two").json()
        assert (answer["model"], answer["choices"][0]["text"]) == (
            "two-Q8_0",
            alone(folder / "more" / "two-Q8_0.gguf"),
        )
        assert ask(server, "three").status_code == 404
        server.popen.send_signal(signal.SIGTERM)
        assert server.ended() == 0
    assert not any("Traceback" in line or "error" in line for line in server.lines)


def test_models_that_the_command_line_names(folder: Path) -> None:
    one, two = (str(path) for path in sorted(folder.rglob("*-Q8_0.gguf"), key=lambda path: path.name))
    with process("--target", f"a={one}", "--target", two, "--n-ctx", "256") as server:
        assert names(server) == ["a", "two-Q8_0"]
        assert ask(server, "a").json()["choices"][0]["text"] == alone(Path(one))
        body = {"model": "two-Q8_0", "prompt": "x", "stream": False, "options": {"num_predict": 2}}
        first, second = (
            httpx.post(f"{server.url}/api/generate", json=body, timeout=PATIENCE).json() for _ in range(2)
        )
        assert 0 < first["load_duration"] < first["total_duration"]
        assert second["load_duration"] == 0 < second["total_duration"]


def test_a_draft_belongs_to_the_target_that_the_command_line_names() -> None:
    """It also drafted for the models of a folder, some of them smaller than itself."""
    options = ModelOptions()
    choice = ModelChoice("big.gguf", "small.gguf", False, Copying.OFF, False, options, options)
    for draft, elsewhere in (("small.gguf", None), ("ngram", "ngram")):
        models = ModelChoices(choice, draft, ((None, "big.gguf"),))
        assert (models.of("big.gguf").draft, models.of("folder/other.gguf").draft) == (draft, elsewhere)


def test_one_target_answers_requests_with_any_name(folder: Path) -> None:
    path = folder / "one-Q8_0.gguf"
    with process("--target", str(path), "--n-ctx", "256") as server:
        assert names(server) == ["one-Q8_0"]
        answer = ask(server, "gpt-4o").json()
        assert (answer["model"], answer["choices"][0]["text"]) == ("one-Q8_0", alone(path))
        unload = {"model": "x", "keep_alive": 0}
        assert httpx.post(f"{server.url}/api/chat", json=unload).json()["done_reason"] == "unload"
        assert httpx.get(f"{server.url}/api/ps").json()["models"][0]["expires_at"].startswith("2318")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unloading_frees_memory(store: ModelStore, tmp_path: Path) -> None:
    """Six times the same models leave no more than three times did. One of them takes 200 MB."""
    for i in range(2):
        recipe = Recipe(seed=i, n_layers=8, width=512, n_ffn=1024, n_context=8192)
        (tmp_path / f"m{i}.gguf").symlink_to(store.path("llama", recipe))
    with process("--models-dir", str(tmp_path), "--models-max", "1", "--n-ctx", "8192") as server:
        facts = psutil.Process(server.popen.pid)
        idle, sizes = facts.memory_info().rss, []
        for _ in range(6):
            for name in ("m0", "m1"):
                assert ask(server, name).status_code == 200
            loaded = facts.memory_info().rss
            httpx.post(f"{server.url}/api/chat", json={"model": "m1", "keep_alive": 0})
            sizes.append((facts.memory_info().rss, len(facts.memory_maps(grouped=False))))
    assert loaded - idle > 150e6
    assert sizes[-1][0] < 1.05 * sizes[2][0]
    assert sizes[-1][0] - idle < 0.2 * (loaded - idle)
    assert sizes[-1][1] <= 1.05 * sizes[2][1]


@pytest.mark.parametrize("kind", ["step35", "eagle3", "dspark"])
def test_what_a_draft_has_stored_is_left_with_its_model(store: ModelStore, kind: str) -> None:
    """What heads, and drafts that read hidden rows, have stored took room from the other models for good."""
    flat = Recipe(dtype="q8_0", spread=0.02)
    target = store.path(kind if kind == "step35" else "llama", flat)
    draft = MTP if kind == "step35" else str(store.draft(DraftRecipe(flat, kind)))
    shared = PrefixStore(1 << 30)
    with served(target, draft, shared).open(lambda _: None) as opened:
        heads = opened.pair.heads
        assert heads is not None
        for prompt in ("the end of the beginning of", "once upon a time in the middle of"):  # the next one
            opened.pair.stream(prompt * 3, seed=1, max_tokens=40).run()  # sends what has ended to the store
        assert all(each.store.root.children for each in heads.caches)
    assert shared.n_bytes == shared.n_left > 0
    with served(target, draft, shared).open(lambda _: None) as opened:
        assert opened.pair.heads is not None
        assert all(each.store.root.children for each in opened.pair.heads.caches)
    shared.drop_left(1 << 30)
    assert (shared.n_bytes, shared.fault()) == (0, None)


def test_a_default_draft_is_left_out_only_while_memory_is_short(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision of the first load was kept until the server stopped, although idle models had left."""
    target = store.path("step35", Recipe(dtype="q8_0"))
    options = ModelOptions(threads=1, n_ctx=256)
    choice = ModelChoice(str(target), None, False, Copying.OFF, False, options, options)
    served = Served(choice, Serving(Drafting(draft_length=2), parallel=1, stays=False))
    needed = served.needed_bytes()

    def has_draft(*, keeps_draft: bool) -> bool:
        with served.open(lambda _: None, keeps_draft) as opened:
            return opened.pair.heads is not None

    def fail(*_: object) -> None:
        raise MemoryFullError("no room for the heads")

    for changed, short, usual in (
        ("llamaspec.plan.available_bytes", lambda: 1000, available_bytes),
        ("llamaspec.hidden_drafts.PredictionHeads", fail, PredictionHeads),
    ):
        monkeypatch.setattr(changed, short)
        with pytest.raises(MemoryFullError, match="no room"):
            has_draft(keeps_draft=True)
        assert not has_draft(keeps_draft=False)
        assert served.needed_bytes() == needed
        monkeypatch.setattr(changed, usual)
        assert has_draft(keeps_draft=True)


def test_a_conversation_goes_on_after_its_model_was_unloaded(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model was used between two turns, and the whole conversation was processed again."""
    shared, recipes = PrefixStore(1 << 20), [Recipe(seed=seed, dtype="q8_0") for seed in range(2)]
    one, other = (served(store.path("llama", recipe), None, shared) for recipe in recipes)
    turns = [list(range(2, 60)), list(range(60, 120))]
    known, texts = [], []
    for each, turn in ((one, turns[0]), (other, turns[1]), (one, turns[0]), (other, turns[1])):
        with each.open(lambda _: None) as opened:
            known.append(opened.pair.target.n_cached(np.array(turn, dtype=np.int32)))
            texts.append(opened.pair.stream(turn, seed=1, max_tokens=8).run().text)
        assert shared.fault() is None
    assert known == [0, 0, 58, 60]
    assert texts[:2] == texts[2:]
    monkeypatch.setattr("llamaspec.cli.served_models.available_bytes", lambda: one.needed_bytes() - 1)
    with one.open(lambda _: None) as opened:  # what the other one has left, in case that it was the first
        assert opened.pair.target.n_cached(np.array(turns[0], dtype=np.int32)) == 0
        assert shared.n_left > 0
    monkeypatch.setattr("llamaspec.cli.served_models.available_bytes", lambda: 0)
    with one.open(lambda _: None):
        assert shared.n_bytes == 0


def test_one_target_is_unloaded_if_asked_for(folder: Path) -> None:
    options = ("--target", str(folder / "one-Q8_0.gguf"), "--n-ctx", "256", "--keep-alive", "10ms")
    with process(*options) as server:
        until(lambda: not httpx.get(f"{server.url}/api/ps").json()["models"])  # without a request, too
        assert ask(server, "any").json()["choices"][0]["text"] == alone(folder / "one-Q8_0.gguf")
        until(lambda: not httpx.get(f"{server.url}/api/ps").json()["models"])


def test_the_users_own_list(folder: Path, tmp_path: Path) -> None:
    one, two = sorted(folder.rglob("*-Q8_0.gguf"), key=lambda path: path.name)
    entries = {"mine": {"path": str(one), "draft": "small"}, "small": {"path": str(two)},
               "cold": {"path": str(one), "options": {"temperature": 0}},
               "gone": {"path": str(tmp_path / "gone.gguf")}}  # fmt: skip
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(entries, sort_keys=False))
    env, more = {"LLAMASPEC_CONFIG": str(tmp_path)}, str(folder)  # a folder with the same files
    with process("--n-ctx", "256", "--models-dir", more, env=env) as server:
        assert names(server) == ["mine", "small", "cold"]
        assert ask(server, "mine").json()["choices"][0]["text"] == alone(one)
        about = httpx.get(f"{server.url}/props").json()
    assert len(about["drafts"]) == 1


def test_options_of_a_model_hold_where_a_request_gives_none(store: ModelStore, tmp_path: Path) -> None:
    one, two = (write_chat_model(tmp_path / f"{name}.gguf", TALKER) for name in ("one", "two"))
    template = tmp_path / "short.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}:")
    options = {"temperature": 0, "n_ctx": 96, "chat_template": str(template)}
    entries = {"mine": {"path": str(one), "options": options}, "other": {"path": str(two)}}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(entries))
    said_: dict[tuple[str, float | None], str] = {}
    with process(env={"LLAMASPEC_CONFIG": str(tmp_path)}) as server:
        for name, heat in itertools.product(entries, (None, 0, 1.5)):
            body = {"prompt": "Hello", "max_tokens": 8, "seed": 3, "model": name, "temperature": heat}
            answer = httpx.post(f"{server.url}{TEXT}", json=body, timeout=PATIENCE).json()
            said_[name, heat] = answer["choices"][0]["text"]
        talk = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        n_prompt = {}
        for name in entries:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json={**talk, "model": name}).json()
            n_prompt[name] = answer["usage"]["prompt_tokens"]
        assert n_prompt["mine"] < n_prompt["other"]
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert {each["id"]: each["meta"]["n_ctx"] for each in listed}["mine"] == 96
    assert said_["mine", None] == said_["mine", 0] == said_["other", 0] != said_["other", None]
    assert said_["mine", 1.5] == said_["other", 1.5] != said_["mine", 0]


def test_a_client_downloads_a_model(env: dict[str, str]) -> None:
    """With the draft of the list; nothing else is downloaded, whatever a client asks for."""
    body = {"model": "big:latest", "prompt": "Hello", "max_tokens": 3}
    with process("--pull", "--n-ctx", "256", env=env) as server:
        assert names(server) == []
        assert httpx.post(f"{server.url}{TEXT}", json=body).status_code == 404
        said_ = httpx.post(f"{server.url}/api/pull", json={"model": "big"}, timeout=PATIENCE).text
        *parts, last = [json.loads(line) for line in said_.splitlines()]
        assert last == {"status": "success"}
        assert {part.get("digest") for part in parts} == {None, "big-Q8_0.gguf", "small-Q8_0.gguf"}
        assert all(part["completed"] == part["total"] > 0 for part in parts[-1:])
        until(lambda: names(server) == ["big", "small"])
        assert httpx.post(f"{server.url}{TEXT}", json=body, timeout=PATIENCE).status_code == 200
        for name in ("hf.co/acme/none", "/etc/passwd", "nothing"):
            answer = httpx.post(f"{server.url}/api/pull", json={"model": name, "stream": False})
            assert (answer.status_code, "error" in answer.json()) == (502, True)


# A machine that stands still for some seconds must not cut the last line off.
PATIENT = f"""
from llamaspec.__main__ import main
from llamaspec.serve import app

app.FINAL_SECONDS = {PATIENCE}
main()
"""


def test_a_download_does_not_delay_the_end(env: dict[str, str], hub: Hub) -> None:
    """Once, the server waited for it, however long it took. The next one continues where it was."""
    hub.stalls = True
    with (
        process("--pull", env=env, entry=[sys.executable, "-c", PATIENT]) as server,
        httpx.stream("POST", f"{server.url}/api/pull", json={"model": "big"}, timeout=PATIENCE) as answer,
    ):
        lines = answer.iter_lines()
        assert any("digest" in line for line in lines)
        server.popen.send_signal(signal.SIGTERM)
        assert json.loads(list(lines)[-1]) == {"error": "the server is stopping"}
        assert server.ended() == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--models-dir", "/nonexistent"], "--models-dir"),
        (["--target", "{one}", "--target", "{one}"], "--target NAME="),
        (["--target", "{one}", "--target", "missing.gguf"], "no such model file: missing.gguf"),
        (["--target", "{one}", "--target", "b={one}", "--alias", "c"], "--alias"),
        (["--target", "{one}", "--target", "b={one}", "--draft", "{one}"], "--draft"),
        (["--models-dir", "{folder}", "--draft", "{one}"], "name that with --target"),
        (
            ["--models-dir", "{folder}", "--target", "{one}", "--draft", "x.gguf"],
            "no such model file: x.gguf",
        ),
        (["--models-dir", "{folder}", "--n-ctx", "100", "--ctx-per-request", "200"], "--ctx-per-request"),
        (["--keep-alive", "soon"], "10m"),
    ],
)
def test_options_that_are_refused(folder: Path, arguments: list[str], told: str) -> None:
    filled = [each.format(one=folder / "one-Q8_0.gguf", folder=folder) for each in arguments]
    answer = invoke("serve", "--port", "0", *filled)
    assert answer.code in (1, 2)
    assert told in answer.stderr.splitlines()[-1]
