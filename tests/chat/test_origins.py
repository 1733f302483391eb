"""Deltas have the log-probabilities and spans of their own text, wherever tokens and marks begin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import CountingUp, FakeModel, tokens
from llamaspec.chat import families
from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.chat.messages import ContentDelta, ReasoningDelta
from llamaspec.chat.notation import AnswerFormat, Reasoning
from llamaspec.chat.parse import AnswerParser
from llamaspec.engine.detokenizer import Span
from llamaspec.engine.stream import TextStream
from llamaspec.values import TARGET, TokenArray
from stepped import Stepped
from texts import Alphabet, Letters, stream

Told: TypeAlias = list[tuple[str, list[str | bytes]]]  # content, and the tokens that come with it

TEXT = AnswerFormat()
CALLS = AnswerFormat(families.HERMES, Reasoning("<think>", "</think>"))
CHANNELS = AnswerFormat(families.HARMONY, families.CHANNELS)
TOOLS: Any = [{"function": {"name": "nap"}}]
NOBODY: Any = None  # a vocabulary that is not used
NAP = '<tool_call>{"name": "nap", "arguments": {}}</tool_call>'


class Words(Letters):
    """Token n is word n; the token after the last word ends the completion."""

    def __init__(self, words: Sequence[bytes]) -> None:
        super().__init__(end=len(words))
        self._words = (*words, b"")

    def piece(self, token: int) -> bytes:
        return self._words[token]


def stream_of(
    words: Sequence[str | bytes], form: AnswerFormat = TEXT, stops: Sequence[str] = (), n: int = 99
) -> AnswerStream:
    """Return an answer of these words, of which at most `n` are generated."""
    known = Words([b"", *(word.encode() if isinstance(word, str) else word for word in words)])
    size = len(words) + 2
    models: dict[str, FakeModel] = {TARGET: Alphabet(vocabulary_size=size, context_size=size + 2)}

    def open_stream(prompt: TokenArray, max_tokens: int) -> TextStream:
        return stream(
            Stepped(models), models, prompt.tolist(), drafter=CountingUp(size), max_tokens=max_tokens,
            vocabulary=known, stops=stops, n_logprobs=0,
        )  # fmt: skip

    return AnswerStream(tokens(0), n, open_stream, AnswerParser(form, TOOLS), NOBODY)


def answer(words: Sequence[str | bytes], *asked: Any, **more: Any) -> list[ContentDelta]:
    """Return the content of the answer and its tokens, delta by delta."""
    steps = stream_of(words, *asked, **more)
    return [delta for deltas in steps for delta in deltas if isinstance(delta, ContentDelta)]


def told(words: Sequence[str | bytes], *asked: Any, **more: Any) -> Told:
    """Return the tokens without the end-of-text token, which every API leaves out."""
    found = answer(words, *asked, **more)
    return [
        (each.text, [words[token - 1] for token, *_ in each.logprobs if token <= len(words)])
        for each in found
    ]


@pytest.mark.parametrize(
    ("words", "stops", "expected"),
    [
        (["a", "b"], (), [("a", ["a"]), ("b", ["b"])]),
        ([b"\xe2\x82", b"\xacb"], (), [("€b", [b"\xe2\x82", b"\xacb"])]),
        ([b"a\xe2", b"\x82", b"\xac"], (), [("a", [b"a\xe2"]), ("€", [b"\x82", b"\xac"])]),
        ([b"a", b"\xe2"], (), [("a", [b"a"]), ("\ufffd", [b"\xe2"])]),
        (["a", "", "b"], (), [("a", ["a"]), ("b", ["", "b"])]),  # "" is a control token
        # A possible beginning of a stop string is held back.
        (["aST", "U", "b"], ("STOP",), [("a", ["aST"]), ("STU", ["U"]), ("b", ["b"])]),
        (["S", "T", "S", "x"], ("STOP",), [("ST", ["S", "T"]), ("Sx", ["S", "x"])]),
        (["a", "S", "T"], ("STOP",), [("a", ["a"]), ("ST", ["S", "T"])]),
        (["a", "S", "TOP", "b"], ("STOP",), [("a", ["a"])]),
        (["S", "aSTOP"], ("STOP",), [("Sa", ["S", "aSTOP"])]),
        (["S", "STOP"], ("STOP",), [("S", ["S"])]),
    ],
)
def test_tokens_come_with_their_first_text(words: list[Any], stops: tuple[str, ...], expected: Told) -> None:
    assert told(words, TEXT, stops) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["So", " <", "tool", "s>"], [("So", ["So"]), (" <tools>", [" <", "tool", "s>"])]),
        (
            ["t<t", "x"],
            [("t", ["t<t"]), ("<tx", ["x"])],
        ),  # the t that was held back was taken for the first one
        (["a", " ", "\n", NAP[:9], NAP[9:]], [("a", ["a"])]),
        (["a <tool", NAP[5:]], [("a", ["a <tool"])]),
        ([NAP, " \nb", "c"], [("b", [" \nb"]), ("c", ["c"])]),
        (["So \n", "a"], [("So", ["So \n"]), (" \na", ["a"])]),
        (["<th", "ink>", "H", "m</", "think", ">", "\n", "\nSo"], [("So", ["\nSo"])]),
        (["<think>Hm", "m</think>So", " it"], [("So", ["m</think>So"]), (" it", [" it"])]),
        (["<think>t </", "think>\n", "t"], [("t", ["t"])]),
    ],
)
def test_marks_reasoning_and_calls_are_skipped(words: list[str], expected: Told) -> None:
    assert told(words, CALLS) == expected


def test_a_cut_mark_does_not_come_with_the_text_before_it() -> None:
    """A stream ended within <tool_call>. The two empty lines before, held back until then, came with the
    log-probabilities of three tokens: the beginning of the mark was among them.
    """
    assert told(["\n", "\n", "<tool", "_call>"], CALLS, n=3) == [("\n\n", ["\n", "\n"])]


def test_messages_of_channels_have_marks_between_them() -> None:
    channel = "<|channel|>final<|message|>"
    words = [channel, "Hi \n", "<|end|>", "<|start|>assistant", channel + " ", "you"]
    assert told(words, CHANNELS) == [
        ("Hi", ["Hi \n"]),
        (" \n", []),
        (" you", [channel + " ", "you"]),
    ]


@settings(deadline=None)
@given(st.text("aST<é€", max_size=12), st.data())
def test_every_token_comes_with_its_first_character(text: str, data: st.DataObject) -> None:
    """None is lost or comes twice, whatever was held back."""
    written = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)))))
    cuts = [0, *cuts, len(written)]
    words = [written[a:b] for a, b in itertools.pairwise(cuts)]
    first = [len(written[:begin].decode(errors="ignore")) for begin in cuts[:-1]]  # character of each word
    stops = data.draw(st.lists(st.text("aST", min_size=1, max_size=3), max_size=2))
    for form in (TEXT, CALLS):
        begin = 0
        for said, with_it in told(words, form, stops):
            end = begin + len(said)
            assert text[begin:end] == said
            assert with_it == [word for word, at in zip(words, first, strict=True) if begin <= at < end]
            begin = end


def test_spans_are_those_of_the_content() -> None:
    found = answer(["<think>", "Hm", "</think>", "\n\nSo ", "it", " is"], CALLS)
    assert "".join(content.text for content in found) == "So it is"
    spans = [span for content in found for span in content.spans]
    assert spans == [Span("So", True), Span(" it", True), Span(" is", False)]


def test_content_of_several_tokens_that_are_ready_is_joined() -> None:
    """One event for a client, however many tokens a round accepted."""
    stream = stream_of(["a", "b", "c"])
    while not (begun := next(stream)):
        pass
    (rest,) = stream.ready()
    assert isinstance(rest, ContentDelta)
    assert [delta.text for delta in begun if isinstance(delta, ContentDelta)] == ["a"]
    assert (rest.text, rest.spans) == ("bc", (Span("b", True), Span("c", False)))
    assert [token.token for token in rest.logprobs][:2] == [2, 3]


def test_every_token_counts_with_the_text_after_it() -> None:
    """Also the tokens of marks, which have no text of the answer."""
    stream = stream_of(["<think>", "Hm", "</think>", "So", " it"], CALLS)
    texts = (delta for deltas in stream for delta in deltas)
    assert [each.n_tokens for each in texts if isinstance(each, ContentDelta | ReasoningDelta)] == [2, 2, 1]
