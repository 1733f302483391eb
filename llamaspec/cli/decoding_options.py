"""Options that say how tokens are drawn and drafted, and the length policy that follows from them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import click

from llamaspec.cli.option_groups import Command, Decorator, option_group
from llamaspec.cli.terminal import say
from llamaspec.errors import PromptError
from llamaspec.length.fixed import FixedLength
from llamaspec.llama.options import MAX_DRAFT
from llamaspec.measure.store import auto_length, known_exact_widths
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE, RULES
from llamaspec.sampling.filters import Sampling

_CHAIN = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class DraftLength(click.ParamType):  # type: ignore[type-arg]
    """A number of draft tokens, or "auto", which becomes None."""

    name = f"auto|0-{MAX_DRAFT}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """From the command line."""
        if value == "auto":
            return None
        try:
            length = int(value)
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_DRAFT:
            self.fail(f"{value} is neither auto nor a number from 0 to {MAX_DRAFT}", param, ctx)
        return length


UNLIMITED = 1 << 31  # tokens; every context ends sooner

TREES = click.option("--trees", is_flag=True,
                     help="Let draft tokens branch where that is expected to be faster: where wide batches "
                          "cost little, with the coupled rule.")  # fmt: skip
_LIMIT = click.option("--max-tokens", "-n", type=click.IntRange(min=1), default=256, show_default=True,
                      help="Stop after this many tokens.")  # fmt: skip
_ANSWER_LIMIT = click.option("--max-tokens", "-n", type=click.IntRange(min=1), default=UNLIMITED,
                             show_default="what the context has room for",
                             help="Stop an answer after this many tokens.")  # fmt: skip
_OPTIONS: tuple[Decorator, ...] = (
    click.option("--temperature", "-t", type=float, default=0.8, show_default=True,
                 help="0 = always the best token."),
    click.option("--top-k", type=int, default=40, show_default=True, help="Keep the k best tokens; 0 = all."),
    click.option("--top-p", type=float, default=0.95, show_default=True,
                 help="Keep the best tokens with this much probability together; 1 = all."),
    click.option("--min-p", type=float, default=0.05, show_default=True,
                 help="Keep tokens at least this probable relative to the best; 0 = all."),
    click.option("--repeat-penalty", type=float, help="Divide the scores of tokens seen lately; 1 = off."),
    click.option("--presence-penalty", type=float, help="Lower the scores of tokens seen lately."),
    click.option("--frequency-penalty", type=float, help="The same, for each time they came."),
    click.option("--seed", type=int, help="For the same text again; default: drawn at random and reported."),
    click.option("--rule", type=click.Choice(list(RULES)), default=DEFAULT_RULE, show_default=True,
                 help="How draft tokens are accepted; only coupled gives the same text for a seed without a "
                      "draft."),
    click.option("--draft-length", "-k", type=DraftLength(), default="auto", show_default=True,
                 help="Draft tokens in each round; 0 = plain decoding, auto = as many as pay."),
    TREES,
    click.option("--exact", is_flag=True,
                 help="Evaluate only batch widths that are bit-identical with single tokens here."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """How a command was asked to generate.

    Raises
    ------
    ValueError
        --exact together with a fixed number of draft tokens.
    """

    sampling: Sampling
    max_tokens: int
    seed: int | None  # None = draw one
    rule: str
    draft_length: int | None  # None = as many as pay
    exact: bool
    trees: bool = False  # draft tokens may branch

    def __post_init__(self) -> None:
        if self.exact and self.draft_length:
            raise ValueError("--exact chooses the number of draft tokens by itself; drop --draft-length")

    def seed_or_random(self) -> int:
        """The seed, or one drawn now."""
        return secrets.randbits(32) if self.seed is None else self.seed


def _decoding(
    *,
    max_tokens: int,
    seed: int | None,
    rule: str,
    draft_length: int | None,
    exact: bool,
    trees: bool,
    **chain: Any,
) -> DecodingOptions:
    """From the command line, where "off" has a value."""
    sampling = Sampling(
        temperature=chain["temperature"],
        top_k=chain["top_k"] or None,
        top_p=None if chain["top_p"] == 1 else chain["top_p"],
        min_p=chain["min_p"] or None,
        repeat_penalty=None if chain["repeat_penalty"] == 1 else chain["repeat_penalty"],
        presence_penalty=chain["presence_penalty"] or None,
        frequency_penalty=chain["frequency_penalty"] or None,
    )
    return DecodingOptions(sampling, max_tokens, seed, rule, draft_length, exact, trees)


def decoding_options(command: Command) -> Command:
    """Options for decoding; the command gets DecodingOptions as `decoding`."""
    return option_group("decoding", _decoding, (_LIMIT, *_OPTIONS))(command)


def answer_decoding_options(command: Command) -> Command:
    """The same for answers, which end by themselves."""
    return option_group("decoding", _decoding, (_ANSWER_LIMIT, *_OPTIONS))(command)


def with_setting(decoding: DecodingOptions, name: str, value: str) -> DecodingOptions:
    """The same options but for one, which is given as on the command line.

    Raises
    ------
    PromptError
        It is none that can be set, or cannot have this value.
    """
    values = settings_of(decoding)
    field = name.lstrip("-").replace("-", "_")
    if field not in values:
        names = ", ".join(values).replace("_", "-")
        raise PromptError(f"there is no setting {name}; choose one of {names}")
    option = next(option for option in _settable() if option.name == field)
    values |= {"rule": decoding.rule, "draft_length": decoding.draft_length, "exact": decoding.exact}
    values["trees"] = decoding.trees
    try:
        values[field] = option.type.convert(value, option, None)
        return _decoding(**values)
    except click.BadParameter as error:
        raise PromptError(
            f"{name} cannot be {value}: {error.message.rstrip('.')}; /set shows them"
        ) from error
    except ValueError as error:
        raise PromptError(f"{name} cannot be {value}: {error}; /set shows them all") from error


def settings_of(decoding: DecodingOptions) -> dict[str, Any]:
    """What can be set between two answers, with its value; None = off, or drawn at random."""
    chain = {name: getattr(decoding.sampling, name) for name in _CHAIN}
    return {**chain, "seed": decoding.seed, "max_tokens": decoding.max_tokens}


def _settable() -> list[click.Parameter]:
    def holder() -> None: ...

    for option in (_ANSWER_LIMIT, *_OPTIONS):
        option(holder)
    found: list[click.Parameter] = holder.__click_params__  # type: ignore[attr-defined]
    return found


def make_policy(pair: Pair, decoding: DecodingOptions) -> LengthPolicy:
    """A fresh policy for one text, with what runs and a probe have found for this pair, if anything."""
    if decoding.draft_length is not None:
        return FixedLength(decoding.draft_length)
    if not decoding.exact:
        return auto_length(pair, tell=say, trees=decoding.trees)
    widths = known_exact_widths(pair)
    if widths == {1}:
        say(
            "--exact: no wider batch is sure to be bit-identical here, decoding plainly; on a CPU "
            "--cache-type-v bf16 may help, after llamaspec probe"
        )
    return auto_length(pair, widths, say, trees=decoding.trees)
