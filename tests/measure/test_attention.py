"""How attention is computed: chosen from made-up times, and exactness seen in the real llama.cpp."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp import llama_cpp as lib

from command import invoke, naming
from llamaspec import ModelOptions
from llamaspec.errors import LlamaspecError
from llamaspec.llama.attention import (
    READ,
    AttentionShape,
    AttentionTrial,
    ModelSize,
    model_size,
    write_model,
)
from llamaspec.measure import attention, fitting
from llamaspec.measure.attention import (
    CONFIGURATIONS,
    DEEP,
    PLAIN,
    SAFE,
    SHALLOW,
    AttentionProbe,
    BusyError,
    Configuration,
    Measured,
    Turn,
    time_configurations,
)
from llamaspec.measure.attention_choice import TextSize, choose
from llamaspec.measure.fitting import fitted, forget_attention
from llamaspec.measure.pair_files import ModelFile
from llamaspec.measure.store import store_attention, stored_attention
from model_store import ModelStore
from tiny_models import Recipe

BF16, OFF = CONFIGURATIONS[2:]
SHAPE = AttentionShape(n_layers=16, n_heads=32, n_kv_heads=8, head_size=64)
SIZE = ModelSize(SHAPE, 131_072, 800_000_000, 800_000_000, 1_200_000_000)
BASE = Turn(
    single_shallow=0.0011,
    single_deep=0.0036,
    several_shallow=0.0028,
    several_deep=0.0098,
    reading_first=0.0078,
    reading_shallow=0.0165,
)


def times(factor: float) -> Turn:
    """Attention that takes so many times as long at any depth, with the same overhead."""
    deeper = {
        "single_deep": BASE.single_shallow + factor * (BASE.single_deep - BASE.single_shallow),
        "several_deep": BASE.several_shallow + factor * (BASE.several_deep - BASE.several_shallow),
        "reading_shallow": BASE.reading_first + factor * (BASE.reading_shallow - BASE.reading_first),
    }
    return replace(BASE, **deeper)


def probe(exact: Sequence[Configuration], *turns: Sequence[float]) -> AttentionProbe:
    """From the factors of PLAIN, SAFE, BF16 and OFF in each turn."""
    return AttentionProbe(
        tuple(
            Measured(configuration, configuration in exact, tuple(times(turn[i]) for turn in turns))
            for i, configuration in enumerate(CONFIGURATIONS)
        ),
        weights_single=1 / 22e9,
        weights_several=1.3 / 22e9,
        weights_reading=1 / 45e9,
    )


@pytest.mark.parametrize(
    ("exact", "factors", "chosen"),
    [
        ((SAFE, BF16), (1.0, 1.9, 1.4, 0.6), OFF),  # the fastest by far has the word
        ((SAFE, BF16), (1.0, 1.9, 0.61, 0.6), BF16),  # exact at no cost to speak of
        ((SAFE, BF16), (1.0, 0.55, 1.4, 0.6), SAFE),  # exact and the fastest
        ((), (1.0, 1.9, 1.4, 1.2), PLAIN),
        ((), (1.0, 1.9, 1.4, 0.93), PLAIN),  # in short texts it would be slower, and not exact
        ((PLAIN, SAFE, BF16), (1.02, 1.9, 1.4, 1.0), PLAIN),  # one thread
    ],
)
def test_the_fastest_or_an_exact_one_that_costs_little(
    exact: Sequence[Configuration], factors: Sequence[float], chosen: Configuration
) -> None:
    choice = choose(probe(exact, *[factors] * 5), SIZE, 8192)
    assert (choice.configuration, choice.is_exact, choice.is_steady) == (chosen, chosen in exact, True)


def test_what_a_choice_says_of_itself() -> None:
    """Of 1800 tokens 1350 are read, 450 written; up to 256 tokens nothing is faster than PLAIN."""
    choice = choose(probe((SAFE,), *[(4.0, 9.0, 6.0, 0.5)] * 3), SIZE, 1800, text=TextSize(1350, 450))
    single = (2.5e-3 / 1536 / 2 * 16, 1575, 8e8 / 22e9)
    several = (7.0e-3 / 1536 / 2 * 16, 1575, 1.3 * 8e8 / 22e9)
    reading = (8.7e-3 / 384 / 64 / 2 * 16, 675, 1.2e9 / 45e9)

    def seconds(factor: float) -> float:
        one, some, read = (
            each * (max(factor, 4.0) * 256 + factor * (depth - 256)) + fixed
            for each, depth, fixed in (single, several, reading)
        )
        return 1350 * read + 450 * (one + some / 2) / 2

    assert choice.gain == pytest.approx(seconds(4.0) / seconds(0.5))
    assert choice.exact_cost == pytest.approx(seconds(9.0) / seconds(0.5))
    assert f"{choice.gain:.2f} times as fast" in choice.summary


def test_a_draft_is_not_exact_at_any_cost() -> None:
    close = probe((SAFE, BF16), *[(1.0, 1.9, 0.61, 0.6)] * 5)
    assert choose(close, SIZE, 8192, is_draft=True).configuration == OFF


def test_weights_that_cost_more_make_attention_matter_less() -> None:
    apart = probe((BF16,), *[(1.5, 1.9, 1.15, 1.0)] * 5)
    assert choose(apart, SIZE, 8192).configuration == OFF
    large = replace(SIZE, n_read_bytes=40_000_000_000, n_parameters=70_000_000_000)
    assert choose(apart, large, 8192).configuration == BF16


def test_depth_decides() -> None:
    """What costs little in a short text costs much in a long one."""
    apart = probe((BF16,), *[(1.5, 1.9, 1.15, 1.0)] * 5)
    assert choose(apart, SIZE, 512).configuration == BF16
    assert choose(apart, SIZE, 8192).configuration == OFF


def test_the_text_at_hand_decides_whatever_the_context_has_room_for() -> None:
    """Behind a prompt that is too long for exact bits the fastest has the word; before, the exact default."""
    apart = probe((), *[(1.0, 1.9, 1.4, 0.9)] * 5)

    def chosen(text: TextSize | None, n_ctx: int = 8192) -> Configuration:
        return choose(apart, SIZE, n_ctx, text=text).configuration

    assert (chosen(None), chosen(TextSize(255, 99)), chosen(TextSize(256, 99))) == (PLAIN, PLAIN, OFF)
    slow = probe((), *[(1.0, 1.9, 1.4, 0.3)] * 5)
    assert choose(slow, SIZE, 8192).configuration == OFF
    assert choose(slow, SIZE, 8192, text=TextSize(99, 300)).configuration == PLAIN


def test_a_text_ends_with_its_context() -> None:
    found = probe((), *[(1.0, 1.9, 1.4, 0.4)] * 5)
    full, longer = TextSize(300, 600), TextSize(300, 5000)
    assert choose(found, SIZE, 900, text=longer) == choose(found, SIZE, 900, text=full)
    assert choose(found, SIZE, 900, text=TextSize(2000, 5)) == choose(found, SIZE, 900, text=TextSize(900, 0))
    assert choose(found, SIZE, 8192, text=longer).gain > choose(found, SIZE, 8192, text=full).gain > 1


def test_a_prompt_counts_as_a_token_for_each_four_bytes() -> None:
    assert TextSize.expected(b"", 7) == TextSize(0, 7)
    assert TextSize.expected(9 * b"x", 7) == TextSize(3, 7)


def test_scores_of_a_long_context_need_room() -> None:
    """Without flash attention 32 heads keep 64 KiB of scores for each token of the context."""
    found = probe((SAFE,), *[(1.0, 1.9, 1.4, 0.6)] * 3)
    assert choose(found, SIZE, 16_384, room=8 << 30).configuration == OFF
    assert choose(found, SIZE, 16_385, room=8 << 30).configuration == PLAIN


def test_texts_that_share_the_cache_pass_over_each_others_cells() -> None:
    """Without flash attention; of four, half of the other three."""
    found = probe((SAFE,), *[(1.0, 1.9, 1.4, 0.4)] * 5)
    shared = choose(found, SIZE, 8192, n_texts=2)
    assert shared.configuration == OFF
    assert shared.gain == pytest.approx(choose(probe((SAFE,), *[(1.0, 1.9, 1.4, 0.6)] * 5), SIZE, 8192).gain)
    assert choose(found, SIZE, 8192, n_texts=4).configuration == PLAIN


@pytest.mark.parametrize(
    "turns",
    [
        [(1.0, 2.0, 1.4, 0.5)] * 2,  # too few
        [(1.0, 2.0, 1.4, 0.5), (1.0, 2.0, 1.4, 3.5)] * 3,  # now this one is the fastest, now that
    ],
)
def test_noise_is_not_believed(turns: list[tuple[float, ...]]) -> None:
    choice = choose(probe((SAFE, BF16), *turns), SIZE, 8192)
    assert (choice.configuration, choice.is_steady) == (PLAIN, False)


def test_what_else_the_machine_does_only_adds_to_times() -> None:
    """So the least time of each tells what it costs, whatever the others say."""
    calm, slow = (4.0, 9.0, 6.0, 0.5), (9.0, 11.0, 8.0, 6.5)
    text = TextSize(1350, 450)
    held_up = choose(probe((SAFE,), slow, calm, slow), SIZE, 1800, text=text)
    alone = choose(probe((SAFE,), *[calm] * 3), SIZE, 1800, text=text)
    assert held_up.gain == pytest.approx(alone.gain)
    assert held_up.exact_cost == pytest.approx(alone.exact_cost)


def test_a_machine_that_slows_all_alike_is_believed() -> None:
    turns = [tuple(slow * factor for factor in (1.0, 2.0, 1.4, 0.5)) for slow in (1.0, 7.0, 2.0, 1.0, 4.0)]
    choice = choose(probe((SAFE,), *turns), SIZE, 8192)
    assert (choice.configuration, choice.is_steady) == (OFF, True)


@dataclass
class FakeTrial:
    """Takes seconds by width and depth; a clock goes on meanwhile."""

    clock: list[float]
    each: float
    is_exact: bool = True
    depth: int = 128

    def deepen(self, depth: int) -> None:
        self.depth = depth

    def seconds(self, width: int) -> float:
        taken = 1e-3 + self.each * self.depth * width
        self.clock[0] += taken
        return taken

    def logits(self, widths: Sequence[int]) -> npt.NDArray[np.float32]:
        scores = np.arange(sum(widths), dtype=np.float32)
        wrong = not self.is_exact and self.depth == DEEP and 3 in widths
        return scores + np.float32(wrong)


def test_configurations_take_turns() -> None:
    clock = [0.0]
    trials = {c: FakeTrial(clock, (i + 1) * 1e-7, c != PLAIN) for i, c in enumerate(CONFIGURATIONS)}
    found = time_configurations(trials, FakeTrial(clock, 1e-9), 10.0, lambda: clock[0])
    assert [one.is_exact for one in found.measured] == [False, True, True, True]
    for i, one in enumerate(found.measured):
        assert one.turns[0].single == pytest.approx((i + 1) * 1e-7 / 2)
        assert one.turns[0].several == pytest.approx(4 * (i + 1) * 1e-7 / 2)
        assert one.turns[0].reading == pytest.approx((i + 1) * 1e-7 / 2)
        assert len(one.turns) == 7


def test_a_busy_machine_is_given_up() -> None:
    clock = [0.0]
    trials = {c: FakeTrial(clock, 1e-3) for c in CONFIGURATIONS}
    with pytest.raises(BusyError, match="close what computes"):
        time_configurations(trials, FakeTrial(clock, 1e-9), 1.0, lambda: clock[0])
    assert attention.PATIENCE < clock[0] < attention.PATIENCE + 64 * 0.512 + 1


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("attention") / "heads.gguf"
    write_model(path, AttentionShape(2, 4, 2, 64))
    return path


def logits(path: Path, batches: Sequence[int], **options: object) -> npt.NDArray[np.float32]:
    with AttentionTrial(path, ModelOptions(n_ctx=SHALLOW, **options)) as trial:  # type: ignore[arg-type]
        trial.deepen(SHALLOW)
        return trial.logits(batches)


@pytest.mark.parametrize(
    ("cache", "n_threads", "is_exact"),
    [("bf16", 2, True), ("f16", 1, True), ("f16", 2, False)],
)
def test_bits_of_the_real_engine(heads: Path, cache: str, n_threads: int, is_exact: bool) -> None:
    """With values in f16, threads share a single position by parts of the context."""
    options = {"cache_type_v": cache, "threads": n_threads, "flash_attention": "on"}
    alone, together = (logits(heads, batches, **options) for batches in ([1] * 8, [3, 5]))
    assert np.array_equal(alone, together) == is_exact
    assert np.allclose(alone, together, atol=0.1)
    assert alone.std() > 0.1


def test_copies_deepen_the_context(heads: Path) -> None:
    """Copied tokens weigh as much as those that were read, so what attention gives stays."""
    with AttentionTrial(heads, ModelOptions(n_ctx=SHALLOW, threads=1, cache_type_v="bf16")) as trial:
        before = trial.logits([2])
        trial.deepen(SHALLOW)
        after = trial.logits([2])
        assert not np.array_equal(before, after)
        assert np.allclose(before, after, atol=0.2)
        trial.seconds(4)
        assert np.array_equal(trial.logits([2]), after)  # nothing stays of what was timed


def test_a_deep_context_has_as_many_copies_as_it_takes(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, n_tokens = lib.llama_state_seq_set_data, [READ]

    def copied(*arguments: Any) -> Any:
        n_tokens.append(2 * n_tokens[-1])
        return put(*arguments)

    monkeypatch.setattr(lib, "llama_state_seq_set_data", copied)
    with AttentionTrial(heads, ModelOptions(n_ctx=16 * READ, threads=1)) as trial:
        for depth, expected in ((READ, READ), (3 * READ, 4 * READ), (4 * READ, 4 * READ), (DEEP, DEEP)):
            trial.deepen(depth)
            assert n_tokens[-1] == expected


def test_a_configuration_that_cannot_be(heads: Path) -> None:
    with pytest.raises(LlamaspecError, match="cannot try attention"):
        AttentionTrial(heads.with_name("none.gguf"), ModelOptions(threads=1))


def test_shapes_of_files(store: ModelStore) -> None:
    recipe = Recipe(width=128, n_heads=4, n_kv_heads=2, n_context=700)
    path = store.path("llama", recipe)
    found = model_size(path)
    assert found is not None
    assert found.shape == AttentionShape(2, 4, 2, 32)
    assert (found.trained_context_size, found.n_bytes) == (700, path.stat().st_size)
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 2 * 32
    assert 0.9 < 4 * found.n_parameters / path.stat().st_size < 1
    for kind in ("gemma3", "mamba", "jamba"):  # windows and states: other attention
        assert model_size(store.path(kind)) is None


@pytest.fixture
def file(store: ModelStore, own_cache: None) -> ModelFile:
    return ModelFile(store.path("llama", Recipe(n_context=900)), ModelOptions(threads=2))


def measuring(found: AttentionProbe | LlamaspecError, calls: list[float]) -> Callable[..., AttentionProbe]:
    def measure(size: ModelSize, n_threads: int, seconds: float) -> AttentionProbe:
        calls.append(seconds)
        if isinstance(found, LlamaspecError):
            raise found
        return found

    return measure


STEADY = probe((SAFE, BF16), *[(3.0, 2.5, 0.7, 0.9)] * 5)


def test_measured_once(file: ModelFile) -> None:
    calls: list[float] = []
    measure = measuring(STEADY, calls)
    first = fitted(file, measure=measure)
    assert (first.is_new, first.choice and first.choice.configuration) == (True, BF16)
    options = first.file.options
    assert (options.flash_attention, options.cache_type_k, options.cache_type_v) == ("auto", "bf16", "bf16")
    again = fitted(file, measure=measure)
    assert (again.is_new, again.file) == (False, first.file)
    assert calls == [1.0]
    assert forget_attention(file)
    assert not forget_attention(file)
    assert fitted(file, measure=measure).is_new


def test_what_is_best_for_several_texts_follows_from_what_was_measured_for_one(file: ModelFile) -> None:
    calls: list[float] = []
    measure = measuring(probe((SAFE,), *[(1.0, 1.9, 1.4, 0.01)] * 5), calls)
    found = [fitted(file, measure=measure, n_texts=n).file.options.flash_attention for n in (1, 400)]
    assert (found, calls) == (["off", "auto"], [1.0])


def test_what_was_measured_once_does_for_every_text(file: ModelFile) -> None:
    """Up to 256 tokens nothing is measured; what is kept must not be noise in longer texts either."""
    calls: list[float] = []
    measure = measuring(probe((), *[(1.0, 1.9, 1.4, 0.93)] * 5), calls)
    assert fitted(file, measure=measure, text=TextSize(6, 250)) == fitting.Fitted(file)
    assert not calls
    sizes = (TextSize(400, 400), TextSize(10, 247))
    found = [fitted(file, measure=measure, text=text).file.options.flash_attention for text in sizes]
    assert (found, calls) == (["off", "auto"], [1.0])
    forget_attention(file)
    noisy = probe((), (1.0, 2.0, 1.4, 0.5), (1.0, 2.0, 1.4, 3.5), (1.0, 2.0, 1.4, 0.5))
    for _ in range(2):
        again = fitted(file, measure=measuring(noisy, calls), text=TextSize(10, 247))
        assert again.is_new
        assert again.choice is not None
        assert not again.choice.is_steady


def test_noise_is_not_kept(file: ModelFile) -> None:
    noisy = probe((SAFE,), (1.0, 2.0, 1.4, 0.5), (1.0, 2.0, 1.4, 3.5), (1.0, 2.0, 1.4, 0.5))
    found = fitted(file, measure=measuring(noisy, []))
    assert found.choice is not None
    assert (found.choice.configuration, found.choice.is_steady) == (PLAIN, False)
    calls: list[float] = []
    fitted(file, measure=measuring(STEADY, calls), is_thorough=True)
    assert calls == [6.0]


def test_too_busy(file: ModelFile) -> None:
    busy = measuring(BusyError("busy"), [])
    assert fitted(file, measure=busy) == fitting.Fitted(file, fault="busy")
    failing = measuring(LlamaspecError("no room"), [])
    assert fitted(file, measure=failing) == fitting.Fitted(file, fault="no room")


@pytest.mark.parametrize("change", [{"n_ctx": 256}, {"n_ctx": 64}])
def test_nothing_is_measured_in_short_contexts(file: ModelFile, change: dict[str, int]) -> None:
    calls: list[float] = []
    short = replace(file, options=replace(file.options, **change))  # type: ignore[arg-type]
    assert fitted(short, measure=measuring(STEADY, calls)) == fitting.Fitted(short)
    assert not calls


def test_nothing_is_measured_where_it_cannot_matter(
    file: ModelFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[float] = []
    measure = measuring(STEADY, calls)
    assert fitted(file, measure=measure, may_measure=False) == fitting.Fitted(file)
    missing = ModelFile(tmp_path / "none.gguf", ModelOptions())
    assert fitted(missing, measure=measure) == fitting.Fitted(missing)
    monkeypatch.setattr(fitting, "computes_on_gpu", lambda options: True)
    assert fitted(file, measure=measure) == fitting.Fitted(file)
    assert not calls


def test_what_is_kept_is_what_was_measured(file: ModelFile) -> None:
    store_attention(SHAPE, 2, STEADY)
    assert stored_attention(SHAPE, 2).value == STEADY
    assert stored_attention(SHAPE, 3).value is None
    assert stored_attention(replace(SHAPE, n_heads=16), 2).value is None


def test_commands_use_what_is_known(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` says what was measured, also where the person fixed something else."""
    monkeypatch.delenv("LLAMASPEC_FLASH_ATTN")
    size = model_size(file.path)
    assert size is not None
    store_attention(size.shape, 1, STEADY)
    named = naming([file.path])

    def finding(*arguments: str, topic: str = "target attention") -> str:
        (found,) = [
            f for f in invoke("doctor", *named, *arguments, "--json").json["findings"] if f["topic"] == topic
        ]
        return str(found["text"])

    said = finding()
    assert said.startswith("measured on this machine: flash attention on, keys bf16, values bf16")
    assert finding(topic="target KV types") == "keys bf16, values bf16"
    assert "where one text is all" not in said  # it is best for all lengths
    store_attention(size.shape, 1, probe((), *[(1.0, 1.9, 1.4, 0.93)] * 5))
    assert finding().endswith(
        "; where one text is all that is written, by its length: 450 tokens: flash attention off, keys f16, "
        "values f16"
    )
    assert "where one text is all" not in finding("--n-ctx", "400")  # there is no other length
    store_attention(size.shape, 1, STEADY)
    fixed = finding("--cache-type-v", "f16")
    assert fixed.startswith("measured to be best: ")
    assert "--cache-type-v" in fixed


def test_a_command_measures_once_and_says_so(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMASPEC_FLASH_ATTN")
    monkeypatch.setattr(fitting, "measure_attention", lambda *arguments: STEADY)
    arguments = ["generate", *naming([file.path]), "-p", 200 * "abcd", "-n", "300"]
    first, second = (invoke(*arguments).stderr for _ in range(2))
    assert "measured once for this machine; this time flash attention on, keys bf16" in first
    assert "--cache-type-v" in first
    assert "measured" not in second


def test_a_measurement_of_the_real_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However long it takes here; what it finds is sound and can be used.

    While it lasts no file lies around that would stay if the process were killed.
    """
    monkeypatch.setattr(attention, "is_busy", lambda: False)
    monkeypatch.setattr(attention, "MOST_TURNS", 3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    timed = attention.time_configurations
    left: list[Path] = []

    def timing(*arguments: Any) -> AttentionProbe:
        left.extend(tmp_path.iterdir())
        return timed(*arguments)

    monkeypatch.setattr(attention, "time_configurations", timing)
    shape = AttentionShape(2, 4, 2, 32)
    found = attention.measure_attention(shape, 1, 1.0, lambda: 0.0)
    assert not left
    assert [one.configuration for one in found.measured] == list(CONFIGURATIONS)
    assert {len(one.turns) for one in found.measured} == {3}
    assert [one.is_exact for one in found.measured[:3]] == [True, True, True]  # one thread
    assert choose(found, replace(SIZE, shape=shape), 4096).gain > 0


def test_beside_many_programs_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "is_busy", lambda: True)
    with pytest.raises(BusyError):
        attention.measure_attention(SHAPE, 2, 1.0, lambda: 0.0)
