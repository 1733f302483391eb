"""The scripts that drive a server: a short soak by clients of every kind, and the load script."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest

import serve_load
from llamaspec import Completion, TextStream
from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.engine.sequence import RunningSequence
from llamaspec.sampling.constraint import GrammarSequence
from llamaspec.serve.requests import Job
from llamaspec.serve.scheduling import SequenceState, Submission
from serve_load import AUTO, BASE, Arm, Case, Load, figures
from serve_soak import CANARY, TEMPLATE, Tally, drive, growth, rows_left
from serving import CONTEXT, Served, open_demo, said, served, until

N_CLIENTS, N_REQUESTS = 4, 25  # of each client
OF_A_REQUEST = (
    Submission,
    SequenceState,
    Job,
    AnswerStream,
    TextStream,
    RunningSequence,
    GrammarSequence,
    Completion,
)


def kept() -> Counter[str]:
    """What is still held of requests, in this process."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in OF_A_REQUEST)


def test_nothing_is_lost_and_nothing_changes(demo_files: tuple[Path, Path]) -> None:
    """In a KV cache that is too small for all rows at once."""
    process, tally = psutil.Process(os.getpid()), Tally()
    with open_demo(demo_files, n_cells=2 * CONTEXT) as pair:
        expected = said(pair, str(CANARY["prompt"]), 7, 24)
        with served(pair, template=TEMPLATE) as server:
            server.client.get("/health")
            n_files, before = process.num_fds(), kept()
            drive(server.url, tally, N_CLIENTS, 1, lambda n: n < N_REQUESTS)
            assert rows_left(server.url) == 0
            until(lambda: kept() <= before)
        assert tally.wrong == []
        assert sum(tally.kinds.values()) == N_CLIENTS * N_REQUESTS
        assert tally.canaries == {expected}
    assert process.num_fds() <= n_files
    assert not [thread for thread in threading.enumerate() if thread.name == "llamaspec-decode"]


def test_growth_is_seen() -> None:
    """Else the script could never fail."""
    steady = [(100.0 + i % 3, 20, 8) for i in range(50)]
    assert growth(steady)["grew"] == []
    leaking = [(100.0 + i, 20 + i, 8 + i) for i in range(50)]
    assert growth(leaking)["grew"] == ["rss_mib", "descriptors", "threads"]


# tokens per second of each turn; the second turn ran on a machine that was half as fast
SPEEDS = {
    AUTO: (30.0, 16.0, 33.0),
    BASE: (20.0, 10.0, 24.0),
    "llama-server, no draft": (22.0, 9.0, 21.0),
    "llama-server n_max=2": (25.0, 20.0, 22.0),
}


def load(arm: str, turn: int, n_clients: int = 1, **more: float) -> Load:
    speed = SPEEDS[arm][turn] * n_clients
    measured = {"first_seconds": 0.1 + turn, "gap_p50": 0.02, "gap_p99": 0.5, "draft_length": 3.0 / n_clients}
    return Load("big-Q4_0.gguf", arm, n_clients, 1.0, turn, 60, 60 / speed, **{**measured, **more})


def loads(*clients: int) -> list[Load]:
    return [load(arm, turn, n) for n in clients for turn in range(3) for arm in SPEEDS]


def test_medians_of_speeds_and_of_ratios_of_the_same_turn() -> None:
    found = {each.arm: each for each in figures(loads(1))}
    own = found[AUTO]
    assert own.speed == pytest.approx(30.0)
    assert own.to_base == pytest.approx(1.5)  # of 1.5, 1.6 and 1.375
    assert own.to_peer == pytest.approx(1.2)  # of 1.2, 0.8 and 1.5: n_max=2 is the faster arm
    assert own.first_seconds == pytest.approx(1.1)
    assert found[BASE].to_base == 1.0
    assert found["llama-server, no draft"].to_peer == pytest.approx(0.88)


def test_a_load(server: Served) -> None:
    """This server drafts 3 tokens, but for the last rounds of a text."""
    case = Case(2, 0.0, 1, 2, 12)
    found = serve_load._measure(Path("x/big.gguf"), Arm(AUTO, server.url), case, ["def f(x):", "import os"])
    assert (found.target, found.arm, found.n_clients, found.turn) == ("big.gguf", AUTO, 2, 1)
    assert found.n_tokens == 2 * 2 * 12
    assert 2.0 < found.draft_length <= 3.0
    assert 0.0 < found.gap_p50 <= found.gap_p99 < found.seconds
    assert 0.0 < found.first_seconds < found.seconds
