"""Files that llamaspec keeps, damaged at random: each is ignored, reported in one line, and overwritten."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hub_server import OWN_LIST
from llamaspec import ModelOptions
from llamaspec.catalog import Entry, add_own, own_list, read_catalog, remove_own
from llamaspec.chat.conversation_files import load_conversation, save_conversation
from llamaspec.chat.messages import Message
from llamaspec.errors import LlamaspecError, printable
from llamaspec.length.automatic import AutoLength
from llamaspec.length.cost_curve import CostCurve
from llamaspec.length.prior import LearnedPrior
from llamaspec.measure.probe import Probe, WidthTiming
from llamaspec.measure.store import keep
from llamaspec.measure.store import stored as stored_of
from llamaspec.measure.turns import Spread
from llamaspec.plan import DraftPlan, ModelFile

N = 100  # damaged copies of each file
TIMING = Spread(0.009, 0.01, 0.012)
PROBE = Probe((64,), (), (WidthTiming(1, (TIMING,), 0.0),), TIMING)
MESSAGES = (Message("user", "hello"), Message("assistant", "hi \u4e2d"))
OWN = Entry(name="mine", path="~/model.gguf", notes="x")
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 2**31, 2**63, 2**64, 10**400, -0.0, 1e308, "", "x" * 5000, "\x1b[2J\n", "~nouser/x",
    "\ud800",
    "1e400", "NaN", [], [[]], {}, {"a": 1}, float("nan"), float("inf"), "../../x", "a\0b",
)  # fmt: skip
WHOLE = (
    b"", b"\0" * 99, b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 50_000, b"[" * 3000 + b"]" * 3000, b"{}",
    b"[]",
    b"null",
    b"1" + b"0" * 5000, b"1e400", b"NaN", b'"x"', b"\xef\xbb\xbf{}", b"a: &a [*a]",
    b"!!python/object:os.system {}",
    b"? [" * 2000, b"- " * 3000, b"{" * 3000, b"a: !!timestamp 99999-01-01", b"x: 2001-01-01", b"<<: 1",
    b"=: 1",
    b"a: 0x" + b"f" * 5000, b"a: " + b"1:" * 4000 + b"1", b"a: 2001-99-99", b"a: !!binary x",
    b"%YAML 9.9\n---\na: 1", b"a: !!bool x", b"a: !!int ''", b"!!set {a: 1}", b"a: 0b_", b"a: 190:99:0x",
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A kind of file: how to write it, and how to read it; `fault` returns the error of reading, or None."""

    path: Path
    write: Callable[[], object]
    fault: Callable[[], str | None]
    is_yaml: bool = False


def _raised(read: Callable[[], object]) -> str | None:
    try:
        read()
    except LlamaspecError as error:
        return str(error)
    return None


@pytest.fixture(params=["probe", "prior", "catalog", "session"])
def stored(
    request: pytest.FixtureRequest, target_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Stored:
    monkeypatch.setenv("LLAMASPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLAMASPEC_CONFIG", str(tmp_path))
    pair = DraftPlan(ModelFile(target_file, ModelOptions(threads=1)))
    session = tmp_path / "session.json"
    if request.param == "catalog":
        own_list().write_text(OWN_LIST)
        return Stored(
            own_list(), lambda: own_list().write_text(OWN_LIST), lambda: _raised(_use_catalog), is_yaml=True
        )
    if request.param == "session":
        return Stored(
            session,
            lambda: save_conversation(session, MESSAGES),
            lambda: _raised(lambda: load_conversation(session)),
        )
    prior = AutoLength(CostCurve((1, 3), (0.02, 0.03), 0.004)).experience()
    measured = PROBE if request.param == "probe" else prior
    keep(pair, measured)
    (path,) = (tmp_path / "cache").rglob("*.json")
    return Stored(path, lambda: keep(pair, measured), lambda: _used(pair, type(measured)))


def _used(pair: DraftPlan, kind: type[Probe | LearnedPrior]) -> str | None:
    faults: list[str] = []
    kept = stored_of(pair, kind, faults.append)
    if isinstance(kept, LearnedPrior):
        costs = AutoLength(kept).shared.costs
        costs.observe_verify(1, 0.02)
        costs.learned()
    return faults[0] if faults else None


def _use_catalog() -> None:
    for entry in read_catalog().entries.values():
        if entry.path is not None:
            _raised(entry.own_file)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def damaged(content: bytes, rng: random.Random, *, is_yaml: bool) -> bytes:
    """Return a damaged copy, with other bytes or with other values in its structure."""
    how = rng.randrange(5)
    if how == 0:
        return rng.choice(WHOLE)
    if how == 1:
        copy = bytearray(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)
        copy = copy or bytearray(b"x")
        for _ in range(rng.choice((1, 3, 20))):
            copy[rng.randrange(len(copy)) : rng.randrange(len(copy)) + 1] = (
                rng.randbytes(rng.choice((0, 1, 2))) or b"["
            )
            copy = copy or bytearray(b"x")
        return bytes(copy)
    value = yaml.safe_load(content) if is_yaml else json.loads(content)
    for _ in range(rng.choice((1, 1, 2))):
        container, key = rng.choice(list(_places(value)) or [([0], 0)])
        what = rng.randrange(4)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, dict):
            container[rng.choice(("", "x", "name", "\x1b]0;", "is_own"))] = container[key]
        else:
            container[key] = rng.choice(VALUES)
    return json.dumps(value).encode()  # which is YAML, too


def check(stored: Stored) -> str | None:
    """Read a file; return its fault, which must be one short line."""
    fault = stored.fault()
    assert fault is None or ("\n" not in fault and len(fault) < 1000), fault
    return fault


def test_damaged_content_is_one_line(stored: Stored) -> None:
    stored.write()
    content = stored.path.read_bytes()
    assert check(stored) is None
    rng, n_faults = random.Random(stored.path.name), 0
    n = N // 4 if stored.is_yaml else N  # which is slow to read
    for _ in range(n):
        stored.path.write_bytes(damaged(content, rng, is_yaml=stored.is_yaml))
        n_faults += check(stored) is not None
    assert n_faults > n / 4
    stored.write()
    assert stored.path.read_bytes() == content
    assert check(stored) is None
    assert [path.name for path in stored.path.parent.iterdir() if path.name.endswith(".tmp")] == []


def test_a_pipe_keeps_nobody_waiting_and_is_replaced(stored: Stored) -> None:
    """tests/test_files.py has all other things that are no files."""
    stored.path.unlink(missing_ok=True)
    os.mkfifo(stored.path)
    assert printable(str(stored.path)) in (check(stored) or "")
    if not stored.is_yaml:  # people write it themselves
        stored.write()
        assert stored.path.is_file()
        assert check(stored) is None


def test_the_users_list_is_changed_only_when_it_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMASPEC_CONFIG", str(tmp_path))
    own_list().write_text("[" * 3000)
    for change in (lambda: add_own(OWN), lambda: remove_own("mine")):
        with pytest.raises(LlamaspecError):
            change()
    assert own_list().read_text() == "[" * 3000
