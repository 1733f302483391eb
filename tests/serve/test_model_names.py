"""Names of models as people know them."""

from __future__ import annotations

import pytest

from llamaspec.serve.model_names import matching

NAMES = [
    ("qwen3-8b", "qwen3-8b:Q4_K_M", "hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M", "hf.co/Qwen/Qwen3-8B-GGUF"),
    ("qwen3-8b:Q8_0", "hf.co/Qwen/Qwen3-8B-GGUF:Q8_0"),
    ("coder-0.5b-Q4_0",),
    ("coder-1.5b-Q4_0",),
    ("coder-1.5b-UD-Q4_K_XL",),
    ("Gemma-F16",),
    ("gemma-q8_0",),
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("qwen3-8b", 0),
        ("qwen3:8b", 0),
        ("QWEN3:8B", 0),
        ("qwen3-8b:latest", 0),
        ("qwen3:8b-q4_K_M", 0),
        ("qwen3-8b:q8_0", 1),
        ("hf.co/Qwen/Qwen3-8B-GGUF:Q8_0", 1),
        ("hf:Qwen/Qwen3-8B-GGUF", 0),
        ("huggingface.co/qwen/qwen3-8b-gguf:latest", 0),
        ("coder-0.5b", 2),
        ("coder:0.5b", 2),
        ("coder-0.5b-Q4_0.gguf", 2),
        ("coder-1.5b", None),  # there are two
        ("coder:1.5b-ud-q4_k_xl", 4),
        ("coder", None),
        ("gemma", None),
        ("gemma-f16", 5),
        ("", None),
        ("coder-0.5b-Q8_0", None),
    ],
)
def test_names(name: str, found: int | None) -> None:
    assert matching(name, NAMES) == found
