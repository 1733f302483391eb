"""A target and its draft, loaded together: the object that programs and all commands use.

Several threads or asyncio tasks may generate at the same time. Their sequences share evaluations, and each
gets the completion that it would get alone. One compute thread serves all pairs of a process.
"""

from __future__ import annotations

import functools
import operator
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import numpy as np

from llamaspec.drafters.calling import drafting, first_row, preparing, reads_rows, report
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.detokenizer import Detokenizer
from llamaspec.engine.prefill_decode import REPEATED
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.speculate import Speculation
from llamaspec.engine.stream import Progress, TextStream, TimedConstraint
from llamaspec.engine.thread import ComputeThread
from llamaspec.errors import PromptError
from llamaspec.length.automatic import AutoLength
from llamaspec.length.fixed import FixedLength
from llamaspec.length.prior import LearnedPrior
from llamaspec.llama.model import LlamaModel, Longest
from llamaspec.llama.prefix_store import PrefixStore
from llamaspec.llama.vocabulary import difference
from llamaspec.llama.weights import LoadProgress, Weights
from llamaspec.plan import DraftPlan
from llamaspec.protocols import Constraint, Drafter, LengthPolicy, Model
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE, RULES
from llamaspec.sampling.filters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.sequence_drafters import SequenceDrafters
from llamaspec.values import (
    DRAFT,
    MTP,
    NO_TOKENS,
    TARGET,
    Copying,
    Forward,
    ForwardRequest,
    Source,
    TokenArray,
    scope_of,
    without_pictures,
)

if TYPE_CHECKING:
    from llamaspec.drafters.common_vocabulary import CommonTokens
    from llamaspec.drafters.earlier import EarlierAnswers
    from llamaspec.hidden_drafts import HiddenDraft
    from llamaspec.llama.prefix_folder import Cached
    from llamaspec.sampling.constraint import Grammars

Result = TypeVar("Result")

MAX_LOGPROBS = 100  # alternatives reported with each token


class Pair:
    """A target and, if there is one, its draft.

    Close a pair, or use it as a context manager. A pair that is no longer referenced is freed, too. A pair
    from `open_pair` closes its models; a pair made from open models leaves them open.
    """

    def __init__(
        self,
        target: LlamaModel,
        draft: LlamaModel | None = None,
        load_seconds: float = 0.0,
        *,
        heads: HiddenDraft | None = None,
        copying: Copying = Copying.WEIGHED,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target, self.draft, self.heads = target, draft, heads  # heads draft in place of a draft model
        self.load_seconds = load_seconds
        self.clock = clock  # seconds
        self.owned = ExitStack()  # closes the models that belong to the pair
        self._drafters = SequenceDrafters.of(target, draft, heads, copying)
        self.length: LengthPolicy = self.auto_length()  # the default for streams
        models: dict[str, Model] = {TARGET: target}
        if draft is not None:
            models[DRAFT] = draft
        if heads is not None:
            models[MTP] = heads
        self._scheduler = Scheduler(models, clock=clock)
        self._thread = ComputeThread(self._scheduler)

    @property
    def models(self) -> tuple[LlamaModel, ...]:
        """The target and, if there is one, the draft model."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def caches(self) -> tuple[Cached, ...]:
        """What stores finished sequences: the models, and the caches of a draft that reads hidden rows."""
        return (*self.models, *([] if self.heads is None else self.heads.caches))

    @property
    def common(self) -> CommonTokens | None:
        """The tokens that target and draft share, if their vocabularies differ."""
        return self._drafters.common

    @property
    def sources(self) -> frozenset[Source]:
        """Where draft tokens come from."""
        return self._drafters.sources

    def auto_length(self, prior: LearnedPrior | None = None) -> AutoLength:
        """Return a new length policy for this pair, which starts from what earlier runs have learnt."""
        pads = not self.target.keeps_states
        return AutoLength(prior, sources=self.sources, pads=pads)

    def stream(
        self,
        prompt: str | bytes | Sequence[int] | TokenArray,
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_tokens: int = 256,
        stops: Sequence[str] = (),
        spelled: Mapping[int, bytes] | None = None,
        rule: str = DEFAULT_RULE,
        policy: LengthPolicy | None = None,
        drafter: Drafter | None = None,
        copies: bool = True,
        on_prefill: Progress | None = None,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
        prediction: str | bytes | Sequence[int] | TokenArray | None = None,
        is_interactive: bool = False,
        scope: str | None = "",
    ) -> TextStream:
        """Start a completion. Iterate over it for its pieces, or call `run()` for the whole completion.

        Parameters
        ----------
        prompt : str, bytes or [n] int
            Text, UTF-8 bytes, or token ids. `chat_prompt` makes one of messages.
        sampling : Sampling, optional
            Default: llama.cpp's values, temperature 0.8.
        seed : int, optional
            Default: random. Under the coupled rule the same seed gives the same text with any draft and
            any policy.
        max_tokens : int
            Maximum number of tokens to generate.
        stops : sequence of str, or str
            Strings that end the completion.
        spelled : dict of int to bytes, optional
            Control tokens that appear in the text, with their spelling; see `AnswerFormat.spelled`.
        rule : str
            "coupled", "rejection" or "block".
        policy : LengthPolicy, optional
            How many tokens to draft. Default: `length`, which drafts as many as speed things up.
        drafter : Drafter, optional
            Where draft tokens come from. Default: the draft that the pair was opened with. `NoDrafter()` is
            plain decoding.
        copies : bool
            Whether draft tokens may be copied from earlier text. A `prediction` is always copied from.
        on_prefill : callable, optional
            Called with the number of prompt tokens processed so far, and their total.
        constraint : Constraint, optional
            Restricts the completion; made by `json_schema` or `grammar`.
        logprobs : int, optional
            Report the log-probability of each token, and of this many of the most probable tokens.
        prediction : str, bytes or [n] int, optional
            Text that the completion is likely to repeat, such as the file being edited. Draft tokens are
            copied from it; it does not change the completion.
        is_interactive : bool
            A person is waiting: process the prompt and the first 128 tokens before the prompts of others.
        scope : str, optional
            Whose completion it is, such as a user's name. It finds cached tokens only of completions of the
            same scope, and of the scope "*"; draft tokens may be copied from those of the same scope. None:
            as "", but nothing is copied from other completions, nor from this one.

        Raises
        ------
        PromptError
            The prompt is empty, not UTF-8, or does not fit.
        TypeError, ValueError
            An argument has the wrong type or is out of range.
        """
        sampling, n_vocabulary = Sampling() if sampling is None else sampling, self.target.vocabulary_size
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, got {sampling!r}")
        if max(sampling.logit_bias or (0,)) >= n_vocabulary:
            raise ValueError(f"logit bias: token ids must be from 0 to {n_vocabulary - 1}")
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must be from 0 to {MAX_LOGPROBS}, got {logprobs}")
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule}")
        text = Detokenizer(self.target.vocabulary, (stops,) if isinstance(stops, str) else stops, spelled)
        earlier = None if scope is None else self._answers.of(scope)
        predicted = NO_TOKENS
        if prediction is not None:
            predicted = self._tokens(prediction, "prediction", add_special=False)
        config = Speculation(
            prompt=self._tokens(prompt),
            max_tokens=_whole("max_tokens", max_tokens),
            context_size=self.target.context_size,
            rule=RULES[rule],
            sampling=sampling,
            streams=SeededStreams(secrets.randbits(32) if seed is None else _whole("seed", seed)),
            constraint=None if constraint is None else TimedConstraint(constraint.start_sequence()),
            max_scored=self.target.max_scored,
            n_logprobs=logprobs,
            scope=scope_of(scope),
            n_cached=functools.partial(self.target.n_cached, scope=scope_of(scope)),
            on_end=None if earlier is None else earlier.add,
        )
        # All arguments are valid from here on, so whatever starts is closed with the stream.
        if policy is None:
            policy = FixedLength(0) if isinstance(drafter, NoDrafter) else self.length
        length = policy.start_sequence(drops=config.rule.drops, max_tokens=max_tokens)
        config = replace(config, length=length)
        if drafter is None:
            drafter = self._drafters.make(config, predicted, earlier=earlier, copies=copies)
        config = replace(config, drafter=drafter)
        return TextStream(config, text, self._thread, on_prefill, is_interactive=is_interactive)

    def json_schema(self, schema: Mapping[str, Any] | str) -> Constraint:
        """Return a constraint for `stream`: JSON of a schema, with the properties in the schema's order.

        Any number of streams and threads may use it. The first constraint of a pair takes up to a second,
        because it indexes the vocabulary.

        Raises
        ------
        ConstraintError
            The schema is invalid, too large, or uses a feature that llguidance lacks.
        """
        return self._grammars.json_schema(schema)

    def grammar(self, text: str) -> Constraint:
        """Return a constraint for `stream`: text of a grammar, in llguidance's Lark or llama.cpp's GBNF.

        Raises
        ------
        ConstraintError
            The grammar is invalid or too large.
        """
        return self._grammars.grammar(text)

    @functools.cached_property
    def _answers(self) -> EarlierAnswers:
        from llamaspec.drafters.earlier import EarlierAnswers

        answers: EarlierAnswers = self.__dict__.setdefault("_answers", EarlierAnswers())
        return answers  # the same object for two threads at once

    @functools.cached_property
    def _grammars(self) -> Grammars:
        from llamaspec.sampling.constraint import Grammars

        return Grammars(self.target.vocabulary)

    def run(self, measurement: Generator[ForwardRequest, Forward, Result]) -> Result:
        """Run a coroutine that yields evaluation requests, alongside the streams; return its result.

        The coroutine may use the logits of an answer until its next request.

        Examples
        --------
        >>> def score(tokens):  # doctest: +SKIP
        ...     forward = yield ForwardRequest(TARGET, tokens)
        ...     return forward.logits[0].copy()
        >>> pair.run(score(tokens))  # doctest: +SKIP
        """
        return self._thread.run(measurement)

    def forget(self) -> None:
        """Clear all KV caches and the earlier answers."""
        self._thread.call(self._scheduler.forget)
        self._thread.call(self._answers.clear)

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function on the compute thread, between two evaluations."""
        return self._thread.call(function)

    def close(self) -> None:
        """End all streams and free the pair's own models; may be called twice, and from any thread."""
        self._thread.close()
        self.owned.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def draft_step(self, context: TokenArray, n_steps: int) -> Generator[ForwardRequest, Forward, float]:
        """Measure the seconds of one of `n_steps` draft tokens in a row, with all the drafter's work."""
        rule, streams, size = RULES[DEFAULT_RULE], SeededStreams(0), self.target.context_size
        length = FixedLength(n_steps)
        config = Speculation(context, 1, size, rule, Sampling(), streams, length=length)
        drafter = self._drafters.asking_model(config)
        if reads_rows(drafter):
            rows_from = max((yield from first_row(drafter, context)), len(context) - 1 - REPEATED)
            forward = yield ForwardRequest(TARGET, context[:-1], 0, rows_from=rows_from)
            report(drafter, context[:-1], forward.hidden)
        yield from preparing(drafter, context)
        start = self.clock()
        yield from drafting(drafter, context, length)
        return (self.clock() - start) / (1 if Source.BLOCK in self.sources else n_steps)

    def _tokens(
        self,
        text: str | bytes | Sequence[int] | TokenArray,
        what: str = "prompt",
        *,
        add_special: bool = True,
    ) -> TokenArray:
        if isinstance(text, str):
            try:
                text = text.encode()
            except UnicodeEncodeError as error:
                raise PromptError(f"the {what} is not UTF-8: {error.reason}; remove such text") from error
        if isinstance(text, bytes | bytearray | memoryview):
            vocabulary = self.target.vocabulary
            return vocabulary.tokenize(bytes(text), add_special=add_special) if len(text) else NO_TOKENS
        tokens = np.array(text) if np.size(text) else NO_TOKENS
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            found, remedy = type(text).__name__, "for messages, use chat_prompt"
            raise TypeError(f"a {what} is text, bytes or token ids, not {found}; {remedy}")
        size = self.target.vocabulary_size
        written = tokens if self.target.projector is None else without_pictures(tokens)
        if len(written) and not 0 <= written.min() <= written.max() < size:
            raise ValueError(f"token ids must be from 0 to {size - 1}")
        return tokens.astype(np.int32)


def _whole(name: str, value: SupportsIndex) -> int:
    """Return a whole number; TypeError if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None


def demo_target() -> Path:
    """Return the path of the embedded target model."""
    return Path(str(files("llamaspec") / "demo" / "target.gguf"))


def demo_draft() -> Path:
    """Return the path of the embedded draft model, which was distilled from the embedded target."""
    return Path(str(files("llamaspec") / "demo" / "draft.gguf"))


def load_pair(
    plan: DraftPlan, *, store: PrefixStore | None = None, on_load: LoadProgress | None = None
) -> Pair:
    """Load the models of a plan; parameters and errors are those of `open_plan` in `opening.py`."""
    start, draft, heads = time.perf_counter(), None, None
    with ExitStack() as opened:  # if opening a model fails, this closes the others
        target = LlamaModel(plan.target.path, plan.target.options, on_load, store, plan.longest)
        opened.callback(target.close)
        if plan.heads is not None:
            from llamaspec.hidden_drafts import open_hidden_draft

            heads = open_hidden_draft(plan, plan.heads, target, on_load)
            opened.callback(heads.close)
        if plan.draft is not None:
            longest = None if plan.longest is None else partial(_longest, plan.longest, target)
            draft = LlamaModel(plan.draft.path, plan.draft.options, on_load, target.store, longest)
            opened.callback(draft.close)
        pair = Pair(target, draft, time.perf_counter() - start, heads=heads, copying=plan.copying)
        pair.owned = opened.pop_all()
    return pair


def _longest(longest: Longest, target: LlamaModel, draft: Weights) -> int | None:
    """Return the tokens of a draft's longest sequence; of another vocabulary, it may need any number."""
    is_same = difference(target.vocabulary, draft.vocabulary) is None
    return longest(target.weights) if is_same else None
