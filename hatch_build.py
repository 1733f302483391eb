"""Builds the library of `llamaspec/kernels/`: a part of every installation, and a program.

As a hook of hatchling it compiles the library into the source folder and puts it into the wheel, which then
runs on one platform only. Where that is not possible the wheel has no library, and one line says why.
`python hatch_build.py` builds the library of a checkout if a source is newer, and `python hatch_build.py
OUTPUT FLAG...` another one, with more flags. CXX may name a cross-compiler.

One library serves all processors: only files that are named after an instruction set use it, and `hooks.cpp`
chooses at run time. So `-march=native` has no place here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "llamaspec/kernels"
LIBRARY = f"{FOLDER}/libllamaspec_kernels.so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# By platform: additional flags by the name of the file
INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "linux-x86_64": {
        "avx2": _AVX2,
        "avx_vnni": (*_AVX2, "-mavxvnni"),
        "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"),
    },
    "linux-aarch64": {"neon_dotprod": ("-march=armv8.2-a+dotprod",)},
}


class NotBuiltError(Exception):
    """The library cannot be built here; the message is the reason, in one line."""


class KernelsHook(BuildHookInterface[Any]):
    """Puts the library into wheels."""

    PLUGIN_NAME = "custom"
    _is_foreign = False

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library, or say why there is none; `version` is "standard" or "editable"."""
        root = Path(self.root)
        try:
            platform = build(root)
        except NotBuiltError as reason:
            self.app.display_warning(missing(reason))
            return
        build_data["artifacts"].append(f"/{LIBRARY}")  # although git ignores it
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform.replace('-', '_')}"  # any Python: ctypes loads it
        self._is_foreign = platform != sysconfig.get_platform()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove a library for another platform: the checkout would take it for its own."""
        if self._is_foreign:
            (Path(self.root) / LIBRARY).unlink()


def missing(reason: NotBuiltError) -> str:
    """Return the line that says why there are no kernels."""
    return f"llamaspec is installed without kernels of its own: {reason}"


def build(root: Path, output: Path | None = None, flags: Sequence[str] = ()) -> str:
    """Compile the sources of a checkout into `output` and return its platform; NotBuiltError if that fails.

    `output` appears only when it is complete. If the build fails, there is no `output`, because an earlier
    one would not match the sources.
    """
    output = output or root / LIBRARY
    try:
        compiler = find_compiler()
        platform = platform_of(compiler)
        sets = INSTRUCTION_SETS.get(platform)
        if sets is None:
            raise NotBuiltError(f"they are for {' and '.join(INSTRUCTION_SETS)}, and this is {platform}")
        others = {name for each in INSTRUCTION_SETS.values() for name in each} - sets.keys()
        sources = sorted(path for path in (root / FOLDER).glob("*.cpp") if path.stem not in others)
        if not sources:
            raise NotBuiltError(f"there are no sources in {FOLDER}")
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent, prefix=".build-") as name, _workers() as workers:
            folder, command = Path(name), [*compiler, *FLAGS, *flags]

            def compiled(source: Path) -> str:
                object_file = folder / f"{source.stem}.o"
                _run([*command, *sets.get(source.stem, ()), "-c", str(source), "-o", str(object_file)])
                return str(object_file)

            objects = list(workers.map(compiled, sources))
            unfinished = folder / output.name
            _run([*command, "-shared", *objects, "-o", str(unfinished), "-ldl"])
            unfinished.replace(output)
            return platform
    except NotBuiltError:
        output.unlink(missing_ok=True)
        raise


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler: $CXX, or the first of `COMPILERS` that is installed."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if which(chosen[0]) is None:
            raise NotBuiltError(f"CXX names {chosen[0]}, which is not installed")
        return chosen
    for name in COMPILERS:
        if which(name) is not None:
            return [name]
    raise NotBuiltError(f"there is no C++ compiler ({', '.join(COMPILERS)}, or another in CXX)")


def platform_of(compiler: Sequence[str]) -> str:
    """Return the platform that a compiler builds for, which is another one than this if it cross-compiles."""
    machine, *system = _run([*compiler, "-dumpmachine"]).strip().split("-")
    return f"linux-{machine}" if "linux" in system else sysconfig.get_platform()


def is_current(root: Path) -> bool:
    """Whether a checkout's library is newer than everything that it is made of."""
    library = root / LIBRARY
    parts = [root / "hatch_build.py", *(root / FOLDER).glob("*.[ch]pp")]
    return library.is_file() and all(part.stat().st_mtime < library.stat().st_mtime for part in parts)


def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def _run(command: Sequence[str]) -> str:
    """Run the compiler, show its warnings and return its output; NotBuiltError if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise NotBuiltError(f"{command[0]} does not start: {error.strerror}") from error
    sys.stderr.write(done.stderr)
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = said[0] if said else f"exit code {done.returncode}"
        raise NotBuiltError(f"{command[0]} failed: {reason}")
    return done.stdout


def main() -> int:
    """Build the library as the arguments say; 0 also without a library, which llamaspec does not need."""
    root, arguments = Path(__file__).parent, sys.argv[1:]
    if not arguments and is_current(root):
        return 0
    try:
        build(root, Path(arguments[0]) if arguments else None, arguments[1:])
    except NotBuiltError as reason:
        sys.stderr.write(f"{missing(reason)}\n")
        return 1 if arguments else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
