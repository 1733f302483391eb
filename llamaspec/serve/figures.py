"""The figures of an answer in JSON: log-probabilities, token usage, timings. tests/serve/test_figures.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llamaspec.chat.deltas import TokenLogprobs
from llamaspec.engine.generation import Summary
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.bodies import SpeculativeFields
from llamaspec.serve.scheduling import Finished, Submission
from llamaspec.values import Round, Source

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def logprob_list(tokens: Iterable[TokenLogprobs], vocabulary: LlamaVocabulary) -> list[dict[str, Any]]:
    """Log-probabilities as in OpenAI's chat API; control tokens are left out."""
    found: list[dict[str, Any]] = []
    for token, (logprob, top), _ in tokens:
        if vocabulary.piece(token):
            tops = [_token(*each, vocabulary) for each in top]
            found.append({**_token(token, logprob, vocabulary), "top_logprobs": tops})
    return found


def _token(token: int, logprob: float, vocabulary: LlamaVocabulary) -> dict[str, Any]:
    piece = vocabulary.piece(token) or vocabulary.text(token)
    text = piece.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(piece)}


def openai_usage(
    ends: Sequence[Finished], n: int = 1, *, prompt: str = "prompt", completion: str = "completion"
) -> dict[str, Any]:
    """Tokens of all sequences of a request, with OpenAI's names; a prompt with `n` choices counts once."""
    prompts = [end.completion for end in ends[::n]]
    n_prompt = sum(each.n_prompt_tokens for each in prompts)
    n_generated = sum(end.completion.summary.n_tokens for end in ends)
    details = {"reasoning_tokens": sum(end.n_reasoning for end in ends)}
    rounds = [each for end in ends for each in end.completion.rounds if each.source is Source.PREDICTION]
    if rounds:
        details["accepted_prediction_tokens"] = sum(each.n_accepted for each in rounds)
        details["rejected_prediction_tokens"] = sum(each.n_verified - each.n_accepted for each in rounds)
    return {
        f"{prompt}_tokens": n_prompt,
        f"{completion}_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        f"{prompt}_tokens_details": {"cached_tokens": sum(each.n_cached for each in prompts)},
        f"{completion}_tokens_details": details,
    }


def figures(end: Finished, options: SpeculativeFields) -> dict[str, Any]:
    """How an answer was generated: llama-server's `timings` and more, and each round if requested."""
    done, summary = end.completion, end.completion.summary
    timings = {
        "cache_n": done.n_cached,
        **_speed("prompt", done.n_prompt_tokens - done.n_cached, done.prefill_seconds),
        **_speed("predicted", summary.n_tokens, summary.decode_seconds),
        "draft_n": summary.n_verified,
        "draft_n_accepted": summary.n_accepted,
        "rounds": summary.n_rounds,
        "accepted_histogram": list(summary.accepted_histogram),
        **_milliseconds(summary),
        "mask_ms": 1e3 * done.mask_seconds,
        "speedup_estimate": summary.speed_up,
        "unused_draft": None if done.unused_draft is None else done.unused_draft._asdict(),
        "draft_fault": done.draft_fault,
    }
    if not options.rounds:
        return {"timings": timings}
    return {"timings": timings, "rounds": [_round(round_) for round_ in done.rounds]}


def work_of(submission: Submission) -> dict[str, Any]:
    """What was computed for a request, for the log; the speed-up is that of its last completion."""
    done = [state.stream.completion for state in submission.states if state.stream is not None]
    ends = [state.last for state in submission.states if isinstance(state.last, Finished)]
    n_generated = sum(each.summary.n_tokens for each in done)
    seconds = sum(each.summary.decode_seconds for each in done)
    return {
        "prompt_tokens": sum(each.n_prompt_tokens for each in done),
        "cached_tokens": sum(each.n_cached for each in done),
        "generated_tokens": n_generated,
        "tokens_per_second": round(n_generated / seconds, 3) if seconds else None,
        "speedup_estimate": ends[-1].completion.summary.speed_up if ends else None,
        "cancelled": submission.is_cancelled,
    }


def _speed(name: str, n: int, seconds: float) -> dict[str, Any]:
    ms = 1e3 * seconds
    per_token, per_second = ms / n if n else None, 1e3 * n / ms if ms else None
    each = {"n": n, "ms": ms, "per_token_ms": per_token, "per_second": per_second}
    return {f"{name}_{key}": value for key, value in each.items()}


def _milliseconds(of: Round | Summary) -> dict[str, float]:
    return {f"{part}_ms": 1e3 * getattr(of, f"{part}_seconds") for part in ("draft", "verify", "overhead")}


def _round(round_: Round) -> dict[str, Any]:
    return {
        **_milliseconds(round_),
        "drafted": round_.n_verified,
        "branches": round_.draft.n_branches,
        "accepted": round_.n_accepted,
        "source": round_.source.value,
        "rows": round_.n_sequences,
    }
