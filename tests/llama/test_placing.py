"""What files need, and how options say what goes where."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from command import PROMPT, expected, invoke, naming
from llamaspec import LlamaModel, ModelOptions, open_pair
from llamaspec.llama import placing, runtime
from llamaspec.llama.devices import Device, gpus_among
from llamaspec.llama.placement import MARGIN_BYTES, Pace, Paces
from llamaspec.llama.placing import computing_devices, model_bytes, place_models
from llamaspec.measure import examine
from llamaspec.measure.pair_files import ModelFile, PairFiles, place_files
from model_store import ModelStore
from tiny_models import Recipe

STEEP = Paces(Pace(1e-9, 0.0, 0.3), Pace(1e-10, 0.0, 0.05))  # also small models are faster on the GPU
CPU = Device("CPU", "a processor", "CPU", 0, 0)
INTEGRATED = Device("Vulkan1", "part of a processor", "integrated GPU", 2**30, 2**31)
OPTIONS = ModelOptions(n_ctx=256)


def card(room: int, name: str = "CUDA0") -> Device:
    return Device(name, "a card", "GPU", room + MARGIN_BYTES, 2**40)


def sizes(path: Path) -> dict[str, int]:
    return {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("n_per_file", [0, 5])
def test_bytes_of_layers_are_those_of_the_file(store: ModelStore, n_per_file: int) -> None:
    """Also of a file in several parts; tensors begin at multiples of 32 bytes."""
    whole = store.path("llama", Recipe(dtype="q8_0", n_layers=3))
    found = model_bytes(
        store.path("llama", Recipe(dtype="q8_0", n_layers=3, tensors_per_file=n_per_file)), OPTIONS, 0
    )
    assert found is not None
    assert len(found.layers) == 4
    for i, name in enumerate(("blk.0.", "blk.1.", "blk.2.", "output")):
        n_bytes = sum(n for tensor, n in sizes(whole).items() if tensor.startswith(name))
        assert n_bytes <= found.layers[i] < n_bytes + 32 * 12
    assert found.n_fixed is None
    assert found.read_share == 1.0


def test_without_an_output_the_embedding_serves(store: ModelStore) -> None:
    path = store.path("llama", Recipe(tied=True))
    found = model_bytes(path, OPTIONS, 0)
    assert found is not None
    assert found.layers[-1] >= sizes(path)["token_embd.weight"] > 0


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2", "jamba"])
def test_the_kv_cache_is_what_llama_cpp_keeps(store: ModelStore, kind: str) -> None:
    """Also where only some layers have keys and values, of which the file has a list."""
    path = store.path(kind, Recipe(n_layers=4, n_heads=4, n_kv_heads=2))
    options = replace(OPTIONS, cache_type_v="f32")
    found = model_bytes(path, options, 0)
    assert found is not None
    with LlamaModel(path, options) as model:
        kept = model.try_memory().bytes_per_token * 256
    assert found.cache * (len(found.layers) - 1) == pytest.approx(kept, rel=0.2)


@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_the_compute_buffer_has_room(
    demo_files: tuple[Path, Path], flash_attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ModelOptions(n_ctx=1024, flash_attention=flash_attention)
    found = model_bytes(demo_files[0], options, 0)
    runtime.set_verbose(True)
    try:
        LlamaModel(demo_files[0], options).close()
    finally:
        runtime.set_verbose(False)
    said = re.search(r"compute buffer size = +([0-9.]+) MiB", capsys.readouterr().err)
    assert found is not None
    assert said is not None
    assert float(said[1]) * 2**20 <= found.compute + 2**20 <= float(said[1]) * 2**20 + (68 << 20)


def test_the_default_context_follows_the_memory_of_the_gpu(store: ModelStore) -> None:
    path = store.path("llama", Recipe(n_context=1 << 16))
    small, large, served = (
        model_bytes(path, options, room)
        for options, room in (
            (ModelOptions(), 0),
            (ModelOptions(), 1 << 40),
            (ModelOptions(n_ctx=256, n_cells=1 << 14), 0),
        )
    )
    assert small is not None
    assert large is not None
    assert served is not None
    assert (large.cache, served.cache) == (16 * small.cache, 4 * small.cache)


def test_a_file_that_is_no_model_places_nothing(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    assert model_bytes(path, OPTIONS, 0) is None
    assert model_bytes(tmp_path / "none.gguf", OPTIONS, 0) is None
    assert place_models((path, OPTIONS), ((), OPTIONS), devices=(card(1 << 30),)).placement is None


def needed(*paths: Path) -> int:
    """Bytes of whole models on one card."""
    found = [model_bytes(path, OPTIONS, 0) for path in paths]
    return sum(each.offloaded(len(each.layers)) + each.compute for each in found if each is not None)


def test_options_say_what_goes_where(store: ModelStore, draft_file: Path) -> None:
    target_file = store.path("llama", Recipe(dtype="q8_0", n_layers=20))

    def placed(room: int, *others: Device) -> tuple[ModelOptions, ModelOptions]:
        devices = (CPU, card(room), *others)
        found = place_models(
            (target_file, OPTIONS), ([draft_file], OPTIONS), devices=devices, main_bytes=1 << 40, paces=STEEP
        )
        assert found.placement is not None
        return found.target, found.draft

    everything, nothing = (OPTIONS, OPTIONS), (replace(OPTIONS, devices=()),) * 2
    all_of_it = needed(target_file, draft_file)
    assert placed(all_of_it) == placed(all_of_it, INTEGRATED) == everything
    assert placed(0) == placed(0, INTEGRATED) == nothing
    target, draft = placed(all_of_it - 1)
    assert (target, draft) == (replace(OPTIONS, gpu_layers=20), OPTIONS)
    assert placed(needed(draft_file)) == (replace(OPTIONS, devices=()), OPTIONS)


def test_integrated_gpus_count_where_there_are_no_others() -> None:
    assert gpus_among((CPU, INTEGRATED)) == (INTEGRATED,)
    assert INTEGRATED.is_unified
    assert replace(card(0), name="MTL0").is_unified
    assert not card(0).is_unified


@pytest.mark.parametrize(
    "given",
    [
        {"devices": ("CUDA0",)},
        {"tensor_split": (1.0, 2.0)},
        {"workers": ("a:1",)},
    ],
)
def test_who_names_devices_decides(target_file: Path, draft_file: Path, given: dict[str, Any]) -> None:
    options = replace(OPTIONS, **given)
    found = place_models((target_file, options), ([draft_file], OPTIONS), devices=(card(0),))
    assert (found.target, found.draft, found.placement) == (options, OPTIONS, None)


def test_what_is_given_of_one_model_stays(target_file: Path, draft_file: Path) -> None:
    fixed = replace(OPTIONS, gpu_layers=2)
    found = place_models((target_file, fixed), ([draft_file], OPTIONS), devices=(card(0),))
    assert (found.target, found.draft) == (fixed, replace(OPTIONS, devices=()))
    found = place_models((target_file, OPTIONS), ([draft_file], fixed), devices=(card(0),))
    assert (found.target, found.draft) == (replace(OPTIONS, devices=()), fixed)
    both = place_models(
        (target_file, fixed), ([draft_file], replace(OPTIONS, devices=())), devices=(card(0),)
    )
    assert both.placement is None
    assert place_models((target_file, fixed), ((), OPTIONS), devices=(card(0),)).placement is None


@pytest.mark.parametrize("is_roomy", [True, False])
def test_drafts_of_drafts_stay_together(target_file: Path, draft_file: Path, *, is_roomy: bool) -> None:
    room = (
        needed(target_file, draft_file, draft_file) + 2**20
        if is_roomy
        else needed(draft_file, draft_file) - 1
    )
    found = place_models(
        (target_file, OPTIONS), ([draft_file, draft_file], OPTIONS), devices=(card(room),), paces=STEEP
    )
    assert found.draft == (OPTIONS if is_roomy else replace(OPTIONS, devices=()))


def test_layers_of_drafts_that_are_given_count_together(target_file: Path, store: ModelStore) -> None:
    """Three of four layers of one, and both of the other."""
    drafts = [store.path("llama", Recipe(dtype="q8_0", n_layers=n)) for n in (3, 1)]
    given = replace(OPTIONS, gpu_layers=3)
    found = place_models((target_file, OPTIONS), (drafts, given), devices=(card(1 << 40),))
    assert found.placement is not None
    assert (found.placement.draft_layers, found.draft) == (5, given)


def test_main_memory_is_this_machines_unless_told(
    target_file: Path, draft_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = (target_file, OPTIONS), ([draft_file], OPTIONS)
    for n_free, told, is_roomy in ((1 << 40, None, True), (9, None, False), (9, 1 << 40, True)):
        monkeypatch.setattr(runtime, "available_bytes", lambda n_free=n_free: n_free)
        found = place_models(*models, devices=(card(0),), main_bytes=told)
        assert found.placement is not None
        assert found.placement.is_roomy == is_roomy


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp here has no GPU and ignores how many layers go there; what is said and set is seen."""
    monkeypatch.setattr(placing, "find_devices", lambda: (CPU, card(1 << 10)))


@pytest.mark.usefixtures("small_card")
def test_files_keep_the_reason(target_file: Path, draft_file: Path) -> None:
    files = PairFiles(
        ModelFile(target_file, OPTIONS), ModelFile(draft_file, OPTIONS), (ModelFile(draft_file, OPTIONS),)
    )
    placed = place_files(files)
    assert placed.placement is not None
    assert [model.options.devices for model in (placed.target, *placed.draft_models)] == [()] * 3
    alone = place_files(PairFiles(ModelFile(target_file, OPTIONS), None))
    assert (alone.target.options.devices, alone.draft) == ((), None)


@pytest.mark.usefixtures("small_card")
def test_it_holds_for_programs_and_commands(target_file: Path, draft_file: Path) -> None:
    models = [target_file, draft_file]
    with open_pair(*models) as pair:
        assert pair.draft is not None
        assert pair.target.options.devices == pair.draft.options.devices == ()
    with open_pair(*models, placement=False) as pair:
        assert pair.target.options.devices is None
    answer = invoke("generate", *naming(models), "--seed", "3", "-n", "20", PROMPT)
    assert answer.stdout.rstrip("\n") == expected(models, seed=3, n=20).text.rstrip("\n")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "CUDA0 has 0.5 GiB free of "),
        (["--placement", "off"], "as the options say"),
        (["-ngl", "3", "--draft-gpu-layers", "3"], "as the options say"),
    ],
)
def test_doctor_explains_it(
    target_file: Path, draft_file: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], told: str
) -> None:
    devices = (CPU, card(1 << 10))
    monkeypatch.setattr(placing, "find_devices", lambda: devices)
    monkeypatch.setattr(examine, "find_devices", lambda: devices)
    monkeypatch.setattr(runtime, "can_offload", lambda: True)
    answer = invoke("doctor", *naming([target_file, draft_file]), *options, "--json")
    (found,) = (finding for finding in answer.json["findings"] if finding["topic"] == "placement")
    assert found["text"].startswith(told)
    assert found["level"] == "ok"


def test_without_a_gpu_everything_is_on_the_cpu(target_file: Path) -> None:
    if placing.has_gpus():
        pytest.skip("there is one")
    answer = invoke("doctor", "--target", target_file, "--json")
    (found,) = (finding for finding in answer.json["findings"] if finding["topic"] == "placement")
    assert found["text"] == "everything on the CPU, there is no GPU to use"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"CUDA0", "CUDA1"}),
        ({"gpu_layers": 5}, {"CUDA0", "CUDA1"}),
        ({"gpu_layers": 4}, {"CUDA0", "CUDA1", "CPU"}),  # the output and three of four layers
        ({"gpu_layers": 0}, {"CPU"}),
        ({"devices": ()}, {"CPU"}),
        ({"devices": ("CUDA1",)}, {"CUDA1"}),
        ({"devices": ("CUDA1",), "gpu_layers": 1}, {"CUDA1", "CPU"}),
    ],
)
def test_what_a_model_computes_on(
    options: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "find_devices", lambda: (CPU, card(0), card(0, "CUDA1"), INTEGRATED))
    assert computing_devices(ModelOptions(**options), 4) == expected
    monkeypatch.setattr(placing, "find_devices", lambda: (CPU,))
    assert computing_devices(ModelOptions(gpu_layers=3), 4) == {"CPU"}
