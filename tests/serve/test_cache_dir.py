"""`--cache-dir`: what one server has read, the next one knows; the texts are the same as without."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx

from serving import PATIENCE_SECONDS, process, until

PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return "
ASKED = {"prompt": PROMPT, "max_tokens": 24, "seed": 5, "temperature": 0.8}


def asked(*options: str) -> tuple[str, int, int, list[str]]:
    """The text, its prompt tokens, those that were cached, and what the server said besides."""
    with process(*options) as server:
        answer: Any = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=PATIENCE_SECONDS).json()
        server.popen.send_signal(signal.SIGTERM)
        assert server.ended() == 0
        until(lambda: server.lines[-1] == "llamaspec: stopped")
    usage = answer["usage"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert not any("Traceback" in line for line in server.lines)
    return answer["choices"][0]["text"], usage["prompt_tokens"], n_cached, server.lines


def test_the_next_server_knows_the_prompt(demo_files: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    text, _, n_cached, _ = asked("--cache-dir", str(folder))
    assert n_cached == 0
    files = sorted(folder.iterdir())
    assert len(files) == 2  # the draft's, too
    assert {file.stat().st_mode & 0o777 for file in (folder, *files)} == {0o700, 0o600}

    again, n_prompt, n_cached, lines = asked("--cache-dir", str(folder))
    assert (again, n_cached) == (text, n_prompt - 1)
    assert any("tokens of prefixes were loaded" in line for line in lines)
