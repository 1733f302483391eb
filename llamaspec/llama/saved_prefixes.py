"""Prefixes that outlive a process: what the KV caches hold, in a private folder of bounded size.

One file for each model and way to compute its keys and values. Models that keep states, or look through a
window, have nothing that could be copied. tests/llama/test_saved_prefixes.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamaspec.errors import LlamaspecError
from llamaspec.llama import runtime
from llamaspec.llama.cells import CachedSequence
from llamaspec.llama.kv_cache import KVCache
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.prefix_file import DamagedError, is_private, read_prefixes, write_prefixes
from llamaspec.llama.trial import file_identity

SUFFIX = ".prefixes"

Tell = Callable[[str], None]  # receives a remark for the person


@dataclass(frozen=True, slots=True)
class PrefixFolder:
    """A folder with the prefixes of models.

    Raises
    ------
    LlamaspecError
        It cannot be made, or others can write there.
    """

    path: Path
    limit: int  # bytes of all files together

    def __post_init__(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.path.stat()
        except OSError as error:
            raise LlamaspecError(
                f"cannot use the folder {self.path}: {error.strerror}; name another"
            ) from error
        if not is_private(facts):
            raise LlamaspecError(
                f"others can write in {self.path}, and llama.cpp trusts what lies there; "
                f"name another folder, or: chmod 700 {self.path}"
            )

    def load(self, models: Sequence[LlamaModel], tell: Tell) -> None:
        """Put what is saved of some models into their KV caches."""
        n_tokens = 0
        for model in models:
            cache, path = model.prefix_cache, self.file_of(model)
            if cache is None:
                tell(f"prefixes of {model.path.name} are not saved: its memory cannot be copied")
                continue
            try:
                n_tokens += _put_in(cache, path, path.stem)
            except FileNotFoundError:
                pass
            except (OSError, DamagedError) as error:
                model.forget()
                reason = (isinstance(error, OSError) and error.strerror) or "it is not as it was written"
                tell(f"{path} counts as empty: {reason}")
        if n_tokens:
            tell(f"{n_tokens} tokens of prefixes were loaded")

    def save(self, models: Sequence[LlamaModel], tell: Tell) -> None:
        """Save what the KV caches of some models hold, which are empty afterwards; oldest files go first."""
        room, paths = self.limit, [self.file_of(model) for model in models]
        try:
            for model, path in zip(models, paths, strict=True):
                if (cache := model.prefix_cache) is not None:
                    room -= write_prefixes(path, path.stem, cache.take_out(), room)
            others = [path for path in self.path.glob(f"*{SUFFIX}") if path not in paths]
            for path in sorted(others, key=lambda path: path.lstat().st_mtime, reverse=True):
                room -= path.lstat().st_size
                if room < 0:
                    path.unlink()
        except OSError as error:
            tell(f"prefixes cannot be saved in {self.path}: {error.strerror}")

    def file_of(self, model: LlamaModel) -> Path:
        """Where prefixes of a model lie: other weights, formats or builds of llama.cpp have other files."""
        options = model.options
        key = json.dumps([
            file_identity(model.path), runtime.backend_description(), options.gpu_layers, options.repack,
            *options.placement,
            options.flash_attention, options.cache_type_k, options.cache_type_v, options.heads,
        ])  # fmt: skip
        return self.path / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"


def _put_in(cache: KVCache, path: Path, key: str) -> int:
    """Put a file's prefixes into an empty cache; how many tokens it holds afterwards."""
    held: list[CachedSequence | None] = []
    for prefix in read_prefixes(path, key):
        trunk = None if prefix.trunk is None else held[prefix.trunk]
        is_left_out = prefix.trunk is not None and trunk is None
        held.append(
            None if is_left_out else cache.put_in(prefix.tokens, prefix.content, trunk, prefix.n_shared)
        )
    return cache.n_used
