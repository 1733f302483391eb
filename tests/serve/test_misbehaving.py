"""One client that misbehaves in any way disturbs no other."""

from __future__ import annotations

import pytest

from serve_misbehaving import FINE, WAYS, beside, histogram
from serve_soak import rows_left
from serving import Served


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_requests_beside_a_client_that_misbehaves(talker: Served, way: str) -> None:
    tally, seconds = beside(talker.url, way, n_clients=4, n_requests=8, seed=1)
    assert tally.wrong == []
    assert tally.statuses.keys() <= FINE
    assert len(seconds) == 8
    assert rows_left(talker.url) == 0
    assert not any("internal error" in line for line in talker.log)


def test_a_histogram_counts_everything() -> None:
    assert histogram([0.001, 0.02, 0.02, 99.0]) == {"<0.01": 1, "<0.03": 2, "more": 1}
