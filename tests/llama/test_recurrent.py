"""Models whose layers keep states: what sequences share, and the contexts that they need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forward_requests import Count, request, text
from llamaspec.llama.cells import copy_state
from llamaspec.llama.prefix_folder import PrefixFolder
from llamaspec.llama.prefix_store import Bytes
from llamaspec.values import EVERYONE, TARGET, ForwardRequest, HiddenRows, scope_of
from model_store import OpenModel

KINDS = ("mamba", "jamba", "lfm2", "qwen35")
END = 1  # the token that ends messages
SYSTEM = np.array([*text(60), END], dtype=np.int32)
N_KEPT = len(SYSTEM) - 1  # the state before the token that ends it


def prompt(i: int) -> ForwardRequest:
    """Return a request for a conversation with the same system message as others."""
    return ForwardRequest(TARGET, np.concatenate([SYSTEM, text(30, i), [END], text(9, i)]).astype(np.int32))


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_conversations_share_the_state_after_their_first_message(
    opened: OpenModel, kind: str, is_over: bool
) -> None:
    """A system prompt was processed anew in each conversation, also while the first one still runs."""
    model, fresh = opened(kind), opened(kind)
    for i in range(4):
        request = prompt(i)
        (n_cached,) = model.prepare([(i, request, 0)])
        assert n_cached == (N_KEPT if i else 0)
        logits = model.evaluate([(i, request)])[0]
        fresh.forget()
        assert np.allclose(logits, fresh.forward(request), atol=2e-3)
        if is_over:
            model.release(i)


def test_the_shared_state_outlives_the_conversations_that_begin_with_it(
    opened: OpenModel, tmp_path: Path
) -> None:
    """Also if they are so long that they no longer have a checkpoint there."""
    model = opened("jamba")
    for i in range(2):
        for n in (8, 108, 208, 308, 408):
            model.forward(ForwardRequest(TARGET, np.concatenate([SYSTEM, text(n, i)])), number=i)
        model.release(i)
        model.store_finished()
    folder, other, reported = PrefixFolder(tmp_path / "saved", 1 << 40), opened("jamba"), list[str]()
    folder.save([model], reported.append)
    folder.load([other], reported.append)
    assert other.n_cached(prompt(9).tokens) == N_KEPT
    other.forward(prompt(5), number=0)
    other.release(0)
    other.store_finished()
    for each in (model, other):
        assert each.n_cached(prompt(9).tokens) == N_KEPT


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_of_a_peak_are_closed(opened: OpenModel, kind: str) -> None:
    """Each sequence has its own context, and those of a peak stayed for ever."""
    model = opened(kind)
    size = model.cache_use()[1]
    for i in range(5):
        model.forward(prompt(i), number=i)
    assert model.cache_use()[1] == 5 * size
    for i in (3, 0, 4, 1, 2):
        model.release(i)
    assert model.cache_use()[1] == size
    for i in range(5):  # what they held is in the store
        assert model.n_cached(prompt(i).tokens) >= len(SYSTEM) + 30


@pytest.mark.parametrize("n", [5, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_found_only_in_their_scope(opened: OpenModel, evaluated: Count, kind: str, n: int) -> None:
    """Also if they have too few tokens to be stored."""
    model = opened(kind)
    for number, (scope, n_new) in enumerate((("a", n), ("b", n), ("b", 2), (EVERYONE, n), ("c", 2))):
        assert model.n_cached(text(n), scope_of(scope)) == (n if n_new == 2 else 0)
        evaluated.taken()
        model.forward(request(n + 2 - (n_new == n) * 2, scope=scope), number)
        assert evaluated.taken() == n_new
        model.release(number)
    if n == 60:  # what "c" has continued is still there for others
        assert model.n_cached(text(n), scope_of("d")) == n


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_copied_only_where_it_may_be_needed(
    opened: OpenModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was copied every eight tokens, although nothing was drafted."""
    model, copied = opened(kind), list[int]()

    def counted(context: object, seq_id: int, flags: int = 0) -> Bytes | None:
        copied.append(flags)
        return copy_state(context, seq_id, flags)

    monkeypatch.setattr("llamaspec.llama.checkpoints.copy_state", counted)
    model.forward(request(100, n_logits=0))
    for n in range(101, 229):
        model.forward(request(n))
    assert len(copied) == 1  # near the end of the prompt
    for n in range(229, 233):
        model.forward(request(n, draft=text(3, 9)))
    assert len(copied) == (1 if kind in ("lfm2", "qwen35") else 2)  # before the first draft


def test_all_rows_of_a_prompt_arrive_although_its_evaluation_pauses(opened: OpenModel) -> None:
    """Only those after the last pause did, and the prediction heads saw nothing of the tokens before."""
    model, other, tokens = (opened("qwen35", heads=True), opened("qwen35", heads=True), prompt(1).tokens)
    model.forward(ForwardRequest(TARGET, tokens, rows_from=0), number=0)
    found, parts = model.hidden(0), list[HiddenRows]()
    for end in range(0, len(tokens), 10):
        other.forward(ForwardRequest(TARGET, tokens[: end + 10], 0, rows_from=end), number=0)
        part = other.hidden(0)
        assert part is not None
        parts.append(part._replace(rows=part.rows.copy()))
    assert found is not None
    assert (found.start, found.end) == (0, len(tokens))
    assert np.allclose(found.rows, np.concatenate([part.rows for part in parts]), atol=2e-3)
