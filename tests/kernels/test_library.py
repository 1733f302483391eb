"""Loading the kernels: in time or too late, switched off, refused, missing; and who is told."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from command import python
from llamaspec.errors import LlamaspecError
from llamaspec.kernels import AUTO, OFF, VARIABLE, KernelLibrary, Kernels, parse_choice
from llamaspec.llama import runtime

Q4_0, Q8_0 = 2, 8
FACTS = """
import sys
from contextlib import suppress
from pathlib import Path
import llamaspec.kernels as kernels  # `from llamaspec import` would import everything
kernels.library.path = Path(sys.argv[1])
{first}
from llamaspec import LlamaModel, LlamaspecError, ModelOptions, open_pair, demo_target
options = ModelOptions(threads=1, **{options})
with open_pair(demo_target(), demo_target(), ngram=False, target_options=options) as pair:
    with suppress(LlamaspecError):  # it comes too late
        LlamaModel(demo_target(), ModelOptions(threads=1, kernels="off"))
    completion = pair.stream("import os", seed=3, max_tokens=8).run()
print(kernels.library.facts)
print(kernels.library.n_products > 0)
print(repr(completion.text))
"""


def facts(
    library: Path, *, first: str = "", options: str = "{}", variable: str = ""
) -> tuple[str, bool, str]:
    """Return, from a process of its own: the kernels, whether llama.cpp called them, and a text."""
    code = FACTS.format(first=first, options=options)
    answer = python(code, library, env={VARIABLE: variable})
    assert answer.code == 0, answer
    found, is_called, text = answer.stdout.splitlines()
    assert answer.stderr == ""
    return found, is_called == "True", text


@pytest.fixture
def loaded(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> KernelLibrary:
    """The library, loaded as in a process without llama.cpp."""
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    library = KernelLibrary(stand_in)
    library.load()
    return library


def test_llama_cpp_calls_a_library_that_was_loaded_first(called_stand_in: Path) -> None:
    found, is_called, text = facts(called_stand_in)
    assert (found, is_called) == (str(Kernels("avx512", 7)), True)
    off = str(Kernels(reason=f"{VARIABLE} is off"))
    assert facts(called_stand_in, variable="0") == (off, False, text)
    off = str(Kernels(reason="an option switched llamaspec's off"))
    assert facts(called_stand_in, options="{'kernels': 'off'}") == (off, False, text)


def test_too_late_after_llama_cpp(called_stand_in: Path) -> None:
    code = FACTS.format(first="import llama_cpp", options="{}")
    answer = python(code, called_stand_in, env={VARIABLE: ""})
    assert "False" in answer.stdout.splitlines()[1]
    assert answer.stderr.count("RuntimeWarning: llamaspec's kernels stay off: llama_cpp was imported") == 1
    quiet = "import llama_cpp, warnings; warnings.filterwarnings('ignore', message='llamaspec.s kernels')"
    found, is_called, _ = facts(called_stand_in, first=quiet)
    assert "llama_cpp was imported before llamaspec; write `from llamaspec import ...`" in found
    assert not is_called


@pytest.mark.parametrize("first", ["model", "gguf_file", "trial", "options"])
def test_every_module_loads_the_library_before_llama_cpp(stand_in: Path, first: str) -> None:
    code = f"""
import sys
import llamaspec.kernels as kernels
load, early = kernels.KernelLibrary.load, []
kernels.KernelLibrary.load = lambda self: (early.append("llama_cpp" not in sys.modules), load(self))
import llamaspec.llama.{first}
print(early)
"""
    assert python(code, stand_in).stdout == "[True]\n"


def test_who_does_not_want_them_is_not_warned(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = KernelLibrary(stand_in)
    monkeypatch.setitem(sys.modules, "llama_cpp", sys)
    monkeypatch.setenv(VARIABLE, OFF)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.load()
        KernelLibrary(stand_in.with_name("missing.so")).load()
    assert library.facts == Kernels(reason=f"{VARIABLE} is off")


@pytest.mark.parametrize("first", [None, AUTO])
def test_once_on_they_stay_on(loaded: KernelLibrary, first: str | None) -> None:
    """A switch during an evaluation of another model made it hang, or gave logits that were not numbers."""
    assert loaded.facts == Kernels(reason="no model has been opened")
    assert (loaded.covers(Q4_0), loaded.bytes_per_cell(6, 4)) == (False, 0)
    loaded.choose(first, runtime.loaded)
    with pytest.raises(
        LlamaspecError, match=r"^kernels='off' comes too late, .* started with 'auto'; .*=off$"
    ):
        loaded.choose(OFF, runtime.loaded)
    loaded.choose(AUTO, runtime.loaded)
    assert (loaded.facts, loaded.facts.key) == (Kernels("avx512", 7), ["avx512", 7])
    assert (loaded.covers(Q4_0), loaded.covers(Q8_0), loaded.bytes_per_cell(6, 4)) == (True, False, 24)


def test_once_off_they_stay_off(loaded: KernelLibrary) -> None:
    loaded.choose(OFF, runtime.loaded)
    with pytest.raises(LlamaspecError, match=r"^kernels='auto' comes too late, .* started with 'off'"):
        loaded.choose(AUTO, runtime.loaded)
    for same in (OFF, None):
        loaded.choose(same, runtime.loaded)
        assert loaded.facts == Kernels(reason="an option switched llamaspec's off")
    assert (loaded.covers(Q4_0), loaded.facts.key) == (False, [])


def test_any_choice_is_right_for_another_llama_cpp(
    loaded: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_REFUSES", "1")
    for choice in (AUTO, OFF, AUTO):
        loaded.choose(choice, runtime.loaded)
        reason = "llama.cpp is another one; install an older one"
        assert loaded.facts == Kernels(reason=reason, is_misfit=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_loaded_copy_of_a_library_is_found() -> None:
    """llama-cpp-python's folder may have three copies of each, and only one computes."""
    found = runtime.loaded("ggml-cpu")
    assert found is not None
    mapped = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "ggml-cpu" in line
    }
    assert mapped == {str(Path(found._name).resolve())}


def test_a_build_of_llama_cpp_without_such_libraries(loaded: KernelLibrary) -> None:
    assert runtime.loaded("ggml-cpu") is not None
    assert runtime.loaded("ggml-nothing") is None
    loaded.choose(AUTO, lambda name: None if name == "ggml-cpu" else runtime.loaded(name))
    (found,) = re.findall(
        r"^llama.cpp's kernels only: this build of llama.cpp has no libggml-cpu; pip install '(.*)'$",
        loaded.facts.describe(),
    )
    assert Requirement(found).name == "llama-cpp-python"


def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "damaged.so"
    for content in (b"", Path(ctypes.__file__).read_bytes()):
        path.write_bytes(content)
        library = KernelLibrary(path)
        library.load()
        library.choose(AUTO, runtime.loaded)
        assert "cannot be loaded" in library.facts.describe()
        assert library.facts.describe().endswith("; install llamaspec again")


def test_a_library_that_was_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    library = KernelLibrary(tmp_path / "missing.so")
    monkeypatch.setattr(sys, "platform", "linux")
    library.load()
    library.choose(AUTO, runtime.loaded)
    is_possible = "not built; install a C++ compiler" in library.facts.describe()
    assert is_possible == (os.uname().machine in ("x86_64", "aarch64"))
    monkeypatch.setattr(sys, "platform", "darwin")
    library.load()
    assert library.facts.describe() == (
        "llama.cpp's kernels only: llamaspec's are for Linux on x86-64 and arm64 processors"
    )


@pytest.mark.parametrize("text", ["off", "OFF", "0", "no", "false", " off "])
def test_words_for_off(text: str) -> None:
    assert parse_choice(text) == "off"


@pytest.mark.parametrize("text", ["on", "1", "yes", "avx2", "\x1b"])
def test_a_wrong_word_in_the_environment(stand_in: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A program is told when it opens a model, and not when it imports llamaspec."""
    monkeypatch.setenv(VARIABLE, text)
    library = KernelLibrary(stand_in)
    library.load()
    with pytest.raises(LlamaspecError) as caught:
        library.choose(AUTO, runtime.loaded)
    assert str(caught.value) == (
        f"the environment variable {VARIABLE} cannot be used: kernels must be auto or off, got {text!r}"
    )
