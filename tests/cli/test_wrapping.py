"""Text that is wrapped at words while it arrives, on a terminal that is imitated."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from llamaspec.cli.wrapping import WordWrap

TEXT = (
    "The KV cache keeps what was evaluated, 日本語の文章 too.\n\tx = a_very_long_name_without_space(1)\nend"
)


def on_screen(written: str, width: int) -> list[str]:
    """Return the lines of a terminal after what was written; no line may reach its last column."""
    lines = [""]
    for part in re.findall(r"\x1b\[\d+D\x1b\[K|[\s\S]", written):
        if part == "\n":
            lines.append("")
        elif part.startswith("\x1b"):
            gone = int(part[2 : part.index("D")])
            while gone > 0:
                gone -= cell_len(lines[-1][-1])
                lines[-1] = lines[-1][:-1]
            assert gone == 0
        else:
            lines[-1] += part
        assert cell_len(lines[-1].expandtabs()) < width
    return lines


@pytest.mark.parametrize("width", [12, 20, 33, 80, 200])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_words_stay_whole(width: int, size: int) -> None:
    wrap = WordWrap(width)
    written = "".join(wrap(TEXT[at : at + size]) for at in range(0, len(TEXT), size))
    lines = on_screen(written, width)
    assert "".join("".join(lines).split()) == "".join(TEXT.split())
    for word in TEXT.split():
        if cell_len(word) < width - 9:  # also behind a tab
            assert any(word in line for line in lines)
    if width == 200:
        assert lines == TEXT.split("\n")
