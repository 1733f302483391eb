"""Several models behind one address: which one answers, when it is loaded, and when it is unloaded."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from llamaspec import open_pair
from llamaspec.errors import MemoryFullError, ModelFileError
from llamaspec.serve.models import OnPull
from llamaspec.serve.ollama_models import NEVER
from patience import PATIENCE, until
from serving import Gate, Served, said
from shelf import NAMES, OPTIONS, Shelf, several

HI: Any = [{"role": "user", "content": "Hi"}]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(server: Served, model: str | None, seed: int = 1, n: int = 12, **more: Any) -> Any:
    body = {"prompt": "Hello", "seed": seed, "max_tokens": n, "model": model, **more}
    return server.post(TEXT, body)


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def alone(shelf: Shelf, name: str, seed: int = 1, n: int = 12) -> str:
    """Return what a model says without a server and without a draft."""
    with open_pair(shelf.files[name][0], target_options=OPTIONS) as pair:
        return said(pair, "Hello", seed, n)


def statuses(server: Served) -> dict[str, str]:
    listed = server.client.get("/v1/models").json()["data"]
    return {each["id"]: each["status"]["value"] for each in listed}


# Which model answers


@pytest.mark.parametrize("name", ["Beta:latest", "org/beta"])
def test_the_name_of_a_request_chooses_the_model(shelf: Shelf, name: str) -> None:
    with several(shelf) as server:
        answer = ask(server, name)
        assert answer.json()["model"] == "beta"
        assert text(answer) == alone(shelf, "beta")
        assert shelf.opened == ["beta"]
        assert statuses(server) == dict.fromkeys(NAMES, "unloaded") | {"beta": "loaded"}


def test_models_are_loaded_and_unloaded_as_in_llama_server(shelf: Shelf) -> None:
    with several(shelf) as server:
        for path, value in (
            ("load", "loaded"),
            ("load", "loaded"),
            ("unload", "unloaded"),
            ("unload", "unloaded"),
        ):
            assert server.post(f"/models/{path}", {"model": "org/beta"}).json() == {"success": True}
            assert statuses(server)["beta"] == value
        assert server.post("/models/load", {"model": "nobody"}).status_code == 404
        assert server.post("/models/unload", {}).status_code == 400


def test_without_a_name_the_last_model_answers(shelf: Shelf) -> None:
    with several(shelf) as server:
        refused = ask(server, None)
        assert refused.status_code == 400
        assert all(name in refused.json()["error"]["message"] for name in NAMES)
        for name in ("gamma", "beta"):
            ask(server, name)
            assert ask(server, None).json()["model"] == name


def test_a_model_that_is_not_there(shelf: Shelf) -> None:
    bodies: dict[str, Any] = {
        CHAT: {"messages": HI},
        "/v1/messages": {"messages": HI, "max_tokens": 3},
        "/api/chat": {"messages": HI},
        "/api/show": {},
        "/tokenize": {"content": "a"},
    }
    with several(shelf) as server:
        for path, body in bodies.items():
            answer = server.post(path, {**body, "model": "secret"})
            error = answer.json()["error"]
            told = error if path.startswith("/api") else error["message"]
            assert answer.status_code == 404
            assert "not found" in told
            assert all(name in told for name in NAMES)
            assert "secret" not in told
    assert shelf.opened == []


def test_models_that_arrive_and_leave(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaspec.serve.models.SCAN_SECONDS", 0.0)
    late = shelf.files.pop("delta")
    with several(shelf) as server:
        assert ask(server, "delta").status_code == 404
        shelf.files["delta"] = late
        assert ask(server, "delta").status_code == 200
        del shelf.files["beta"]
        assert "beta" not in statuses(server)


def test_a_model_that_leaves_while_a_request_begins_to_use_it(shelf: Shelf) -> None:
    """It was loaded, but the server did not know it any more, and never unloaded it."""
    with several(shelf) as server:
        (model,) = (each for each in server.models.all if each.name == "beta")

        async def leave() -> bool:
            del shelf.files["beta"]
            with server.models.loader.using(model):
                return model in await server.models.listed()

        assert asyncio.run_coroutine_threadsafe(leave(), server.loop).result(PATIENCE)
        until(lambda: "beta" not in statuses(server))


# Loading and unloading


def test_many_requests_to_four_models_of_which_two_fit(shelf: Shelf) -> None:
    """Each text is as if the model were alone; nothing fails, and at the end nothing is left."""
    n, n_seeds = 50, 2
    expected = {(name, seed): alone(shelf, name, seed) for name in NAMES for seed in range(n_seeds)}
    with several(shelf, max_queue=n) as server:
        loaded = 0

        def one(i: int) -> None:
            nonlocal loaded
            name, seed = NAMES[(i * 7 // 5) % len(NAMES)], i % n_seeds
            assert text(ask(server, name, seed)) == expected[name, seed]
            loaded = max(loaded, len(server.models.loaded))

        with ThreadPoolExecutor(6) as clients:
            list(clients.map(one, range(n)))
        assert loaded == 2
        assert server.models.queue.sequences() == ([], 0)
        until(lambda: all(model.n_users == 0 for model in server.models.all))
    assert sorted(shelf.opened) == sorted(shelf.closed)


def test_the_least_recently_used_model_makes_room(shelf: Shelf) -> None:
    with several(shelf) as server:
        for name in ("alpha-Q8_0", "beta", "alpha-Q8_0", "gamma"):
            ask(server, name)
        assert shelf.closed == ["beta"]
        until(lambda: [model.name for model in server.models.loaded] == ["gamma", "alpha-Q8_0"])


def test_a_number_of_models_may_be_the_limit(shelf: Shelf) -> None:
    with several(shelf, memory_bytes=None, max_models=1) as server:
        ask(server, "beta")
        ask(server, "gamma")
        assert shelf.closed == ["beta"]


def test_a_model_in_use_is_not_unloaded_and_keeps_no_other_one_out(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one waits until its answer has ended. A later request to the first waits behind it."""
    with several(shelf, memory_bytes=1) as server, ThreadPoolExecutor(3) as clients:
        ask(server, "beta")
        gate = Gate(server.service.pair, monkeypatch)
        first = clients.submit(ask, server, "beta")
        until(lambda: server.n_running() == 1)
        other = clients.submit(ask, server, "gamma")
        until(lambda: "gamma waits until beta can be unloaded" in server.log)
        later = clients.submit(ask, server, "beta")
        until(lambda: any(model.waiting for model in server.models.loaded))
        assert not any(each.done() for each in (first, other, later))
        assert shelf.closed == []
        gate.open()
        expected = [alone(shelf, name) for name in ("beta", "gamma", "beta")]
        assert [text(each.result()) for each in (first, other, later)] == expected
        assert shelf.opened == ["beta", "gamma", "beta"]


def test_an_idle_model_is_unloaded(shelf: Shelf) -> None:
    with several(shelf, idle_seconds=0.05) as server:
        assert text(ask(server, "beta")) == alone(shelf, "beta")
        until(lambda: shelf.closed == ["beta"])
        assert text(ask(server, "beta")) == alone(shelf, "beta")


def test_downloads_that_stall_stop_no_other_request(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """They took all threads that also look for new models."""
    monkeypatch.setattr("llamaspec.serve.models.SCAN_SECONDS", 0.0)
    gate, pulled = threading.Event(), list[str]()

    def stalling(name: str, _: OnPull) -> None:
        pulled.append(name)
        gate.wait(PATIENCE)

    with several(shelf) as server, ExitStack() as stack:
        stack.callback(gate.set)
        server.models.pull = stalling
        for i in range(40):
            stack.enter_context(server.sent("/api/pull", {"model": str(i)}))
        until(lambda: len(pulled) == 4)
        assert server.client.get("/v1/models", timeout=30).status_code == 200
        gate.set()
        until(lambda: len(pulled) == 40)


def test_a_model_that_cannot_be_loaded_fails_only_its_own_requests(shelf: Shelf) -> None:
    """The log says why. Clients learn no path of the server, as they once did."""
    shelf.faults["gamma"] = ModelFileError("/home/me/gamma.gguf is damaged")
    with several(shelf) as server:
        for streams in (False, True):
            failed = ask(server, "gamma", stream=streams)
            assert failed.status_code == 400
            assert "gamma cannot be loaded" in failed.json()["error"]["message"]
            assert "/home/me" not in failed.text
        assert text(ask(server, "beta")) == alone(shelf, "beta")
        del shelf.faults["gamma"]
        assert text(ask(server, "gamma")) == alone(shelf, "gamma")
    assert sum("cannot load gamma: /home/me/gamma.gguf is damaged" in line for line in server.log) == 2


def test_a_machine_without_memory_unloads_idle_models_and_tries_again(shelf: Shelf) -> None:
    def needs_all(name: str) -> None:
        if name == "gamma" and len(shelf.closed) < 2:
            raise MemoryFullError("no room")

    shelf.before = needs_all
    with several(shelf, memory_bytes=None) as server:
        for name in ("alpha-Q8_0", "beta"):
            ask(server, name)
        assert text(ask(server, "gamma")) == alone(shelf, "gamma")
        assert shelf.closed == ["alpha-Q8_0", "beta"]


# Waiting for a model


def test_a_stream_says_that_its_model_is_loading(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaspec.serve.loading.SILENT_SECONDS", 0.0)
    gate = shelf.gates["beta"] = threading.Event()
    body = {"prompt": "Hello", "max_tokens": 12, "seed": 1, "model": "beta", "stream": True}
    with several(shelf) as server, server.client.stream("POST", TEXT, json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": loading beta"
        assert statuses(server)["beta"] == "loading"
        gate.set()
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert any("loading beta" in line for line in server.log)
    assert "".join(part["choices"][0]["text"] for part in parts) == alone(shelf, "beta")


@pytest.mark.parametrize("path", ["/api/generate", "/v1/messages", CHAT])
def test_a_stream_that_has_begun_ends_in_the_form_of_its_api(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Those that fail: test_failing_streams.py."""
    monkeypatch.setattr("llamaspec.serve.loading.SILENT_SECONDS", 0.0)
    body = {"prompt": "Hello", "messages": HI, "max_tokens": 5, "options": {"num_predict": 5}}
    with several(shelf) as server:
        shelf.gates["beta"] = gate = threading.Event()
        with server.client.stream("POST", path, json={**body, "stream": True, "model": "beta"}) as answer:
            assert answer.status_code == 200
            gate.set()
            last = [line for line in answer.iter_lines() if line][-1]
    assert ("done" in last.lower()) or "message_stop" in last


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_ends_the_loading(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    monkeypatch.setattr("llamaspec.serve.loading.SILENT_SECONDS", 0.0)
    gate = shelf.gates["beta"] = threading.Event()
    body = {"prompt": "Hello", "max_tokens": 12, "model": "beta", "stream": streams}
    with several(shelf) as server:
        with server.sent(TEXT, body):
            until(lambda: any("loading beta" in line for line in server.log))
        until(lambda: any("nobody waits for beta" in line for line in server.log))
        gate.set()
        assert text(ask(server, "beta")) == alone(shelf, "beta")


def test_a_server_that_stops_waits_for_no_model(shelf: Shelf) -> None:
    shelf.gates["beta"] = threading.Event()
    with several(shelf) as server, ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(ask, server, "beta")
        until(lambda: any("loading beta" in line for line in server.log))
        server.stop()
        assert waiting.result().status_code == 503


# Ollama's requests to load and unload


def test_ollama_loads_and_unloads(shelf: Shelf) -> None:
    with several(shelf) as server:

        def loaded() -> list[str]:
            return [each["name"] for each in server.client.get("/api/ps").json()["models"]]

        for path in ("/api/chat", "/api/generate"):
            answer = server.post(path, {"model": "beta", "keep_alive": "5m", "stream": False}).json()
            assert (answer["done_reason"], answer["model"]) == ("load", "beta")
            assert loaded() == ["beta:latest"]
            answer = server.post(path, {"model": "beta:latest", "keep_alive": 0}).json()
            assert (answer["done_reason"], loaded()) == ("unload", [])
        names = [each["name"] for each in server.client.get("/api/tags").json()["models"]]
        assert names == [f"{name}:latest" for name in NAMES]
        info = server.post("/api/show", {"model": "gamma"}).json()["model_info"]
        assert (info["llama.context_length"], info["general.basename"]) == (512, "gamma")
        assert shelf.opened == ["beta", "beta"]
        assert server.client.request("DELETE", "/api/delete", json={"model": "beta"}).status_code == 403
        assert server.post("/api/pull", {"model": "beta"}).json() == {"status": "success"}
        refused = server.post("/api/pull", {"model": "another"})
        assert (refused.status_code, "--pull" in refused.json()["error"]) == (404, True)


@pytest.mark.parametrize(("keep_alive", "stays"), [("10ms", False), (-1, True)])
def test_keep_alive_after_an_answer(shelf: Shelf, keep_alive: int | str, stays: bool) -> None:
    body = {"model": "beta", "messages": HI, "stream": False, "keep_alive": keep_alive}
    with several(shelf, idle_seconds=None if not stays else 0.0) as server:
        answer = server.post("/api/chat", {**body, "options": {"num_predict": 4}})
        assert answer.status_code == 200
        if stays:
            ask(server, "gamma")
            until(lambda: shelf.closed == ["gamma"])
            assert [model.name for model in server.models.loaded] == ["beta"]
        else:
            until(lambda: shelf.closed == ["beta"])


def test_a_keep_alive_longer_than_the_calendar(shelf: Shelf) -> None:
    """`/api/ps` was an internal error as long as the model was loaded: the year had five digits."""
    with several(shelf) as server:
        body = {"model": "beta", "messages": HI, "stream": False, "options": {"num_predict": 1}}
        assert server.post("/api/chat", {**body, "keep_alive": 999_999_999_999}).status_code == 200
        (about,) = server.client.get("/api/ps").json()["models"]
        assert about["expires_at"] == NEVER


def test_a_keep_alive_that_is_no_duration(shelf: Shelf) -> None:
    with several(shelf) as server:
        answer = server.post("/api/chat", {"model": "beta", "messages": HI, "keep_alive": "soon"})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("keep_alive")


# What the server says about its models


def test_metrics_slots_and_log_name_the_model(shelf: Shelf) -> None:
    with several(shelf) as server:
        for name, n in (("beta", 3), ("gamma", 5)):
            ask(server, name, n=n)
        metrics = server.client.get("/metrics").text
        assert 'llamaspec:generation_tokens_total{model_name="beta"} 3.0' in metrics
        assert 'llamaspec:generation_tokens_total{model_name="gamma"} 5.0' in metrics
        assert 'llamaspec:num_requests_running{model_name="gamma"} 0.0' in metrics
        slots = server.client.get("/slots").json()
        assert [slot["is_processing"] for slot in slots] == [False] * 4
        assert server.client.get("/props").json()["model_alias"] == "gamma"
        assert server.client.get("/props?model=beta").json()["model_alias"] == "beta"
        unloaded = server.client.get("/props?model=delta").json()
        assert "model_path" not in unloaded
    assert any("/v1/completions 200" in line and " beta" in line for line in server.log)
