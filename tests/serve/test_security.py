"""Access by host, origin and key; and the log."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Literal

import pytest

from llamaspec import Pair
from llamaspec.serve import ServeSettings
from llamaspec.serve.log import ServerLog
from serving import Served, open_demo, served

BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:8080", 200),
        ("192.168.1.5:8080", 200),  # an address cannot be that of a stranger's page
        ("LocalHost.:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example:8080", 403),
        ("127.0.0.1.nip.io", 403),
        ("1.2.3.4.", 403),
        ("[::1].evil.example", 403),
        ("[::1]evil.example:80", 403),
        ("[::1", 403),
        ("[::1%25evil.example]", 403),
        ("127.0.0.1:80:evil", 403),
        ("localhost:evil.example", 403),
        ("localhost:", 200),
        ("", 403),
    ],
)
def test_only_names_of_this_machine_are_answered(server: Served, host: str, status: int) -> None:
    assert server.client.get("/health", headers={"Host": host}).status_code == status


def test_a_server_without_keys_knows_its_names() -> None:
    """Once, a server for other machines answered any name, and a local one refused a proxy."""
    open_ = ServeSettings(host="0.0.0.0", no_auth=True, allowed_hosts=("Box.example.",))
    assert all(map(open_.knows_host, ("box.example", "BOX.example.", "localhost", "10.0.0.7", "[fd00::1]")))
    assert not any(map(open_.knows_host, ("evil.example", "box.example.evil.example", "box", "")))


def test_a_request_with_a_key_may_come_through_any_proxy(demo: Pair) -> None:
    """A proxy that passes on `Host`, or one that replaces it, in front of the server's own page."""
    with served(demo, keys=("k",)) as server:
        for host in ("llm.example", "127.0.0.1"):
            asks = {"Host": host, "Origin": "https://llm.example", "Authorization": "Bearer k"}
            assert server.post("/v1/completions", BODY, headers=asks).status_code == 200
            del asks["Authorization"]
            assert server.post("/v1/completions", BODY, headers=asks).status_code == 401
            assert server.client.get("/", headers=asks).status_code == 200


def test_a_proxy_of_a_server_without_keys(demo: Pair) -> None:
    """If it replaced `Host`, every message of the page was refused."""
    with served(demo, allowed_hosts=("llm.example",)) as server:
        for host, origin, status in (
            ("llm.example", "https://llm.example", 200),
            ("127.0.0.1:8080", "https://llm.example", 200),
            ("127.0.0.1:8080", "https://llm.example:444", 403),
            ("127.0.0.1:8080", "http://localhost", 403),
            ("other.example", "https://llm.example", 403),
        ):
            asks = {"Host": host, "Origin": origin}
            assert server.post("/v1/completions", BODY, headers=asks).status_code == status, asks


def test_pages_of_other_origins_are_refused(server: Served) -> None:
    assert server.post("/v1/completions", BODY, headers={"Origin": "https://evil.example"}).status_code == 403
    assert server.post("/v1/completions", BODY, headers={"Origin": "null"}).status_code == 403
    own = server.post("/v1/completions", BODY, headers={"Origin": server.url})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers


def test_pages_of_an_allowed_origin_are_answered(demo: Pair) -> None:
    origin = "https://chat.example"
    with served(demo, cors_origins=(origin,), keys=("k",)) as server:
        asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        before = server.client.options("/v1/completions", headers=asks)
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, origin)
        refused = server.post("/v1/completions", BODY, headers={"Origin": origin})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
        allowed = {"Origin": origin, "Authorization": "Bearer k"}
        assert server.post("/v1/completions", BODY, headers=allowed).status_code == 200
        other = server.post("/v1/completions", BODY, headers={**allowed, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers  # its browser does not show it the answer
        asks["Origin"] = "https://evil.example"
        assert server.client.options("/v1/completions", headers=asks).status_code == 400


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_keys(demo: Pair, log_format: str) -> None:
    keys = ("first-secret", "second-secret")
    with served(demo, keys=keys, log_format=log_format) as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer"},
            {"Authorization": "first-secret"},
            {"X-Api-Key": "first-secre"},
            {"Authorization": "Bearer fürst-secret".encode()},
        ):
            answer = server.client.get("/v1/models", headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        for key in keys:
            both = {"Authorization": "Bearer none", "X-Api-Key": key}  # a client with a setting for each
            for headers in ({"Authorization": f"Bearer {key}"}, {"X-Api-Key": key}, both):
                assert server.client.get("/v1/models", headers=headers).status_code == 200
        assert server.post("/v1/messages", {}).json()["error"]["type"] == "authentication_error"
        assert server.client.get("/health").status_code == 200
        assert "secret" not in repr(server.service.settings)
    assert len(server.log) == 14
    assert "secret" not in "".join(server.log)


def test_answers_to_other_keys_are_not_copied(demo_files: tuple[Path, Path]) -> None:
    """Copies change no text, but the time that an answer takes."""
    body = {"prompt": "def read(path):", "max_tokens": 24, "temperature": 0, "speculative": {"rounds": True}}

    def sources(key: str) -> set[str]:
        answer = server.post("/v1/completions", body, headers={"X-Api-Key": key}).json()
        return {each["source"] for each in answer["rounds"] if each["accepted"]}

    with open_demo((demo_files[0], "ngram")) as pair, served(pair, keys=("one", "two")) as server:
        assert "earlier" not in sources("one")
        assert "earlier" in sources("one")
        assert "earlier" not in sources("two")
        assert "earlier" in sources("two")


def test_the_json_log(demo: Pair) -> None:
    with served(demo, log_format="json") as server:
        server.client.get("/v1/models?key=hidden")
        server.client.get("/%1b%5b2J%0ax")
        server.client.get("/v1/models/hidden")
        server.client.request("HIDDEN", "/v1/models")
        for address in ("192.0.2.7", "hidden", "::1%hidden"):  # as a proxy of this machine tells it
            server.client.get("/health", headers={"X-Forwarded-For": address})
    assert "hidden" not in "".join(server.log).lower()
    lines = [json.loads(line) for line in server.log]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("GET", "/v1/models", 200),
        ("GET", "unknown", 404),
        ("GET", "unknown", 404),
        ("unknown", "/v1/models", 405),
        *[("GET", "/health", 200)] * 3,
    ]
    assert [line["client"] for line in lines[-3:]] == ["192.0.2.7", "unknown", "::1"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_log_that_nobody_can_read(log_format: Literal["text", "json"]) -> None:
    """A closed pipe or a full disk cut connections off, and the server ended without its grace time."""

    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    log = ServerLog(full, log_format)
    log.line("a request")


def test_the_log_has_the_work_of_a_request(demo: Pair) -> None:
    body = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 8, "seed": 1}
    with served(demo, log_format="json") as server:
        usage = server.post("/v1/chat/completions", body).json()["usage"]
        server.events("/v1/chat/completions", body)
    for line in (json.loads(line) for line in server.log):
        assert line["prompt_tokens"] == usage["prompt_tokens"]
        assert line["generated_tokens"] == 8
        assert line["tokens_per_second"] > 0
        assert not line["cancelled"]
    assert json.loads(server.log[1])["cached_tokens"] > 0
    with served(demo) as server:
        server.post("/v1/chat/completions", body)
    (told,) = server.log
    assert f": {usage['prompt_tokens']} prompt tokens (" in told
    assert " 8 generated, " in told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"host": "0.0.0.0"}, "--no-auth"),
        ({"host": "192.168.1.5"}, "--api-key"),
        ({"host": "example.org"}, "--api-key"),
        ({"keys": ("",)}, "key"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ServeSettings(**settings)  # type: ignore[arg-type]
