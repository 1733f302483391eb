"""Building the library: what is compiled how, and what is left if that fails."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

import hatch_build
from hatch_build import (
    FOLDER,
    INSTRUCTION_SETS,
    LIBRARY,
    NotBuiltError,
    build,
    find_compiler,
    is_current,
    platform_of,
)

try:
    PLATFORM = platform_of(find_compiler())
except NotBuiltError as error:
    PLATFORM = str(error)
here = pytest.mark.skipif(PLATFORM not in INSTRUCTION_SETS, reason=f"no kernels: {PLATFORM}")
PART = """
#ifndef {wanted}
#error {wanted} is missing
#endif
#ifdef {unwanted}
#error {unwanted} is too much
#endif
extern "C" int hidden_{name}(void) {{ return {number}; }}
extern "C" __attribute__((visibility("default"))) int shown_{name}(void) {{ return hidden_{name}(); }}
"""
PARTS = {  # by platform and file: a macro of the compiler that it needs, and one that it must not have
    "linux-x86_64": {
        "hooks": ("__x86_64__", "__SSE3__"),
        "avx2": ("__AVX2__", "__AVXVNNI__"),
        "avx_vnni": ("__AVXVNNI__", "__AVX512F__"),
        "avx512": ("__AVX512VNNI__", "__AVX512VBMI__"),
    },
    "linux-aarch64": {
        "hooks": ("__aarch64__", "__ARM_FEATURE_DOTPROD"),
        "neon_dotprod": ("__ARM_FEATURE_DOTPROD", "__ARM_FEATURE_MATMUL_INT8"),
    },
}
COMPILERS = {"linux-aarch64": "aarch64-linux-gnu-g++", PLATFORM: ""}  # "" = that of this machine


def write_parts(root: Path, parts: dict[str, tuple[str, str]] | None = None) -> Path:
    """Write a checkout with sources that know what they are compiled for; "hooks" is for any processor."""
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for number, (name, (wanted, unwanted)) in enumerate((parts or {"hooks": ("__linux__", "none")}).items()):
        text = PART.format(name=name, wanted=wanted, unwanted=unwanted, number=number)
        (root / FOLDER / f"{name}.cpp").write_text(text)
    return root


def left(root: Path) -> list[str]:
    """Return the names in the folder of the kernels, except those of sources."""
    return sorted(path.name for path in (root / FOLDER).iterdir() if path.suffix != ".cpp")


@here
@pytest.mark.parametrize("platform", [*PARTS])
def test_each_file_is_compiled_for_the_processors_that_it_is_named_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    """Those of other platforms are left out."""
    compiler = COMPILERS.get(platform, "no compiler")
    if compiler and which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    for other in PARTS:
        write_parts(tmp_path, PARTS[other])
    write_parts(tmp_path, PARTS[platform])
    assert build(tmp_path) == platform
    assert left(tmp_path) == [Path(LIBRARY).name]
    if platform != PLATFORM:
        return
    library = ctypes.CDLL(str(tmp_path / LIBRARY))
    for number, name in enumerate(PARTS[platform]):
        assert library[f"shown_{name}"]() == number
        with pytest.raises(AttributeError):
            library[f"hidden_{name}"]


@here
def test_another_library_with_more_flags(tmp_path: Path) -> None:
    root = write_parts(tmp_path / "root")
    build(root, tmp_path / "made" / "other.so", ["-Dshown_hooks=renamed"])
    assert ctypes.CDLL(str(tmp_path / "made" / "other.so")).renamed() == 0
    assert left(root) == []


@here
@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        ("nothing-of-this-name", "CXX names nothing-of-this-name, which is not installed"),
        ("SCRIPT", "failed: x.cpp:1: error: no room"),
        (None, "there is no C++ compiler (c++, g++, clang++, or another in CXX)"),
    ],
)
def test_without_a_compiler_that_works_no_library_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, says: str
) -> None:
    """An earlier library would not match the sources."""
    root = write_parts(tmp_path)
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\necho 'x.cpp: In function f:' >&2\necho 'x.cpp:1: error: no room' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    (root / LIBRARY).write_text("earlier")
    if compiler is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    else:
        monkeypatch.setenv("CXX", compiler.replace("SCRIPT", str(script)))
    with pytest.raises(NotBuiltError) as caught:
        build(root)
    assert str(caught.value).endswith(says)
    assert "\n" not in str(caught.value)
    assert left(root) == []


@pytest.mark.parametrize(
    ("compiler", "platform"),
    [("arm64-apple-darwin23.1.0", "macosx-14.0-arm64"), ("i686-linux-gnu", "linux-i686")],
)
def test_other_platforms_have_no_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, platform: str
) -> None:
    monkeypatch.setattr("sysconfig.get_platform", lambda: "macosx-14.0-arm64")
    monkeypatch.setenv("CXX", f"echo {compiler}")
    with pytest.raises(
        NotBuiltError, match=f"^they are for linux-x86_64 and linux-aarch64, and this is {platform}$"
    ):
        build(write_parts(tmp_path))


@here
def test_the_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = " ".join(hatch_build.find_compiler())
    monkeypatch.setenv("CXX", f"{compiler} -Dshown_hooks='named by CXX'".replace("'named by CXX'", "by_cxx"))
    build(write_parts(tmp_path))
    assert ctypes.CDLL(str(tmp_path / LIBRARY)).by_cxx() == 0


@here
@pytest.mark.parametrize("when", ["-c", "-shared"])
def test_ctrl_c_leaves_the_earlier_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    root, run = write_parts(tmp_path), hatch_build._run

    def interrupted(command: list[str]) -> str:
        said = run(command)
        if when in command:
            raise KeyboardInterrupt
        return said

    (root / LIBRARY).write_text("earlier")
    monkeypatch.setattr(hatch_build, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(root)
    assert left(root) == [Path(LIBRARY).name]
    assert (root / LIBRARY).read_text() == "earlier"


@here
def test_a_process_that_uses_the_earlier_library_keeps_it(tmp_path: Path) -> None:
    root = write_parts(tmp_path)
    (root / LIBRARY).write_text("earlier")
    with (root / LIBRARY).open() as earlier:
        build(root)
        assert earlier.read() == "earlier"


@here
def test_the_program_builds_if_a_source_is_newer(tmp_path: Path) -> None:
    root = write_parts(tmp_path)
    program = root / "hatch_build.py"
    program.write_bytes(Path(hatch_build.__file__).read_bytes())

    def built(compiler: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "CXX": compiler}
        return subprocess.run(
            [sys.executable, program], env=environment, capture_output=True, text=True, check=True
        )

    sound = " ".join(hatch_build.find_compiler())
    assert built(sound).stderr == ""
    assert is_current(root)
    assert built("false").stderr == ""  # nothing to do
    header = root / FOLDER / "products.hpp"
    header.write_text("")
    later = (root / LIBRARY).stat().st_mtime + 10
    os.utime(header, (later, later))
    line = "llamaspec is installed without kernels of its own: false failed: exit code 1\n"
    assert built("false").stderr == line
    assert not (root / LIBRARY).exists()


@here
def test_warnings_of_the_compiler_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = write_parts(tmp_path)
    with (root / FOLDER / "hooks.cpp").open("a") as source:
        source.write("static int unused(int x) { return 0; }\n")
    build(root)
    assert "-Wunused" in capfd.readouterr().err
