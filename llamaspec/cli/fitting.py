"""Attention as is best on this machine, for the models of a command line that does not say how."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from llamaspec.cli.terminal import SlowProgress, say
from llamaspec.measure.attention_choice import TextSize
from llamaspec.measure.fitting import Fitted, fitted
from llamaspec.measure.pair_files import ModelFile, PairFiles


class Fixed(Protocol):
    """What a command line fixes; a `ModelChoice` does."""

    @property
    def fixes_target(self) -> bool:
        """Whether it says how the target's attention is computed."""

    @property
    def fixes_draft(self) -> bool:
        """Whether it says how the draft's attention is computed."""


def fit_files(
    files: PairFiles,
    fixed: Fixed,
    *,
    may_measure: bool = True,
    is_thorough: bool = False,
    text: TextSize | None = None,
    n_texts: int = 1,
) -> PairFiles:
    """The same files, with flash attention and types of the KV cache chosen where the person did not.

    For one text, if that is all there will be, or for `n_texts` that share the KV cache.
    """

    def fit(role: str, file: ModelFile) -> ModelFile:
        with SlowProgress(f"measuring attention for the {role}, once for this machine"):
            found = fitted(
                file,
                is_draft=role == "draft",
                may_measure=may_measure,
                is_thorough=is_thorough,
                text=text,
                n_texts=n_texts,
            )
        _tell(role, found)
        return found.file

    target, draft = files.target, files.draft
    if not fixed.fixes_target:
        target = fit("target", target)
    if draft is not None and not fixed.fixes_draft:
        draft = fit("draft", draft)
    return replace(files, target=target, draft=draft)


def _tell(role: str, found: Fitted) -> None:
    choice = found.choice
    if choice is None:
        return  # of a draft it costs time only
    if found.is_new and choice.is_steady:
        say(
            f"{role}: measured once for this machine; this time {choice.summary}; fix it with {OPTIONS[role]}"
        )
    elif found.is_new:
        say(
            f"{role}: the machine is too busy to find out how attention is best computed; for now "
            f"{choice.configuration}; `llamaspec doctor` measures it once it is not, {OPTIONS[role]} fix it"
        )


OPTIONS = {
    "target": "--flash-attn, --cache-type-k, --cache-type-v",
    "draft": "--flash-attn, --draft-cache-type-k, --draft-cache-type-v",
}
