"""The log says where the prefix of a conversation changed, and nothing if it did not."""

from __future__ import annotations

import pytest

from llamaspec import Pair
from llamaspec.serve.service import PrefixWatch
from llamaspec.values import TokenArray
from serving import Served, served

RULES = "".join(f"{n}: call the function f{n}({n}) and return {n * n}\n" for n in range(20))


@pytest.fixture
def watch(demo: Pair) -> PrefixWatch:
    return PrefixWatch(demo.target.vocabulary)


def tokens(demo: Pair, text: str) -> TokenArray:
    return demo.target.vocabulary.tokenize(text.encode(), add_special=False)


def test_the_difference_is_shown(demo: Pair, watch: PrefixWatch) -> None:
    first, second = (tokens(demo, f"It is {time} now.\n{RULES}") for time in ("12:03\x1b[2J", "12:04"))
    assert watch.compare(first) is None
    told = watch.compare(second)
    assert told is not None
    n_lost = len(first) - int((first[: len(second)] != second[: len(first)]).argmax())
    assert told.startswith(f'prefix differs at token {len(first) - n_lost} of {len(second)}: after "')
    assert told.endswith(f"; {n_lost} tokens are processed again")
    assert "3\x1b[2J now." in told
    assert '", now "04 now.' in told


def test_nothing_is_logged_if_no_prefix_changed(demo: Pair, watch: PrefixWatch) -> None:
    conversation, other = tokens(demo, RULES), tokens(demo, "import os\n" + "print(os.name)\n" * 60)
    longer = tokens(demo, RULES + "And then?\n" + RULES)
    for prompt in (conversation, conversation, longer, other, other[:30], conversation[:60], longer):
        assert watch.compare(prompt) is None
    for time in ("12:03", "12:04"):  # few tokens do not matter
        assert watch.compare(tokens(demo, f"It is {time} now.\n{RULES[:200]}")) is None


def test_the_log_shows_the_difference(demo: Pair) -> None:
    def ask(server: Served, system: str) -> list[str]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]
        answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200
        return [line for line in server.log if "prefix differs" in line]

    with served(demo) as server:
        for time in ("12:03", "12:03", "12:04\x1b[2J"):
            told = ask(server, f"It is {time} now.\n{RULES}")
            assert len(told) == (time != "12:03")
        assert "4\\x1b[2J" in told[0]
