"""From tokens to text: UTF-8 split over tokens, and beginnings of stop strings."""

from __future__ import annotations

import pytest

from llamaspec.engine.detokenizer import Span, TextAssembler


def pieces(parts: list[bytes], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """Return the text that each part makes certain, and finally the rest."""
    text = TextAssembler(stops)
    shown = ["".join(span.text for span in text.add(part, drafted=False)) for part in parts]
    return [*shown, "".join(span.text for span in text.finish())], text.stopped


EURO = "€".encode()
SMILE = "😀".encode()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], [""]),
        ([b"a", b"bc"], ["a", "bc", ""]),
        ([EURO[:1], EURO[1:]], ["", "€", ""]),
        ([EURO[:1], EURO[1:2], EURO[2:] + b"x"], ["", "", "€x", ""]),
        ([SMILE[:3], SMILE[3:] + SMILE[:1], SMILE[1:]], ["", "😀", "😀", ""]),
        ([b"a" + EURO[:2]], ["a", "\ufffd"]),  # incomplete at the end
        ([b"\xff", b"b"], ["\ufffd", "b", ""]),
        ([EURO[:2], b"b"], ["", "\ufffdb", ""]),
        ([b""], ["", ""]),
    ],
)
def test_characters(parts: list[bytes], expected: list[str]) -> None:
    assert pieces(parts) == (expected, False)


@pytest.mark.parametrize(
    ("parts", "stops", "expected", "stopped"),
    [
        ([b"one END two"], ("END",), ["one ", ""], True),
        ([b"one E", b"N", b"D"], ("END",), ["one ", "", "", ""], True),
        ([b"one E", b"N", b"X"], ("END",), ["one ", "", "ENX", ""], False),
        ([b"one EN"], ("END",), ["one ", "EN"], False),  # only the beginning
        ([b"aab", b"x"], ("aabb", "bx"), ["", "aa", ""], True),
        ([b"aaa", b"aab"], ("aab",), ["a", "aa", ""], True),
        ([b"x", b"END"], ("END",), ["x", "", ""], True),
        ([b"b then a"], ("a", "b"), ["", ""], True),  # first in the text, not in the list
        ([b"ENDEND"], ("END",), ["", ""], True),
        (["a€".encode()[:2], "€b".encode()[1:]], ("€",), ["a", "", ""], True),
        ([b"END", b"more"], ("END",), ["", "", ""], True),
    ],
)
def test_stop_strings(parts: list[bytes], stops: tuple[str, ...], expected: list[str], stopped: bool) -> None:
    assert pieces(parts, stops) == (expected, stopped)


def test_every_split_of_a_text_gives_the_same_text() -> None:
    whole = "naïve €uro 😀 STOP tail".encode()
    for i in range(len(whole)):
        for j in range(i, len(whole)):
            shown, stopped = pieces([whole[:i], whole[i:j], whole[j:]], ("STOP",))
            assert "".join(shown) == "naïve €uro 😀 "
            assert stopped


def test_spans_keep_the_origin_of_the_text() -> None:
    text = TextAssembler(["xyz"])
    assert text.add(b"ax", drafted=True) == [Span("a", True)]
    assert text.add(b"y", drafted=False) == []
    assert text.add(b"-", drafted=True) == [Span("x", True), Span("y", False), Span("-", True)]


@pytest.mark.parametrize(("part", "n"), [(b"ax", 2), (EURO[:1], 0), (EURO, 1), (b"\xff", 1)])
def test_characters_count_once_they_are_complete(part: bytes, n: int) -> None:
    text = TextAssembler(["xyz"])  # whether they are held back or not
    text.add(part, drafted=True)
    assert text.n_characters == n
