"""Memory that threads have freed serves other threads: counted in what glibc tells of its arenas."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

# Threads that live at once and allocate, each of which would have an arena of its own.
THREADS = """
import ctypes, re, sys, threading
from llamaspec.serve.arenas import share_one_arena
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.fopen.restype = [ctypes.c_void_p], ctypes.c_void_p
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
share_one_arena()
together = threading.Barrier(4)
def work():
    together.wait()
    libc.free(libc.malloc(5000))
    together.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
print(len(re.findall("<heap nr", open(sys.argv[1]).read())))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no arenas")
@pytest.mark.parametrize(("wanted", "expected"), [({}, 1), ({"MALLOC_ARENA_MAX": "2"}, 2)])
def test_threads_share_one_arena_unless_told_otherwise(
    tmp_path: Path, wanted: dict[str, str], expected: int
) -> None:
    """Schemas are compiled in threads; the server grew by what lay free in the arenas of some."""
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", THREADS, str(tmp_path / "arenas.xml")]
    done = subprocess.run(
        command, env={**environment, **wanted}, capture_output=True, text=True, timeout=300, check=True
    )
    assert int(done.stdout) == expected
