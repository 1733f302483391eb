"""Drafts with hidden rows on the real llama.cpp: they propose what a reference in numpy proposes.

The reference computes every round of a completion anew, from hidden rows of one evaluation of the whole text.
So it sees rows that are missing, late, or of the wrong token, wherever a completion comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from forward_requests import text
from head_requests import opened
from hidden_reference import Reference
from llamaspec import FixedLength, LlamaModel, ModelOptions, NoDrafter, Pair, Sampling
from llamaspec.engine.completion import Completion
from llamaspec.sampling.acceptance_rules import RULES
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sampling.sampler import Sampler
from llamaspec.values import TARGET, Draft, ForwardRequest, TokenArray
from model_store import ModelStore
from tiny_hidden import DraftRecipe
from tiny_models import Recipe

FAMILIES = ("llama", "qwen3", "mixtral", "lfm2", "qwen35", "gemma4")
KINDS = ("eagle3", "dflash", "dspark", "dflash2")
TARGET_RECIPE = Recipe(n_context=2048, spread=0.5)
GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=None, top_p=None, min_p=None)


@dataclass
class Case:
    """An open pair, and the means to check its drafts."""

    pair: Pair
    draft: DraftRecipe
    reference: Reference
    model: LlamaModel  # another copy of the target

    def complete(
        self, prompt: TokenArray, n: int = 30, sampling: Sampling = DRAWN, seed: int = 0
    ) -> Completion:
        stream = self.pair.stream(prompt, max_tokens=n, sampling=sampling, seed=seed, policy=FixedLength(4))
        return stream.run()

    def check(
        self, prompt: TokenArray, made: Completion, sampling: Sampling = DRAWN, seed: int = 0, begin: int = 0
    ) -> list[int]:
        """Compare all drafts with the reference; return how many tokens of each were accepted."""
        whole = np.concatenate([prompt, np.array(made.tokens, dtype=np.int32)])
        self.model.forget()
        rows, n, accepted = self._rows(whole), len(prompt), []
        for round_ in made.rounds:
            if len(round_.draft):
                wanted = self.expected(
                    whole[:n], rows, len(round_.draft), Sampler(sampling, len(prompt)), seed, begin
                )
                assert round_.draft.tokens.tolist() == wanted.tokens.tolist(), f"after {n} tokens"
                np.testing.assert_allclose(round_.confidences, wanted.confidences, atol=2e-3)
                accepted.append(round_.n_accepted)
            n += len(round_.tokens)
        return accepted

    def _rows(self, whole: TokenArray) -> np.ndarray:
        parts = []
        for end in (*range(512, len(whole), 512), len(whole)):
            self.model.forward(ForwardRequest(TARGET, whole[:end], 1, rows_from=(end - 1) // 512 * 512))
            hidden = self.model.hidden(-1)
            assert hidden is not None
            parts.append(hidden.rows.astype(np.float64))
        return np.concatenate(parts)

    def expected(
        self, context: TokenArray, rows: np.ndarray, n: int, sampler: Sampler, seed: int, begin: int
    ) -> Draft:
        """Return what the reference drafts after a text."""
        rule, streams, draft = RULES["coupled"], SeededStreams(seed), Draft()
        block = None if self.draft.kind == "eagle3" else self.reference.block(context, rows, begin)
        first = 1 - (self.draft.kind == "dspark" and self.draft.from_anchor)
        for i in range(n):
            path = np.concatenate([context, draft.tokens])
            if block is None:
                logits = self.reference.eagle3(context, rows, draft.tokens.tolist(), begin + 1)[-1]
            elif self.draft.kind == "dflash2":
                logits = self.reference.lattice_scores(block, i + 1, int(path[-1]))
            else:
                logits = block.logits[i + first]
            q = sampler.distribution(logits.astype(np.float32), path, None)
            token = rule.draw(q, streams, len(context), i)
            is_known = block is not None and block.confidence is not None
            sure = float(block.confidence[i + first]) if is_known else _probability(logits, token)  # type: ignore[union-attr, index]
            draft = draft.plus(token, q, sure)
        return draft


def _probability(logits: np.ndarray, token: int) -> float:
    return float(1 / np.exp(logits - logits[token]).sum())


@contextmanager
def case(store: ModelStore, family: str, draft: DraftRecipe, **options: object) -> Iterator[Case]:
    target = store.path(family, draft.target)
    file = store.draft(draft)
    wanted = ModelOptions(
        threads=1, n_ctx=1024, cache_type_k="f32", cache_type_v="f32", flash_attention="off",
        hidden_layers=draft.layers,
    )  # fmt: skip
    with opened((target, file), **{"n_ctx": 512, **options}) as pair, LlamaModel(target, wanted) as model:
        yield Case(pair, draft, Reference(draft, target), model)


def of(kind: str, **changes: object) -> DraftRecipe:
    return replace(DraftRecipe(TARGET_RECIPE, kind), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_proposes_the_same_tokens(store: ModelStore, family: str, kind: str) -> None:
    """Greedily, where every score counts, and with noise, where tokens are accepted at all places."""
    with case(store, family, of(kind)) as each:
        accepted = []
        for sampling in (GREEDY, DRAWN):
            for seed, n in enumerate((1, 2, 3, 40)):
                prompt = text(n, seed)
                accepted += each.check(prompt, each.complete(prompt, 24, sampling, seed), sampling, seed)
    assert len(accepted) > 60


VARIANTS = {
    "own ends": of("eagle3", own_ends=True),
    "d2t": of("eagle3", n_tokens=100),
    "3.1": of("eagle3", norm_before_fc=True, norm_before_residual=True),
    "one layer": of("dflash", layers=(1,)),
    "five layers": of("dflash", layers=(0, 1, 0, 1, 1)),
    "causal": of("dflash", is_causal=True),
    "window": of("dflash", window=9),
    "own d2t": of("dflash", n_tokens=100, own_ends=True),
    "sections": of("dflash", sections=True),
    "long block": of("dflash", block=16),
    "short block": of("dflash", block=2),
    "bonus anchor": of("dspark", from_anchor=False),
    "no confidence": of("dspark", has_confidence=False),
    "reduced": of("dspark", n_tokens=120),
    "causal dspark": of("dspark", is_causal=True, block=7),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_variants(store: ModelStore, variant: str) -> None:
    with case(store, "llama", VARIANTS[variant]) as each:
        for sampling in (GREEDY, DRAWN):
            prompt = text(30)
            assert each.check(prompt, each.complete(prompt, 24, sampling), sampling)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_tokens_are_rejected_at_every_place(store: ModelStore, kind: str) -> None:
    """The less the scores matter beside the noise, the more tokens are accepted."""
    accepted = []
    for spread in (0.02, 0.2):
        with case(store, "llama", of(kind, target=replace(TARGET_RECIPE, spread=spread))) as each:
            for seed in range(3):
                prompt = text(20, seed)
                accepted += each.check(prompt, each.complete(prompt, 40, seed=seed), seed=seed)
    assert {*range(4)} <= {*accepted}


@pytest.mark.parametrize("family", ["llama", "lfm2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_in_between_others(store: ModelStore, family: str, kind: str) -> None:
    """The next turn begins with cached tokens, of which the target evaluates the last ones again."""
    with case(store, family, of(kind)) as each:
        prompt, other = text(100), text(50, seed=3)
        first = each.complete(prompt)
        each.check(prompt, first)
        each.check(other, each.complete(other, seed=2), seed=2)
        longer = np.concatenate([prompt, np.array(first.tokens, dtype=np.int32), text(9, seed=4)])
        again = each.complete(longer, seed=5)
        assert again.n_cached > 40
        each.check(longer, again, seed=5)
        forked = np.concatenate([prompt[:40], text(12, seed=6)])
        each.check(forked, each.complete(forked, seed=7), seed=7)


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_of_which_some_are_swapped_out(store: ModelStore, kind: str) -> None:
    """The cells suffice for two of them."""
    with case(store, "llama", of(kind), n_cells=256) as each:
        prompts = [text(40 + 7 * i, seed=i) for i in range(4)]
        streams = [
            each.pair.stream(prompt, max_tokens=60, seed=i, sampling=DRAWN, policy=FixedLength(3),
                             is_interactive=i == 3)
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        running = list(streams)
        while running:
            running = [stream for stream in running if next(stream, None) is not None]
        for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            assert each.check(prompt, stream.completion, seed=i)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [511, 512, 513, 700])
def test_prompts_around_the_size_of_a_chunk(store: ModelStore, kind: str, n: int) -> None:
    with case(store, "llama", of(kind), n_ctx=1024) as each:
        assert each.check(text(n), each.complete(text(n), 8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_knows_too_little_begins_behind(store: ModelStore, kind: str) -> None:
    """The target has cached more tokens than it evaluates again, the draft none of them."""
    with case(store, "llama", of(kind), n_ctx=1024) as each:
        prompt = text(701)
        plain = each.pair.stream(prompt[:700], max_tokens=2, drafter=NoDrafter(), seed=0, sampling=DRAWN)
        plain.run()
        made = each.complete(prompt, 12, seed=1)
        assert 0 < made.n_cached < 200
        each.check(prompt, made, seed=1, begin=700 - 512)
