"""Chooses the next evaluation: rounds of several sequences, and prompt chunks between or beside them.

Only `Scheduler` calls this module, and evaluates what it chooses. tests/engine/test_turns.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamaspec.engine.sequence import Slot
from llamaspec.protocols import Model
from llamaspec.values import CHUNK, TARGET, WAIT_SECONDS, ForwardRequest

INTERACTIVE_SECONDS = 3.0  # longest time for which prompts wait for interactive sequences


class Group(NamedTuple):
    """Sequences that are evaluated together."""

    model: str
    slots: list[Slot]
    width: int  # number of positions to evaluate, with padding
    n_prefill: int = 0  # of these, positions of a prompt chunk of the last slot, beside rounds of the others


class Batching:
    """Chooses the next evaluation; a draft model comes before the model for which it drafts."""

    def __init__(self, models: dict[str, Model]) -> None:
        self._models = models
        self._prompts_wait = False  # a round was evaluated since the last prompt chunk
        self._last_prompt_model: str | None = None  # the model that processed the last prompt chunk
        self._speeds: dict[str, float] = {}  # positions per second in the last prompt chunk of each model
        # Seconds for which prompts have waited for interactive sequences; None if none waits.
        self._held_seconds: float | None = None

    def next_group(self, waiting: Sequence[Slot]) -> Group | None:
        """Return the next evaluation; None if no sequence waits for one."""
        prompts: list[Slot] = []
        others: dict[str, list[Slot]] = {}
        for each in waiting:
            request = each.request
            if request is not None and request is each.part and request.n_scored:
                others.setdefault(request.model, []).append(each)
            else:  # its prompt comes first
                prompts.append(each)
        prompts = self._prompts_now(prompts, waiting)
        if prompts and (self._prompts_wait or not others):
            self._prompts_wait = False
            return self._prompt_chunk(prompts)
        name = next((name for name in reversed(self._models) if name in others), None)
        if name is None:
            return None
        group = self._together(name, others[name])
        if name == TARGET and prompts:
            group = self._with_prompt_chunk(group, max(prompts, key=_is_of_target))
            self._last_prompt_model = TARGET if group.n_prefill else self._last_prompt_model
            self._prompts_wait = not group.n_prefill or not all(map(_is_of_target, prompts))
        return group

    def _prompts_now(self, prompts: list[Slot], waiting: Sequence[Slot]) -> list[Slot]:
        """Return the prompts to process; for a time, only urgent ones while an interactive sequence runs.

        A sequence that has had a round is urgent, too: it was swapped out and processes its tokens again.
        """
        urgent = [each for each in prompts if each.goes_first or each.has_rounds]
        if len(urgent) == len(prompts) or not any(each.goes_first for each in waiting):
            self._held_seconds = None
            return prompts
        self._held_seconds = self._held_seconds or 0.0
        return urgent if self._held_seconds < INTERACTIVE_SECONDS else prompts

    def note(self, group: Group, seconds: float) -> None:
        """Note how fast a model processes prompts, and how long prompts have waited."""
        last = group.slots[-1]
        is_prompt = last.part is not None and not last.part.n_scored
        if is_prompt and group.width >= CHUNK:
            self._speeds[group.model] = group.width / max(seconds, 1e-9)
        if self._held_seconds is not None:
            has_ended = is_prompt and not (last.goes_first or last.has_rounds)
            self._held_seconds = 0.0 if has_ended else self._held_seconds + seconds

    def _chunk(self, name: str, *, is_alone: bool) -> int:
        """Return the number of prompt positions to evaluate at once, for which other sequences must wait."""
        most = self._models[name].batch_size
        if is_alone:
            return most
        n = int(WAIT_SECONDS * self._speeds.get(name, 0.0)) // CHUNK * CHUNK
        return min(max(n, CHUNK), most)

    def part(self, request: ForwardRequest, n_cached: int, *, is_alone: bool) -> ForwardRequest:
        """Return a request, or the chunk of its prompt that must be evaluated first.

        The target evaluates a prompt apart from the positions of a round, so that the length policy learns
        what a round costs.
        """
        size, n_before = self._chunk(request.model, is_alone=is_alone), request.n_before
        is_round = request.model == TARGET and request.n_scored > 0
        if n_cached >= n_before or (request.n_tokens - n_cached <= size and not is_round):
            return request
        return request.prefill(min(n_cached + size, n_before))

    def padding(self, slot: Slot, request: ForwardRequest, n_sequences: int) -> int:
        """Return the number of positions that pad a round of a sequence that is alone, to time its width."""
        if n_sequences > 1 or request.model != TARGET or not request.n_scored:
            return 0
        if not self._can_share(TARGET, slot):
            return 0
        target = self._models[TARGET]
        most = min(target.context_size - request.n_tokens, target.batch_size - request.n_scored)
        return max(0, min(slot.timed_width() - request.n_scored, most))

    def _prompt_chunk(self, prompts: Sequence[Slot]) -> Group:
        """Return a chunk of one prompt.

        Draft models process prompts quickly, so they go first, but never twice in a row while the target has
        a prompt waiting. They never process a prompt beside a round.
        """
        draft_is_next = self._last_prompt_model in (None, TARGET)
        slot = min(prompts, key=lambda each: _is_of_target(each) == draft_is_next)
        assert slot.part is not None
        self._last_prompt_model = slot.part.model
        return Group(slot.part.model, [slot], slot.part.n_tokens - slot.n_cached)

    def _with_prompt_chunk(self, group: Group, slot: Slot) -> Group:
        """Add a prompt chunk to rounds, if the evaluation may be as wide as that.

        One evaluation costs less than two (SARATHI, arXiv 2308.16369).
        """
        part, target = slot.part, self._models[TARGET]
        if part is None or part.model != TARGET or part.n_scored:
            return group
        if not all(self._can_share(TARGET, each) for each in (*group.slots, slot)):
            return group
        n_new = sum(each.n_new for each in group.slots)
        n_part, room = part.n_tokens - slot.n_cached, target.max_chunked_prefill - n_new
        if 2 * room < min(slot.n_new, target.batch_size):  # apart, more than twice as many would be processed
            return group
        n_prefill = min(n_part, room)
        if n_prefill < n_part:
            slot.shorten(n_prefill)
        return Group(TARGET, [*group.slots, slot], n_new + n_prefill, n_prefill)

    def _can_share(self, name: str, slot: Slot) -> bool:
        """Whether the next evaluation of a sequence may include others."""
        return not slot.is_suspect and self._models[name].can_share

    def _together(self, name: str, slots: list[Slot]) -> Group:
        """Return as many sequences as fit one evaluation; those that have waited longest come first."""
        model, together, width, n_scored = self._models[name], list[Slot](), 0, 0
        can_share = self._can_share(name, slots[0])
        for each in [each for each in slots if self._can_share(name, each)] if can_share else slots[:1]:
            assert each.request is not None
            more = each.n_new + each.n_padding
            n_scored += each.request.n_scored
            if together and (width + more > model.batch_size or n_scored > model.max_scored):
                break
            together.append(each)
            width += more
        return Group(name, together, width)


def _is_of_target(slot: Slot) -> bool:
    return slot.part is not None and slot.part.model == TARGET
