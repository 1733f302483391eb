"""Prediction heads on the real llama.cpp: a used KV cache gives the answers of a fresh one.

Tiny models of each kind: one head over a hybrid (qwen35), one over keys and values, and three in turn
(step35).
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import tiny_models as tiny
from fakes import tokens
from forward_requests import Count, assert_same, text
from head_requests import Asking, drafting, evaluating, joined, n_known, opened, reading
from llamaspec import FixedLength, ModelOptions, NoDrafter, Pair, Sampling, open_pair
from llamaspec.drafters.hidden import NO_ROWS
from llamaspec.errors import ContextFullError, PairError, RowsMissingError
from llamaspec.llama import hidden_rows
from llamaspec.llama.batch import Segment
from llamaspec.llama.hidden_draft_file import heads_in_file
from llamaspec.llama.row_contexts import HeadContext
from llamaspec.values import (
    MTP,
    NO_TOKENS,
    TARGET,
    Forward,
    ForwardRequest,
    HiddenInput,
    HiddenRows,
    Logits,
    TokenArray,
)
from model_store import ModelStore, OpenModel
from tiny_models import Recipe

KINDS = ("qwen35", "step35-one", "step35")
LONGEST = {"qwen35": 4, "step35-one": 4, "step35": 3}  # draft tokens
TOLERANCE = 2e-3  # logits depend on the last bits of a hidden row; a wrong row changes them by 0.5
LONG = 2048
RECIPE = Recipe(n_context=LONG)


@contextmanager
def opened_pair(store: ModelStore, kind: str, **options: object) -> Iterator[Pair]:
    with opened(files_of(store, kind), **options) as pair:
        yield pair


def files_of(store: ModelStore, kind: str) -> tuple[Path, str]:
    """Target and draft."""
    return store.path(kind, RECIPE), "mtp"


def distance(one: Logits, other: Logits) -> float:
    return float(np.abs(one - other).max())


def assert_fresh(other: Pair, read: TokenArray, draft: TokenArray, answers: Sequence[Logits]) -> None:
    other.forget()
    for answer, expected in zip(answers, other.run(reading(read, draft)), strict=True):
        assert_same(answer, expected, TOLERANCE)


class Rounds:
    """A completion that is drafted and verified, with random outcomes."""

    def __init__(self, rng: np.random.Generator, begin: TokenArray, longest: int) -> None:
        self.rng, self.text, self.longest = rng, begin, longest
        self.seen: list[tuple[TokenArray, TokenArray, list[Logits]]] = []

    def some(self, n: int) -> TokenArray:
        return self.rng.integers(2, 288, n).astype(np.int32)

    def play(self, n_rounds: int) -> Generator[ForwardRequest, Forward, None]:
        rows = yield from evaluating(ForwardRequest(TARGET, self.text[:-1], n_logits=0, rows_from=0))
        for _ in range(n_rounds):
            draft = self.some(int(self.rng.integers(1, self.longest + 1)))
            if self.rng.random() < 0.8:  # otherwise the heads get no request
                answers = yield from drafting(self.text, draft[:-1], rows)
                self.seen.append((self.text, draft[:-1], answers))
            verified = ForwardRequest(TARGET, self.text, draft=draft, rows_from=len(self.text) - 1)
            rows = joined(rows, (yield from evaluating(verified)))
            n_accepted = int(self.rng.integers(len(draft) + 1))
            self.text = np.concatenate([self.text, draft[:n_accepted], self.some(1)])
            rows = HiddenRows(0, rows.part(0, len(self.text) - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_cached_answers_are_fresh_answers(store: ModelStore, kind: str) -> None:
    """Accepted draft tokens are evaluated again with the target's hidden rows; rejected ones are removed."""
    rng = np.random.default_rng(3)
    with opened_pair(store, kind, n_ctx=512) as pair, opened_pair(store, kind, n_ctx=512) as other:
        for _ in range(3):
            rounds = Rounds(
                rng, rng.integers(2, 288, int(rng.integers(2, 40))).astype(np.int32), LONGEST[kind]
            )
            pair.run(rounds.play(12))
            for read, draft, answers in rounds.seen:
                assert_fresh(other, read, draft, answers)


@pytest.mark.parametrize("kind", KINDS)
def test_the_hidden_rows_matter(store: ModelStore, kind: str) -> None:
    """Otherwise the comparisons here could not fail: other earlier tokens give other logits."""
    with opened_pair(store, kind) as pair:
        read = text(30)
        answers = pair.run(reading(read, tokens(5)))
        changed = read.copy()
        changed[-2] += 1  # within the window of every layer, not the token that the head embeds
        others = pair.run(reading(changed, tokens(5)))
        assert all(distance(a, b) > 0.1 for a, b in zip(answers, others, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_continues_another_starts_from_there(
    store: ModelStore, evaluated: Count, kind: str
) -> None:
    """As in the next turn of a conversation: the target evaluates again what the heads have not seen."""
    n_heads = {"step35": 3}.get(kind, 1)

    def accepting() -> Asking:
        answers = yield from reading(text(60), tokens(5))
        yield ForwardRequest(TARGET, text(60), draft=text(70)[60:])  # all of them accepted
        return answers

    with opened_pair(store, kind) as pair, opened_pair(store, kind) as other:
        pair.run(accepting())
        evaluated.taken()
        longer = text(76)
        n_cached = pair.run(n_known(longer))
        assert n_cached == (60 if n_heads == 1 else 59)  # without the draft token
        answers = pair.run(reading(longer, tokens(7), n_cached - 1))
        n_read = evaluated.taken()
        assert_fresh(other, longer, tokens(7), answers)
    assert n_read <= 18 + n_heads * 18  # the target's, and those of each head with draft tokens


@pytest.mark.parametrize("kind", ["step35-one", "step35"])
def test_a_sequence_with_the_beginning_of_another_shares_its_cells_in_the_heads(
    store: ModelStore, evaluated: Count, kind: str
) -> None:
    """The target has cached the beginning, so it evaluates the last token of it again, for its hidden row."""
    begin = text(200)
    other_end = np.concatenate([begin[:100], text(30, seed=9)])
    with opened_pair(store, kind) as pair:
        pair.run(reading(begin, tokens(5)))
        evaluated.taken()
        n_cached = pair.run(n_known(other_end))
        assert n_cached == 100
        answers = pair.run(reading(other_end, tokens(7), n_cached - 1))
        assert evaluated.taken() < 125
        with opened_pair(store, kind) as other:
            assert_fresh(other, other_end, tokens(7), answers)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_process_a_long_prompt_together_with_the_target(
    store: ModelStore, evaluated: Count, kind: str
) -> None:
    """Fewer hidden rows are kept than the prompt has tokens, but all except the first are known in time."""
    with opened_pair(store, kind, n_ctx=2048) as pair:
        pair.stream(text(1800), max_tokens=8, policy=FixedLength(2), seed=0).run()
    hidden = [each.hidden for each in evaluated.segments if each.hidden is not None]
    assert sum(len(rows) for rows in hidden) >= 1790
    assert not any((rows == 0).all(axis=1).any() for rows in hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_without_rows_begin_behind_them(store: ModelStore, kind: str) -> None:
    """They never get zeros. What they compute depends on all tokens, also on those that they do not see."""
    read = text(40)

    def asking(pair: Pair, first: int, before: TokenArray) -> Asking:
        path = np.concatenate([before, read])
        rows = yield from evaluating(ForwardRequest(TARGET, path[:-1], n_logits=0, rows_from=first))
        with pytest.raises(RowsMissingError):
            yield from drafting(path, tokens(5), rows)
        return (yield from drafting(path, tokens(5), rows, begin=first + 1))

    with opened_pair(store, kind) as pair:
        whole = pair.run(reading(read, tokens(5)))
        pair.forget()
        behind = pair.run(asking(pair, 30, NO_TOKENS))
        again = pair.run(asking(pair, 30, NO_TOKENS))
        assert all(distance(a, b) < TOLERANCE for a, b in zip(behind, again, strict=True))
        assert all(distance(a, b) > 0.01 for a, b in zip(whole, behind, strict=True))
        longer = np.concatenate([tokens(7, 8), read])
        if kind != "step35":  # the others of its heads were not asked
            assert pair.run(n_known(read, 31)) == 40
        assert pair.run(n_known(longer, 33)) == 33, "the same tokens after other ones"


def test_several_heads_draft_one_token_each(store: ModelStore) -> None:
    with opened_pair(store, "step35") as pair:
        assert pair.heads is not None
        assert pair.heads.longest == 3
        completion = pair.stream("the end", max_tokens=40, policy=FixedLength(6), seed=1).run()
        assert max(len(round_.draft) for round_ in completion.rounds) == 3
        with pytest.raises(ContextFullError, match="so far ahead"):
            pair.run(reading(text(20), tokens(5, 6, 7)))


def test_each_head_computes_its_own_layer(store: ModelStore, opened: OpenModel) -> None:
    target = opened("step35", heads=True)
    hidden = np.ones((5, target.weights.hidden_size), dtype=np.float32)
    logits = []
    for head in range(3):
        context = HeadContext(target.weights, target.options, head)
        context.decode([Segment(0, 0, text(5), 1, hidden)])
        logits.append(context.logits(1)[0].copy())
        context.close()
    assert all(np.abs(a - b).max() > 0.1 for a, b in itertools.combinations(logits, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_logits_are_the_same_bits_without_heads(
    store: ModelStore, opened: OpenModel, kind: str
) -> None:
    without = opened(kind, RECIPE)
    with open_pair(*files_of(store, kind), target_options=ModelOptions(threads=1)) as pair:
        for width in (1, 2, 5, 9):
            for model in (pair.target, without):
                model.forget()
                model.forward(ForwardRequest(TARGET, text(30), n_logits=0))
            wanted = ForwardRequest(TARGET, text(31), draft=text(width, seed=4))
            assert (pair.target.forward(wanted) == without.forward(wanted)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_ends_at_the_end_of_the_context(store: ModelStore, kind: str) -> None:
    with opened_pair(store, kind, n_ctx=64) as pair:
        sampling = Sampling(temperature=0)
        plain = pair.stream(text(40), drafter=NoDrafter(), sampling=sampling).run()
        pair.forget()
        found = pair.stream(text(40), policy=FixedLength(4), sampling=sampling).run()
    assert found.stop_reason is plain.stop_reason
    assert len(found.tokens) == len(plain.tokens) == 24
    assert found.tokens[:-4] == plain.tokens[:-4]
    assert found.summary.n_verified > 0


def test_impossible_requests(store: ModelStore) -> None:
    with opened_pair(store, "step35-one", n_ctx=64) as pair:
        assert pair.heads is not None
        hidden = HiddenInput(1, HiddenRows(0, np.ones((64, 64), dtype=np.float32)), NO_ROWS)
        for wanted in (
            ForwardRequest(MTP, text(20), n_logits=2, hidden=hidden),
            ForwardRequest(MTP, text(20), draft=tokens(3), hidden=hidden),
            ForwardRequest(MTP, text(65), hidden=hidden),
            ForwardRequest(MTP, tokens(3, -5), hidden=hidden),
            ForwardRequest(MTP, tokens(3, 99_999), hidden=hidden),
            ForwardRequest(MTP, text(20)),
            ForwardRequest(MTP, text(20), hidden=hidden._replace(begin=0)),
            ForwardRequest(MTP, text(1), hidden=hidden),
        ):
            with pytest.raises(
                ValueError, match=r"scores the last|do not fit|must be from|needs hidden rows"
            ):
                pair.heads.prepare([(0, wanted, 0)])


# Files


def test_a_damaged_file_has_no_heads(store: ModelStore, tmp_path: Path) -> None:
    """The file ends in the middle of its metadata: the list of models is shown all the same."""
    path = tiny.truncated(store.path("qwen35"), tmp_path / "cut.gguf", 700)
    assert heads_in_file(path).n_heads == 0


def test_a_file_whose_heads_were_left_out(tmp_path: Path) -> None:
    """llama.cpp loads it, but would abort the process if its heads were used."""
    path = tiny.write_step35(tmp_path / "whole.gguf")
    without = tiny.without_tensors(path, tmp_path / "trunk.gguf", "nextn.eh_proj")
    assert heads_in_file(path).n_heads == 3
    assert heads_in_file(without).n_heads == 0
    with pytest.raises(PairError, match="has no prediction heads"):
        open_pair(without, "mtp")


def test_more_heads_than_the_architecture_computes(tmp_path: Path) -> None:
    path = tiny.write_qwen35(tmp_path / "model.gguf", n_predictors=2)
    with pytest.raises(
        PairError, match=r"has 2 prediction heads, which llama.cpp cannot compute for 'qwen35'"
    ):
        open_pair(path, "mtp")


def test_heads_in_another_part_of_the_file(tmp_path: Path) -> None:
    path = tiny.write_step35(tmp_path / "model.gguf", Recipe(tensors_per_file=6))
    assert path.name.startswith("model-00001-of-")
    assert heads_in_file(path).n_heads == 3
    with open_pair(path, "mtp", target_options=ModelOptions(threads=1)) as pair:
        assert pair.stream("the", max_tokens=12, policy=FixedLength(2)).run().summary.n_verified > 0


def test_a_build_that_cannot_compute_heads(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_rows, "_ext", None)
    for files in ((store.path("qwen35"), "mtp"), (store.path("gemma4"), store.path("gemma4-assistant"))):
        with pytest.raises(PairError, match=r"this build of llama.cpp cannot compute"):
            open_pair(*files)
