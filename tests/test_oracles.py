"""A completion with drafts is the target's own, on the real engine: oracles that know nothing of models.

Plain decoding is the same loop with `NoDrafter`. On a CPU, Q8_0 and Q4_0 matrices compute the same bits at
every batch width, so the tokens must be equal. With other types, completions may fork if the choice was
close: `nats_between` returns how close.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import Length, Partly, all_but_last, every_second, nothing, sure
from forward_requests import EXACT, MEMORIES, scores
from llamaspec import (
    Completion,
    Distribution,
    FixedLength,
    ModelOptions,
    NoDrafter,
    Pair,
    Sampling,
    open_pair,
)
from llamaspec.errors import EvaluationError
from llamaspec.length.automatic import AutoLength
from llamaspec.protocols import LengthPolicy, Stream
from llamaspec.sampling.filters import distribution
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import TARGET, Draft, Evaluation, ForwardRequest, Round, Source
from model_store import ModelStore
from tiny_hidden import DraftRecipe
from tiny_models import Recipe

CPU = ModelOptions(threads=1, gpu_layers=0)
Q8_0 = Recipe(dtype="q8_0")
CLOSE = 0.05  # nats; a tiny model's logits differ by up to 0.03 between widths
TEMPERATURES = (0.0, 0.5, 0.8, 1.5)
AT_TEMPERATURES = [Sampling(temperature=temperature) for temperature in TEMPERATURES]
NOT_TRUNCATED = [replace(each, top_k=None, top_p=None, min_p=None) for each in AT_TEMPERATURES]
WARM = [Sampling(temperature=1.0)]  # multiplied by the number of seeds
REPEATED = "the end of the beginning and the beginning of the end, " * 3
LENGTHS = (0, 1, 2, 3, 5, 8)
NOISES = (0.0, 0.01, 0.1, 0.5)
RULES = ("coupled", "rejection", "block")
# Drafts that read hidden rows. They are random, so the target's scores matter little, and noise decides.
SOURCES = {"eagle3": Source.EAGLE3, "dflash": Source.BLOCK, "dspark": Source.BLOCK, "dflash2": Source.BLOCK}
HIDDEN = {kind: DraftRecipe(Recipe(dtype="q8_0", spread=0.02), kind) for kind in SOURCES}
PROMPTS = (
    "def quicksort(items):\n",
    "import os\nimport sys\n\n\nclass Reader:\n    ",
    "    def __init__(self, name, value=None):\n        ",
    "for i in range(10):\n",
    "The function returns",
    '"""Utilities for reading',
    "try:\n    import ",
    "x",
)


@contextmanager
def opened(target: Path, draft: Path) -> Iterator[Pair]:
    """Open a pair on one thread of the CPU, where Q8_0 and Q4_0 are exact."""
    with open_pair(target, draft, target_options=CPU, draft_options=CPU) as pair:
        yield pair


def plain(pair: Pair, prompt: str, sampling: Sampling, seed: int, n: int) -> Completion:
    pair.forget()  # logits after a prompt depend on its chunks in the last bits
    return pair.stream(prompt, drafter=NoDrafter(), sampling=sampling, seed=seed, max_tokens=n).run()


def assisted(
    pair: Pair,
    prompt: str,
    sampling: Sampling,
    seed: int,
    n: int,
    n_draft: int | LengthPolicy,
    rule: str = "coupled",
) -> Completion:
    pair.forget()
    policy = FixedLength(n_draft) if isinstance(n_draft, int) else n_draft
    return pair.stream(prompt, policy=policy, sampling=sampling, seed=seed, max_tokens=n, rule=rule).run()


def assert_same(
    pair: Pair,
    prompt: str,
    policies: Sequence[int | LengthPolicy],
    samplings: Sequence[Sampling] = AT_TEMPERATURES,
    n: int = 48,
) -> list[Completion]:
    """Complete by each policy and compare with plain decoding; each sampling has its own seed."""
    completions = []
    for seed, sampling in enumerate(samplings):
        right = plain(pair, prompt, sampling, seed, n).tokens
        for policy in policies:
            found = assisted(pair, prompt, sampling, seed, n, policy)
            assert found.tokens == right, f"{sampling}, {policy}"
            completions.append(found)
    return completions


def nats_between(p: Distribution, a: int, b: int, seed: int, position: int) -> float:
    """Return how much more probable, in nats, the token that was not chosen would have to be."""
    streams = SeededStreams(seed)
    winner = streams.choose(p, Stream.TOKEN, position)
    is_loser = p.tokens == (b if winner == a else a)
    if winner not in (a, b) or not is_loser.any():
        return float("inf")

    def wins(nats: float) -> bool:
        weights = p.probabilities * np.where(is_loser, np.exp(nats), 1.0)
        return (
            streams.choose(Distribution(p.tokens, weights / weights.sum()), Stream.TOKEN, position) != winner
        )

    low, high = 0.0, 60.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def assert_same_or_close(
    pair: Pair, prompt: str, sampling: Sampling, seed: int, right: Completion, found: Completion
) -> None:
    """Check that tokens are equal, or fork at a choice that was nearly a tie."""
    pairs = zip(right.tokens, found.tokens, strict=True)
    fork = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if fork is None:
        return
    context = np.append(pair.target.vocabulary.tokenize(prompt.encode()), right.tokens[:fork]).astype(
        np.int32
    )
    pair.forget()
    pair.run(
        scores(ForwardRequest(TARGET, context[:-1], n_logits=0))
    )  # then the last token alone, as in plain decoding
    p = distribution(pair.run(scores(ForwardRequest(TARGET, context)))[0], sampling, context)
    gap = nats_between(p, right.tokens[fork], found.tokens[fork], seed, len(context))
    assert gap < CLOSE, f"fork at token {fork}, {gap:.4f} nats apart"


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_same_seed_same_tokens(store: ModelStore, dtype: str, noise: float) -> None:
    """Under the coupled rule, neither the draft nor the number of draft tokens changes a token."""
    target = Recipe(dtype=dtype)
    with opened(store.path("llama", target), store.path("llama", target.draft(noise))) as pair:
        assert_same(pair, "the end", LENGTHS)


def test_plain_decoding_plans_no_drafts(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy would try widths and plan rounds, so the baseline of all comparisons would be slower."""
    monkeypatch.setattr(AutoLength, "start_sequence", lambda self, **how: pytest.fail("asked"))
    target = store.path("llama", Recipe(dtype="q8_0"))
    with opened(target, target) as pair:
        assert len(pair.stream(PROMPTS[0], drafter=NoDrafter(), max_tokens=8).run().tokens) == 8
        with pytest.raises(pytest.fail.Exception, match="asked"):
            pair.stream(PROMPTS[0])


def test_same_seed_same_tokens_with_penalties_and_no_truncation(store: ModelStore) -> None:
    """Penalties depend on the draft tokens; without truncation every token is possible."""
    target = Recipe(dtype="q8_0")
    samplings = (
        Sampling(repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        Sampling(temperature=0, repeat_penalty=1.5),
        Sampling(temperature=1.2, top_k=None, top_p=None, min_p=None),
        Sampling(temperature=2.0, top_k=3, top_p=None, min_p=0.2),
    )
    with opened(store.path("llama", target), store.path("llama", target.draft())) as pair:
        assert_same(pair, "x", (1, 4, 7), samplings, 60)


def test_same_seed_same_tokens_however_many_draft_tokens_pay(store: ModelStore) -> None:
    """The automatic length depends on the clock, the tokens do not."""
    target = Recipe(dtype="q8_0")
    with opened(store.path("llama", target), store.path("llama", target.draft(0.01))) as pair:
        # one policy for all completions, which learns from each
        assert_same(pair, "in the", [AutoLength()], 6 * [Sampling()], 120)


def test_a_better_draft_is_accepted_more_often(store: ModelStore) -> None:
    """Otherwise the tests above would compare plain decoding with plain decoding."""
    target, rates = Recipe(dtype="q8_0"), []
    for noise in NOISES:
        with opened(store.path("llama", target), store.path("llama", target.draft(noise))) as pair:
            rates.append(assisted(pair, "the", Sampling(), 3, 250, 2).summary.acceptance_rate or 0.0)
    assert rates[0] == 1
    assert rates == sorted(rates, reverse=True)
    assert 0.5 < rates[1] < 1
    assert rates[3] < 0.3


@pytest.mark.parametrize(
    ("kind", "dtype"), [*itertools.product(MEMORIES, ["f32", "f16"]), ("qwen35", "q8_0")]
)
def test_forks_only_where_the_choice_was_close(store: ModelStore, kind: str, dtype: str) -> None:
    """Widths are not exact here, and some memories evaluate accepted tokens again. Qwen 3.5 has a head."""
    target = Recipe(dtype=dtype)
    draft = "mtp" if kind == "qwen35" else store.path(kind, target.draft())
    with open_pair(store.path(kind, target), draft, target_options=CPU, draft_options=CPU) as pair:
        for seed in range(6):
            # without truncation, which a token at its edge passes or not
            sampling = Sampling(temperature=(0.7, 1.0)[seed % 2], top_k=None, top_p=None, min_p=None)
            right = plain(pair, "the", sampling, seed, 40)
            for n_draft in (1, 3, 6):
                found = assisted(pair, "the", sampling, seed, 40, n_draft)
                assert found.summary.n_accepted > 0 or draft != "mtp"
                assert_same_or_close(pair, "the", sampling, seed, right, found)


def test_the_gap_is_what_it_says() -> None:
    """A token is chosen if it is raised by a little more than the gap, but not by a little less."""
    p = Distribution(np.array([1, 4, 9], dtype=np.int32), np.array([0.6, 0.3, 0.1]))
    for position in range(20):
        chosen = SeededStreams(5).choose(p, Stream.TOKEN, position)
        for other in {1, 4, 9} - {chosen}:
            gap = nats_between(p, chosen, other, 5, position)
            for nats, right in ((gap - 1e-3, chosen), (gap + 1e-3, other)):
                weights = p.probabilities * np.where(p.tokens == other, np.exp(nats), 1)
                shifted = Distribution(p.tokens, weights / weights.sum())
                assert SeededStreams(5).choose(shifted, Stream.TOKEN, position) == right
        assert nats_between(p, chosen, 2, 5, position) == float("inf")


def self_draft_rates(
    pair: Pair, rule: str, n: int, lengths: Sequence[int], prompt: str = "the end"
) -> list[float | None]:
    rates = []
    for seed, temperature in enumerate(TEMPERATURES):
        for sampling in (
            Sampling(temperature=temperature),
            Sampling(temperature=temperature, top_k=None, top_p=None, min_p=None),
            Sampling(temperature=temperature, repeat_penalty=1.2, frequency_penalty=0.1),
        ):
            for n_draft in lengths:
                found = assisted(pair, prompt, sampling, seed, n, n_draft, rule)
                assert found.summary.n_verified >= n // 2
                rates.append(found.summary.acceptance_rate)
    return rates


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_a_draft_equal_to_the_target_is_never_rejected(store: ModelStore, dtype: str, rule: str) -> None:
    """With a draft that reads stale tokens the text is still right; only this oracle sees the fault."""
    path = store.path("llama", Recipe(dtype=dtype))
    with opened(path, path) as pair:
        assert set(self_draft_rates(pair, rule, 40, (1, 2, 5, 8))) == {1.0}


def files_with_rows(store: ModelStore, kind: str) -> tuple[Path, Path | str]:
    """Return a target with its own prediction heads, or with a draft that reads its hidden rows."""
    if kind in HIDDEN:
        return store.path("llama", HIDDEN[kind].target), store.draft(HIDDEN[kind])
    return store.path(kind, Recipe(dtype="q8_0")), "mtp"


@contextmanager
def opened_with_heads(store: ModelStore, kind: str, ngram: bool | None = None) -> Iterator[Pair]:
    """Open a target with a draft that reads its hidden rows."""
    with open_pair(*files_with_rows(store, kind), ngram=ngram, target_options=CPU) as pair:
        yield pair


@pytest.mark.parametrize("kind", ["step35-one", "step35", *HIDDEN])
def test_same_seed_same_tokens_with_prediction_heads(store: ModelStore, kind: str) -> None:
    samplings = NOT_TRUNCATED if kind in HIDDEN else AT_TEMPERATURES
    with opened_with_heads(store, kind) as pair:
        completions = assert_same(pair, "the end", LENGTHS, samplings)
    sources = {round_.source for found in completions for round_ in found.rounds if len(round_.draft)}
    assert sources == {SOURCES.get(kind, Source.MTP)}
    n_accepted = sum(found.summary.n_accepted for found in completions)
    assert n_accepted > (0 if kind == "dflash2" else 100), "it has few candidates, and they are random"


@pytest.mark.parametrize("kind", ["step35", "eagle3", "dspark"])
def test_same_seed_same_tokens_with_prediction_heads_and_copies(store: ModelStore, kind: str) -> None:
    """While earlier text is copied, the draft processes nothing; it catches up later."""
    with opened_with_heads(store, kind, ngram=True) as pair:
        completions = assert_same(pair, REPEATED, [4], 4 * WARM, 120)
    sources = {round_.source for found in completions for round_ in found.rounds if len(round_.draft)}
    assert sources == {Source.NGRAM, SOURCES.get(kind, Source.MTP)}


@pytest.mark.parametrize("rule", RULES)
def test_a_head_that_computes_what_the_target_computes_is_hardly_rejected(
    store: ModelStore, rule: str
) -> None:
    """Only rounding causes rejections: .967 to .984. No other test sees a head that reads stale tokens."""
    with opened_with_heads(store, "step35-blind") as pair:
        longer = (
            "the end of all that is and of the rest"  # than the window: a head never sees the first token
        )
        rates = self_draft_rates(pair, rule, 40, (1, 2, 5, 8), longer)
        assert np.mean([rate for rate in rates if rate is not None]) > 0.95


# Drafts that are verified in part, or not at all

PARTS = {
    "every second": Partly(4, every_second),
    "what is sure": Partly(5, sure),
    "all but the last": Partly(3, all_but_last),
    "nothing": Partly(2, nothing),
}
SETTLED = ("every second", "nothing")  # decided before drafting


def n_left_out(found: Completion, source: Source | None = None) -> int:
    """Return the number of draft tokens, of one source or of all, that were not verified."""
    return sum(round_.n_dropped for round_ in found.rounds if source in (None, round_.source))


@pytest.mark.parametrize("part", list(PARTS))
@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_same_seed_same_tokens_where_a_part_is_verified(store: ModelStore, noise: float, part: str) -> None:
    target = Recipe(dtype="q8_0")
    with opened(store.path("llama", target), store.path("llama", target.draft(noise))) as pair:
        samplings = [*AT_TEMPERATURES]
        samplings[1::2] = [replace(sampling, repeat_penalty=1.2) for sampling in samplings[1::2]]
        for found in assert_same(pair, "the end", [PARTS[part]], samplings):
            assert n_left_out(found) > 5 or part == "what is sure"


@pytest.mark.parametrize("part", list(PARTS))
def test_same_seed_same_tokens_where_a_part_of_copies_is_verified(store: ModelStore, part: str) -> None:
    target = Recipe(dtype="q8_0")
    paths = store.path("llama", target), store.path("llama", target.draft(0.1))
    with open_pair(*paths, ngram=True, target_options=CPU, draft_options=CPU) as pair:
        completions = assert_same(pair, REPEATED, [PARTS[part]], 3 * WARM, 60)
    assert sum(n_left_out(found, Source.NGRAM) for found in completions) > 3 or part == "what is sure"


@pytest.mark.parametrize("rule", RULES)
def test_what_a_draft_equal_to_the_target_leaves_out_would_have_been_accepted(
    store: ModelStore, rule: str
) -> None:
    path = store.path("llama", Recipe(dtype="q8_0"))
    with opened(path, path) as pair:
        for part in PARTS if rule == "coupled" else SETTLED:
            for seed, temperature in enumerate(TEMPERATURES):
                sampling = Sampling(temperature=temperature, repeat_penalty=1.2)
                found = assisted(pair, "the end", sampling, seed, 40, PARTS[part], rule)
                assert found.summary.n_accepted == found.summary.n_verified
                shadows = [round_.counterfactual for round_ in found.rounds if round_.n_dropped]
                assert {counterfactual and counterfactual[1] for counterfactual in shadows} <= {1.0}
                assert shadows or part == "what is sure"


@pytest.mark.parametrize("kind", ["step35-one", "step35", "eagle3", "dflash", "dflash2"])
@pytest.mark.parametrize("part", list(PARTS))
def test_same_seed_same_tokens_where_a_part_of_the_heads_drafts_is_verified(
    store: ModelStore, part: str, kind: str
) -> None:
    """Copies are drafted, too, and the draft processes nothing meanwhile."""
    with opened_with_heads(store, kind, ngram=True) as pair:
        completions = assert_same(pair, REPEATED, [PARTS[part]], n=40)
    assert sum(n_left_out(found, SOURCES.get(kind, Source.MTP)) for found in completions) > 5


@pytest.mark.parametrize("kind", [*MEMORIES, "qwen35"])
def test_a_part_is_verified_by_every_memory(store: ModelStore, kind: str) -> None:
    """Completions fork only if the choice was close; some memories evaluate accepted tokens again."""
    target = Recipe()
    draft = "mtp" if kind == "qwen35" else store.path(kind, target.draft())
    with open_pair(store.path(kind, target), draft, target_options=CPU, draft_options=CPU) as pair:
        for seed, part in enumerate(PARTS):
            sampling = Sampling(temperature=0.7, top_k=None, top_p=None, min_p=None)
            right = plain(pair, "the", sampling, seed, 40)
            found = assisted(pair, "the", sampling, seed, 40, PARTS[part])
            assert_same_or_close(pair, "the", sampling, seed, right, found)
            assert n_left_out(found) > 5 or part == "what is sure"


class Kept(Partly):
    """Keeps the drafts of all sequences."""

    def start_sequence(self, *, drops: bool = False, max_tokens: int | None = None) -> Kept:
        return self


@pytest.mark.parametrize("kind", [*MEMORIES, "step35-one", "step35", "qwen35", "eagle3", "dflash"])
@pytest.mark.parametrize("n", [nothing, every_second])
def test_drafts_are_those_of_a_fresh_pair_whatever_was_drafted_in_vain(
    store: ModelStore, n: Callable[[Draft, Sequence[Round]], int], kind: str
) -> None:
    """With stale tokens or stale hidden rows the text is still right, so the drafts are compared."""
    target, options = Recipe(), replace(CPU, **EXACT)  # type: ignore[arg-type]
    files = files_with_rows(store, kind)
    if kind not in HIDDEN:
        draft = store.path(kind, target.draft(0.01)) if kind in MEMORIES else "mtp"
        files = store.path(kind, target), draft
    sampling = Sampling(temperature=0.7, top_k=None, top_p=None, min_p=None)
    used, fresh = Kept(3, n), Kept(3, nothing)
    with open_pair(*files, target_options=options, draft_options=options) as pair:
        prompt, n_right = pair.target.vocabulary.tokenize(b"the end of"), 0
        found = pair.stream(prompt, policy=used, sampling=sampling, seed=1, max_tokens=40).run()
        ends = [0, *itertools.accumulate(len(round_.tokens) for round_ in found.rounds)]
        for i in range(len(found.rounds) - 4):
            context = np.append(prompt, found.tokens[: ends[i]]).astype(np.int32)
            pair.forget()
            fresh.made.clear()
            stream = pair.stream(context, policy=fresh, sampling=sampling, seed=1, max_tokens=4)
            next(stream)
            stream.close()
            np.testing.assert_allclose(used.made[i].confidences, fresh.made[0].confidences, atol=1e-3)
            n_right += int(used.made[i].tokens[0]) == found.tokens[ends[i]]
        assert n_right > 3  # rejected draft tokens have become text


def test_texts_beside_each_other_of_which_a_part_is_verified(store: ModelStore) -> None:
    target = Recipe(dtype="q8_0")
    prompts = ["the end", "the end of the", "in the beginning", "x"]
    with opened(store.path("llama", target), store.path("llama", target.draft(0.1))) as pair:
        alone = [plain(pair, prompt, Sampling(), seed, 40).tokens for seed, prompt in enumerate(prompts)]
        pair.forget()
        streams = [
            pair.stream(prompt, policy=part, seed=seed, max_tokens=40)
            for seed, (prompt, part) in enumerate(zip(prompts, PARTS.values(), strict=True))
        ]
        for _ in itertools.zip_longest(*streams):
            pass
        assert [each.completion.tokens for each in streams] == alone
        assert max(round_.n_sequences for each in streams for round_ in each.completion.rounds) > 2


FAILING: dict[str, Callable[[ModelStore], tuple[Path, Path | str]]] = {
    "draft": lambda store: (store.path("llama", Q8_0), store.path("llama", Q8_0.draft(0.1))),
    "heads": lambda store: (store.path("step35", Q8_0), "mtp"),
    "assistant": lambda store: (store.path("gemma4"), store.path("gemma4-assistant")),
    "EAGLE-3": lambda store: files_with_rows(store, "eagle3"),
    "DFlash": lambda store: files_with_rows(store, "dflash"),
}


class InChunks:
    """Lets a draft model process the prompt in chunks, beside rounds."""

    n_to_read, unused, is_winning = 64, None, False

    def start_prompt(self, n_unread: int) -> None: ...

    def observe_prompt(self, evaluation: Evaluation, seconds: float) -> None: ...

    def observe_reading(self, n: int, seconds: float) -> None: ...

    def plain_seconds(self, evaluation: Evaluation) -> float | None: ...


@pytest.mark.parametrize("policy", [lambda: FixedLength(3), lambda: Length(3, reading=InChunks())])
@pytest.mark.parametrize("kind", FAILING)
def test_a_draft_that_fails_ends_no_text(
    store: ModelStore, kind: str, policy: Callable[[], LengthPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion ended with the draft. It continues, and is the one without a draft."""
    target, draft = FAILING[kind](store)
    prompt = "the end of the beginning, " * 12
    with open_pair(target, draft, ngram=False, target_options=CPU, draft_options=CPU) as pair:
        right = plain(pair, prompt, Sampling(), 1, 40)
        for model in (pair.draft, pair.heads):
            for number in (1, 2, 4) if model is not None else ():
                left = [number]

                def fail(*batch: Any, evaluate: Any = model and model.evaluate, left: Any = left) -> Any:
                    left[0] -= 1
                    if left[0] <= 0:
                        raise EvaluationError("llama.cpp failed")
                    return evaluate(*batch)

                with monkeypatch.context() as patch:
                    patch.setattr(model, "evaluate", fail)
                    found = assisted(pair, prompt, Sampling(), 1, 40, policy())
                assert found.tokens == right.tokens
                assert found.draft_fault == "llama.cpp failed"
                assert left[0] == 0, "it was evaluated again"


def test_a_consumer_that_stops_early_leaves_no_trace(store: ModelStore) -> None:
    """Streams of one pair are closed anywhere, one after the other; each equals that of a fresh pair."""
    target = Recipe(dtype="q8_0")
    files = store.path("llama", target), store.path("llama", target.draft())
    rng = np.random.default_rng(1)
    with opened(*files) as pair, opened(*files) as other:
        for seed in range(12):
            prompt = ("the end", "the", "in the end of", "x")[seed % 4]
            stream = pair.stream(prompt, seed=seed, policy=FixedLength(4), max_tokens=60)
            for _, _ in zip(range(int(rng.integers(1, 30))), stream, strict=False):
                pass
            stream.close()
            found = stream.completion.tokens
            assert found == plain(other, prompt, Sampling(), seed, 60).tokens[: len(found)]


# The embedded pair


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize("n_draft", [None, 4])
def test_same_seed_same_tokens_with_copies(
    demo_files: tuple[Path, Path], n_draft: int | None, with_draft: bool
) -> None:
    """Draft tokens are copied from a prompt that repeats itself, with and without a draft model."""
    target, draft = demo_files
    prompt = 4 * "    self.assertEqual(result, expected)\n"
    policy = AutoLength() if n_draft is None else FixedLength(n_draft)
    drafts = draft if with_draft else None
    with open_pair(target, drafts, ngram=True, target_options=CPU, draft_options=CPU) as pair:
        completions = assert_same(pair, prompt, [policy], AT_TEMPERATURES[:3], 60)
    copied = [round_ for found in completions for round_ in found.rounds if round_.source is Source.NGRAM]
    # whether copies are faster for so small a model depends on the clock
    assert sum(round_.n_accepted for round_ in copied) > 0 or n_draft is None


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_of_the_embedded_pair(demo: Pair, prompt: str) -> None:
    assert_same(demo, prompt, (1, 3, 6, AutoLength()), [Sampling(temperature=0)], 64)


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.2])
def test_sampled_text_of_the_embedded_pair(demo: Pair, temperature: float) -> None:
    for seed, prompt in enumerate(PROMPTS[:4]):
        sampling = Sampling(temperature=temperature)
        right = plain(demo, prompt, sampling, seed, 48).tokens
        assert assisted(demo, prompt, sampling, seed, 48, 4).tokens == right


def test_the_embedded_draft_is_worth_asking(demo: Pair) -> None:
    rounds = [
        round_
        for prompt in PROMPTS
        for round_ in assisted(demo, prompt, Sampling(temperature=0), 0, 48, 1).rounds
        if len(round_.draft)
    ]
    assert np.mean([round_.n_accepted for round_ in rounds]) > 0.5


def test_the_embedded_eagle3_draft_is_worth_asking(demo_files: tuple[Path, Path]) -> None:
    """Its text is the target's own, and it knows more than a random draft."""
    with opened(demo_files[0], demo_files[0].with_name("eagle3.gguf")) as pair:
        completions = [
            found for prompt in PROMPTS[:4] for found in assert_same(pair, prompt, (1,), AT_TEMPERATURES[:3])
        ]
    rounds = [round_ for found in completions for round_ in found.rounds if len(round_.draft)]
    assert np.mean([round_.n_accepted for round_ in rounds]) > 0.3


def test_the_embedded_target_drafts_for_itself(demo_files: tuple[Path, Path]) -> None:
    with opened(demo_files[0], demo_files[0]) as pair:
        for rule in RULES:
            found = assisted(pair, PROMPTS[0], Sampling(), 1, 40, 5, rule)
            assert found.summary.acceptance_rate == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["right", "partly", "wrong"])
def test_a_prediction_changes_no_token(demo_files: tuple[Path, Path], kind: str, temperature: float) -> None:
    sampling, n_copied = Sampling(temperature=temperature), 0
    with open_pair(*demo_files, target_options=CPU, draft_options=CPU) as pair:
        right = plain(pair, PROMPTS[0], sampling, 5, 60)
        said = np.array(right.tokens, np.int32)
        if kind != "right":
            said[:: 7 if kind == "partly" else 1] = 3
        for policy in (FixedLength(6), None):
            pair.forget()
            found = pair.stream(
                PROMPTS[0], prediction=said, policy=policy, sampling=sampling, seed=5, max_tokens=60
            ).run()
            assert found.tokens == right.tokens
            n_copied += sum(r.n_accepted for r in found.rounds if r.source is Source.PREDICTION)
    assert n_copied > 20 or kind != "right"


def test_a_pair_that_is_used_again_says_the_same(demo_files: tuple[Path, Path]) -> None:
    """A cached prompt is not processed again, which would round its last token in another batch.

    With several threads, llama.cpp sums a single position's attention over more than 256 tokens in another
    order than a batch's, so this test uses one thread.
    """
    prompt = "def read_lines(path):\n    return path\n" * 24  # long enough for the kernels of wide batches
    one = ModelOptions(threads=1)
    with open_pair(*demo_files, target_options=one) as pair:
        runs = [pair.stream(prompt, seed=3, max_tokens=60).run().tokens for _ in range(3)]
        assert pair.stream(prompt, seed=3, max_tokens=60, drafter=NoDrafter()).run().tokens == runs[0]
    assert runs[0] == runs[1] == runs[2]
