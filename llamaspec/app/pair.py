"""A target and its draft, opened together: what a program uses, and what the commands are built on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import TracebackType

from llamaspec.drafters.chain import FirstThatGuesses
from llamaspec.drafters.model import ModelDrafter
from llamaspec.drafters.ngram import NgramDrafter
from llamaspec.engine.decode import Speculation
from llamaspec.engine.generate import Progress, TextStream
from llamaspec.errors import PromptError
from llamaspec.llama.model import LlamaModel, LoadProgress
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.pairing import check_pair
from llamaspec.protocols import Drafter, LengthPolicy
from llamaspec.rules.auto_length import AutoLength
from llamaspec.rules.dice import SeededDice
from llamaspec.rules.verify import RULES
from llamaspec.values import Sampling, TokenArray

DEFAULT_RULE = "coupled"
_DRAFT_OPTIONS = ModelOptions(max_scored=1)


def demo_target() -> Path:
    """The embedded target model."""
    return Path(str(files("llamaspec") / "demo" / "target.gguf"))


def demo_draft() -> Path:
    """The embedded draft model, distilled from the embedded target."""
    return Path(str(files("llamaspec") / "demo" / "draft.gguf"))


class Pair:
    """A target that decides what is said and, if there is one, a draft that guesses it.

    Close it, or use it as a context manager. Made by `open_pair`.
    """

    def __init__(
        self, target: LlamaModel, draft: LlamaModel | None, load_seconds: float, *, ngram: bool = False
    ) -> None:
        self.target = target
        self.draft = draft
        self.ngram = ngram  # earlier text is copied where it goes on alike, before the draft is asked
        self.load_seconds = load_seconds
        self._policy = AutoLength()  # for streams that bring none

    def stream(
        self,
        prompt: str | bytes | TokenArray,
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_tokens: int = 256,
        stops: Sequence[str] = (),
        rule: str = DEFAULT_RULE,
        policy: LengthPolicy | None = None,
        drafter: Drafter | None = None,
        on_prefill: Progress | None = None,
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
        rule : str
            "coupled", "rejection" or "block".
        policy : LengthPolicy, optional
            How many tokens to guess; default: as many as pay, learnt from stream to stream.
        drafter : Drafter, optional
            Who guesses; default what the pair was opened with. `SilentDrafter()` is plain decoding.
        on_prefill : callable, optional
            Told how many tokens of the prompt have been read, of how many.

        Raises
        ------
        PromptError
            The prompt is empty, not UTF-8, or does not fit.
        """
        sampling = sampling or Sampling()
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule}")
        dice = SeededDice(secrets.randbits(32) if seed is None else seed)
        speculation = Speculation(
            target=self.target,
            drafter=drafter or self._drafter(sampling, rule, dice),
            policy=policy or self._policy,
            rule=RULES[rule],
            sampling=sampling,
            dice=dice,
            clock=time.perf_counter,
        )
        tokens = self._tokens(prompt)
        return TextStream(
            tokens,
            self.target.vocabulary,
            speculation,
            max_tokens=max_tokens,
            stops=stops,
            on_prefill=on_prefill,
            n_remembered=self.target.remembered(tokens),
        )

    def forget(self) -> None:
        """Empty both memories, as if nothing had been asked."""
        self.target.forget()
        if self.draft is not None:
            self.draft.forget()

    def close(self) -> None:
        """Free both models; more than once is allowed."""
        if self.draft is not None:
            self.draft.close()
        self.target.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drafter(self, sampling: Sampling, rule: str, dice: SeededDice) -> Drafter:
        drafters: list[Drafter] = [NgramDrafter()] if self.ngram else []
        if self.draft is not None:
            n_tokens = self.target.vocabulary_size
            drafters.append(ModelDrafter(self.draft, sampling, RULES[rule], dice, n_tokens=n_tokens))
        return drafters[0] if len(drafters) == 1 else FirstThatGuesses(drafters)

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

    With `ngram` earlier text is copied where it goes on alike; the draft, if any, guesses elsewhere.

    Raises
    ------
    ModelFileError, MemoryFullError
        A model cannot be loaded.
    PairError
        The two models number tokens differently.

    Examples
    --------
    >>> with open_pair(demo_target(), demo_draft()) as pair:  # doctest: +SKIP
    ...     for piece in pair.stream("import os", sampling=Sampling(temperature=0.7), seed=7):
    ...         print(piece.text, end="")
    """
    start = time.perf_counter()
    target_model = LlamaModel(Path(target), target_options, on_load)
    if draft is None:
        return Pair(target_model, None, time.perf_counter() - start, ngram=ngram)
    try:
        draft_model = LlamaModel(Path(draft), draft_options or _DRAFT_OPTIONS, on_load)
    except BaseException:
        target_model.close()
        raise
    pair = Pair(target_model, draft_model, 0.0, ngram=ngram)
    try:
        check_pair(target_model.vocabulary, draft_model.vocabulary)
    except BaseException:
        pair.close()
        raise
    pair.load_seconds = time.perf_counter() - start
    return pair
