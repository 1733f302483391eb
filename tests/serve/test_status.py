"""The state of the server, and the fields that control drafting."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from llamaspec import Pair, Sampling
from llamaspec.measure.store import keep_gains, key_of
from patience import until
from serving import CONTEXT, Served, counters, process, said, served

BODY = {"prompt": "def f(", "max_tokens": 24, "seed": 5}


def numbers(server: Served) -> dict[str, float]:
    """Return the metrics by their names and labels."""
    return counters(server.client.get("/metrics").text)


def test_metrics_add_up(demo: Pair) -> None:
    with served(demo) as server:
        answers = [server.post("/v1/completions", {**BODY, "n": n}).json() for n in (1, 2)]
        after = numbers(server)
    accepted = after["spec_decode_num_accepted_tokens_total"]
    assert after["spec_decode_num_draft_tokens_total"] >= answers[0]["timings"]["draft_n"] > 0
    assert answers[0]["timings"]["draft_n_accepted"] <= accepted
    assert sum(value for name, value in after.items() if "accepted_tokens_per_pos" in name) == accepted
    n_rounds = sum(value for name, value in after.items() if name.startswith("rounds_by_rows"))
    assert n_rounds == after["rounds_total"]
    assert after["generation_tokens_total"] == sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert after['request_success_total{finished_reason="limit"}'] == 3
    assert 0 < after["kv_cache_usage_perc"] <= 1


def test_health(demo: Pair) -> None:
    with served(demo) as server:
        for path in ("/health", "/v1/health"):
            assert server.client.get(path).json() == {"status": "ok"}
        server.service.queue.stop()
        assert server.client.get("/health").status_code == 503


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/models", "data"),
        ("/v1/models/", "data"),
        ("//v1//models", "data"),
        ("/v1/v1/models", "data"),
        ("/v1/api/tags/", "models"),
        ("/models/target", "meta"),
        ("/v1/props", "total_slots"),
        ("/completions", "choices"),
        ("/v1/completion", "content"),
        ("/v1/v1/chat/completions/", "choices"),
        ("/messages", "stop_reason"),
        ("/responses", "output"),
        ("/v1/", None),
        ("/v2/models", None),
        ("/v1/models.json", None),
        ("/openai/v1/models", None),
    ],
)
def test_paths_that_clients_make(server: Served, path: str, told: str | None) -> None:
    """A base URL with one `/v1` too few or too many, or with a slash at its end, cost a client a 404."""
    said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    text = {"prompt": "a", "max_tokens": 1}
    bodies = {"chat": said, "messages": said, "completion": text, "responses": {"input": "a", **text}}
    body = next((body for name, body in bodies.items() if name in path), None)
    answer = server.client.request("GET" if body is None else "POST", f"{server.url}{path}", json=body)
    assert answer.status_code == (404 if told is None else 200), answer.text
    assert told is None or told in answer.json()


def test_props_models_and_the_page(demo: Pair) -> None:
    with served(demo, alias="mine") as server:
        props = server.client.get("/props").json()
        assert (props["model_alias"], props["total_slots"]) == ("mine", 4)
        assert props["default_generation_settings"]["n_ctx"] == CONTEXT
        assert "/" not in props["model_path"]
        assert props["kernels"] == demo.target.weights.kernels
        listed = server.client.get("/v1/models").json()
        (model,) = listed["data"]
        assert (model["id"], listed["models"]) == ("mine", [])
        assert model["context_length"] == model["max_model_len"] == model["meta"]["n_ctx"] == CONTEXT
        assert server.client.get("/v1/models/mine").json() == model
        assert server.post("/v1/completions", BODY).json()["model"] == "mine"
        page = server.client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def test_a_server_of_the_embedded_pair_names_its_kernels() -> None:
    with process(env={"LLAMASPEC_KERNELS": "off"}) as server:
        until(lambda: any(line.endswith("; llama.cpp's kernels") for line in server.lines))
        props = httpx.get(f"{server.url}/props").json()
    assert (props["model_alias"], props["kernels"]) == ("demo", "llama.cpp's kernels")


def test_the_verdict_of_earlier_runs(demo: Pair, own_cache: None) -> None:
    """The page shows it."""
    for gains in (None, {"code": 1.58}):
        if gains is not None:
            keep_gains(key_of(demo), gains)
        with served(demo) as server:
            told = server.client.get("/props").json()["speculative"]["verdict"]
        wanted = (
            "on this machine this pair is about 1.6 times as fast for code "
            "(measured by llamaspec bench at temperature 0)"
        )
        assert told == (wanted if gains else None)


def test_a_request_controls_drafting(server: Served, alone: Pair) -> None:
    """The drafts change, but not the text."""
    expected = said(alone, "def f(", 5, 24)

    def ask(**speculative: object) -> dict[str, float]:
        answer = server.post("/v1/completions", {**BODY, "speculative": speculative}).json()
        assert answer["choices"][0]["text"] == expected
        timings: dict[str, float] = answer["timings"]
        return timings

    assert ask()["draft_n"] > 0
    assert ask(enabled=False)["draft_n"] == 0
    assert ask(max_draft=0)["draft_n"] == 0
    one = ask(max_draft=1)
    assert 0 < one["draft_n"] <= one["rounds"]
    many = {**BODY, "speculative": {"rule": "rejection"}}
    assert server.post("/v1/completions", many).json()["timings"]["draft_n"] > 0


@pytest.mark.parametrize(
    "prompts", [["def f(", "import"], ["def f("], [[70], [71, 72]], [[70]], [70], "def f("]
)
def test_one_prompt_or_several(server: Served, demo: Pair, prompts: list[Any]) -> None:
    """Strings or token ids; each is continued as it would be alone."""
    of_tokens = isinstance(prompts[0], int)
    each = [prompts] if of_tokens or isinstance(prompts, str) else prompts
    body = {"max_tokens": 4, "temperature": 0}
    choices = server.post("/v1/completions", {**body, "prompt": prompts}).json()["choices"]
    tokens = [one if isinstance(one, str) else np.array(one, dtype=np.int32) for one in each]
    plain = Sampling(temperature=0)
    said_alone = [demo.stream(one, sampling=plain, max_tokens=4).run().text for one in tokens]
    assert [choice["text"] for choice in choices] == said_alone


def test_a_model_whose_name_has_slashes(demo: Pair) -> None:
    with served(demo, alias="org/model:7b") as server:
        listed = server.client.get("/v1/models").json()["data"]
        for name in ("org/model:7b", "org%2Fmodel:7b", "org%2Fmodel%3A7b"):
            answer = server.client.get(f"/v1/models/{name}")
            assert [answer.json()] == listed
        assert server.client.get("/v1/models/org").json()["error"]["code"] == "model_not_found"


def test_the_prompt_of_a_conversation(server: Served) -> None:
    """As llama-server's /apply-template has it; also of a conversation that is too long."""
    for text in ("Hé 😀", "a b " * 600):
        answer = server.post("/apply-template", {"messages": [{"role": "user", "content": text}]})
        assert answer.json()["prompt"].endswith(f"# user: {text}\n# assistant:")
