"""Workers of tests, which answer as a fresh installation would."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import pytest

import local_worker
from command import environment
from llamaspec.llama.rpc import has_rpc
from local_worker import Worker

needs_rpc = pytest.mark.skipif(
    not os.environ.get("CI") and not has_rpc(), reason="this build of llama.cpp has no RPC; .ci/run's has"
)


def running_worker() -> AbstractContextManager[Worker]:
    """A worker that listens."""
    return local_worker.running_worker(env=environment())
