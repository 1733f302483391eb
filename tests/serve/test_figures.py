"""Figures of answers, and metrics: of real completions, and of rounds made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamaspec import Pair
from llamaspec.serve.bodies import SpeculativeFields
from llamaspec.serve.metrics import Metrics, ModelMetrics
from llamaspec.serve.request_queue import Finished
from llamaspec.serve.response_forms import figures, openai_usage
from llamaspec.values import Evaluation, Source
from patience import until
from rounds import a_round, a_text
from serving import Gate, Served, counters, served

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 40, "seed": 1}


def test_spans_are_the_text(server: Served) -> None:
    events = server.events(CHAT, {**BODY, "speculative": {"spans": True}})
    chunks = [data for _, data in events[:-1]]
    for chunk in chunks:
        content = chunk["choices"][0]["delta"].get("content", "")
        assert "".join(span["text"] for span in chunk.get("spans", [])) == content
    spans = [span for chunk in chunks for span in chunk.get("spans", [])]
    assert {span["drafted"] for span in spans} == {True, False}
    assert sum(chunk.get("n_tokens", 0) for chunk in chunks) == chunks[-1]["timings"]["predicted_n"]
    alone = server.events(CHAT, {**BODY, "speculative": {"spans": True, "enabled": False}})
    spans = [span for _, data in alone[:-1] for span in data.get("spans", [])]
    assert {span["drafted"] for span in spans} == {False}
    assert not any("spans" in data for _, data in server.events(CHAT, BODY)[:-1])


def test_rounds_add_up(server: Served) -> None:
    body = {**BODY, "speculative": {"rounds": True}}
    chunk = server.events(CHAT, body)[-2][1]
    for answer in (server.post(CHAT, body).json(), chunk):
        timings, rounds = answer["timings"], answer["rounds"]
        assert len(rounds) == timings["rounds"]
        for total, part in (("draft_n", "drafted"), ("draft_n_accepted", "accepted")):
            assert timings[total] == sum(round_[part] for round_ in rounds)
        for part in ("draft_ms", "verify_ms", "overhead_ms"):
            assert timings[part] == pytest.approx(sum(round_[part] for round_ in rounds))
        assert {(round_["source"], round_["rows"]) for round_ in rounds} == {("model", 1)}
    for path, prompt in (("/v1/completions", "prompt"), ("/v1/responses", "input")):
        assert server.post(path, {**body, prompt: "a", "max_output_tokens": 9}).json()["rounds"]
    assert server.post("/v1/messages", body).json()["rounds"]
    assert "rounds" not in server.post(CHAT, BODY).json()


def test_rows_and_draft_tokens_by_rows(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(demo) as server:
        server.post(CHAT, {**BODY, "n": 2})
        props = server.client.get("/props").json()
        lengths = props["speculative"]["draft_length_by_rows"]
        assert 0 < lengths["2"] <= 3  # the draft length of this server
        until(lambda: server.client.get("/props").json()["rows"] == {"running": 0, "waiting": 0})
        gate = Gate(demo, monkeypatch)
        queue = server.service.queue  # its sequences are held before their first evaluation
        with server.client.stream("POST", CHAT, json={**BODY, "stream": True, "n": 2}):
            until(lambda: server.client.get("/props").json()["rows"]["running"] == 2)
            gate.open()
        until(lambda: not queue.sequences()[0])


ALONE = a_round((1, 2, 3), accepted=2, next_token=4, seconds=(0.25, 1.0, 0.125))
SHARED = replace(
    a_round((5, 6), accepted=1, next_token=7, seconds=(0.5, 2.0, 0.25), source=Source.NGRAM),
    verified_in=Evaluation(3, 4),
)
PLAIN = a_round(next_token=8, seconds=(0.0, 1.5, 0.5))
TEXT = a_text([ALONE, SHARED, PLAIN], n_cached=30, prefill_seconds=0.05)  # 3 + 2 + 1 tokens in 6.125 s

NONE, ROUNDS = SpeculativeFields(), SpeculativeFields(rounds=True)


def counted(metrics: Metrics) -> dict[str, float]:
    """Return the metrics that are not zero, by name and label."""
    return {name: value for name, value in counters(metrics.text({}, 0).decode()).items() if value}


def test_metrics_of_rounds() -> None:
    """Sequences that share an evaluation divide its seconds; overhead is not shared."""
    every = Metrics()
    metrics = ModelMetrics(every, "model")
    metrics.rounds([ALONE, SHARED, PLAIN])
    assert counted(every) == {
        "rounds_total": 3,
        'rounds_by_rows_total{rows="1"}': 2,
        'rounds_by_rows_total{rows="4"}': 1,
        'draft_tokens_by_rows_total{rows="1"}': 3,
        'draft_tokens_by_rows_total{rows="4"}': 2,
        'seconds_total{phase="draft"}': 0.25 + 0.125,
        'seconds_total{phase="verify"}': 1.0 + 0.5 + 1.5,
        'seconds_total{phase="overhead"}': 0.125 + 0.25 + 0.5,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 5,
        "spec_decode_num_accepted_tokens_total": 3,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 2,
        'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 1,
    }
    assert metrics.draft_length_by_rows() == {"1": 1.5, "4": 2.0}


@pytest.mark.parametrize("reason", ["limit", "interrupt", "error"])
def test_metrics_of_a_sequence(reason: str) -> None:
    """The tokens of a cancelled request count, too."""
    metrics = Metrics()
    ModelMetrics(metrics, "model").ended(reason, replace(TEXT, mask_seconds=0.375), 2.0, 3.5)
    assert counted(metrics) == {
        "request_queue_seconds_total": 2.0,
        "request_first_token_seconds_total": 3.5,
        f'request_success_total{{finished_reason="{reason}"}}': 1,
        "prompt_tokens_total": 40,
        "prompt_tokens_cached_total": 30,
        "generation_tokens_total": 6,
        'seconds_total{phase="prefill"}': 0.05,
        'seconds_total{phase="mask"}': 0.375,
    }


def test_metrics_of_a_sequence_that_generated_nothing() -> None:
    metrics = Metrics()
    ModelMetrics(metrics, "model").ended("interrupt", None, 10.0, None)
    ModelMetrics(metrics, "model").ended("interrupt", a_text([]), 10.0, None)
    assert counted(metrics) == {
        "request_queue_seconds_total": 20.0,
        'request_success_total{finished_reason="interrupt"}': 2,
    }


def test_the_timings_of_an_answer() -> None:
    """10 of 40 prompt tokens were processed in 50 ms, and 6 tokens generated in 6.125 s."""
    text = replace(TEXT, mask_seconds=0.375, summary=replace(TEXT.summary, speed_up=1.25))
    assert figures(Finished(text), NONE)["timings"] == {
        "cache_n": 30,
        "prompt_n": 10,
        "prompt_ms": pytest.approx(50.0),
        "prompt_per_token_ms": pytest.approx(5.0),
        "prompt_per_second": pytest.approx(200.0),
        "predicted_n": 6,
        "predicted_ms": 6125.0,
        "predicted_per_token_ms": pytest.approx(6125 / 6),
        "predicted_per_second": pytest.approx(6 / 6.125),
        "draft_n": 5,
        "draft_n_accepted": 3,
        "rounds": 3,
        "accepted_histogram": [1, 1, 1],
        "draft_ms": 750.0,
        "verify_ms": 4500.0,
        "overhead_ms": 875.0,
        "mask_ms": 375.0,
        "unused_draft": None,
        "draft_fault": None,
        "speedup_estimate": 1.25,
    }
    cached = figures(Finished(replace(TEXT, n_cached=40, prefill_seconds=0.0)), NONE)["timings"]
    assert (cached["prompt_n"], cached["prompt_per_token_ms"], cached["prompt_per_second"]) == (0, None, None)


def test_a_prompt_with_several_choices_counts_once() -> None:
    other = replace(TEXT, n_prompt_tokens=7, n_cached=5)
    ends = [Finished(TEXT, 2), Finished(TEXT, 3), Finished(other), Finished(other, 4)]
    assert openai_usage(ends, n=2) == {
        "prompt_tokens": 47,
        "completion_tokens": 24,
        "total_tokens": 71,
        "prompt_tokens_details": {"cached_tokens": 35},
        "completion_tokens_details": {"reasoning_tokens": 9},
    }
