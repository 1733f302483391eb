"""Which emulated processors have which instruction set."""

from __future__ import annotations

import pytest

from kernels.emulated import COMMAND, PROCESSORS, Emulator


@pytest.mark.skipif(not COMMAND, reason="part of `make test-arm`")
@pytest.mark.parametrize(
    ("processor", "levels"),
    [("cortex-a53", []), ("cortex-a72", []), ("cortex-a76", ["neon-dotprod"]), ("max", ["neon-dotprod"])],
)
def test_instruction_sets_are_found_at_run_time(processor: str, levels: list[str]) -> None:
    emulator = Emulator(processor)
    assert [level for level in PROCESSORS if emulator.has(level)] == levels
