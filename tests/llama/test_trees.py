"""Trees of draft tokens on the real llama.cpp: the logits of each path are those of a chain."""

from __future__ import annotations

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from forward_requests import EXACT, TOLERANCE, RandomTrees, assert_same, evaluate, full, paths, text
from llamaspec.errors import EvaluationAbortedError
from llamaspec.llama.options import N_BRANCHES
from llamaspec.values import TARGET, ForwardRequest, Logits
from model_store import OpenModel
from tiny_models import Recipe


def tree(n_text: int, parents: list[int], seed: int = 0) -> ForwardRequest:
    draft = text(len(parents), seed + 7)
    return ForwardRequest(TARGET, text(n_text, seed), draft=draft, parents=np.array(parents, np.int32))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_random_trees_of_several_sequences(opened: OpenModel, kind: str) -> None:
    """A used model against a fresh one, with so few cells that they are moved."""
    rng = np.random.default_rng(3)
    model, other = (opened(kind, n_ctx=128, n_cells=256, **EXACT) for _ in range(2))
    rows, n_trees = RandomTrees(rng, longest=70), 0
    for _ in range(120):
        for number in rows.leaving():
            model.release(number)
        batch = rows.batch()
        crowded = full(model, batch)
        batch = [entry for entry in batch if entry[0] not in crowded]
        answers = evaluate(model, batch, int(rng.choice([0, 2])))
        for number, wanted in batch:
            right = alone(other, wanted)
            assert_same(answers[number], right, TOLERANCE[kind])
            n_trees += wanted.is_tree
    assert n_trees > 80


def alone(model: object, wanted: ForwardRequest) -> Logits:
    """Evaluate each path as a chain."""
    rows = []
    for path in paths(wanted):
        model.forget()  # type: ignore[attr-defined]
        rows.append(model.forward(ForwardRequest(TARGET, path)).copy()[0])  # type: ignore[attr-defined]
    return np.array(rows, dtype=np.float32).reshape(wanted.n_scored, model.vocabulary_size)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_paths_have_the_bits_of_chains(opened: OpenModel, dtype: str) -> None:
    """If the kernel is the same at every width and values are cached as bf16."""
    rng = np.random.default_rng(1)
    model, other = (opened("llama", Recipe(dtype=dtype), n_ctx=512, cache_type_v="bf16") for _ in range(2))
    held = text(240)
    for _ in range(8):
        parents = np.array([rng.integers(-1, i) for i in range(9)], np.int32)
        wanted = ForwardRequest(TARGET, held, 1, rng.integers(2, 288, 9).astype(np.int32), parents)
        answer = model.forward(wanted)
        known = list(zip(paths(wanted), answer, strict=True))
        for path, number in known:
            assert np.array_equal(other.forward(ForwardRequest(TARGET, path))[0], number)
        held = np.concatenate([known[int(rng.integers(10))][0], text(1, int(rng.integers(100)))])


def test_an_accepted_path_is_not_evaluated_again(opened: OpenModel) -> None:
    """Also if it is not the first branch; rejected tokens have no influence."""
    model = opened(n_ctx=256, **EXACT)
    wanted = tree(40, [-1, 0, 0, -1, 3, 4])
    model.forward(wanted)
    path = np.concatenate([wanted.tokens, wanted.draft[[3, 4, 5]]])
    behind = ForwardRequest(TARGET, np.append(path, np.int32(5)))
    (n_cached,) = model.prepare([(-1, behind, 0)])
    assert n_cached == len(path)
    answer = model.evaluate([(-1, behind)])[0].copy()
    model.forget()
    assert_same(answer, model.forward(behind))


def test_a_new_level_extends_the_cached_tree(opened: OpenModel) -> None:
    model = opened(n_ctx=256, **EXACT)
    whole = tree(20, [-1, -1, 0, 0, 1])
    assert whole.parents is not None
    model.forward(ForwardRequest(TARGET, whole.tokens))
    first = ForwardRequest(TARGET, whole.tokens, 0, whole.draft[:2], whole.parents[:2])
    level = ForwardRequest(TARGET, whole.tokens, 0, whole.draft, whole.parents, n_known=2)
    assert model.prepare([(-1, first, 0)]) == [20]
    model.evaluate([(-1, first)])
    assert model.prepare([(-1, level, 0)]) == [22]
    answer = model.evaluate([(-1, level)])[0].copy()
    model.forget()
    assert_same(answer, model.forward(whole)[3:])


def test_too_many_branches_for_one_evaluation_are_split(opened: OpenModel) -> None:
    model, other = (opened(n_ctx=1024, **EXACT) for _ in range(2))
    batch = [(number, tree(10 + number, [-1] * 12, number)) for number in range(5)]
    model.prepare([(number, wanted, 0) for number, wanted in batch])
    answers = [logits.copy() for logits in model.evaluate(batch)]
    for (_, wanted), answer in zip(batch, answers, strict=True):
        assert_same(answer, alone(other, wanted))


def test_a_tree_with_too_many_branches_is_refused(opened: OpenModel) -> None:
    with pytest.raises(ValueError, match="at most 32 branches"):
        opened(n_ctx=256).prepare([(0, tree(10, [-1] * (N_BRANCHES + 1)), 0)])


@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2"])
def test_models_with_states_refuse_trees(opened: OpenModel, kind: str) -> None:
    model = opened(kind)
    assert model.keeps_states
    with pytest.raises(ValueError, match="chains"):
        model.prepare([(0, tree(10, [-1, -1]), 0)])
    assert model.forward(tree(10, [-1, 0, 1])).shape[0] == 4


def test_an_aborted_evaluation_leaves_no_trace(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(n_ctx=512, **EXACT)
    wanted = tree(100, [-1, 0, -1, 2])
    model.forward(ForwardRequest(TARGET, wanted.tokens[:10]))
    decode = lib.llama_decode

    def aborted(*arguments: object) -> int:
        assert decode(*arguments) == 0
        return 2

    with monkeypatch.context() as patch:
        patch.setattr(lib, "llama_decode", aborted)
        with pytest.raises(EvaluationAbortedError):
            model.forward(wanted)
    answer = model.forward(wanted).copy()
    model.forget()
    assert_same(answer, model.forward(wanted))
