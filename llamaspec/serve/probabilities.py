"""How probable the tokens of an answer were, in the forms of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.serve.deltas import TokenLogprobs

LOWEST = -9999.0  # JSON knows no infinity


def token_list(tokens: Iterable[TokenLogprobs], vocabulary: LlamaVocabulary) -> list[dict[str, Any]]:
    """As the chat API and /v1/responses tell it; control tokens are not part of the text."""
    return [
        {
            **_token(token, logprobs.logprob, vocabulary),
            "top_logprobs": [_token(*top, vocabulary) for top in logprobs.top],
        }
        for token, logprobs in tokens
        if vocabulary.piece(token)
    ]


def columns(tokens: Iterable[TokenLogprobs], vocabulary: LlamaVocabulary, offset: int) -> dict[str, Any]:
    """As the completions API tells it; `offset` counts characters of the text before."""
    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in token_list(tokens, vocabulary):
        told["tokens"].append(token["token"])
        told["token_logprobs"].append(token["logprob"])
        told["top_logprobs"].append({top["token"]: top["logprob"] for top in token["top_logprobs"]})
        told["text_offset"].append(offset)
        offset += len(token["token"])
    return told


def _token(token: int, logprob: float, vocabulary: LlamaVocabulary) -> dict[str, Any]:
    piece = vocabulary.piece(token) or vocabulary.text(token)
    return {
        "token": piece.decode(errors="replace"),
        "logprob": max(logprob, LOWEST),
        "bytes": list(piece),
    }
