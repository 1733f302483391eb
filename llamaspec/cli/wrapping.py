"""Breaks the lines of text that arrives in pieces between words."""

from __future__ import annotations

import shutil

from rich.cells import cell_len

_TAB = 8  # columns


class WordWrap:
    """Moves a word to the next line of the terminal if it does not fit, also if a part of it is shown."""

    def __init__(self, width: int | None = None) -> None:
        self._limit = (width or shutil.get_terminal_size().columns) - 1  # at the last column, cursors differ
        self._column = 0
        self._word = ""  # its letters so far

    def __call__(self, text: str) -> str:
        """Return what to write for the next piece; it may go back over a word."""
        return "".join(map(self._next, text))

    def _next(self, character: str) -> str:
        if character.isspace():
            self._word = ""
            if character == "\n":
                self._column = 0
            elif self._column >= self._limit:
                self._column, character = 0, "\n"
            else:
                self._column += _TAB - self._column % _TAB if character == "\t" else 1
            return character
        width = cell_len(character)
        back = cell_len(self._word)
        moved = ""
        if self._column + width > self._limit:
            if back < self._column:  # the word is not the whole line
                moved = (f"\x1b[{back}D\x1b[K" if back else "") + f"\n{self._word}"
                self._column = back
            else:
                moved, self._column, self._word = "\n", 0, ""
        self._word += character
        self._column += width
        return moved + character
