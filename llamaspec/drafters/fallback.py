"""Drafters without a model: no draft, tokens that a constraint forces, and one drafter after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamaspec.drafters.calling import drafting, fault_of, first_row, preparing, reads_rows
from llamaspec.protocols import (
    Drafter,
    Drafting,
    FindingRow,
    Preparing,
    RowReader,
    SequenceConstraint,
    SequenceLength,
)
from llamaspec.values import NO_DRAFT, Draft, Rows, Source, TokenArray


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
