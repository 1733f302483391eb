"""Targets whose layers lie on workers: the text, its end when a worker dies, and what is refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llamaspec import FixedLength, ModelOptions, Sampling, open_pair
from llamaspec.errors import DeviceError, ModelFileError, WorkerError
from llamaspec.llama import relay, runtime
from llamaspec.llama.context import Context
from llamaspec.llama.devices import device_of, find_devices
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.relay import Relay
from llamaspec.llama.saved_prefixes import PrefixFolder
from llamaspec.llama.weights import Weights
from llamaspec.llama.workers import own_protocol
from llamaspec.pair import Pair
from llamaspec.values import TARGET, ForwardRequest
from local_worker import Worker
from patience import PATIENCE
from rpc_workers import needs_rpc, running_worker

pytestmark = needs_rpc
HOME = ModelOptions(n_ctx=512, threads=1)
PROMPT = "def f(self):\n    return "


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with running_worker() as running:
        yield running


@pytest.fixture
def mortal() -> Iterator[Worker]:
    """One that a test may kill."""
    with running_worker() as running:
        yield running


def there(*workers: Worker) -> ModelOptions:
    return replace(HOME, workers=tuple(worker.address for worker in workers))


def opened(models: list[Path], options: ModelOptions) -> Pair:
    return open_pair(*models, target_options=options, draft_options=HOME)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_text_at_home(models: list[Path], worker: Worker, temperature: float) -> None:
    sampling = Sampling(temperature=temperature)
    with opened(models[:1], HOME) as plain:
        expected = plain.stream(PROMPT, sampling=sampling, seed=5, max_tokens=60).run()
    with opened(models, there(worker)) as pair:
        drafted = pair.stream(PROMPT, sampling=sampling, seed=5, max_tokens=60, policy=FixedLength(3)).run()
        assert pair.draft is not None
        assert pair.draft.weights.workers is None
    assert drafted.tokens == expected.tokens
    assert drafted.summary.n_accepted > 0


def test_a_worker_that_dies_ends_the_text_with_an_error(models: list[Path], mortal: Worker) -> None:
    with opened(models[:1], HOME) as plain:
        expected = plain.stream(PROMPT, seed=5, max_tokens=300).run()
    with opened(models, there(mortal)) as pair:
        stream = pair.stream(PROMPT, seed=5, max_tokens=300)
        for _ in range(20):
            next(stream)
        mortal.kill()
        with pytest.raises(WorkerError, match=rf"the worker {mortal.address} was lost: .*; start it"):
            stream.run()
        tokens = stream.completion.tokens
        assert len(tokens) >= 20
        assert tokens == expected.tokens[: len(tokens)]
        with pytest.raises(WorkerError, match="was lost"):  # nor does another text begin
            pair.stream(PROMPT, seed=5, max_tokens=3).run()


def test_no_score_is_believed_that_did_not_come(
    target_file: Path, mortal: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama_decode comes back before the scores do: if the worker dies in between, they are zeros."""
    check = Context._check

    def checked(self: Context, status: int) -> None:
        check(self, status)
        mortal.kill()

    with LlamaModel(target_file, there(mortal)) as model:
        tokens = model.vocabulary.tokenize(PROMPT.encode())
        for n in (-2, -1):  # twice, so that one token more is the same graph, of which nothing is asked
            model.forward(ForwardRequest(TARGET, tokens[:n]))
        monkeypatch.setattr(Context, "_check", checked)
        mortal.process.send_signal(signal.SIGSTOP)  # it takes requests, and answers none
        guard = threading.Timer(PATIENCE, mortal.process.kill)  # where llama.cpp asks after all
        guard.start()
        with pytest.raises(WorkerError, match="was lost"):
            model.forward(ForwardRequest(TARGET, tokens))
        guard.cancel()


def test_nothing_that_a_lost_worker_held_is_saved(target_file: Path, mortal: Worker, tmp_path: Path) -> None:
    told: list[str] = []
    with LlamaModel(target_file, there(mortal)) as model:
        model.forward(ForwardRequest(TARGET, model.vocabulary.tokenize(PROMPT.encode())))
        mortal.kill()
        saved = PrefixFolder(tmp_path / "prefixes", 1 << 30)
        saved.save([model], told.append)
    assert [line for line in told if "was lost" in line]
    assert not list((tmp_path / "prefixes").glob("*"))


def test_a_worker_that_dies_while_it_is_given_weights(
    target_file: Path, mortal: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_load(fraction: float) -> None:
        if fraction > 0.3:
            mortal.kill()

    with pytest.raises(WorkerError, match="was lost"):
        LlamaModel(target_file, there(mortal), on_load)


def test_a_worker_that_dies_before_a_context_is_made(target_file: Path, mortal: Worker) -> None:
    """It was told as a lack of memory, with a smaller context as the remedy."""
    weights = Weights(target_file, there(mortal))
    mortal.kill()
    with pytest.raises(WorkerError, match="was lost"):
        Context(weights, there(mortal))
    weights.close()


def test_a_worker_is_free_again_when_the_model_is_closed(target_file: Path, worker: Worker) -> None:
    """Also when opening failed behind the connection."""
    with pytest.raises(ModelFileError):
        LlamaModel(target_file.with_name("nothing.gguf"), there(worker))
    for _ in range(2):
        LlamaModel(target_file, there(worker)).close()


def test_a_worker_serves_one_client(
    target_file: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LlamaModel(target_file, there(worker)):
        monkeypatch.setattr(relay, "CONNECT_SECONDS", 0.1)
        with pytest.raises(WorkerError, match="is busy with another client"):
            LlamaModel(target_file, there(worker))


def test_layers_lie_where_they_are_put(
    target_file: Path, worker: Worker, mortal: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, int] = {}
    send = Relay._send

    def counted(self: Relay, data: bytes) -> None:
        sent[self.address] = sent.get(self.address, 0) + len(data)
        send(self, data)

    monkeypatch.setattr(Relay, "_send", counted)
    both = there(mortal, worker)
    shares = []
    for options in (both, replace(both, tensor_split=(0.0, 1.0)), replace(both, devices=("RPC1",))):
        sent.clear()
        LlamaModel(target_file, options).close()
        shares.append(sent.get(mortal.address, 0) / sum(sent.values()))
    assert shares[0] > 0.2
    assert shares[1] < 0.05
    assert shares[2] < 0.05


def test_a_device_that_no_worker_has(target_file: Path, worker: Worker) -> None:
    with pytest.raises(DeviceError, match="no device RPC1; the workers have RPC0 to RPC0"):
        LlamaModel(target_file, replace(there(worker), devices=("RPC1",)))


def test_the_version_is_the_one_that_a_worker_says(worker: Worker) -> None:
    connected = Relay(worker.address)
    assert connected.protocol == own_protocol()
    connected.close()


@pytest.mark.parametrize("theirs", [(1, 1), (0, 1)])
def test_another_version_is_refused(
    target_file: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch, theirs: tuple[int, int]
) -> None:
    """llama.cpp would end the process. An older minor version is understood, a newer one is not."""
    major, minor = own_protocol()
    other = (major + theirs[0], minor + theirs[1])
    monkeypatch.setattr(Relay, "_greet", lambda self: other)
    with pytest.raises(
        WorkerError, match=rf"speaks version {other[0]}\.{other[1]} .* {major}\.{minor}; install"
    ):
        LlamaModel(target_file, there(worker))


def test_workers_are_no_gpus_of_this_machine() -> None:
    """llama_supports_gpu_offload says yes in every build with RPC: room and defaults would be wrong."""
    assert runtime.can_offload() == any(device.is_gpu for device in find_devices())


def test_the_memory_of_a_worker_is_known(target_file: Path, worker: Worker) -> None:
    with LlamaModel(target_file, there(worker)) as model:
        assert model.weights.devices is not None
        (device,) = map(device_of, model.weights.devices)
        assert device.total_bytes > 0
