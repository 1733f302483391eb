"""A short soak of a server by clients of every kind."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import psutil

from llamaspec import Completion, TextStream
from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.engine.sequence import RunningSequence
from llamaspec.sampling.constraint import GrammarSequence
from llamaspec.serve.jobs import Job
from llamaspec.serve.request_queue import SequenceState, Submission
from patience import until
from serve_soak import CANARY, TEMPLATE, Tally, drive, growth, rows_left
from serving import CONTEXT, open_demo, said, served

N_CLIENTS, N_REQUESTS = 4, 10  # of each client
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
    """Count the objects of requests that are still in memory."""
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in OF_A_REQUEST)


def test_nothing_is_lost_and_nothing_changes(demo_files: tuple[Path, Path]) -> None:
    """In a KV cache that is too small for all sequences at once."""
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
    """Otherwise the script could never fail."""
    steady = [(100.0 + i % 3, 20, 8) for i in range(50)]
    assert growth(steady)["grew"] == []
    leaking = [(100.0 + i, 20 + i, 8 + i) for i in range(50)]
    assert growth(leaking)["grew"] == ["rss_mib", "descriptors", "threads"]
