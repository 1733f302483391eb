"""What is told while a model is fetched. Whoever waits decides how to show it; `hub/` prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from llamaspec.hub.remote import RemoteFile


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is."""

    file: RemoteFile
    activity: Literal["fetching", "checking"]  # checking: the hash of one part is computed
    done_bytes: int  # of all parts while fetching, else of the part that is checked
    total_bytes: int


OnFetch = Callable[[FetchProgress], None]
