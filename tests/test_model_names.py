"""Names of models as people know them."""

from __future__ import annotations

import pytest

from llamaspec.model_names import choices, distinct, matching

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
        ("coder-1.5b", (3, 4)),
        ("coder:1.5b-ud-q4_k_xl", 4),
        ("coder", None),
        ("gemma", (5, 6)),
        ("gemma-f16", 5),
        ("", None),
        ("coder-0.5b-Q8_0", None),
    ],
)
def test_names(name: str, found: int | tuple[int, ...] | None) -> None:
    """A name that several models share was said to be that of none."""
    expected = [] if found is None else [found] if isinstance(found, int) else [*found]
    assert matching(name, NAMES) == expected


def test_of_many_names_only_the_most_similar_are_shown() -> None:
    """A typing error was answered with 13 kB."""
    names = [*(f"filler-{i}" for i in range(2000)), "acme/qwen3-8b-Q4_K_M", "qwen3-8b-Q8_0", "coder"]
    for wrong in ("qwen:8b", "qwn3-8b", "Qwen3-8B-Q5_K_M" + "x" * 10_000):
        told = choices(wrong, names)
        assert all(name in told for name in names[2000:2002])
        assert told.endswith(" and 1,998 more, which /v1/models lists")
        assert len(told) < 200
    assert choices("x", names[-2:]) in (
        "this server has qwen3-8b-Q8_0, coder",
        "this server has coder, qwen3-8b-Q8_0",
    )
    assert choices("x", []) == "this server has no models"


@pytest.mark.parametrize(
    ("wanted", "taken", "names"),
    [
        (["x", "y"], "", "x y"),
        (["x a/x", "x b/x", "y b/y"], "", "a/x b/x y"),
        (["x a/x", "y a/y"], "x", "a/x y"),
        (["x a/x a/1/x", "x a/x a/2/x", "x b/x"], "", "a/1/x a/2/x b/x"),
        (["x a/x", "x a/x"], "", "a/x a/x"),  # nothing tells them apart
    ],
)
def test_names_that_tell_models_apart(wanted: list[str], taken: str, names: str) -> None:
    assert distinct([each.split() for each in wanted], {*taken.split()}) == names.split()
