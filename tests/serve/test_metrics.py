"""Counters and the timings of answers, against rounds made by hand: units, shares, and who was who."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llamaspec import AutoLength, FixedLength
from llamaspec.errors import LlamaspecError
from llamaspec.serve.answers import Done, Event, Failed, Run
from llamaspec.serve.deltas import End
from llamaspec.serve.figures import figures, openai_usage, rounds, speedup, timings
from llamaspec.serve.metrics import Metrics
from llamaspec.serve.status import _slots
from llamaspec.values import Source
from rounds import a_round, a_text

ALONE = a_round((1, 2, 3), accepted=2, next_token=4, seconds=(0.25, 1.0, 0.125))
SHARED = replace(
    a_round((5, 6), accepted=1, next_token=7, seconds=(0.5, 2.0, 0.25), source=Source.NGRAM), n_rows=4
)
PLAIN = a_round(next_token=8, seconds=(0.0, 1.5, 0.5))
TEXT = a_text([ALONE, SHARED, PLAIN], n_cached=30, prefill_seconds=0.05)  # 3 + 2 + 1 tokens in 6.125 s


def counted(metrics: Metrics) -> dict[str, float]:
    """What is not zero, by name and label."""
    lines = (line.rpartition(" ") for line in metrics.text({}).splitlines() if not line.startswith("#"))
    found = {name.removeprefix("llamaspec:"): float(value) for name, _, value in lines}
    return {name: value for name, value in found.items() if value}


def ended(last: Event, *, first_at: float | None = 13.5, is_cancelled: bool = False, **times: Any) -> Metrics:
    """A row asked for at 10 s, begun at 12 s; it is 20 s now."""
    metrics, answer = Metrics(), SimpleNamespace(is_cancelled=is_cancelled)
    settings: dict[str, Any] = {"asked_at": 10.0, "started_at": 12.0, "first_at": first_at, **times}
    metrics.ended(Run(0, SimpleNamespace(), answer, **settings), last, 20.0)  # type: ignore[arg-type]
    return metrics


def test_what_rounds_count() -> None:
    """Seconds of an evaluation that rows share are divided among them; overhead is each row's own."""
    metrics = Metrics()
    metrics.rounds([ALONE, SHARED, PLAIN])
    assert counted(metrics) == {
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


def test_what_a_finished_row_counts() -> None:
    assert counted(ended(Done(replace(TEXT, mask_seconds=0.375), None))) == {
        "request_queue_seconds_total": 2.0,
        "request_first_token_seconds_total": 3.5,
        'request_success_total{finished_reason="limit"}': 1,
        "prompt_tokens_total": 40,
        "prompt_tokens_cached_total": 30,
        "generation_tokens_total": 6,
        'seconds_total{phase="prefill"}': 0.05,
        'seconds_total{phase="mask"}': 0.375,
    }


@pytest.mark.parametrize(("is_cancelled", "reason"), [(True, "interrupt"), (False, "error")])
def test_what_a_row_without_an_answer_counts(is_cancelled: bool, reason: str) -> None:
    """One that never began has waited until now."""
    failed = ended(Failed(LlamaspecError("x")), first_at=None, is_cancelled=is_cancelled, started_at=None)
    assert counted(failed) == {
        "request_queue_seconds_total": 10.0,
        f'request_success_total{{finished_reason="{reason}"}}': 1,
    }


def test_the_text_of_the_metrics() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.refused()
    lines = metrics.text({"num_requests_running": ("Rows that run.", 3.0)}).splitlines()
    refused = lines.index("llamaspec:requests_refused_total 2")
    assert lines[refused - 2 : refused] == [
        "# HELP llamaspec:requests_refused_total Requests refused because the queue was full.",
        "# TYPE llamaspec:requests_refused_total counter",
    ]
    assert "llamaspec:rounds_total 0" in lines
    assert lines[-3:] == [
        "# HELP llamaspec:num_requests_running Rows that run.",
        "# TYPE llamaspec:num_requests_running gauge",
        "llamaspec:num_requests_running 3.0",
    ]
    assert metrics.text({}).endswith("\n")


def test_the_timings_of_an_answer() -> None:
    """10 of 40 tokens of the prompt were read in 50 ms; 6 tokens written in 6.125 s."""
    assert timings(End(replace(TEXT, mask_seconds=0.375), 1.25)) == {
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
        "speedup_estimate": 1.25,
    }
    cached = timings(End(replace(TEXT, n_cached=40, prefill_seconds=0.0), None))
    assert (cached["prompt_n"], cached["prompt_per_token_ms"], cached["prompt_per_second"]) == (0, None, None)


class Believing(AutoLength):
    """What plain rounds take, by their rows."""

    def __init__(self, believed: dict[int, float]) -> None:
        super().__init__()
        self.believed = believed

    def plain_seconds(self, n_rows: int = 1) -> float | None:
        return self.believed.get(n_rows)


def test_the_speed_next_to_plain_decoding() -> None:
    """3 tokens alone, 2 next to three other rows, and 1 alone: in 6.125 s."""
    made, policy = [ALONE, SHARED, PLAIN], Believing({1: 2.0, 4: 3.5})
    assert speedup(made, policy) == pytest.approx((3 * 2.0 + 2 * 3.5 + 2.0) / 6.125)
    beside = replace(SHARED, n_beside=30, verify_seconds=0.01)  # a prompt: not to be compared
    assert speedup([*made, beside], policy) == speedup(made, policy)
    assert speedup([beside], policy) is None
    assert speedup(made, Believing({1: 2.0})) is None  # four rows were never seen without drafts
    assert speedup([a_round(seconds=(0.0, 0.0, 0.0))], policy) is None
    assert speedup([], policy) is None
    assert speedup(made, FixedLength(3)) is None


def test_the_rounds_of_an_answer() -> None:
    assert rounds(End(TEXT, None))[1] == {
        "draft_ms": 500.0,
        "verify_ms": 2000.0,
        "overhead_ms": 250.0,
        "drafted": 2,
        "branches": 1,
        "accepted": 1,
        "source": "ngram",
        "rows": 4,
    }
    assert set(figures(End(TEXT, None), with_rounds=True)) == {"timings", "rounds"}
    assert set(figures(End(TEXT, None), with_rounds=False)) == {"timings"}


def test_a_prompt_with_several_choices_counts_once() -> None:
    other = replace(TEXT, n_prompt_tokens=7, n_cached=5)
    ends = [End(TEXT, None, 2), End(TEXT, None, 3), End(other, None), End(other, None, 4)]
    assert openai_usage(ends, n=2) == {
        "prompt_tokens": 47,
        "completion_tokens": 24,
        "total_tokens": 71,
        "prompt_tokens_details": {"cached_tokens": 35},
        "completion_tokens_details": {"reasoning_tokens": 9},
    }


def test_what_slots_tell_of_rows() -> None:
    """One that has written, one that has just begun, and a place that is free."""
    job = SimpleNamespace(prompt=range(40), drafting=SimpleNamespace(enabled=False))
    running: Any = [
        SimpleNamespace(job=job, stream=SimpleNamespace(rounds=[ALONE, SHARED], is_paused=True)),
        SimpleNamespace(job=SimpleNamespace(prompt=[1], drafting=SimpleNamespace(enabled=True)), stream=None),
    ]
    target, settings = SimpleNamespace(context_size=512), SimpleNamespace(parallel=3)
    service: Any = SimpleNamespace(pair=SimpleNamespace(target=target), settings=settings)
    common = {"n_ctx": 512, "is_processing": True}
    assert _slots(running, service) == [
        {"id": 0, **common, "n_prompt_tokens": 40, "n_decoded": 5, "n_draft": 5, "n_draft_accepted": 3,
         "speculative": False, "is_paused": True},
        {"id": 1, **common, "n_prompt_tokens": 1, "n_decoded": 0, "n_draft": 0, "n_draft_accepted": 0,
         "speculative": True, "is_paused": False},
        {"id": 2, "n_ctx": 512, "is_processing": False},
    ]  # fmt: skip
