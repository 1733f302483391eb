"""A target and its draft, opened together: what a program uses, and what the commands are built on.

Every text is a row of one scheduler, so several threads, or tasks of asyncio, may generate from one pair at
the same time. They share each evaluation, and every text is the one that it would be alone.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from llamaspec.drafters.fallback import FallbackDrafter
from llamaspec.drafters.grammar import AllowedDrafter, GrammarDrafter
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.ngram import NgramDrafter
from llamaspec.drafters.tree import TreeDrafter
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.speculate import Speculation
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.engine.write import TextPlan
from llamaspec.errors import ModelFileError, PromptError
from llamaspec.hub.names import AUTO, has_draft, locate_model, resolve_draft, resolve_model
from llamaspec.length.auto_length import AutoLength
from llamaspec.llama import runtime
from llamaspec.llama.heads import PredictionHeads
from llamaspec.llama.model import LlamaModel
from llamaspec.llama.nextn import check_heads, heads_in_file
from llamaspec.llama.options import DRAFT_SCORED, ModelOptions
from llamaspec.llama.pairing import check_pair
from llamaspec.llama.shared_head import is_shared_head
from llamaspec.llama.weights import LoadProgress
from llamaspec.protocols import Constraint, Drafter, LengthPolicy, Model, RowConstraint
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE, RULES, Coupled
from llamaspec.sampling.grammar import Grammars
from llamaspec.sampling.parameters import Sampling
from llamaspec.sampling.random_streams import SeededStreams
from llamaspec.values import DRAFT, MTP, TARGET, Forward, ForwardRequest, Source, TokenArray

Result = TypeVar("Result")

MAX_LOGPROBS = 100  # tokens told with each token
NGRAM = "ngram"  # in place of a draft: copy from earlier text
_DRAFT_OPTIONS = ModelOptions(max_scored=DRAFT_SCORED)


def demo_target() -> Path:
    """The embedded target model."""
    return Path(str(files("llamaspec") / "demo" / "target.gguf"))


def demo_draft() -> Path:
    """The embedded draft model, distilled from the embedded target."""
    return Path(str(files("llamaspec") / "demo" / "draft.gguf"))


class Pair:
    """A target that decides what is said and, if there is one, a draft that proposes it.

    Close it, or use it as a context manager; a forgotten pair is freed all the same. Made by `open_pair`.
    """

    def __init__(
        self,
        target: LlamaModel,
        draft: LlamaModel | None,
        load_seconds: float,
        *,
        heads: PredictionHeads | None = None,
        ngram: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.draft = draft
        self.heads = heads  # of the target, in place of a draft
        self.ngram = ngram  # earlier text is copied where it goes on alike, before the draft is asked
        self.load_seconds = load_seconds
        self.clock = clock  # seconds
        self._length = AutoLength(sources=self.sources)  # for streams that bring none
        models: dict[str, Model] = {TARGET: target}
        if draft is not None:
            models[DRAFT] = draft
        if heads is not None:
            models[MTP] = heads
        concurrent = draft is not None and _apart(target, draft)
        self._scheduler = Scheduler(models, concurrent=concurrent, clock=clock)

    @property
    def sources(self) -> frozenset[Source]:
        """Where draft tokens come from."""
        found = {Source.MODEL: self.draft, Source.MTP: self.heads, Source.NGRAM: self.ngram or None}
        return frozenset(source for source, drafter in found.items() if drafter is not None)

    def stream(
        self,
        prompt: str | bytes | TokenArray,
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_tokens: int = 256,
        stops: Sequence[str] = (),
        spelled: Mapping[int, bytes] | None = None,
        rule: str = DEFAULT_RULE,
        policy: LengthPolicy | None = None,
        drafter: Drafter | None = None,
        on_prefill: Progress | None = None,
        constraint: Constraint | None = None,
        logprobs: int | None = None,
    ) -> TextStream:
        """Generate piece by piece; `.run()` on the answer generates to the end at once.

        Parameters
        ----------
        prompt : str, bytes or [n] int32
            Text, UTF-8 bytes, or token ids.
        sampling : Sampling, optional
            Default: llama.cpp's values, temperature 0.8.
        seed : int, optional
            Default: drawn at random. The same seed gives the same text under the coupled rule, whatever
            the draft and the policy.
        max_tokens : int
            At most this many new tokens.
        stops : sequence of str
            Strings that end the text.
        spelled : dict of int to bytes, optional
            Control tokens and the text that each has in this stream, such as the marks of a call that
            `AnswerFormat.spelled` names; the others have none.
        rule : str
            "coupled", "rejection" or "block".
        policy : LengthPolicy, optional
            How many tokens to draft; default: as many as pay, learnt from stream to stream.
        drafter : Drafter, optional
            Who drafts; default what the pair was opened with. `NoDrafter()` is plain decoding.
        on_prefill : callable, optional
            Told how many tokens of the prompt have been read, of how many.
        constraint : Constraint, optional
            What the text must look like: made by `json_schema`, `json_object` or `grammar`.
        logprobs : int, optional
            Each piece tells how probable its token was, and so many of the most probable tokens: of
            softmax(logits), before anything else.

        Raises
        ------
        PromptError
            The prompt is empty, not UTF-8, or does not fit.
        """
        sampling = sampling or Sampling()
        tokens = self._tokens(prompt)
        n_vocabulary = self.target.vocabulary_size
        if max(sampling.logit_bias or (0,)) >= n_vocabulary:
            raise ValueError(f"a logit bias is for token ids from 0 to {n_vocabulary - 1}")
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must be from 0 to {MAX_LOGPROBS}, got {logprobs}")
        row_constraint = None if constraint is None else constraint.start_row()
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule}")
        streams = SeededStreams(secrets.randbits(32) if seed is None else seed)
        length = (policy or self._length).start_row()
        if drafter is None:
            trees = hasattr(length, "tree")
            drafter = self._drafter(sampling, rule, streams, len(tokens), row_constraint, trees=trees)
        speculation = Speculation(
            drafter=drafter,
            length=length,
            rule=RULES[rule],
            sampling=sampling,
            streams=streams,
            context_size=self.target.context_size,
            max_scored=self.target.max_scored,
            constraint=row_constraint,
            n_logprobs=logprobs,
        )
        plan = TextPlan(tokens, self.target.vocabulary, speculation, max_tokens, stops, spelled or {})
        return TextStream(plan, self._scheduler, on_prefill)

    def step(self) -> bool:
        """Make one evaluation for all streams that have begun; False where none needs one.

        For a program that looks after many streams in one thread: `TextStream.ready` begins a stream and
        hands out what exists of it.
        """
        return self._scheduler.step()

    def json_schema(self, schema: Mapping[str, Any] | str) -> Constraint:
        """A constraint for `stream`: JSON as a schema wants it, properties in the schema's order.

        Compiled once, for any number of texts and threads. The first constraint of a pair also reads the
        vocabulary, which takes up to a second.

        Raises
        ------
        ConstraintError
            The schema is damaged, too large, or uses what llguidance does not know.
        """
        return self._grammars.json_schema(schema)

    def json_object(self) -> Constraint:
        """A constraint for `stream`: any JSON object."""
        return self._grammars.json_object()

    def grammar(self, text: str) -> Constraint:
        """A constraint for `stream`: texts of a grammar, in llguidance's Lark or llama.cpp's GBNF.

        Raises
        ------
        ConstraintError
            The grammar is damaged, or too large.
        """
        return self._grammars.grammar(text)

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.target.vocabulary)

    def run(self, measurement: Generator[ForwardRequest, Forward, Result]) -> Result:
        """Run a coroutine that yields what it wants evaluated, beside the streams; returns its result.

        Logits that it is sent are valid until its next request.

        Examples
        --------
        >>> def score(tokens):  # doctest: +SKIP
        ...     forward = yield ForwardRequest(TARGET, tokens)
        ...     return forward.logits[0].copy()
        >>> pair.run(score(tokens))  # doctest: +SKIP
        """
        return self._scheduler.run(measurement)

    def cache_use(self) -> tuple[int, int]:
        """Tokens that the target's KV cache holds, and how many it could."""
        return self.target.cache_use()

    def forget(self) -> None:
        """Empty both KV caches, as if nothing had been evaluated."""
        self._scheduler.forget()

    def close(self) -> None:
        """End all streams and free both models; from any thread, and more than once is allowed."""
        self._scheduler.close()
        for model in (self.heads, self.draft, self.target):
            if model is not None:
                model.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drafter(
        self,
        sampling: Sampling,
        rule: str,
        streams: SeededStreams,
        n_prompt: int,
        constraint: RowConstraint | None,
        *,
        trees: bool,
    ) -> Drafter:
        drafters: list[Drafter] = [NgramDrafter()] if self.ngram else []
        if constraint is not None:
            drafters = [AllowedDrafter(drafter, constraint, n_prompt) for drafter in drafters]
        if self.draft is not None or self.heads is not None:
            model = self.model_drafter(sampling, rule, streams, n_prompt, constraint, trees=trees)
            drafters.append(model)
        if constraint is not None:
            drafters.append(GrammarDrafter(constraint, n_prompt))
        return drafters[0] if len(drafters) == 1 else FallbackDrafter(drafters)

    def model_drafter(
        self,
        sampling: Sampling,
        rule: str,
        streams: SeededStreams,
        n_prompt: int = 0,
        constraint: RowConstraint | None = None,
        *,
        trees: bool = False,
    ) -> ModelDrafter:
        """The drafter that asks the draft model, or the target's prediction heads.

        `trees`: it may branch, where both models and the rule can.
        """
        model = self.draft if self.heads is None else self.heads
        assert model is not None
        draft = self.draft if trees and rule == Coupled.name else None
        trees = draft is not None and draft.can_branch and self.target.can_branch
        drafter = (TreeDrafter if trees else ModelDrafter)(
            model.vocabulary_size,
            model.context_size,
            sampling,
            RULES[rule],
            streams,
            n_tokens=self.target.vocabulary_size,
            n_prompt=n_prompt,
            constraint=constraint,
        )
        if self.heads is None:
            return drafter
        return replace(drafter, model=MTP, source=Source.MTP, longest=self.heads.longest)

    def _tokens(self, prompt: str | bytes | TokenArray) -> TokenArray:
        if isinstance(prompt, str):
            prompt = prompt.encode()
        if not isinstance(prompt, bytes):
            return prompt
        if not prompt:
            raise PromptError("the prompt is empty; give some text to continue")
        return self.target.vocabulary.tokenize(prompt)


def open_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    ngram: bool = False,
    target_options: ModelOptions | None = None,
    draft_options: ModelOptions | None = None,
    on_load: LoadProgress | None = None,
) -> Pair:
    """Load a target and, if given, its draft.

    Parameters
    ----------
    target : str or Path
        A file, or a name as the commands take it: of the list of models, or hf:owner/repo:file.
    draft : str or Path, optional
        The same; "auto" is the draft that is known for the target, or else the target's own prediction
        heads; "mtp" is these heads, "ngram" no model at all.
    ngram : bool
        Copy from earlier text where it goes on alike; the draft, if any, is asked elsewhere.

    Raises
    ------
    ModelFileError, MemoryFullError
        A model cannot be found or loaded.
    PairError
        The two models number tokens differently, or the target has no prediction heads.

    Examples
    --------
    >>> with open_pair(demo_target(), demo_draft()) as pair:  # doctest: +SKIP
    ...     for piece in pair.stream("import os", sampling=Sampling(temperature=0.7), seed=7):
    ...         print(piece.text, end="")
    """
    start = time.perf_counter()
    if draft == NGRAM:
        draft, ngram = None, True
    if draft == MTP or (draft == AUTO and drafts_itself(target)):
        path = resolve_model(target)
        return _open_with_heads(path, None, target_options, draft_options, on_load, start, ngram=ngram)
    draft_path = None if draft is None else resolve_draft(draft, target)
    if draft_path is not None and is_shared_head(draft_path):
        path = resolve_model(target)
        return _open_with_heads(path, draft_path, target_options, draft_options, on_load, start, ngram=ngram)
    with ExitStack() as opened:  # closes what is open where something goes wrong
        target_model = LlamaModel(resolve_model(target), target_options, on_load)
        opened.callback(target_model.close)
        draft_model = None
        if draft_path is not None:
            draft_model = LlamaModel(draft_path, draft_options or _DRAFT_OPTIONS, on_load)
            opened.callback(draft_model.close)
            check_pair(target_model.vocabulary, draft_model.vocabulary)
        opened.pop_all()
    return Pair(target_model, draft_model, time.perf_counter() - start, ngram=ngram)


def drafts_itself(target: str | Path) -> bool:
    """Whether "auto" means a target's own prediction heads: no draft is known, and the file is here."""
    if has_draft(str(target)):
        return False
    try:
        return heads_in_file(locate_model(target)).fault is None
    except ModelFileError:
        return False  # what is wrong is said by whoever needs the file


def _open_with_heads(
    path: Path,
    head_path: Path | None,
    target_options: ModelOptions | None,
    head_options: ModelOptions | None,
    on_load: LoadProgress | None,
    start: float,
    *,
    ngram: bool,
) -> Pair:
    """Load a target whose own prediction heads draft, or one that lies in a file of its own."""
    if head_path is None:
        check_heads(path)
    target = LlamaModel(path, replace(target_options or ModelOptions(), heads=True), on_load)
    try:
        heads = PredictionHeads(target, head_options, head_path, on_load)
    except BaseException:
        target.close()
        raise
    return Pair(target, None, time.perf_counter() - start, heads=heads, ngram=ngram)


def _apart(target: LlamaModel, draft: LlamaModel) -> bool:
    """Whether the two compute on different devices: one on the GPU, the other not."""
    on_gpu = [model.options.gpu_layers != 0 for model in (target, draft)]
    return runtime.can_offload() and on_gpu[0] != on_gpu[1]
