"""Pairs that several threads use, and pairs that are forked, closed or interrupted while they compute."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as lib

from command import python
from forward_requests import text
from llamaspec import FixedLength, ModelOptions, Pair, open_pair
from llamaspec.engine.stream import TextStream
from llamaspec.errors import ClosedError
from model_store import ModelStore
from patience import PATIENCE
from tiny_models import Recipe

CPU = ModelOptions(threads=1)
SLOW = Recipe(n_context=8192, n_layers=6, width=256, n_heads=8, n_kv_heads=8, n_ffn=1024)  # 4096 tokens: 10 s


def stream(pair: Pair, seed: int, max_tokens: int = 80) -> TextStream:
    return pair.stream(text(20, seed), seed=seed, max_tokens=max_tokens, policy=FixedLength(3))


FORKED = """
import os, signal, sys, threading
from pathlib import Path
import llamaspec.llama
from llama_cpp import llama_cpp as lib
freed = []
free = lib.llama_free, lib.llama_model_free
lib.llama_free = lambda pointer: (freed.append(os.getpid()), free[0](pointer))
lib.llama_model_free = lambda pointer: (freed.append(os.getpid()), free[1](pointer))
from llamaspec import FixedLength, ModelOptions, open_pair
from llamaspec.errors import ClosedError
options = ModelOptions(threads=2)
pair = open_pair(Path(sys.argv[1]), Path(sys.argv[2]), target_options=options, draft_options=options)
stream = pair.stream("the", seed=1, max_tokens=200, policy=FixedLength(2))
next(stream)
other = pair.stream("and", seed=2, max_tokens=150, policy=FixedLength(2))
inside, go_on = threading.Event(), threading.Event()
decode = lib.llama_decode
def held(*arguments):
    inside.set()
    go_on.wait()
    return decode(*arguments)
lib.llama_decode = held
thread = threading.Thread(target=other.run)
thread.start()
inside.wait()  # the other thread holds the scheduler's lock, and will for ever in the child
child = os.fork()
if child == 0:
    signal.alarm(300)  # ends it where it hangs
    uses = [lambda: list(stream), lambda: pair.stream("the").run(), pair.forget,
            lambda: pair.target.metadata("general.name"), lambda: pair.target.try_memory()]
    for use in uses:
        try:
            use()
        except ClosedError as error:
            print(type(error).__name__, flush=True)
        except BaseException as error:
            print("other", repr(error), flush=True)
    stream.close()
    pair.close()
    del pair, stream, uses
    print("freed", len(freed), flush=True)
    sys.exit(7)
go_on.set()
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status), "parent", len(stream.run().tokens))
thread.join()
print("other", len(other.completion.tokens))
pair.close()
print("freed", len(freed))
"""


def test_a_forked_process_is_told(target_file: Path, draft_file: Path) -> None:
    """It hung. The child frees nothing, and the parent continues."""
    answer = python(FORKED, target_file, draft_file, env={"PYTHONWARNINGS": "ignore"})  # of the fork
    assert (answer.code, answer.stderr) == (0, "")
    child, parent = ["ClosedError"] * 5 + ["freed 0"], ["child 7 parent 200", "other 150", "freed 4"]
    assert answer.stdout.splitlines() == child + parent


def test_closing_during_a_stream_in_another_thread(target_file: Path, draft_file: Path) -> None:
    pair = open_pair(target_file, draft_file, target_options=CPU, draft_options=CPU)
    has_begun, is_closed, pieces = threading.Event(), threading.Event(), list[str]()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for piece in stream(pair, seed, 480):
                pieces.append(piece.text)
                has_begun.set()
                if len(pieces) > 300:  # far ahead: the text must not end before the pair is closed
                    is_closed.wait(PATIENCE)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    assert has_begun.wait(PATIENCE)
    pair.close()
    is_closed.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert [error for error in errors if not isinstance(error, ClosedError)] == []
    assert len(pieces) < 2 * 480
    with pytest.raises(ClosedError):
        stream(pair, 1).run()


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
from llamaspec import ModelOptions, open_pair
from llama_cpp import llama_cpp as lib
from llamaspec.values import ForwardRequest
with open_pair(Path(sys.argv[1]), target_options=ModelOptions(threads=1)) as pair:
    model = pair.target
    tokens = np.random.default_rng(0).integers(2, 288, 4000).astype(np.int32)
    for _ in range(2):  # the first one reads the file from the disk
        begin = time.process_time()
        model.forward(ForwardRequest("target", tokens[::-1][:512].copy()))
        whole = time.process_time() - begin  # of 512 tokens, in seconds of the processor: others use it, too
        model.forget()
    sent, ended = [], []
    decode = lib.llama_decode
    def told(*arguments):
        begin = time.process_time()
        def send():
            while time.process_time() < begin + whole / 8:  # well within the batch
                time.sleep(0.001)
            sent.append(time.process_time())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=send).start()
        status = decode(*arguments)
        ended.append((status, time.process_time()))
        return status
    lib.llama_decode = told
    try:
        pair.stream(tokens[:3000], max_tokens=1).run()
    except KeyboardInterrupt:
        pass
    lib.llama_decode = decode
    (status, end), *others = ended
    late = end - sent[0]
    print("aborted", status, len(others), "soon" if late < whole / 2 else f"late: {late} of {whole}")
    answer = model.forward(ForwardRequest("target", tokens[:30])).copy()
    model.forget()
    print("right", np.abs(answer - model.forward(ForwardRequest("target", tokens[:30]))).max() < 1e-3)
"""


def test_ctrl_c_ends_a_long_prefill_within_a_batch(store: ModelStore) -> None:
    """It ends before llama.cpp returns after 512 tokens."""
    answer = python(INTERRUPTED, store.path("llama", SLOW))
    assert answer.stderr == ""
    assert answer.stdout.splitlines() == ["aborted 2 0 soon", "right True"]


def test_another_signal_costs_an_evaluation_and_no_text(tiny: Pair) -> None:
    """If a handler returns, such as that of SIGWINCH, the scheduler evaluates again."""
    prompt, received, sent = text(400, 3), list[int](), list[int]()
    expected = tiny.stream(prompt, seed=1, max_tokens=10, policy=FixedLength(2)).run().tokens
    tiny.forget()
    decode = lib.llama_decode
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: received.append(number))
    try:

        def disturbed(*arguments: object) -> object:
            if not sent:
                sent.append(1)
                os.kill(os.getpid(), signal.SIGUSR1)
            return decode(*arguments)

        lib.llama_decode = disturbed
        assert tiny.stream(prompt, seed=1, max_tokens=10, policy=FixedLength(2)).run().tokens == expected
    finally:
        lib.llama_decode = decode
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
