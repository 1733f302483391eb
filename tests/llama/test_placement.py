"""What goes to GPUs that have no room for everything: tables whose sizes and costs differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec.llama.placement import (
    DISCRETE,
    MARGIN_BYTES,
    UNIFIED,
    Gpus,
    ModelBytes,
    Pace,
    Paces,
    choose_placement,
    tokens_per_second,
)

MIB = 1 << 20
TARGET = ModelBytes((100 * MIB,) * 10 + (70 * MIB,), cache=7 * MIB, compute=11 * MIB)  # 1140 MiB
DRAFT = ModelBytes((20 * MIB,) * 4 + (13 * MIB,), cache=3 * MIB, compute=5 * MIB)  # 105 MiB
# At 1 GB/s a byte of the CPU costs ten of the GPU, and further positions cost nothing anywhere.
STEEP = Paces(Pace(1e-9, 0.0, 0.0), Pace(1e-10, 0.0, 0.0))
COMPUTING = Paces(
    Pace(1e-9, 0.0, 1.0), Pace(1e-10, 0.0, 0.0)
)  # the CPU has nothing left for a second position


def card(room: int, main: int | None = 64 << 30, *, n: int = 1, is_unified: bool = False) -> Gpus:
    """GPUs with so many bytes beside the margin, on each."""
    names = tuple(f"CUDA{i}" for i in range(n))
    return Gpus(names, (room + MARGIN_BYTES,) * n, main, is_unified)


@pytest.mark.parametrize(
    ("room", "paces", "expected"),
    [
        (1140 + 105 + 16, STEEP, (None, None)),  # all
        (
            1140 + 105 + 15,
            STEEP,
            (10, None),
        ),  # a draft token reads the draft, a round the target's layers once
        (
            1140 + 105 + 15,
            COMPUTING,
            (None, 0),
        ),  # a wide evaluation of one layer on the CPU costs more than drafts
        (105 + 16 + 70 + 107, STEEP, (2, None)),
        (105 + 16 + 70 + 106, STEEP, (1, None)),
        (105 + 16 + 70 + 107, COMPUTING, (3, 0)),
        (105 + 16 + 69, STEEP, (0, None)),  # the draft alone, and the target on the CPU
        (105 + 4, STEEP, (1, 0)),  # the output of the target
        (80, STEEP, (0, 0)),
        (0, STEEP, (0, 0)),
    ],
)
def test_what_goes_to_the_gpu(room: int, paces: Paces, expected: tuple[int | None, int | None]) -> None:
    choice = choose_placement(card(room * MIB), TARGET, DRAFT, paces)
    assert (choice.target_layers, choice.draft_layers) == expected
    assert choice.is_roomy


def test_nothing_goes_to_a_gpu_that_is_slower() -> None:
    slow = Paces(Pace(1e-9, 0.0, 0.3), Pace(1e-9, 0.1, 0.0))  # 100 ms to start a layer
    choice = choose_placement(card(500 * MIB), TARGET, DRAFT, slow)
    assert (choice.target_layers, choice.draft_layers) == (0, 0)


@pytest.mark.parametrize(
    ("room", "target_fixed", "draft_fixed", "expected"),
    [
        (2000, 4, None, (4, None)),  # all that may
        (391 + 11 + 110, 4, None, (4, None)),
        (391 + 11 + 109, 4, None, (4, 0)),
        (20, 4, None, (4, 0)),  # llama.cpp will say that it does not fit
        (500, 0, None, (0, None)),
        (391 + 11 + 109, None, 0, (5, 0)),
        (391 + 11 + 110, None, 5, (4, None)),
        (391 + 11 + 109, None, 5, (3, None)),
        (391 + 11 + 13 + 5, None, 1, (4, 1)),
    ],
)
def test_what_is_fixed_stays(
    room: int, target_fixed: int | None, draft_fixed: int | None, expected: tuple[int | None, int | None]
) -> None:
    """70 + 3 * 107 = 391 MiB are four layers of the target, 105 + 5 the draft, with its buffer."""
    target, draft = replace(TARGET, n_fixed=target_fixed), replace(DRAFT, n_fixed=draft_fixed)
    choice = choose_placement(card(room * MIB), target, draft, STEEP)
    assert (choice.target_layers, choice.draft_layers) == expected


@pytest.mark.parametrize(("room", "expected"), [(1151, None), (1150, 10), (81, 1), (80, 0)])
def test_a_target_alone(room: int, expected: int | None) -> None:
    assert choose_placement(card(room * MIB), TARGET, paces=STEEP).target_layers == expected


def test_of_several_gpus_as_much_as_a_layer_may_stay_empty() -> None:
    """Each holds a buffer; two layers of 107 MiB may lie where one of three ends."""
    enough = (1140 + 2 * 107 + 3 * 11) // 3
    assert choose_placement(card(enough * MIB, n=3), TARGET).target_layers == 10  # a third of a MiB too few
    assert choose_placement(card((enough + 1) * MIB, n=3), TARGET).target_layers is None


def test_main_memory_must_hold_the_rest() -> None:
    """It has room for the draft, but not for a layer more."""
    gpus = card((1140 + 11) * MIB, 110 * MIB)
    choice = choose_placement(gpus, TARGET, DRAFT, STEEP)
    assert (choice.target_layers, choice.draft_layers, choice.is_roomy) == (None, 0, True)
    choice = choose_placement(replace(gpus, main_bytes=104 * MIB), TARGET, DRAFT, STEEP)
    assert not choice.is_roomy
    assert choice.reason.endswith("; main memory has no room for the rest")
    assert choose_placement(replace(gpus, main_bytes=None), TARGET, DRAFT, STEEP).is_roomy


def test_unified_memory_holds_what_is_on_the_gpu_too() -> None:
    gpus = card(800 * MIB, 1244 * MIB, is_unified=True)
    assert gpus.paces is UNIFIED
    assert not choose_placement(gpus, TARGET, DRAFT).is_roomy
    assert choose_placement(replace(gpus, main_bytes=1245 * MIB), TARGET, DRAFT).is_roomy


def test_the_reason_is_one_sentence() -> None:
    choice = choose_placement(card(298 * MIB), TARGET, DRAFT, STEEP)
    assert choice.reason == (
        "CUDA0 has 0.8 GiB free of 1.2 GiB that all would take: the draft and 2 of 11 target layers go "
        "there, by estimate 1.2 times as fast as if only the draft goes there"
    )
    choice = choose_placement(card(4000 * MIB, n=2), TARGET, DRAFT)
    assert choice.reason == "1.2 GiB go to CUDA0 and CUDA1, which have 8.8 GiB free: all that may"


@pytest.mark.parametrize(
    ("room", "draft", "expected"),
    [
        (109, DRAFT, "1 of 11 target layers go there and the draft stays on the CPU, by estimate as fast as "
         "if nothing goes there"),
        (0, DRAFT, "nothing goes there"),
        (434, replace(DRAFT, n_fixed=2), "2 of 5 draft layers and 3 of 11 target layers go there, by "
         "estimate 1.2 times as fast as if only 2 of 5 draft layers go there"),
        (434, None, "4 of 11 target layers go there, by estimate 1.5 times as fast as if nothing goes there"),
    ],
)  # fmt: skip
def test_the_reason_tells_what_goes_where(room: int, draft: ModelBytes | None, expected: str) -> None:
    choice = choose_placement(card(room * MIB), TARGET, draft, STEEP)
    assert choice.reason.partition("would take: ")[2] == expected


def test_speed_is_that_of_the_best_number_of_draft_tokens() -> None:
    """One second for the target and a tenth for each draft token."""
    one_byte = ModelBytes((1,), 0, 0)
    paces = Paces(Pace(1.0, 0.0, 0.0), Pace(0.1, 0.0, 0.0))
    expected = max(sum(0.7**i for i in range(n + 1)) / (1 + 0.1 * n) for n in range(9))
    assert tokens_per_second(one_byte, 0, one_byte, 1, paces) == pytest.approx(expected)
    assert tokens_per_second(one_byte, 0, None, 0, paces) == 1.0
    half_read = replace(one_byte, read_share=0.5)
    assert tokens_per_second(half_read, 0, None, 0, paces) == 2.0
    wide = Paces(Pace(1.0, 0.25, 2.0), paces.gpu)
    assert one_byte.seconds(0, wide, 3) == 1 + 0.25 + 2 * 2.0


@settings(max_examples=40)
@given(
    room=st.integers(0, 1500),
    n_gpus=st.integers(1, 3),
    cache=st.integers(0, 40),
    paces=st.sampled_from([STEEP, COMPUTING, DISCRETE, UNIFIED]),
)
def test_what_is_chosen_fits(room: int, n_gpus: int, cache: int, paces: Paces) -> None:
    """On one GPU to the byte, on several in all."""
    gpus, target = card(room * MIB, n=n_gpus), replace(TARGET, cache=cache * MIB)
    choice = choose_placement(gpus, target, DRAFT, paces)
    used = 0
    for model, n in ((target, choice.target_layers), (DRAFT, choice.draft_layers)):
        n = len(model.layers) if n is None else n
        used += sum(model.layers[len(model.layers) - n :]) + model.cache * max(0, n - 1)
        used += n_gpus * model.compute if n else 0
    assert used <= room * MIB * n_gpus
