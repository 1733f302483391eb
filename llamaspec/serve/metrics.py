"""Prometheus metrics of each model. Those that vLLM has, too, have vLLM's names and its label `model_name`.

tests/serve/test_figures.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from llamaspec.engine.completion import Completion
from llamaspec.values import Round

PREFIX = "llamaspec:"
MODEL = "model_name"  # a label
_ROWS = "the sequences that shared the evaluation."
_COUNTERS: dict[str, tuple[str, ...]] = {  # name -> help, label
    "spec_decode_num_drafts_total": ("Rounds that verified a draft.",),
    "spec_decode_num_draft_tokens_total": ("Draft tokens verified.",),
    "spec_decode_num_accepted_tokens_total": ("Draft tokens accepted.",),
    "spec_decode_num_accepted_tokens_per_pos_total": ("Draft tokens accepted, by position.", "position"),
    "rounds_total": ("Rounds of all sequences, with a draft or without.",),
    "draft_tokens_by_rows_total": (f"Draft tokens verified, by {_ROWS}", "rows"),
    "rounds_by_rows_total": (f"Rounds, by {_ROWS}", "rows"),
    "seconds_total": ("Wall-clock time by phase.", "phase"),
    "prompt_tokens_total": ("Tokens of prompts.",),
    "prompt_tokens_cached_total": ("Tokens of prompts that were cached.",),
    "generation_tokens_total": ("Tokens generated, those of cancelled requests included.",),
    "request_success_total": ("Sequences that ended, by the reason.", "finished_reason"),
    "requests_refused_total": ("Requests refused because the queue was full.",),
    "request_queue_seconds_total": ("Seconds that sequences waited to run.",),
    "request_first_token_seconds_total": ("Seconds from the request to the first text.",),
}
_GAUGES = {
    "num_requests_running": "Sequences that run.",
    "num_requests_waiting": "Sequences that wait to run.",
    "kv_cache_usage_perc": "Used part of the target's KV cache, 0 to 1.",
    "kv_cache_tokens": "Tokens in the target's KV cache.",
}
_STORE = ("prefix_store_bytes", "Main memory for finished sequences of all models.")


class Load(NamedTuple):
    """How busy a loaded model is."""

    n_running: int  # sequences
    n_waiting: int
    n_used: int  # tokens in the target's KV cache
    n_cells: int  # tokens that it can hold


class Metrics:
    """What the server has counted since it started, for each model."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.counters = {
            name: Counter(PREFIX + name, text, (MODEL, *labels), registry=self._registry)
            for name, (text, *labels) in _COUNTERS.items()
        }
        self._gauges = [
            Gauge(PREFIX + name, text, (MODEL,), registry=self._registry) for name, text in _GAUGES.items()
        ]
        name, text = _STORE
        self._store = Gauge(PREFIX + name, text, registry=self._registry)

    def text(self, loads: Mapping[str, Load], n_stored_bytes: int) -> bytes:
        """Return all metrics in Prometheus' text format; `loads` are those of the loaded models, by name."""
        for gauge in self._gauges:
            gauge.clear()
        for model, load in loads.items():
            values = (load.n_running, load.n_waiting, load.n_used / load.n_cells, load.n_used)
            for gauge, value in zip(self._gauges, values, strict=True):
                gauge.labels(model).set(value)
        self._store.set(n_stored_bytes)
        return generate_latest(self._registry)


class ModelMetrics:
    """What the server has counted for one model since it started, also while it was not loaded.

    Sequences that share an evaluation divide its seconds, so that sums are wall-clock time.
    """

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._counters, self._model = metrics.counters, model
        for name, (_, *labels) in _COUNTERS.items():
            if not labels:
                self._add(name, 0)  # a counter that exists from the start

    def rounds(self, rounds: Iterable[Round]) -> None:
        """Count the new rounds of a sequence."""
        for round_ in rounds:
            n, rows = round_.n_verified, str(round_.n_sequences)
            self._add("rounds_total", 1)
            self._add("rounds_by_rows_total", 1, rows)
            self._add("draft_tokens_by_rows_total", n, rows)
            self._add("seconds_total", round_.draft_seconds / round_.n_sequences, "draft")
            self._add("seconds_total", round_.verify_seconds / round_.n_sequences, "verify")
            self._add("seconds_total", round_.overhead_seconds, "overhead")
            if n:
                self._add("spec_decode_num_drafts_total", 1)
                self._add("spec_decode_num_draft_tokens_total", n)
                self._add("spec_decode_num_accepted_tokens_total", round_.n_accepted)
            for position in range(round_.n_accepted):
                self._add("spec_decode_num_accepted_tokens_per_pos_total", 1, str(position))

    def refused(self) -> None:
        """Count a request that was refused because the queue was full."""
        self._add("requests_refused_total", 1)

    def ended(
        self, reason: str, completion: Completion | None, queue_seconds: float, first_text: float | None
    ) -> None:
        """Count a sequence that has ended; `completion` is None if it never began."""
        self._add("request_success_total", 1, reason)
        self._add("request_queue_seconds_total", queue_seconds)
        if first_text is not None:
            self._add("request_first_token_seconds_total", first_text)
        if completion is not None and completion.rounds:  # otherwise its prompt may not have been evaluated
            self._add("prompt_tokens_total", completion.n_prompt_tokens)
            self._add("prompt_tokens_cached_total", completion.n_cached)
            self._add("generation_tokens_total", completion.summary.n_tokens)
            self._add("seconds_total", completion.prefill_seconds, "prefill")
            self._add("seconds_total", completion.mask_seconds, "mask")

    def embedded(self, n_tokens: int) -> None:
        """Count a request for vectors that has been answered."""
        self._add("request_success_total", 1, "stop")
        self._add("prompt_tokens_total", n_tokens)

    def draft_length_by_rows(self) -> dict[str, float]:
        """Return the mean number of draft tokens per round, by how many sequences shared the evaluation."""
        tokens, rounds = (self._by_rows(f"{name}_by_rows_total") for name in ("draft_tokens", "rounds"))
        return {rows: tokens.get(rows, 0.0) / n for rows, n in sorted(rounds.items())}

    def _by_rows(self, name: str) -> dict[str, float]:
        (family,) = self._counters[name].collect()
        own = (sample for sample in family.samples if sample.labels[MODEL] == self._model)
        return {sample.labels["rows"]: sample.value for sample in own}

    def _add(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(self._model, *labels).inc(amount)
