"""Targets with layers on workers: the same text, and errors. tests/cli/test_rpc.py: lost workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llamaspec import FixedLength, ModelOptions, Sampling, open_pair
from llamaspec.errors import DeviceError, ModelFileError
from llamaspec.llama import runtime
from llamaspec.llama.devices import device_of, find_devices
from llamaspec.llama.model import LlamaModel
from llamaspec.pair import Pair
from rpc_workers import Worker, needs_rpc, running_worker

pytestmark = needs_rpc
HOME = ModelOptions(n_ctx=512, threads=1)
PROMPT = "def f(self):\n    return "


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with running_worker() as running:
        yield running


def there(*workers: Worker) -> ModelOptions:
    return replace(HOME, workers=tuple(worker.address for worker in workers))


def opened(models: list[Path], options: ModelOptions) -> Pair:
    return open_pair(*models, target_options=options, draft_options=HOME)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_a_local_target(models: list[Path], worker: Worker, temperature: float) -> None:
    sampling = Sampling(temperature=temperature)
    with opened(models[:1], HOME) as plain:
        expected = plain.stream(PROMPT, sampling=sampling, seed=5, max_tokens=60).run()
    with opened(models, there(worker)) as pair:
        drafted = pair.stream(PROMPT, sampling=sampling, seed=5, max_tokens=60, policy=FixedLength(3)).run()
        assert pair.draft is not None
        assert pair.draft.weights.devices is None
    assert drafted.tokens == expected.tokens
    assert drafted.summary.n_accepted > 0


def test_a_worker_is_free_again_when_the_model_is_closed(target_file: Path, worker: Worker) -> None:
    """Also if opening failed after the connection."""
    with pytest.raises(ModelFileError):
        LlamaModel(target_file.with_name("nothing.gguf"), there(worker))
    for _ in range(2):
        LlamaModel(target_file, there(worker)).close()


def test_a_device_that_no_worker_has(target_file: Path, worker: Worker) -> None:
    with pytest.raises(DeviceError, match=r"no device 'RPC1'; choose from .*RPC0, or none"):
        LlamaModel(target_file, replace(there(worker), devices=("RPC1",)))


def test_workers_are_not_gpus_of_this_machine() -> None:
    """llama_supports_gpu_offload returns True in every build with RPC: room and defaults would be wrong."""
    assert runtime.can_offload() == any(device.is_gpu for device in find_devices())


def test_the_memory_of_a_worker_is_known(target_file: Path, worker: Worker) -> None:
    with LlamaModel(target_file, there(worker)) as model:
        assert model.weights.devices is not None
        (device,) = map(device_of, model.weights.devices)
        assert device.total_bytes > 0
