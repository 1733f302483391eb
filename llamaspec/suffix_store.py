"""Earlier texts of a model, kept between runs for n-gram drafts: one private file for each model.

They lie in the user's cache folder as token ids, readable by nobody else. What is damaged counts as none. A
file belongs to one model file, by its size and its beginning, so no text becomes a draft for another model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from llamaspec.drafters.ngram import MAX_TOKENS, PastTexts, latest
from llamaspec.files import cache_folder, read_file, write_file
from llamaspec.hub import identity
from llamaspec.values import TokenArray

_MAGIC = b"llamaspec texts 1\n"
_MAX_BYTES = 4 * (2 * MAX_TOKENS) + 64
_END = -1  # of a text
_LOCK_SECONDS = 10.0  # a process that holds the lock longer hangs


@dataclass(frozen=True, slots=True)
class SuffixStore:
    """The file that keeps a model's texts."""

    path: Path

    @classmethod
    def of(cls, model: Path) -> SuffixStore:
        """That of a model; an OSError where its file cannot be read."""
        return cls(folder() / f"{identity(model)}.texts")

    def read(self) -> tuple[PastTexts, str | None]:
        """The texts, and why there are none where a file cannot be used."""
        try:
            return PastTexts(self._texts()), None
        except FileNotFoundError:
            return PastTexts(), None
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:
            reason = str(error)
        return PastTexts(), f"{self.path} counts as empty, it cannot be used: {reason}"

    def add(self, texts: Sequence[TokenArray]) -> None:
        """Keep texts besides those that are kept, or raise an OSError; other processes may do so, too."""
        if not texts:
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        end = np.array([_END], np.int32)
        with FileLock(self.path.with_suffix(".lock"), timeout=_LOCK_SECONDS, mode=0o600):
            try:
                kept = tuple(self._texts())
            except (OSError, ValueError):
                kept = ()
            for text in texts:
                kept = latest([*kept, text])
            body = np.concatenate([part for text in kept for part in (text, end)]).astype("<i4").tobytes()
            write_file(self.path, _MAGIC + hashlib.sha256(body).digest() + body, private=True)

    def _texts(self) -> list[TokenArray]:
        content = read_file(self.path, _MAX_BYTES)
        begin = len(_MAGIC) + hashlib.sha256().digest_size
        head, body = content[:begin], content[begin:]
        if head != _MAGIC + hashlib.sha256(body).digest():
            raise ValueError("it is damaged, or of another kind or version")
        tokens = np.frombuffer(body, "<i4").astype(np.int32)
        ends = np.flatnonzero(tokens == _END)
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1] + 1))
        return [tokens[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=False)]


class KeptTexts(NamedTuple):
    """What is kept of all models."""

    n_models: int
    n_bytes: int


def folder() -> Path:
    """Where the files lie."""
    return cache_folder() / "texts"


def kept_texts() -> KeptTexts:
    """How much is kept."""
    sizes = [path.stat().st_size for path in folder().glob("*.texts")]
    return KeptTexts(len(sizes), sum(sizes))


def forget_texts() -> KeptTexts:
    """Delete what is kept of all models; answers how much it was. An OSError where that fails."""
    found = kept_texts()
    for path in folder().glob("*"):
        if path.suffix in (".texts", ".lock"):
            path.unlink(missing_ok=True)
    return found
