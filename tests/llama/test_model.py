"""A real model behaves like a pure function: whatever was asked before, the answer is that of a fresh one.

`fresh` asks a second copy of the model one sequence at a time, with an empty memory. With float memories and
no flash attention the answers agree to 1e-4, though not bit for bit: which cells of the memory a sequence got
decides the order of sums. The scores have a standard deviation of 3, so a wrong memory is far outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from llamaspec import (
    Ask,
    EvaluationError,
    LlamaModel,
    LlamaspecError,
    MemoryFullError,
    ModelOptions,
)
from llamaspec.llama.batch import Batch
from llamaspec.llama.options import BATCH
from llamaspec.llama.snapshots import SPACING
from llamaspec.llama.trie import Node
from llamaspec.values import Logits, TokenArray
from model_store import OpenModel
from tiny_models import Recipe

EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": "off"}
# Largest difference of a score. Gemma's activation is a table of half precision: it amplifies the last bit.
TOLERANCE = {"llama": 1e-4, "gemma3": 2e-2, "mamba": 1e-4, "jamba": 1e-4, "lfm2": 1e-4}
MEMORIES = ("llama", "gemma3", "mamba", "jamba", "lfm2")
LANES = 4
LONG = Recipe(n_context=2048)


def tokens(*ids: int) -> TokenArray:
    return np.array(ids, dtype=np.int32)


def asked(n: int, seed: int = 0, lane: int = 0, n_scored: int = 1) -> Ask:
    """One sequence of random tokens; the same seed begins alike at every length."""
    return Ask(lane, np.random.default_rng(seed).integers(2, 288, 4096).astype(np.int32)[:n], n_scored)


def fresh(model: LlamaModel, asks: Sequence[Ask]) -> list[Logits]:
    """Every ask on its own, by a model that remembers nothing."""
    answers = []
    for ask in asks:
        model.forget()
        answers.append(model.logits([Ask(0, ask.tokens, ask.n)])[0].copy())
    return answers


def assert_same(
    answers: Sequence[Logits], expected: Sequence[Logits], tolerance: float = TOLERANCE["llama"]
) -> None:
    assert len(answers) == len(expected)
    for answer, right in zip(answers, expected, strict=True):
        assert answer.shape == right.shape
        assert answer.dtype == np.float32
        np.testing.assert_allclose(answer, right, rtol=0, atol=tolerance)


@dataclass
class RandomCalls:
    """Calls as drafting, verifying, batches and trees make them, and some that nobody makes."""

    rng: np.random.Generator
    longest: int = 60

    def __post_init__(self) -> None:
        self.held = [self.fresh_tokens(12) for _ in range(LANES)]

    def fresh_tokens(self, n: int) -> TokenArray:
        # Few distinct tokens: sequences that are not related share beginnings too.
        return self.rng.integers(2, 6 if self.rng.random() < 0.5 else 288, n).astype(np.int32)

    def call(self) -> list[Ask]:
        """The asks of one call."""
        kind = self.rng.choice(["chain", "again", "batch", "tree", "swapped"], p=[0.35, 0.1, 0.2, 0.25, 0.1])
        lanes = self.rng.permutation(LANES)[: int(self.rng.integers(2, LANES + 1))].tolist()
        if kind == "chain":
            return [self.ask(lanes[0], self.varied(self.held[lanes[0]]))]
        if kind == "again":
            return [self.ask(lanes[0], self.held[self.rng.integers(LANES)])]
        if kind == "swapped":
            sequences = [self.held[lane] for lane in lanes]
            return [self.ask(lane, tokens) for lane, tokens in zip(lanes, sequences[::-1], strict=True)]
        if kind == "tree":
            trunk = self.varied(self.held[self.rng.integers(LANES)])
            return [self.ask(lane, self.grown(self.cut(trunk, at_most=4))) for lane in lanes]
        return [self.ask(lane, self.varied(self.held[lane])) for lane in lanes]

    def ask(self, lane: int, sequence: TokenArray) -> Ask:
        self.held[lane] = sequence
        return Ask(lane, sequence, min(len(sequence), int(self.rng.choice([1, 1, 2, 3, 5]))))

    def varied(self, sequence: TokenArray) -> TokenArray:
        """Grown, cut, cut and grown, or another sequence altogether."""
        kind = self.rng.choice(["grow", "cut", "both", "new"], p=[0.35, 0.15, 0.4, 0.1])
        if kind == "new" or len(sequence) > self.longest:
            return self.fresh_tokens(int(self.rng.integers(1, 20)))
        if kind == "grow":
            return self.grown(sequence)
        return self.cut(sequence) if kind == "cut" else self.grown(self.cut(sequence))

    def cut(self, sequence: TokenArray, at_most: int = 9) -> TokenArray:
        return sequence[: max(1, len(sequence) - int(self.rng.integers(0, at_most)))]

    def grown(self, sequence: TokenArray) -> TokenArray:
        return np.concatenate([sequence, self.fresh_tokens(int(self.rng.integers(1, 7)))])


@pytest.mark.parametrize(
    ("kind", "n_calls", "n_ctx"),
    [
        ("llama", 400, 512),
        ("llama", 200, 256),
        ("gemma3", 400, 512),
        ("gemma3", 700, 256),  # less room: places behind the window are given away all the time
        ("mamba", 120, 512),
        ("jamba", 120, 512),
        ("lfm2", 120, 512),
    ],
)
def test_cached_answers_are_those_of_a_fresh_model(
    opened: OpenModel, kind: str, n_calls: int, n_ctx: int
) -> None:
    model, other = opened(kind, n_lanes=LANES, n_ctx=n_ctx, **EXACT), opened(kind, n_ctx=n_ctx, **EXACT)
    calls = RandomCalls(np.random.default_rng(100 * n_ctx))
    for _ in range(n_calls):
        asks = calls.call()
        assert_same(model.logits(asks), fresh(other, asks), TOLERANCE[kind])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "jamba"])
def test_sequences_longer_than_a_batch(opened: OpenModel, kind: str) -> None:
    """Several parts per call, scores wanted on both sides of a border, a long beginning in common."""
    model, other = opened(kind, LONG, n_lanes=3, **EXACT), opened(kind, LONG, **EXACT)
    border = asked(BATCH + 3, n_scored=7)
    long = [asked(700, lane=0), Ask(1, np.append(asked(650).tokens, tokens(9, 9)), 3), asked(30, 1, lane=2)]
    back = asked(600, n_scored=2)
    for asks in ([border], [asked(BATCH)], long, [back], [asked(601, n_scored=1)]):
        assert_same(model.logits(asks), fresh(other, asks), TOLERANCE[kind])


def test_lanes_that_change_places(opened: OpenModel) -> None:
    """Once, a lane counted on what another lane had just been made to forget: a wrong text answered."""
    model, other = opened(n_lanes=2, **EXACT), opened(**EXACT)
    model.logits([asked(20, 1, lane=0), asked(20, 2, lane=1)])
    swapped = [asked(22, 2, lane=0), asked(22, 1, lane=1)]
    assert_same(model.logits(swapped), fresh(other, swapped))


def test_sliding_window_does_not_go_back_to_places_given_away(opened: OpenModel) -> None:
    """llama.cpp reuses the places behind the window: other lanes fill them while one lane stands still."""
    model, other = (opened("gemma3", n_lanes=n, n_ctx=256, **EXACT) for n in (4, 1))
    model.logits([asked(120)])
    for seed in range(1, 6):
        model.logits([asked(40, seed, lane=1 + seed % 3)])
    for n in (100, 60, 119, 17):
        assert_same(model.logits([asked(n)]), fresh(other, [asked(n)]), TOLERANCE["gemma3"])


@dataclass
class Count:
    """Positions that llama.cpp was given to evaluate."""

    nodes: list[Node]

    @property
    def n(self) -> int:
        return len(self.nodes)

    def taken(self) -> int:
        """The number since the last look."""
        n = self.n
        self.nodes.clear()
        return n


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Count:
    count = Count([])
    fill = Batch.fill

    def counted(self: Batch, nodes: Sequence[Node]) -> lib.llama_batch:
        count.nodes.extend(nodes)
        return fill(self, nodes)

    monkeypatch.setattr(Batch, "fill", counted)
    return count


def test_every_distinct_position_is_evaluated_once(opened: OpenModel, evaluated: Count) -> None:
    """Whatever the memory holds, a call costs the distinct prefixes that it does not hold, and the scored."""
    model = opened(n_lanes=LANES)
    calls = RandomCalls(np.random.default_rng(3))
    for _ in range(200):
        asks = calls.call()
        model.logits(asks)
        given = [(node.position, tuple(sorted(node.lanes))) for node in evaluated.nodes]
        distinct = {ask.tokens[: i + 1].tobytes() for ask in asks for i in range(len(ask.tokens))}
        by_prefix = [
            next(ask for ask in asks if ask.lane == lanes[0]).tokens[: position + 1].tobytes()
            for position, lanes in given
        ]
        assert len(by_prefix) == len(set(by_prefix))
        assert set(by_prefix) <= distinct
        for ask in asks:  # the scored ones are among them, with the lane of the ask
            scored = {(i, ask.lane) for i in range(len(ask.tokens) - ask.n, len(ask.tokens))}
            assert scored <= {(position, lane) for position, lanes in given for lane in lanes}
        evaluated.taken()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_a_call_costs(opened: OpenModel, evaluated: Count, kind: str) -> None:
    model = opened(kind, n_lanes=3)
    costs = []
    for asks in (
        [asked(50)],  # everything
        [asked(50)],  # asked again: the scored position only
        [asked(54, n_scored=5)],  # the last token and four guesses
        [asked(53)],  # two guesses rejected: one position
        [asked(53, lane=1)],  # another lane takes over what the first knows
        [
            asked(60, lane=0),
            Ask(2, np.append(asked(56).tokens, tokens(5)), 1),
        ],  # 7 in common (53..59), 1 alone
    ):
        model.logits(asks)
        costs.append(evaluated.taken())
    assert costs == [50, 1, 5, 1, 1, 8]


@pytest.mark.parametrize(("kind", "back"), [("mamba", 3), ("jamba", 3), ("lfm2", 1)])
def test_states_go_back_to_a_copy(opened: OpenModel, evaluated: Count, kind: str, back: int) -> None:
    """Where llama.cpp keeps no earlier states, what stood since the last copy is read again, no more."""
    model = opened(kind)
    costs = []
    for n in (50, 55, 53, 54):  # a copy is taken at 50
        model.logits([asked(n)])
        costs.append(evaluated.taken())
    assert costs == [50, 5, back, 1]


@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2"])
def test_states_of_several_lanes_are_read_again(opened: OpenModel, evaluated: Count, kind: str) -> None:
    model = opened(kind, n_lanes=2)
    costs = []
    for n in (50, 55, 53, 54):
        model.logits([asked(n)])
        costs.append(evaluated.taken())
    assert costs == [50, 5, 53, 1]


@dataclass
class Rounds:
    """What one lane is asked while text is generated: steps of a draft or verifications, and rarer things."""

    rng: np.random.Generator
    judges: bool  # the target's asks; else the draft's
    longest: int = 300

    def __post_init__(self) -> None:
        self.text = self.some(20)

    def some(self, n: int) -> TokenArray:
        return self.rng.integers(2, 288, n).astype(np.int32)

    def asks(self) -> list[Ask]:
        """Of one round, and of what sometimes happens between two."""
        if self.rng.random() < 0.1:
            self.text = self.text[: int(self.rng.integers(1, len(self.text) + 1))]  # far back
        elif self.rng.random() < 0.05 or len(self.text) > self.longest:
            self.text = self.some(int(self.rng.integers(1, 40)))  # something else
        n = int(self.rng.integers(0, 13))
        path = np.concatenate([self.text, self.some(n)])
        n_right = int(self.rng.integers(0, n + 1))
        start, self.text = len(self.text), np.concatenate([path[: len(self.text) + n_right], self.some(1)])
        if self.judges:
            return [Ask(0, path, n + 1)]
        return [Ask(0, path[:end], 1) for end in range(start, len(path) + 1)]


@pytest.mark.parametrize("judges", [False, True], ids=["draft", "target"])
@pytest.mark.parametrize("kind", MEMORIES)
def test_wrong_guesses_leave_no_trace(opened: OpenModel, kind: str, judges: bool) -> None:
    model, other = opened(kind, max_scored=16, **EXACT), opened(kind, max_scored=16, **EXACT)
    rounds = Rounds(np.random.default_rng(17), judges)
    for _ in range(150 if judges else 50):
        for ask in rounds.asks():
            assert_same(model.logits([ask]), fresh(other, [ask]), TOLERANCE[kind])


@pytest.mark.parametrize(("kind", "judges", "most"), [
    ("llama", True, 0), ("llama", False, 0),
    ("lfm2", True, 0), ("lfm2", False, SPACING),
    ("mamba", True, 2 * SPACING), ("mamba", False, SPACING),
    ("jamba", True, 2 * SPACING), ("jamba", False, SPACING),
])  # fmt: skip
def test_what_wrong_guesses_cost(
    opened: OpenModel, evaluated: Count, kind: str, judges: bool, most: int
) -> None:
    """Tokens read again in a round of up to eight guesses: a few, however long the text is."""
    model, rng = opened(kind, max_scored=16), np.random.default_rng(2)
    text = asked(100).tokens
    model.logits([Ask(0, text[:-1], 0)])
    evaluated.taken()
    for _ in range(60):
        n_guesses, n_new = int(rng.integers(0, 9)), 1  # the last token of the text has not been read yet
        path = np.concatenate([text, rng.integers(2, 288, n_guesses).astype(np.int32)])
        n_right = int(rng.integers(0, n_guesses + 1))
        for end in [len(path)] if judges else range(len(text), len(path) + 1):
            model.logits([Ask(0, path[:end], n_guesses + 1 if judges else 1)])
        assert evaluated.taken() - n_guesses - n_new <= most
        text = np.concatenate([path[: len(text) + n_right], rng.integers(2, 288, 1).astype(np.int32)])


def test_views_are_valid_until_the_next_call(opened: OpenModel) -> None:
    """No copy is made of V scores: a view that is kept shows the next answer."""
    model = opened()
    first = model.logits([asked(30, n_scored=3)])[0]
    kept = first.copy()
    assert not first.flags.owndata
    model.logits([asked(30, 1, n_scored=3)])
    assert not np.array_equal(first, kept)


def test_the_asker_may_reuse_its_array(opened: OpenModel) -> None:
    """Once, the memory remembered the array instead of the tokens, and took a changed one for read."""
    model, other = opened(**EXACT), opened(**EXACT)
    buffer = asked(30).tokens.copy()
    model.logits([Ask(0, buffer, 1)])
    buffer[10:] = asked(30, 1).tokens[10:]
    assert_same(model.logits([Ask(0, buffer, 1)]), fresh(other, [Ask(0, buffer, 1)]))


INTERRUPTIBLE = (
    "llama_decode",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_memory_clear",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_set_data_ext",
)


@dataclass
class Interrupts:
    """Ctrl-C before or after calls of llama.cpp, by chance."""

    rng: np.random.Generator
    chance: float
    after: bool
    armed: bool = False
    n: int = 0

    def arrange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in INTERRUPTIBLE:
            monkeypatch.setattr(lib, name, self._around(getattr(lib, name)))

    def _around(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            interrupt = self.armed and self.rng.random() < self.chance
            result = function(*arguments) if self.after or not interrupt else None
            if interrupt:
                self.n += 1
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("after", [False, True], ids=["before it ran", "after it ran"])
def test_interrupted_evaluations_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str, after: bool
) -> None:
    """Ctrl-C may come before and after every call of llama.cpp; the memory must know what it holds."""
    model, other = opened(kind, n_lanes=LANES, **EXACT), opened(kind, **EXACT)
    calls = RandomCalls(np.random.default_rng(11), longest=40)
    interrupts = Interrupts(np.random.default_rng(5), 0.25, after)
    interrupts.arrange(monkeypatch)
    for _ in range(60):
        interrupts.armed = True
        asks = calls.call()
        try:
            answers = model.logits(asks)
        except KeyboardInterrupt:
            interrupts.armed = False
            asks = calls.call()
            answers = model.logits(asks)
        interrupts.armed = False
        assert_same(answers, fresh(other, asks), TOLERANCE[kind])
    assert interrupts.n > 20


@pytest.mark.parametrize("judges", [False, True], ids=["draft", "target"])
@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2"])
@pytest.mark.parametrize("after", [False, True], ids=["before it ran", "after it ran"])
def test_interrupted_rounds_leave_later_answers_right(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, kind: str, after: bool, judges: bool
) -> None:
    model, other = opened(kind, max_scored=16, **EXACT), opened(kind, max_scored=16, **EXACT)
    rounds = Rounds(np.random.default_rng(3), judges)
    interrupts = Interrupts(np.random.default_rng(4), 0.15, after)
    interrupts.arrange(monkeypatch)
    for _ in range(40):
        for ask in rounds.asks():
            interrupts.armed = True
            try:
                answers = model.logits([ask])
            except KeyboardInterrupt:
                continue  # the next ask comes without this one having been answered
            interrupts.armed = False
            assert_same(answers, fresh(other, [ask]), TOLERANCE[kind])
    assert interrupts.n > 5


def test_forgetting_may_be_interrupted(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = opened(**EXACT), opened(**EXACT)
    model.logits([asked(20)])
    clear = lib.llama_memory_clear

    def interrupted(*arguments: object) -> None:
        clear(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(lib, "llama_memory_clear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.forget()
    monkeypatch.undo()
    assert_same(model.logits([asked(21)]), fresh(other, [asked(21)]))


@pytest.mark.parametrize("kind", MEMORIES)
def test_lanes_that_are_too_long_together(opened: OpenModel, kind: str) -> None:
    """Each fits alone. Where they do not fit together it says so, and the model goes on.

    Together they are also more than a batch of such a context takes: this once aborted the process.
    """
    model, other = opened(kind, n_lanes=3, n_ctx=256, **EXACT), opened(kind, n_ctx=256, **EXACT)
    asks = [asked(200, lane, lane) for lane in range(3)]
    if kind == "mamba":  # a state has one size whatever the text
        assert_same(model.logits(asks), fresh(other, asks))
    else:
        with pytest.raises(MemoryFullError, match=r"256 tokens is full.*--n-ctx"):
            model.logits(asks)
    for ask in (asked(150), asked(250, 1, lane=1)):
        model.forget()
        assert_same(model.logits([ask]), fresh(other, [ask]), TOLERANCE[kind])


def test_a_full_memory_empties_itself(opened: OpenModel) -> None:
    """The lanes of the failed call hold nothing afterwards, so a smaller question needs no `forget`."""
    model, other = opened(n_lanes=2, n_ctx=256, **EXACT), opened(n_ctx=256, **EXACT)
    model.logits([asked(200)])
    with pytest.raises(MemoryFullError):
        model.logits([asked(200, 1, lane=1)])
    assert_same(model.logits([asked(100, 1, lane=1)]), fresh(other, [asked(100, 1)]))


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [(1, MemoryFullError, "full"), (2, EvaluationError, "aborted"), (-3, EvaluationError, "code -3")],
)
def test_return_codes_of_llama_decode(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, status: int, error: type[LlamaspecError], says: str
) -> None:
    model, other = opened(**EXACT), opened(**EXACT)
    model.logits([asked(20)])
    monkeypatch.setattr(lib, "llama_decode", lambda *_: status)
    with pytest.raises(error, match=says):
        model.logits([asked(25)])
    monkeypatch.undo()
    assert_same(model.logits([asked(24)]), fresh(other, [asked(24)]))


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        ([], "at least one ask"),
        ([asked(5, lane=2)], "lanes below 2"),
        ([asked(5, lane=-1)], "lanes below 2"),
        ([asked(5), asked(6)], "distinct lanes"),
        ([asked(5, n_scored=-1)], "cannot score -1 of 5"),
        ([asked(5, n_scored=6)], "cannot score 6 of 5"),
        ([asked(0)], "cannot score 1 of 0"),
        ([asked(20, n_scored=9)], "at most 8 positions"),
        ([asked(20, n_scored=4), asked(20, 1, lane=1, n_scored=5)], "at most 8 positions"),
        ([asked(513)], "513 tokens in a context of 512"),
        ([Ask(0, tokens(5, 288), 1)], "below 288"),
        ([Ask(0, tokens(5, -1), 1)], "below 288"),
        ([Ask(0, tokens(2**31 - 1), 1)], "below 288"),
    ],
)
def test_what_would_abort_the_process_is_refused(opened: OpenModel, asks: list[Ask], says: str) -> None:
    model, other = opened(n_lanes=2, max_scored=8, **EXACT), opened(**EXACT)
    model.logits([asked(10)])
    with pytest.raises(ValueError, match=says):
        model.logits(asks)
    assert_same(model.logits([asked(12)]), fresh(other, [asked(12)]))


def test_a_whole_context_can_be_asked(opened: OpenModel) -> None:
    model, other = opened(**EXACT), opened(**EXACT)
    assert model.context_size == 512
    assert_same(model.logits([asked(512, n_scored=2)]), fresh(other, [asked(512, n_scored=2)]))


def test_a_closed_model_refuses_everything(opened: OpenModel) -> None:
    """Each of these read freed memory once."""
    model = opened()
    vocabulary = model.vocabulary
    model.close()
    model.close()
    uses: list[Callable[[], object]] = [
        lambda: model.logits([asked(5)]),
        model.forget,
        lambda: model.description,
        lambda: model.metadata("general.name"),
        lambda: vocabulary.tokenize(b"text"),
        lambda: vocabulary.piece(70),
        lambda: vocabulary.is_end(71),
        lambda: vocabulary.text(72),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()


def test_description_and_metadata(opened: OpenModel) -> None:
    model = opened()
    assert "llama" in model.description
    assert model.metadata("general.name") == "tiny llama"
    assert model.metadata("no.such.key") is None
    assert (model.vocabulary_size, model.trained_context_size) == (288, 512)


def test_options_reach_the_context(opened: OpenModel) -> None:
    """A model trained on more than 4096 tokens gets 4096 unless told."""
    long = Recipe(n_context=8192)
    assert opened("llama", long).context_size == 4096
    assert opened("llama", long, n_ctx=1024).context_size == 1024
    assert opened("llama", n_ctx=1024).context_size == 1024
    assert opened().context_size == 512


def test_repacking_is_optional(opened: OpenModel) -> None:
    """Quantised weights, several positions at once: here some builds of llama.cpp crash; see test_files."""
    recipe = Recipe(dtype="q4_0")
    packed, plain = opened("llama", recipe, **EXACT), opened("llama", recipe, repack=False, **EXACT)
    answers = [model.logits([asked(40, n_scored=8)])[0] for model in (packed, plain)]
    assert np.corrcoef(answers[0].ravel(), answers[1].ravel())[0, 1] > 0.99


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="threads must be"):
        ModelOptions(threads=0)


def test_reading_alone_scores_nothing_and_what_is_remembered_is_not_read_again(
    opened: OpenModel, evaluated: Count
) -> None:
    model = opened()
    tokens = np.arange(1, 41, dtype=np.int32)
    assert model.logits([Ask(0, tokens[:30], 0)])[0].shape == (0, model.vocabulary_size)
    model.logits([Ask(0, tokens[:30], 0)])
    model.logits([Ask(0, tokens[:20], 0)])
    assert len(evaluated.nodes) == 30
    model.logits([Ask(0, tokens, 2)])
    assert len(evaluated.nodes) == 50
