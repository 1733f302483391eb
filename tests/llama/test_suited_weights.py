"""Which files our kernels take, and what that means for repacking, for keys of caches and for the process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as lib

from llamaspec import LlamaModel, ModelOptions
from llamaspec.kernels import AUTO, OFF, VARIABLE, Kernels
from llamaspec.llama import runtime, trial
from llamaspec.llama.gguf_file import GgufFile, TensorFacts, multiplied_types
from llamaspec.llama.prefix_folder import PrefixFolder
from llamaspec.llama.trial import ensure_tried
from llamaspec.llama.weights import Weights, suits_kernels
from llamaspec.plan import make_plan
from model_store import ModelStore, OpenModel
from tiny_models import Recipe

F32, F16, Q4_0, Q5_0, Q8_0 = 0, 1, 2, 6, 8
CPU = ModelOptions(threads=1, gpu_layers=0)


@dataclass
class FakeLibrary:
    """Kernels for some types."""

    types: set[int] = field(default_factory=set)
    facts: Kernels = field(default_factory=lambda: Kernels("avx2", 3))
    choices: list[str | None] = field(default_factory=list)

    def covers(self, ggml_type: int) -> bool:
        return ggml_type in self.types

    def choose(self, choice: str | None, _find: object) -> None:
        self.choices.append(choice)

    def bytes_per_cell(self, _heads: int, _n_threads: int) -> int:
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    for module in ("runtime", "weights", "trial", "context"):
        monkeypatch.setattr(f"llamaspec.llama.{module}.library", fake)
    return fake


@pytest.fixture
def repacked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether llama.cpp could repack the weights of each file that was loaded since."""
    load, seen = lib.llama_model_load_from_file, list[bool]()

    def loading(path: bytes, parameters: Any) -> Any:
        seen.append(parameters.use_extra_bufts)
        return load(path, parameters)

    monkeypatch.setattr(lib, "llama_model_load_from_file", loading)
    monkeypatch.setattr(runtime, "repacking_is_safe", lambda: True)
    return seen


def file(**tensors: tuple[int, int]) -> GgufFile:
    """Return a file with these tensors: dimensions and type by the name, with __ for a point."""
    named = {name.replace("__", "."): TensorFacts((1,) * n, kind) for name, (n, kind) in tensors.items()}
    return GgufFile(tensors=named)


TABLE = [
    (file(blk__0__attn_q__weight=(2, Q4_0), blk__0__ffn_up_exps__weight=(3, Q8_0)), {Q4_0, Q8_0}),
    (file(token_embd__weight=(2, Q5_0)), {Q5_0}),  # the output matrix, too
    (file(token_embd__weight=(2, Q5_0), output__weight=(2, Q8_0)), {Q8_0}),
    (file(output_norm__weight=(1, F32), blk__0__attn_q__bias=(2, F32), blk__0__x__weight=(4, F16)), set()),
    (file(position_embd__weight=(2, F16), token_types__weight=(2, F16)), set()),
    (file(per_layer_token_embd__weight=(2, Q5_0), per_layer_model_proj__weight=(2, F16)), {F16}),
    (file(blk__3__ssm_conv1d__weight=(2, F32), blk__3__ssm_in__weight=(2, Q8_0)), {Q8_0}),
    (file(blk__3__shortconv__conv__weight=(2, F32), blk__3__shortconv__in_proj__weight=(2, Q8_0)), {Q8_0}),
    (file(blk__0__ffn_gate_inp__weight=(2, F32)), {F32}),
]


@pytest.mark.parametrize(("found", "types"), TABLE)
def test_the_types_of_the_matrices_that_are_multiplied_with(found: GgufFile, types: set[int]) -> None:
    assert multiplied_types([found]) == types


def test_the_output_matrix_may_be_in_another_part() -> None:
    parts = [file(token_embd__weight=(2, Q5_0)), file(output__weight=(2, Q8_0))]
    assert multiplied_types(parts) == {Q8_0}
    assert multiplied_types(reversed(parts)) == {Q8_0}


@pytest.mark.parametrize(
    ("covered", "types", "suits"),
    [
        ({Q4_0}, {Q4_0}, True),
        ({Q4_0, F32}, {Q4_0, F32}, True),  # the router of a mixture of experts
        ({Q4_0}, {Q4_0, Q8_0}, False),
        (set(), {Q4_0}, False),
        ({Q4_0}, {F32}, False),
        ({Q4_0}, set(), False),
    ],
)
def test_kernels_suit_a_file_if_they_take_all_of_its_types(
    library: FakeLibrary, covered: set[int], types: set[int], suits: bool
) -> None:
    library.types = covered
    tensors = {f"blk.{kind}.attn_q.weight": TensorFacts((1, 1), kind) for kind in types}
    assert suits_kernels([GgufFile(tensors=tensors)]) == suits


@pytest.mark.parametrize("per_file", [0, 4])
def test_weights_that_our_kernels_take_stay_as_they_are(
    store: ModelStore, library: FakeLibrary, repacked: list[bool], per_file: int
) -> None:
    recipe = Recipe(dtype="q4_0", tensors_per_file=per_file)
    path = store.path("llama", recipe)
    for types, options, expected in (
        (set[int](), CPU, True),
        ({Q8_0}, CPU, True),
        ({Q4_0}, CPU, False),
        (set[int](), ModelOptions(threads=1, gpu_layers=0, repack=False), False),
    ):
        library.types = types
        weights = Weights(path, options)
        assert repacked.pop() == weights.may_be_repacked == expected
        assert weights.kernels == ("llamaspec's AVX2 kernels" if Q4_0 in types else "llama.cpp's kernels")
        weights.close()


@pytest.mark.parametrize("choice", [AUTO, OFF])
def test_a_model_chooses_kernels_for_the_process(
    store: ModelStore, library: FakeLibrary, choice: str
) -> None:
    path, options = store.path(), ModelOptions(threads=1, gpu_layers=0, kernels=choice)
    with LlamaModel(path, options):
        assert {*library.choices} - {None} == {choice}
    draft = make_plan(path, path, target_options=options).draft
    assert draft is not None
    assert draft.options.kernels == choice


def test_what_is_kept_belongs_to_the_kernels(opened: OpenModel, library: FakeLibrary, tmp_path: Path) -> None:
    """Other kernels round differently and have other costs."""
    model, folder = opened("llama"), PrefixFolder(tmp_path, 1 << 20)
    files, keys = set(), []
    for facts in (Kernels("avx2", 3), Kernels("avx2", 4), Kernels("avx512", 3), Kernels(reason="old")):
        library.facts = facts
        files.add(folder.folder_of(model))
        keys.append(ModelOptions().placement)
    assert len(files) == 4
    assert keys == [["avx2", 3], ["avx2", 4], ["avx512", 3], []]
    library.facts = Kernels("avx2", 3)
    assert ModelOptions(kernels=OFF).placement == []
    assert ModelOptions(devices=("CPU",)).placement == [("CPU",), (), (), "avx2", 3]


@pytest.mark.parametrize("facts", [Kernels("avx2", 3), Kernels(reason="off")])
def test_a_trial_has_the_kernels_of_its_process(
    store: ModelStore, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: Kernels
) -> None:
    given: list[str] = []

    def child(*arguments: Any) -> None:
        given.append(arguments[-1][VARIABLE])

    monkeypatch.setenv("LLAMASPEC_TRUST_FILES", "0")
    monkeypatch.setenv("LLAMASPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("llamaspec.llama.child.run_child", child)
    monkeypatch.setattr(trial, "check_outcome", lambda *_: None)
    library.facts = facts
    ensure_tried(store.path("llama"))
    assert given == [OFF if facts.level is None else AUTO]
