"""The benchmark of whole requests: the turns of its arms, and its figures.

Arms take turns request by request, in rotated order, with the same prompts, so that a machine that warms up
or is busy slows all alike. Every conversation begins with a number of its own, so no arm finds its prompt in
a cache. Within a conversation the prefix grows, and caches count. Ratios compare an arm's answer with the
baseline's answer to the same request.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import starmap
from typing import Any, TypeAlias

from llamaspec.errors import printable
from llamaspec.measure.compare import first_difference
from llamaspec.measure.served_arms import AUTO, PEER, PEER_BEST, PEER_PLAIN, PLAIN, Answer, RefusedError
from llamaspec.measure.tasks import BenchTask, Request, requests_of
from llamaspec.measure.turns import in_turn

WARM_UP = "Count from one to thirty, in words."
WARM_UP_TOKENS = 24
_MOST_SECONDS, _MOST_TOKENS = 1e6, 1 << 30  # of an answer; a report with more was not measured

Message = dict[str, str]  # role and content
Ask: TypeAlias = Callable[[Mapping[str, Any]], Answer]  # receives the body of a chat request


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one arm's answer to one request. It holds no text, because reports are shared."""

    arm: str
    group: str
    task: str
    prompt: str  # label of the request, such as "ask 2"
    repeat: int
    n_prompt_tokens: int
    n_tokens: int
    seconds: float  # from the request to the end of the stream
    first_seconds: float  # from the request to the first text
    n_drafted: int | None  # as the server reports
    n_accepted: int | None
    differs_at: int | None  # the first character that differs from the baseline's answer

    def __post_init__(self) -> None:
        counts = self.repeat, self.n_prompt_tokens, self.n_tokens, self.differs_at or 0
        seconds = self.first_seconds, self.seconds
        is_possible = all(0 <= each <= _MOST_TOKENS for each in counts)
        if not is_possible or not all(1e-9 < each < _MOST_SECONDS for each in seconds):
            raise ValueError(f"the answer of {self.arm!r} to {self.prompt!r} has impossible figures")

    @classmethod
    def of(cls, arm: str, request: Request, repeat: int, answer: Answer, baseline: Answer) -> Sample:
        """Make a sample of an answer."""
        figures = asdict(answer)
        del figures["text"], figures["reply"]
        figures["differs_at"] = first_difference(answer.text, baseline.text)
        group, task, prompt = map(printable, (request.task.group, request.task.name, request.label))
        return cls(arm, group, task, prompt, repeat, **figures)

    @property
    def request(self) -> tuple[str, int]:
        """Prompt and repeat; the answers of all arms to one request share them."""
        return self.prompt, self.repeat

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed after the first token; None if there was no second one."""
        decoding = self.seconds - self.first_seconds
        return (self.n_tokens - 1) / decoding if self.n_tokens > 1 and decoding > 0 else None

    def seconds_for(self, n_tokens: int) -> float:
        """Return the seconds that `n_tokens` tokens would take, because answers differ in length."""
        rate = self.tokens_per_second
        if rate is None or n_tokens == self.n_tokens or n_tokens < 1:
            return self.seconds
        return self.first_seconds + (n_tokens - 1) / rate


def baseline_of(arms: Iterable[str]) -> str:
    """Return the arm that others are compared with: llama-server without a draft, else our plain decoding."""
    return PEER_PLAIN if PEER_PLAIN in arms else PLAIN


def ask_all(
    asks: Mapping[str, Ask],
    tasks: Sequence[BenchTask],
    fields: Mapping[str, Any],
    n_repeats: int,
    notify: Callable[[str], None],
) -> Iterator[list[Sample]]:
    """Send every request to every arm, and yield the samples of one request at a time.

    `fields` replace the fields that tasks set. Each arm first answers a request that does not count. If an
    arm refuses a request, the rest of its conversation is left out. `notify` receives a line for each answer
    and for each refused request.
    """
    order = [*asks]
    for name in order:
        messages = [{"role": "user", "content": WARM_UP}]
        asks[name]({**fields, "messages": messages, "max_tokens": WARM_UP_TOKENS})
    requests = requests_of(tasks)
    total = len(requests) * n_repeats
    for repeat in range(n_repeats):
        history: dict[int, dict[str, list[Message]]] = {}  # by conversation and arm
        refused: set[int] = set()
        for number, request in enumerate(requests, repeat * len(requests)):
            here, user = request.conversation, request.turn.user
            if here in refused:
                continue
            if here not in history:
                history[here] = {name: [] for name in order}
                user = f"[{repeat * len(requests) + here + 1}]\n{user}"
            for messages in history[here].values():
                messages.append({"role": "user", "content": user})
            body = {**request.fields, **fields, "seed": number}
            try:
                answers: dict[str, Answer] = {}
                for name in in_turn(order, number):
                    answers[name] = asks[name]({**body, "messages": [*history[here][name]]})
                    notify(f"{number + 1}/{total} {request.label}, {name}: {answers[name].seconds:.2f} s")
            except RefusedError as error:
                notify(f"{request.label} is left out: {error}")
                refused.add(here)
                continue
            if request.counts:
                baseline = answers[baseline_of(order)]
                yield [Sample.of(name, request, repeat, answers[name], baseline) for name in order]
            for name, messages in history[here].items():
                recorded = request.turn.answer
                reply = answers[name].reply if recorded is None else recorded
                messages.append({"role": "assistant", "content": reply or "…"})


# Figures

AnswerPairs: TypeAlias = dict[
    str, list[tuple[Sample, Sample]]
]  # prompt -> answers of an arm and the baseline


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one arm on several prompts; ratios are the baseline's seconds divided by the arm's."""

    whole: float  # ratio of whole requests, geometric mean over prompts
    spread: float  # factor: exp of the standard deviation of the logarithms
    worst: float  # smallest ratio of a prompt
    worst_prompt: str
    decoding: float | None  # ratio after the first token, geometric mean
    first: float  # ratio up to the first text, geometric mean
    total: float  # ratio of all requests together
    seconds: float  # median
    first_seconds: float  # median
    total_seconds: float  # of all requests together, each as if it had the baseline's number of tokens
    forks: dict[str, tuple[int, ...]]  # prompt -> where answers first differ from the baseline's
    n_answers: int
    n_drafted: int  # draft tokens that were verified
    n_accepted: int

    @property
    def n_same(self) -> int:
        """Number of answers that equal the baseline's."""
        return self.n_answers - sum(map(len, self.forks.values()))


def answer_pairs(samples: Sequence[Sample], arm: str, baseline: str) -> AnswerPairs:
    """Return an arm's answers, each beside the baseline's answer to the same request."""
    beside = {sample.request: sample for sample in samples if sample.arm == baseline}
    pairs: AnswerPairs = {}
    for sample in samples:
        if sample.arm == arm:
            pairs.setdefault(sample.prompt, []).append((sample, beside[sample.request]))
    return pairs


def _whole(mine: Sample, base: Sample) -> float:
    """Return how many times as fast a request is, with the answer scaled to the baseline's length."""
    return base.seconds / mine.seconds_for(base.n_tokens)


def best_of(arms: Sequence[AnswerPairs]) -> AnswerPairs:
    """Return for each prompt the answers of the arm that turned out to be the fastest."""
    return {
        prompt: max(
            (arm[prompt] for arm in arms), key=lambda pairs: statistics.median(starmap(_whole, pairs))
        )
        for prompt in arms[0]
    }


def figures(pairs: AnswerPairs) -> Figures:
    """Fold the answers to one or more prompts; each prompt counts with the medians over its repeats."""

    def medians(value: Callable[[Sample, Sample], float]) -> list[float]:
        return [statistics.median(starmap(value, each)) for each in pairs.values()]

    wholes = dict(zip(pairs, medians(_whole), strict=True))
    worst_prompt = min(wholes, key=wholes.__getitem__)
    rates = [
        [
            mine.tokens_per_second / base.tokens_per_second
            for mine, base in each
            if mine.tokens_per_second and base.tokens_per_second
        ]
        for each in pairs.values()
    ]
    decoding = [statistics.median(each) for each in rates if each]
    logs = [math.log(whole) for whole in wholes.values()]
    forks = {
        prompt: tuple(mine.differs_at for mine, _ in each if mine.differs_at is not None)
        for prompt, each in pairs.items()
    }
    answers = [pair for each in pairs.values() for pair in each]
    total_seconds = sum(mine.seconds_for(base.n_tokens) for mine, base in answers)
    return Figures(
        whole=math.exp(statistics.mean(logs)),
        spread=math.exp(statistics.stdev(logs)) if len(logs) > 1 else 1.0,
        worst=wholes[worst_prompt],
        worst_prompt=worst_prompt,
        decoding=statistics.geometric_mean(decoding) if decoding else None,
        first=statistics.geometric_mean(medians(lambda mine, base: base.first_seconds / mine.first_seconds)),
        total=sum(base.seconds for _, base in answers) / total_seconds,
        seconds=statistics.median(medians(lambda mine, _: mine.seconds)),
        first_seconds=statistics.median(medians(lambda mine, _: mine.first_seconds)),
        total_seconds=total_seconds,
        forks={prompt: places for prompt, places in forks.items() if places},
        n_answers=len(answers),
        n_drafted=sum(mine.n_drafted or 0 for mine, _ in answers),
        n_accepted=sum(mine.n_accepted or 0 for mine, _ in answers),
    )


def figures_of_arms(samples: Sequence[Sample]) -> dict[str, Figures]:
    """Return the figures of each arm; if there are several llama-servers, also of the best of each prompt."""
    names = [*dict.fromkeys(sample.arm for sample in samples)]
    arms = {arm: answer_pairs(samples, arm, baseline_of(names)) for arm in names}
    peers = [each for arm, each in arms.items() if arm.startswith(PEER)]
    if len(peers) > 1:
        arms[PEER_BEST] = best_of(peers)
    return {arm: figures(each) for arm, each in arms.items()}


def speed_ups(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the speed-up of llamaspec's defaults over plain decoding, by group of tasks."""
    groups = grouped(samples, "group").items()
    return {group: figures(answer_pairs(each, AUTO, PLAIN)).whole for group, each in groups}


def best_type(arms: Mapping[str, Figures]) -> str | None:
    """Return the llama-server that is fastest over all prompts; None if there is none."""
    peers = [arm for arm in arms if arm.startswith(PEER) and arm != PEER_BEST]
    return max(peers, key=lambda arm: arms[arm].whole, default=None)


def grouped(samples: Sequence[Sample], kind: str) -> dict[str, list[Sample]]:
    """Return samples by one of their fields: group or task."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(getattr(sample, kind), []).append(sample)
    return by_name
