"""Drafters without a model: no draft, the tokens that a constraint forces, and a choice among drafters.

A drafter's methods may be plain functions or coroutines; the functions at the end call either kind.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llamaspec.errors import EVALUATION_FAULTS
from llamaspec.protocols import (
    Drafter,
    Drafting,
    Failing,
    FindingRow,
    Preparing,
    RowReader,
    SequenceConstraint,
    SequenceLength,
)
from llamaspec.values import (
    NO_DRAFT,
    Draft,
    Forward,
    ForwardRequest,
    HiddenRows,
    Rows,
    Source,
    TokenArray,
)

Result = TypeVar("Result")


class NoDrafter:
    """No draft: plain decoding."""

    def prepare(self, context: TokenArray) -> None:
        """Do nothing."""

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        """Return an empty draft."""
        return NO_DRAFT


@dataclass(frozen=True, slots=True)
class ForcedDrafter:
    """Drafts tokens wherever a constraint allows only one, such as the keys of a JSON object."""

    constraint: SequenceConstraint
    n_prompt: int  # tokens before the first that was generated

    def prepare(self, context: TokenArray) -> None:
        """Do nothing."""

    def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
        """Draft the forced tokens while the policy wants more."""
        draft = Draft(source=Source.GRAMMAR)
        if length.wants_more(draft):
            for token in self.constraint.forced(context[self.n_prompt :]).tolist():
                draft = draft.plus(token)
                if not length.wants_more(draft):
                    break
        return draft


@dataclass(frozen=True, slots=True)
class FallbackDrafter:
    """Tries several drafters in turn until one has a draft."""

    drafters: Sequence[Drafter]

    @property
    def fault(self) -> str | None:
        """The first error after which one of the drafters stopped using its model."""
        return fault_of(*self.drafters)

    @property
    def reads_rows(self) -> bool:
        """Whether one of the drafters wants hidden rows."""
        return any(map(reads_rows, self.drafters))

    def first_row(self, prompt: TokenArray) -> FindingRow:
        """Return the first position of a prompt whose hidden row a drafter needs."""
        first = len(prompt)
        for each in self._readers:
            first = min(first, (yield from first_row(each, prompt)))
        return first

    def committed(self, tokens: TokenArray, rows: Rows, position: int) -> None:
        """Pass hidden rows on."""
        for each in self._readers:
            each.committed(tokens, rows, position)

    @property
    def _readers(self) -> list[RowReader]:
        return [each for each in self.drafters if isinstance(each, RowReader) and each.reads_rows]

    def prepare(self, context: TokenArray) -> Preparing:
        """Let every drafter process a prompt."""
        for drafter in self.drafters:
            yield from preparing(drafter, context)

    def propose(self, context: TokenArray, length: SequenceLength) -> Drafting:
        """Return the first draft that is not empty."""
        for drafter in self.drafters:
            draft = yield from drafting(drafter, context, length)
            if len(draft):
                return draft
        return NO_DRAFT


# Calling a drafter


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
