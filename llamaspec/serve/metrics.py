"""Counters in Prometheus' text format, with vLLM's names where it has one for the same thing.

Seconds of an evaluation that several rows share are divided among them, so that sums are wall clock.
Filled by the decode thread, read by the event loop. tests/serve/test_status.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from llamaspec.engine.events import StopReason
from llamaspec.serve.answers import Done, Event, Run
from llamaspec.values import Round

PREFIX = "llamaspec:"
_HELP = {
    "spec_decode_num_drafts_total": "Rounds that verified a draft.",
    "spec_decode_num_draft_tokens_total": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens_total": "Draft tokens accepted.",
    "spec_decode_num_accepted_tokens_per_pos_total": "Draft tokens accepted, by their place in the draft.",
    "rounds_total": "Rounds of all rows, with a draft or without.",
    "draft_tokens_by_rows_total": "Draft tokens verified, by the rows that shared the evaluation.",
    "rounds_by_rows_total": "Rounds, by the rows that shared the evaluation.",
    "seconds_total": "Wall clock by phase.",
    "prompt_tokens_total": "Tokens of prompts.",
    "prompt_tokens_cached_total": "Of them, tokens that the KV cache held before.",
    "generation_tokens_total": "Tokens written.",
    "request_success_total": "Rows that ended, by the reason.",
    "requests_refused_total": "Requests refused because the queue was full.",
    "request_queue_seconds_total": "Seconds that rows waited for a place.",
    "request_first_token_seconds_total": "Seconds from the request to the first text.",
}  # fmt: skip


class Metrics:
    """What the server has done since it started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def rounds(self, rounds: Iterable[Round]) -> None:
        """Count rounds of a row."""
        with self._lock:
            for round_ in rounds:
                self._count_round(round_)

    def ended(self, run: Run, last: Event, now: float) -> None:
        """Count a row that has ended."""
        with self._lock:
            self._add("request_queue_seconds_total", (run.started_at or now) - run.asked_at)
            if run.first_at is not None:
                self._add("request_first_token_seconds_total", run.first_at - run.asked_at)
            if not isinstance(last, Done):
                self._add("request_success_total", 1, f'finished_reason="{_reason(run)}"')
                return
            done = last.completion
            self._add("request_success_total", 1, f'finished_reason="{done.stop_reason.value}"')
            self._add("prompt_tokens_total", done.n_prompt_tokens)
            self._add("prompt_tokens_cached_total", done.n_cached)
            self._add("generation_tokens_total", done.summary.n_tokens)
            self._add("seconds_total", done.prefill_seconds, 'phase="prefill"')
            self._add("seconds_total", done.mask_seconds, 'phase="mask"')

    def refused(self) -> None:
        """Count a request that found the queue full."""
        with self._lock:
            self._add("requests_refused_total", 1)

    def draft_length_by_rows(self) -> dict[str, float]:
        """The mean number of draft tokens in a round, by the rows that shared the evaluation."""
        with self._lock:
            counts = dict(self._counts)
        return {
            label.removeprefix('rows="').removesuffix('"'): counts["draft_tokens_by_rows_total", label] / n
            for (name, label), n in sorted(counts.items())
            if name == "rounds_by_rows_total"
        }

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Everything in Prometheus' format; `gauges` are name -> (help, value) as they are now."""
        with self._lock:
            counts = dict(self._counts)
        return "\n".join([*_counter_lines(counts), *_gauge_lines(gauges), ""])

    def _count_round(self, round_: Round) -> None:
        rows = f'rows="{round_.n_rows}"'
        self._add("rounds_total", 1)
        self._add("rounds_by_rows_total", 1, rows)
        self._add("draft_tokens_by_rows_total", round_.n_verified, rows)
        self._add("seconds_total", round_.draft_seconds / round_.n_rows, 'phase="draft"')
        self._add("seconds_total", round_.verify_seconds / round_.n_rows, 'phase="verify"')
        self._add("seconds_total", round_.overhead_seconds, 'phase="overhead"')
        if round_.n_verified:
            self._add("spec_decode_num_drafts_total", 1)
            self._add("spec_decode_num_draft_tokens_total", round_.n_verified)
            self._add("spec_decode_num_accepted_tokens_total", round_.n_accepted)
        for position in range(round_.n_accepted):
            self._add("spec_decode_num_accepted_tokens_per_pos_total", 1, f'position="{position}"')

    def _add(self, name: str, amount: float, label: str = "") -> None:
        self._counts[name, label] += amount  # type: ignore[assignment]


def _reason(run: Run) -> str:
    return StopReason.INTERRUPT.value if run.answer.is_cancelled else "error"


def _counter_lines(counts: Mapping[tuple[str, str], float]) -> Iterator[str]:
    for name, told in _HELP.items():
        yield f"# HELP {PREFIX}{name} {told}"
        yield f"# TYPE {PREFIX}{name} counter"
        labels = sorted(label for other, label in counts if other == name) or [""]
        for label in labels:
            yield f"{PREFIX}{name}{{{label}}} {counts.get((name, label), 0)}".replace("{}", "")


def _gauge_lines(gauges: Mapping[str, tuple[str, float]]) -> Iterator[str]:
    for name, (told, value) in gauges.items():
        yield f"# HELP {PREFIX}{name} {told}"
        yield f"# TYPE {PREFIX}{name} gauge"
        yield f"{PREFIX}{name} {value}"
