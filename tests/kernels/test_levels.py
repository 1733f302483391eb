"""Which processors have which instruction set."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.emulated import COMMAND, PROCESSORS, Emulator
from kernels.library import at_level, open_library

AVX2 = {"avx2", "fma", "f16c"}
NEEDED = {
    "avx2": AVX2,
    "avx-vnni": AVX2 | {"avx_vnni"},
    "avx512": AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "neon-dotprod": {"asimddp"},
}
CPUS = Path("/proc/cpuinfo")


@pytest.mark.skipif(not CPUS.exists(), reason="only Linux says what its processor has")
@pytest.mark.parametrize("level", NEEDED)
def test_the_kernels_find_what_linux_finds(level: str) -> None:
    """Libraries that zig built denied every instruction set."""
    flags = set(CPUS.read_text().split())
    with at_level(open_library(), level) as has_it:
        assert has_it == (NEEDED[level] <= flags)


@pytest.mark.skipif(not COMMAND, reason="part of `make test-arm`")
@pytest.mark.parametrize(
    ("processor", "levels"),
    [("cortex-a53", []), ("cortex-a72", []), ("cortex-a76", ["neon-dotprod"]), ("max", ["neon-dotprod"])],
)
def test_instruction_sets_are_found_at_run_time(processor: str, levels: list[str]) -> None:
    emulator = Emulator(processor)
    assert [level for level in PROCESSORS if emulator.has(level)] == levels
