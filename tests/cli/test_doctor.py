"""`llamaspec doctor`: its findings on machines and models, sound and faulty."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from command import Answer, invoke, naming, run
from llamaspec import LlamaModel, ModelOptions
from llamaspec.kernels import Kernels
from llamaspec.llama import runtime
from llamaspec.llama.devices import Device, find_devices
from llamaspec.llama.gguf_file import GgufFile, active_parameters
from llamaspec.llama.memory_sizes import MemoryFacts
from llamaspec.llama.weights import ModelFacts
from llamaspec.measure.doctor import (
    N_DRAFT,
    Examined,
    acceptance_finding,
    as_size,
    machine_findings,
    model_findings,
    pace_finding,
    pair_findings,
    room_finding,
    thread_finding,
)
from llamaspec.measure.findings import Finding
from llamaspec.measure.machine import MachineFacts
from llamaspec.measure.probe import Probe, WidthTiming
from llamaspec.measure.turns import Spread
from llamaspec.pair import Pair
from model_store import ModelStore, OpenModel
from tiny_models import WINDOW, Recipe, truncated
from tiny_vocabulary import BYTES
from vocabularies import FakeVocabulary

CPU = Device("CPU", "a processor", "CPU", 0, 0)
GPU = Device("CUDA0", "a card", "GPU", 2**30, 2**31)
OUR_KERNELS = Kernels(reason="LLAMASPEC_KERNELS is off")
MACHINE = MachineFacts("linux", "llama.cpp", (CPU,), False, False, True, OUR_KERNELS, 2**30, 4, 8)
FACTS = ModelFacts("llama", 7 * 10**9, None, 2**29, None, 0.0, keeps_states=False, keeps_positions=True)
MEMORY = MemoryFacts(bytes_per_token=1024.0, fixed_bytes=0, n_right=18, n_kept=18)


def examined(
    role: str = "target",
    *,
    facts: ModelFacts = FACTS,
    memory: MemoryFacts = MEMORY,
    flash_attention: bool | None = True,
    context_size: int = 1024,
    options: ModelOptions | None = None,
) -> Examined:
    """A model that is not loaded."""
    model = SimpleNamespace(
        path=Path("big.gguf"),
        description="llama 7B Q4_0",
        facts=lambda: facts,
        options=options or ModelOptions(),
        context_size=context_size,
        trained_context_size=4096,
    )
    return Examined(role, cast(LlamaModel, model), memory, flash_attention)


def timed(target: float, draft: float) -> Probe:
    """Return a probe with these seconds per token."""
    single, step = (Spread(seconds, seconds, seconds) for seconds in (target, draft))
    return Probe((64,), (), (WidthTiming(1, (single,), 0.0),), step)


def listed(answer: Answer) -> dict[str, dict[str, Any]]:
    """Return the findings by topic."""
    return {finding["topic"]: finding for finding in answer.json["findings"]}


def only(findings: list[Finding], topic: str) -> Finding:
    (found,) = (finding for finding in findings if finding.topic == topic)
    return found


def test_a_sound_pair(target_file: Path, draft_file: Path) -> None:
    answer = invoke("doctor", *naming([target_file, draft_file]), "--json")
    found = listed(answer)
    assert answer.code == answer.json["problems"] == 0
    assert answer.json["warnings"] == sum(finding["level"] == "warning" for finding in found.values())
    assert all((finding["level"] == "ok") == (finding["remedy"] is None) for finding in found.values())
    assert "llama 0.11M Q8_0" in found["target"]["text"]
    assert found["target context"]["text"] == "512 tokens, trained on 512"
    assert found["target rollback"]["text"].endswith("rejected draft tokens are removed from the cache")
    assert found["vocabulary"]["text"] == f"the same: {len(BYTES)} tokens"
    assert found["special tokens"]["level"] == "ok"
    assert found["draft KV types"]["text"] == "keys f16, values f16"
    assert "faster" in found["draft cost"]["text"]


def test_for_people_one_aligned_line_each(target_file: Path, draft_file: Path) -> None:
    answer = invoke("doctor", *naming([target_file, draft_file]))
    lines = answer.stdout.splitlines()
    assert "\x1b" not in answer.stdout
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    start = lines[0].index("llama-cpp-python")
    assert all(line[start - 2 : start] == "  " and line[start] != " " for line in lines)


def test_without_a_target_the_embedded_pair_is_examined(demo_files: tuple[Path, Path]) -> None:
    answer = invoke("doctor", "--threads", "1", "--json")
    assert answer.code == 0
    assert answer.complaints == ["llamaspec: no --target given, using the small embedded pair"]
    assert "target.gguf" in listed(answer)["target"]["text"]


def test_without_a_draft(target_file: Path) -> None:
    found = listed(invoke("doctor", *naming([target_file]), "--no-ngram", "--json"))
    assert found["draft"]["level"] == "warning"
    assert "vocabulary" not in found


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("gemma3", f"some layers see the last {WINDOW} positions; rejected draft tokens are removed from"),
        ("jamba", "the model keeps states; rejected draft tokens are rolled back from a snapshot"),
        ("lfm2", "the model keeps states; rejected draft tokens are rolled back to an earlier"),
    ],
)
def test_memory_kinds(store: ModelStore, kind: str, says: str) -> None:
    found = listed(invoke("doctor", *naming([store.path(kind)]), "--json"))["target rollback"]
    assert (found["level"], found["text"][: len(says)]) == ("ok", says)


@pytest.mark.parametrize("n_ctx", [2, 4, 8])
def test_a_small_context(target_file: Path, n_ctx: int) -> None:
    """The trial of the memory needs 20 tokens, if there is room for them."""
    answer = invoke("doctor", "--target", target_file, "-c", str(n_ctx))
    assert (answer.code, "internal error" in answer.stderr) == (0, False)


@pytest.mark.parametrize("n_trained", [4, 8])
def test_a_file_with_a_small_context(store: ModelStore, n_trained: int) -> None:
    """With a draft, alone, and with another vocabulary, whose acceptance is tried."""
    target = store.path("llama", Recipe(n_context=n_trained))
    other = store.path("llama", Recipe(n_context=n_trained, shuffled=1))
    for models in ([target], [target, target], [target, other]):
        answer = invoke("doctor", *naming(models), "--json")
        assert (answer.code, "internal error" in answer.stderr) == (0, False), answer.stdout
        assert listed(answer)["target context"]["text"].startswith(f"{n_trained} tokens")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "jamba", "lfm2"])
def test_the_trial_leaves_no_trace(opened: OpenModel, kind: str) -> None:
    model = opened(kind)
    first = model.try_memory()
    assert model.try_memory() == first
    assert first.n_repeated in range(first.n_right + 1)


@pytest.mark.parametrize("cache", ["f32", "f16", "q8_0"])
def test_memory_is_measured(opened: OpenModel, cache: str) -> None:
    """The KV cache has keys and values of 2 layers with 64 units for each token; the rest is small."""
    options = {"cache_type_k": cache, "cache_type_v": cache}
    exact = 2 * 2 * 64 * {"f32": 4, "f16": 2, "q8_0": 34 / 32}[cache]
    assert exact <= opened("llama", **options).try_memory().bytes_per_token <= exact + 32


def test_states_have_one_size(opened: OpenModel) -> None:
    memory = opened("mamba").try_memory()
    assert memory.bytes_per_token == 0
    assert memory.size(10) == memory.size(10_000) > 2 * 16 * 128 * 4


def test_another_vocabulary_is_tried(
    store: ModelStore, target_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a model drafts for itself, all tokens are accepted, so the highest limit is met."""
    monkeypatch.setattr("llamaspec.measure.doctor.FEW", 1.0)
    other = store.path("llama", Recipe(dtype="q8_0", shuffled=1))
    answer = invoke("doctor", *naming([target_file, other]), "--json")
    found = listed(answer)
    assert (answer.code, answer.json["problems"]) == (0, 0)
    shared = f"both have {len(BYTES)} of the target's {len(BYTES)} tokens, covering about 100% of typical"
    assert shared in found["vocabulary"]["text"]
    assert found["vocabulary"]["text"].endswith("the draft draws from the shared tokens")
    assert (found["acceptance"]["level"], found["acceptance"]["text"][:5]) == ("ok", "100% ")
    assert "draft cost" in found


def test_a_draft_that_agrees_with_nothing(store: ModelStore, target_file: Path) -> None:
    other = store.path("llama", Recipe(seed=9, shuffled=1))
    found = listed(invoke("doctor", *naming([target_file, other]), "--json"))
    assert found["acceptance"]["level"] == "warning"  # two random models
    assert "accepted in a short trial" in found["acceptance"]["text"]


def test_the_trial_of_a_very_slow_target_is_short(opened: OpenModel) -> None:
    target = opened("llama", Recipe(dtype="q8_0"))
    draft = opened("llama", Recipe(dtype="q8_0", shuffled=1))
    n_verified = []
    for clock in (itertools.count(step=10.0).__next__, lambda: 0.0):
        with Pair(target, draft, clock=clock) as pair:
            n_verified.append(int(acceptance_finding(pair).text.split()[2]))
    assert n_verified[0] <= N_DRAFT < n_verified[1]


def test_a_draft_with_too_little_in_common(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is found before a model is tried, so a file with only a vocabulary will do as the draft."""
    monkeypatch.setattr("llamaspec.sequence_drafters.difference", lambda *_: "token 0")
    draft = cast(LlamaModel, SimpleNamespace(vocabulary=FakeVocabulary([b"only", b"words"])))
    (found,) = pair_findings(opened("llama"), draft, None, lambda label: nullcontext(lambda done: None))
    assert (found.level, found.topic) == ("problem", "vocabulary")
    assert found.text == "the draft's vocabulary has only 0% of the target's tokens in typical text"
    assert found.remedy == "choose a draft of the target's family"


def test_special_tokens_that_differ(store: ModelStore, target_file: Path) -> None:
    other = store.path("llama", Recipe(vocabulary=replace(BYTES, eos=BYTES.bos)))
    found = listed(invoke("doctor", *naming([target_file, other]), "--json"))["special tokens"]
    assert found["level"] == "warning"
    assert f"token {BYTES.eos} in the target and token {BYTES.bos} in the draft" in found["text"]


@pytest.mark.parametrize("place", ["target", "draft"])
@pytest.mark.parametrize(
    ("name", "remedy"), [("missing", "check the path"), ("cut", "download or convert it again")]
)
def test_a_model_that_cannot_be_loaded(
    target_file: Path, tmp_path: Path, place: str, name: str, remedy: str
) -> None:
    bad = tmp_path / "missing.gguf" if name == "missing" else truncated(target_file, tmp_path / "cut.gguf")
    models = [bad, target_file] if place == "target" else [target_file, bad]
    answer = invoke("doctor", *naming(models), "--json")
    found = listed(answer)
    assert (answer.code, answer.json["problems"]) == (1, 1)
    assert (found[place]["level"], found[place]["remedy"]) == ("problem", remedy)
    assert found["draft" if place == "target" else "target"]["level"] == "ok"
    assert "vocabulary" not in found


def test_options_that_surprise(target_file: Path, draft_file: Path) -> None:
    options = ["--n-ctx", "1024", "--draft-ctx", "512", "--draft-cache-type-k", "q4_0"]
    found = listed(invoke("doctor", *naming([target_file, draft_file]), *options, "--json"))
    assert found["target context"]["remedy"] == "use 512 tokens or fewer (--n-ctx)"
    assert found["draft context"]["level"] == "ok"
    assert found["draft KV types"]["level"] == "warning"
    assert found["target KV types"]["level"] == "ok"


@pytest.mark.parametrize(
    ("variable", "options", "says"),
    [
        ("off", ["--kernels", "auto"], "llama.cpp's kernels only: LLAMASPEC_KERNELS is off"),
        ("", ["--kernels", "off"], "llama.cpp's kernels only: an option switched llamaspec's off"),
    ],
)
def test_kernels_that_are_switched_off(
    target_file: Path, variable: str, options: list[str], says: str
) -> None:
    command = ["doctor", *naming([target_file]), *options, "--json"]
    found = listed(run(*command, env={"LLAMASPEC_KERNELS": variable}))
    if runtime.kernels().level is not None:
        assert (found["kernels"]["text"], found["kernels"]["remedy"]) == (says, None)
    assert found["kernels"]["text"].startswith("llama.cpp's kernels only: ")


def test_a_model_that_the_kernels_do_not_take(opened: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaspec.llama.weights.suits_kernels", lambda _parts: False)
    machine = replace(MACHINE, kernels=Kernels("avx2", 1))
    model = opened("llama", threads=1)
    found = list(model_findings(machine, Examined("draft", model, MEMORY, None)))
    text = "llama.cpp's kernels: llamaspec's do not take all types of its weights"
    assert only(found, "draft kernels") == Finding("ok", "draft kernels", text)


def test_devices() -> None:
    devices = find_devices()
    assert any(device.kind == "CPU" for device in devices)
    assert all(device.name and device.description for device in devices)
    (memory,) = (device.total_bytes for device in devices if device.name == "CPU")
    assert memory == pytest.approx(psutil.virtual_memory().total, rel=0.2)


@pytest.mark.parametrize(
    ("changes", "topic", "remedy"),
    [
        ({}, "devices", None),
        ({"system": "darwin"}, "devices", "GGML_METAL"),
        ({"system": "darwin", "can_offload": True}, "devices", None),
        ({"has_nvidia": True}, "devices", "GGML_CUDA"),
        ({"has_nvidia": True, "can_offload": True, "devices": (GPU, CPU)}, "devices", None),
        ({}, "backend", None),
        ({"repacking_is_safe": False}, "backend", "-mno-amx-tile"),
        ({}, "kernels", None),
        ({"kernels": Kernels("avx2", 1)}, "kernels", None),
        ({"kernels": Kernels(reason="they were not built; install a compiler")}, "kernels", "install a comp"),
        (
            {"kernels": Kernels(reason="this is ggml 0.26", is_misfit=True)},
            "kernels",
            "pip install 'llama-cpp",
        ),
    ],
)
def test_machines(changes: dict[str, Any], topic: str, remedy: str | None) -> None:
    found = only(list(machine_findings(replace(MACHINE, **changes))), topic)
    assert (found.level == "ok") == (remedy is None)
    assert found.remedy is None if remedy is None else remedy in (found.remedy or "")


@pytest.mark.parametrize(("asked", "level"), [(None, "ok"), (4, "ok"), (5, "warning")])
def test_threads(asked: int | None, level: str) -> None:
    assert thread_finding(MACHINE, "target", asked).level == level


@pytest.mark.parametrize(("n_taken", "is_busy"), [(0.0, False), (4.2, False), (4.6, True)])
def test_other_programs(n_taken: float, is_busy: bool) -> None:
    """Four cores of eight hardware threads."""
    found = list(machine_findings(replace(MACHINE, n_taken=n_taken)))[3:]
    assert bool(found) == is_busy
    assert not is_busy or "4.6 of 8" in found[0].text


@pytest.mark.parametrize(
    ("changes", "n_ctx", "level"),
    [
        ({}, 1024, "ok"),
        ({}, 2**19 - 2**15, "warning"),  # 0.97 of the memory
        ({}, 2**20, "problem"),
        ({"free_bytes": None}, 2**20, "ok"),
        ({"can_offload": True, "devices": (GPU, CPU), "free_bytes": 0}, 1024, "ok"),
        ({"can_offload": True, "devices": (GPU, CPU)}, 2**20, "warning"),  # the rest stays on the CPU
    ],
)
def test_room(changes: dict[str, Any], n_ctx: int, level: str) -> None:
    found = room_finding(replace(MACHINE, **changes), [examined(context_size=n_ctx)])
    assert found.level == level


@pytest.mark.parametrize(
    ("n_kept", "states", "level", "says"),
    [
        (18, False, "ok", "are removed from the cache"),
        (18, True, "ok", "to an earlier state in the cache"),
        (16, True, "ok", "from a snapshot, 2 of 18 tokens were evaluated again"),
        (0, True, "warning", "the whole sequence is evaluated again"),
    ],
)
def test_ways_back(n_kept: int, states: bool, level: str, says: str) -> None:
    model = examined(memory=replace(MEMORY, n_kept=n_kept), facts=replace(FACTS, keeps_states=states))
    found = only(list(model_findings(MACHINE, model)), "target rollback")
    assert found.level == level
    assert says in found.text


def test_flash_attention() -> None:
    def said(asked: str, chosen: bool | None = None, machine: MachineFacts = MACHINE) -> Finding:
        model = examined(options=ModelOptions(flash_attention=asked), flash_attention=chosen)
        return only(list(model_findings(machine, model)), "target flash attention")

    with_gpu = replace(MACHINE, can_offload=True, devices=(GPU, CPU))
    assert said("off", machine=with_gpu).level == "warning"
    assert (said("off").level, said("off").text) == ("ok", "off")  # CPUs are no slower without it
    assert [said("auto", chosen, with_gpu).text for chosen in (True, False, None)] == [
        "auto: on",
        "auto: off, not possible here",
        "auto",
    ]


@pytest.mark.parametrize(("step", "level"), [(0.03, "ok"), (0.04, "warning"), (0.2, "warning")])
def test_pace(step: float, level: str) -> None:
    assert pace_finding(timed(0.1, step)).level == level
    assert pace_finding(timed(0.1, step), is_known=True).level == "ok", "what was measured counts more"
    assert pace_finding(timed(0.1, step), "others", is_known=True).level == "warning", "it tells nothing"


def test_active_parameters() -> None:
    """The model has the shape of Qwen3-30B-A3B; its parameters are counted here matrix by matrix."""
    sizes = {
        "block_count": 48,
        "embedding_length": 2048,
        "feed_forward_length": 6144,
        "expert_feed_forward_length": 768,
        "expert_count": 128,
        "expert_used_count": 8,
    }
    metadata = {"general.architecture": "qwen3moe"} | {f"qwen3moe.{key}": n for key, n in sizes.items()}
    ends = 2 * 151936 * 2048 + 2048
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048
    router, expert = 2048 * 128, 3 * 2048 * 768
    n_all, n_active = (ends + 48 * (attention + router + n * expert) for n in (128, 8))
    assert active_parameters(GgufFile(metadata), n_all) == n_active
    assert active_parameters(GgufFile({**metadata, "qwen3moe.expert_count": 0}), n_all) is None
    assert active_parameters(GgufFile({"general.architecture": "llama"}), 10) is None


# In figures


@pytest.mark.parametrize(
    ("n", "told"),
    [(3 * 2**28, "0.8 GiB"), (2**29, "0.5 GiB"), (2**29 - 2**20, "511.0 MiB"), (3 * 2**19, "1.5 MiB")],
)
def test_sizes(n: int, told: str) -> None:
    assert as_size(n) == told


def test_the_figures_of_the_room() -> None:
    """Keys and values take 1 KiB for each of 2^18 tokens, and 1 MiB and 2 KiB for each of 512."""
    draft = examined(
        "draft",
        facts=replace(FACTS, weights_bytes=3 * 2**27),
        memory=replace(MEMORY, bytes_per_token=1536.0, fixed_bytes=2**20, attention_bytes_per_token=512),
        context_size=512,
    )
    models = [examined(context_size=2**18), draft]
    told = room_finding(replace(MACHINE, free_bytes=3 * 2**29), models).text
    assert told.startswith("1.1 GiB needed (target 0.5 GiB weights, 256.0 MiB context + draft 384.0 MiB")
    assert told.endswith("1.5 GiB free in main memory")
    assert "unknown" in room_finding(replace(MACHINE, free_bytes=None), models).text
    on_gpu = room_finding(replace(MACHINE, can_offload=True, devices=(GPU, CPU)), models)
    assert on_gpu.text.endswith("1.0 GiB free on the GPU")
    assert str(on_gpu.remedy).endswith("(--n-ctx, --gpu-layers)")
