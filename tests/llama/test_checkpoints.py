"""The states that are kept of a sequence: which stay at the limit, and the room that they take."""

from __future__ import annotations

import numpy as np
import pytest

from forward_requests import text
from llamaspec.llama import checkpoints
from llamaspec.llama.checkpoints import MIN_KEPT, SHARE, Checkpoints
from llamaspec.llama.prefix_store import Bytes, PrefixStore

SIZE = 10  # bytes of a state


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*_: object) -> Bytes:
        return np.zeros(SIZE, dtype=np.uint8)

    monkeypatch.setattr(checkpoints, "copy_state", copied)


def kept(limit: int, places: range) -> list[int]:
    states = Checkpoints(None, 0, PrefixStore(limit))
    for n in places:
        states.keep(n)
    return [each.n for each in states.kept]


def test_at_the_limit_the_latest_states_stay_and_some_older_ones() -> None:
    """A branch is the less likely the farther back it is, so the distances grow."""
    assert kept(SHARE * SIZE * 6, range(100, 600, 100)) == [100, 200, 300, 400, 500]
    places = kept(SHARE * SIZE * 6, range(100, 3300, 100))
    distances = np.diff(places)
    assert (len(places), places[-1]) == (6, 3200)
    assert (np.diff(distances) <= 0).all()
    assert distances[0] > 4 * distances[-1]
    assert len(kept(0, range(100, 3300, 100))) == MIN_KEPT  # so that a conversation goes on without a store


def test_states_take_their_room_from_the_store() -> None:
    """They were not counted: four for each sequence."""
    store = PrefixStore(SHARE * SIZE)
    store.put(text(8), 8, lambda start, end: np.zeros(3 * SIZE, dtype=np.uint8))
    states = Checkpoints(None, 0, store)
    states.keep(5)
    assert store.n_bytes
    assert not store.has_room(SIZE)
    closed = PrefixStore(limit_of=store)
    others = [Checkpoints(None, 0, each) for each in (store, store, store, closed)]
    for each in others:
        each.keep(5)
    assert not store.n_bytes
    closed.close()
    for each in (states, *others):
        each.cut(0)
    assert store.has_room(SHARE * SIZE)
    assert store.fault() is None
