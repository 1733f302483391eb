"""Opens a pair: the same way for programs, commands and the server.

A plan becomes loaded models and a length policy. The policy starts from what earlier runs have measured and
learnt on this machine. The pair keeps what it learns: after each minute of work, so that a process that is
killed loses little, and when it is closed. tests/test_opening.py.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamaspec.errors import InexactError, LlamaspecError, MemoryFullError, ModelFileError, PairError
from llamaspec.length.automatic import AutoLength
from llamaspec.length.fixed import FixedLength
from llamaspec.length.prior import LearnedPrior
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.weights import LoadProgress
from llamaspec.measure.store import Notify, ignore_line, key_of, stored, update
from llamaspec.pair import Pair, load_pair
from llamaspec.plan import DraftPlan, make_plan
from llamaspec.values import Copying, Source

WORTH_KEEPING = 24  # evaluations of the target; what a shorter run learns is not kept
KEPT_EVERY = 60.0  # seconds of generation after which what was learnt is kept


@dataclass(frozen=True, slots=True)
class Drafting:
    """How much to draft."""

    draft_length: int | None = None  # None = automatic
    exact: bool = False  # refuse to run if results may depend on what is evaluated beside them


def open_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    ngram: bool | None = None,
    target_options: ModelOptions | None = None,
    draft_options: ModelOptions | None = None,
    cache_ram: int | None = None,
    on_load: LoadProgress | None = None,
) -> Pair:
    """Load a target and, if given, its draft.

    How much is drafted starts from what earlier runs have measured and learnt on this machine. The pair keeps
    what it learns for the next run, in the user's cache folder.

    Parameters
    ----------
    target : str or Path
        A file, a name from the list of models, or hf:owner/repo:file.
    draft : str or Path, optional
        The same, or "auto": the draft known for the target, or else the target's own prediction heads; "mtp":
        these heads; "ngram": only copies of earlier text. Default: no draft model and no heads. Only the
        commands look for a draft on their own.
    ngram : bool, optional
        Copy draft tokens from earlier text. Default: yes, except beside a draft model with a fixed draft
        length, because nothing weighs copies against the model's tokens then.
    cache_ram : int, optional
        Bytes of main memory for the KV caches of finished sequences, so that a known beginning of a prompt is
        not processed again. Default: a quarter of the free memory, at most 8 GiB; 0 = none.

    Raises
    ------
    ModelFileError, MemoryFullError
        A model cannot be found or loaded.
    PairError
        The draft shares too few tokens with the target, or the target has no prediction heads.

    Examples
    --------
    >>> with open_pair(demo_target(), demo_draft()) as pair:  # doctest: +SKIP
    ...     for piece in pair.stream("import os", sampling=Sampling(temperature=0.7), seed=7):
    ...         print(piece.text, end="")
    """
    plan = make_plan(
        target,
        draft,
        copying=Copying.of(ngram),
        target_options=target_options,
        draft_options=draft_options,
    )
    store = None if cache_ram is None else PrefixStore(cache_ram)
    return open_plan(plan, store=store, on_load=on_load)


def open_plan(
    plan: DraftPlan,
    drafting: Drafting = Drafting(),  # immutable
    *,
    store: PrefixStore | None = None,
    on_load: LoadProgress | None = None,
    notify: Notify = ignore_line,
    keeps_draft: bool = False,
) -> Pair:
    """Load the models of a plan, and give the pair its length policy; see `open_pair`.

    The pair stores finished sequences within the limit of `store`, which several pairs may share; None = the
    default limit. `notify` receives warnings, also if the target is opened without a draft that nobody asked
    for, because that cannot be loaded. With `keeps_draft`, it is not left out for lack of memory, which the
    caller can free: MemoryFullError. InexactError if `drafting.exact` was asked for and results may differ.
    """
    with ExitStack() as opened:
        try:
            if keeps_draft and plan.is_default and not plan.has_room:
                raise MemoryFullError("no room for the target and its draft; close other programs")
            pair = opened.enter_context(load_pair(plan, store=store, on_load=on_load))
        except (ModelFileError, PairError, MemoryFullError) as error:
            if not plan.is_default or (keeps_draft and isinstance(error, MemoryFullError)):
                raise
            plan = plan.without_draft
            pair = opened.enter_context(load_pair(plan, store=store, on_load=on_load))
            notify(f"continuing without the draft: {error}")
        if drafting.exact and (reason := pair.call(pair.target.why_inexact)) is not None:
            raise InexactError(f"--exact is impossible: {reason}")
        if drafting.draft_length is None:
            start_learning(pair, notify)
        else:
            pair.length = FixedLength(drafting.draft_length)
        opened.pop_all()
    return pair


def start_learning(pair: Pair, notify: Notify = ignore_line) -> AutoLength:
    """Let a pair start from what earlier runs have learnt, and keep what it learns.

    If the time of a draft step is not certain, it is measured now.
    """
    prior = stored(pair, LearnedPrior, notify)
    policy = pair.auto_length(prior)
    if Source.MODEL in pair.sources and not policy.shared.costs.is_step_certain:
        with suppress(LlamaspecError):  # a draft that fails is reported when it is used
            policy.shared.costs.observe_first_step(time_draft_step(pair))
    keeper = _Keeper(key_of(pair), prior, policy, notify)
    policy.shared.on_work = keeper.count
    pair.owned.callback(keeper.keep)
    pair.length = policy
    return policy


def time_draft_step(pair: Pair) -> float:
    """Return the seconds of a draft step, the faster of two timings; this takes five draft steps."""
    tokens = np.resize(pair.target.vocabulary.tokenize(b"def main"), 2)  # the first may be a start token
    pair.run(pair.draft_step(tokens, 1))  # loads the weights from the disk
    return min(pair.run(pair.draft_step(tokens, 2)) for _ in range(2))


class _Keeper:
    """Keeps what a length policy learns."""

    def __init__(self, key: str, prior: LearnedPrior | None, policy: AutoLength, notify: Notify) -> None:
        self._key, self._policy, self._notify = key, policy, notify
        self._own = prior  # the file's content, unless another process has written it
        self._latest = policy.experience()  # at the start, or kept last
        self._seconds = 0.0  # of generation since then

    def count(self, seconds: float) -> None:
        """Add seconds of generation; keep what was learnt if it is time."""
        self._seconds += seconds
        if self._seconds >= KEPT_EVERY:
            self.keep()

    def keep(self) -> None:
        """Keep what was learnt, if the run was long enough, beside what other processes have kept."""
        self._seconds = 0.0
        if self._policy.shared.costs.n_timed < WORTH_KEEPING:
            return
        start, learnt = self._latest, self._policy.experience()

        def merged(kept: LearnedPrior | None) -> LearnedPrior:
            if kept is not None and kept != self._own:
                return learnt.merged(start, kept)
            self._own = learnt
            return learnt

        update(self._key, LearnedPrior, merged, self._notify)
        self._latest = learnt
