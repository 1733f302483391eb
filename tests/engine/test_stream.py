"""Streams: why a completion ends, what an early stop leaves, and how a prompt is processed."""

from __future__ import annotations

import pytest

from fakes import CountingUp, FakeModel, Length, OverDelivers
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.completion import StopReason
from llamaspec.engine.prefill_decode import PREFILL_PART
from llamaspec.engine.stream import TextStream
from llamaspec.errors import PromptError
from llamaspec.protocols import SequenceLength
from llamaspec.values import TARGET, Draft, TokenArray
from stepped import Stepped
from texts import Alphabet, Letters, stream


def alphabet(**settings: int) -> FakeModel:
    return Alphabet(vocabulary_size=5, **{"context_size": 30, "batch_size": 600, **settings})  # type: ignore[arg-type]


def made(
    prompt: str = "ab", k: int = 2, model: FakeModel | None = None, end: int | None = None, **settings: object
) -> TextStream:
    models = {TARGET: model or alphabet()}
    ids = Letters().tokenize(prompt.encode()).tolist()
    settings = {"length": Length(k), "vocabulary": Letters(end), **settings}
    return stream(Stepped(models), models, ids, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize(
    ("settings", "text", "reason"),
    [
        ({"max_tokens": 7}, "cdeabcd", StopReason.LIMIT),
        ({"max_tokens": 1}, "c", StopReason.LIMIT),
        ({"max_tokens": 99, "end": 0}, "cde", StopReason.END),
        ({"max_tokens": 99, "end": 0, "stops": ("ex",)}, "cde", StopReason.END),  # e was held back
        ({"max_tokens": 99, "stops": ("ab",)}, "cde", StopReason.STOP),
        ({"max_tokens": 4, "stops": ("ea",)}, "cd", StopReason.STOP),
        ({"max_tokens": 4, "stops": ("abx",)}, "cdea", StopReason.LIMIT),  # held back, then shown
        ({"max_tokens": 99, "prompt": "ab" * 13}, "cdea", StopReason.CONTEXT),
    ],
)
def test_why_a_completion_ends(settings: dict[str, object], text: str, reason: StopReason, k: int) -> None:
    length = Length(k)
    of = made(k=k, length=length, **settings)  # type: ignore[arg-type]
    shown = "".join(piece.text for piece in of)
    assert (shown, of.completion.stop_reason) == (text, reason)
    assert of.completion.text == shown
    assert length.n_closed == 1
    assert [round_.tokens.tolist() for round_ in length.rounds] == [
        round_.tokens.tolist() for round_ in of.completion.rounds
    ]


@pytest.mark.parametrize(("max_tokens", "n"), [(7, 7), (1, 1), (99, 28)])
@pytest.mark.parametrize("n_drafted", [5, 40])
def test_a_draft_that_is_too_long_is_cut(n_drafted: int, max_tokens: int, n: int) -> None:
    """Five tokens after one `wants_more` once exceeded the limit, or failed at the end of the context."""
    done = made(k=1, drafter=OverDelivers(n_drafted, 5), max_tokens=max_tokens).run()
    assert len(done.tokens) == n
    assert sum(len(round_.tokens) for round_ in done.rounds) == n


def test_a_draft_with_more_tokens_than_can_be_scored_is_cut() -> None:
    done = made(k=1, model=alphabet(max_scored=4, context_size=99), drafter=OverDelivers(40, 5)).run()
    assert [len(round_.draft) for round_ in done.rounds] == [3, 3, 3]
    assert len(done.tokens) == 12


def test_nothing_is_drafted_beyond_the_limit() -> None:
    asked: list[int] = []

    class Watching(CountingUp):
        def propose(self, context: TokenArray, length: SequenceLength) -> Draft:
            asked.append(len(draft := super().propose(context, length)))
            return draft

    made(k=3, drafter=Watching(5), max_tokens=6).run()
    assert asked == [3, 1]


def test_tokens_without_text_are_pieces() -> None:
    of = made(vocabulary=Letters(mute=4), max_tokens=5)
    pieces = list(of)
    assert [(piece.token, piece.text) for piece in pieces] == [
        (2, "c"),
        (3, "d"),
        (4, ""),
        (0, "a"),
        (1, "b"),
    ]
    assert not pieces[2].drafted
    assert [piece.drafted for piece in pieces[:2]] == [True, True]
    assert of.completion.tokens == (2, 3, 4, 0, 1)


@pytest.mark.parametrize("n", range(1, 6))
def test_an_early_stop_keeps_what_was_read(n: int) -> None:
    length = Length(2)
    of = made(max_tokens=50, length=length)
    shown = "".join(next(of).text for _ in range(n))
    of.close()
    done = of.completion
    assert done.text == shown == "cdeab"[:n]
    assert done.tokens == (2, 3, 4, 0, 1)[:n]
    assert done.stop_reason is StopReason.INTERRUPT
    assert done.summary.n_tokens == n
    assert list(of) == []
    of.close()
    assert length.n_closed == 1
    assert of.completion == done or of.completion.tokens == done.tokens


def test_a_stream_that_is_never_read_closes_its_length() -> None:
    closed, forgotten = Length(), Length()
    made(length=closed).close()
    made(length=forgotten)
    assert (closed.n_closed, forgotten.n_closed) == (1, 1)


def test_statistics_count_the_tokens_of_the_completion() -> None:
    done = made(k=3, end=1, max_tokens=99).run()  # c d e a, then the end within a draft
    summary = done.summary
    assert done.tokens == (2, 3, 4, 0)
    assert summary.n_tokens == 5
    assert summary.n_rounds == 2
    assert (summary.n_drafted, summary.n_verified, summary.n_accepted) == (6, 6, 6)
    assert summary.accepted_histogram == (0, 0, 0, 2)
    assert summary.mean_tokens_per_round == 4


def test_progress_of_a_long_prompt_is_reported() -> None:
    told: list[tuple[int, int]] = []
    model = alphabet(context_size=900)
    prompt, n = "a" * (PREFILL_PART + 30), PREFILL_PART + 29
    of = made(prompt, model=model, drafter=NoDrafter(), max_tokens=1, on_prefill=lambda *at: told.append(at))
    assert of.run().n_cached == 0
    assert told == [(PREFILL_PART, n), (n, n), (n, n)]
    assert [evaluated.width for evaluated in model.evaluated] == [PREFILL_PART, 29, 1]


def test_the_drafter_processes_a_long_prompt_in_parts() -> None:
    """Prediction heads need the hidden states of each part, which are not kept for long."""
    n, taken = 2 * PREFILL_PART + 30, list[int]()

    class Reading(NoDrafter):
        def prepare(self, context: TokenArray) -> None:
            taken.append(len(context))

    model = alphabet(context_size=2000)
    made("a" * n, model=model, drafter=Reading(), max_tokens=1).run()
    assert taken == [PREFILL_PART + 1, 2 * PREFILL_PART + 1, n]


def test_cached_tokens_are_counted_if_the_rest_takes_several_evaluations() -> None:
    """Each part finds the parts before it cached; these must not count."""
    model = alphabet(context_size=900, batch_size=8)
    scheduler, prompt = Stepped({TARGET: model}), [0] * 20 + [1] * 40
    stream(scheduler, {TARGET: model}, prompt[:21], drafter=NoDrafter(), max_tokens=1).run()
    model.evaluated.clear()
    done = stream(scheduler, {TARGET: model}, prompt, drafter=NoDrafter(), max_tokens=1).run()
    assert [evaluated.width for evaluated in model.evaluated] == [8, 8, 8, 8, 6, 1]
    assert done.n_cached == 21


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": "a" * 30}, "leaves no room"),
        ({"max_tokens": 0}, "max tokens"),
        ({"stops": ("x", "")}, "stop string"),
    ],
)
def test_invalid_arguments_are_refused(settings: dict[str, object], complaint: str) -> None:
    error = PromptError if "prompt" in settings else ValueError
    with pytest.raises(error, match=complaint):
        made(**settings)  # type: ignore[arg-type]


def test_control_tokens_have_text_if_requested() -> None:
    """Tool calls are marked by control tokens: a parser of calls needs them, a terminal does not."""
    plain = made(max_tokens=7)
    spelled = made(max_tokens=7, spelled={4: b"<mark>"}, stops=("rk>a",))
    assert plain.run().text == "cdeabcd"
    done = spelled.run()
    assert (done.text, done.stop_reason) == ("cd<ma", StopReason.STOP)
