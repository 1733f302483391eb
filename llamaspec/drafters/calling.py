"""Calling a drafter, whose methods may be plain functions or coroutines."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from llamaspec.errors import EVALUATION_FAULTS
from llamaspec.protocols import Drafter, Drafting, Failing, FindingRow, Preparing, RowReader, SequenceLength
from llamaspec.values import Draft, Forward, ForwardRequest, HiddenRows, TokenArray

Result = TypeVar("Result")


def drafting(drafter: Drafter, context: TokenArray, length: SequenceLength) -> Drafting:
    """Let a drafter draft; return its draft. TypeError if it returns anything else."""
    proposed: object = drafter.propose(context, length)
    draft = (yield from proposed) if isinstance(proposed, Generator) else proposed
    if not isinstance(draft, Draft):
        name = type(drafter).__name__
        raise TypeError(f"{name}.propose must return a Draft, got {type(draft).__name__}; see Draft.certain")
    return draft


def preparing(drafter: Drafter, context: TokenArray) -> Preparing:
    """Let a drafter process a prompt."""
    prepared: object = drafter.prepare(context)
    if isinstance(prepared, Generator):
        yield from prepared
    elif prepared is not None:
        name = type(drafter).__name__
        raise TypeError(f"{name}.prepare must return nothing, got {type(prepared).__name__}")


def reads_rows(drafter: Drafter) -> bool:
    """Whether a drafter wants the target's hidden rows."""
    return isinstance(drafter, RowReader) and drafter.reads_rows


def first_row(drafter: Drafter | RowReader, prompt: TokenArray) -> FindingRow:
    """Return the first position of a prompt whose hidden row a drafter needs; len(prompt) = none."""
    if not isinstance(drafter, RowReader) or not drafter.reads_rows:
        return len(prompt)
    found = drafter.first_row(prompt)
    return (yield from found) if isinstance(found, Generator) else found


def report(drafter: Drafter, tokens: TokenArray, hidden: HiddenRows | None) -> None:
    """Report hidden rows of a sequence that begins with `tokens` to a drafter; leave out those after it."""
    if hidden is not None and isinstance(drafter, RowReader) and hidden.start < len(tokens):
        committed = tokens[hidden.start : hidden.end]
        drafter.committed(committed, hidden.rows[: len(committed)], hidden.start)


def metered(
    asking: Generator[ForwardRequest, Forward, Result],
) -> Generator[ForwardRequest, Forward, tuple[Result, list[tuple[ForwardRequest, float]]]]:
    """Run a coroutine; return its result and its requests with the seconds of each."""
    spent: list[tuple[ForwardRequest, float]] = []
    try:
        request = next(asking)
        while True:
            try:
                forward = yield request
            except EVALUATION_FAULTS as error:
                request = asking.throw(error)
                continue
            spent.append((request, forward.seconds))
            request = asking.send(forward)
    except StopIteration as end:
        return end.value, spent


def fault_of(*drafters: Drafter) -> str | None:
    """Return the first error after which one of these drafters stopped using its model."""
    faults = (drafter.fault for drafter in drafters if isinstance(drafter, Failing))
    return next((fault for fault in faults if fault is not None), None)
