"""Who may reuse whose prefixes: to all others, a server counts and evaluates as if it had seen nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from forward_requests import Count
from llamaspec import Pair
from llamaspec.serve import ServeSettings
from llamaspec.serve.service import _scope_name
from llamaspec.values import EVERYONE
from serving import Served, served

SECRET = "My number is 48213975. Tell nobody!\n" * 4
TALK = {"messages": [{"role": "user", "content": SECRET}]}
OPTIONS = {"num_predict": 2, "temperature": 0}
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {**TALK, "max_tokens": 2},
    "/v1/completions": {"prompt": SECRET, "max_tokens": 2},
    "/v1/responses": {"input": SECRET, "max_output_tokens": 2},
    "/v1/messages": {**TALK, "max_tokens": 2},
    "/completion": {"prompt": SECRET, "n_predict": 2},
    "/api/chat": {**TALK, "stream": False, "options": OPTIONS},
    "/api/generate": {"prompt": SECRET, "stream": False, "options": OPTIONS},
}
KEYS = ("one", "two", "all")


class Asker(NamedTuple):
    """A key and a salt."""

    key: str
    salt: str | None = None

    def ask(self, server: Served, path: str, **more: Any) -> Any:
        body = {**BODIES[path], "temperature": 0, "cache_salt": self.salt, **more}
        answer = server.post(path, body, headers={"X-Api-Key": self.key})
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (Asker("one"), Asker("two")),
        (Asker("one"), Asker("one", "a")),
        (Asker("one", "a"), Asker("one", "b")),
        (Asker("one", "a"), Asker("two", "a")),
        (Asker("all", "a"), Asker("two")),
    ],
)
def test_another_scope_is_served_as_by_a_cold_cache(
    demo: Pair, evaluated: Count, first: Asker, other: Asker
) -> None:
    """The cached tokens told one user, digit by digit, what another had written. So did the time."""
    with served(demo, keys=KEYS, shared_key="all") as server:
        for path in BODIES:
            demo.forget()
            counts = list[int]()
            for asker in (first, other, other, first):
                evaluated.taken()
                asker.ask(server, path)
                counts.append(evaluated.taken())  # of the draft model, too
            cold, cold_again, *warm = counts
            assert cold == cold_again > 100, path
            assert max(warm) < cold / 4, path
        answers = [other.ask(server, "/v1/completions", prompt=f"{n}{SECRET}") for n in range(2)]
        assert all(each["usage"]["prompt_tokens_details"]["cached_tokens"] < 4 for each in answers)


def test_prefixes_of_the_shared_key_serve_all_keys(demo: Pair) -> None:
    rules = "".join(f"Rule {n}: be brief and kind.\n" for n in range(8))

    def n_cached(key: str, prompt: str) -> int:
        answer = Asker(key).ask(server, "/v1/completions", prompt=prompt)
        n: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return n

    with served(demo, keys=KEYS, shared_key="all") as server:
        demo.forget()
        assert n_cached("all", rules) == 0
        n_rules = n_cached("all", rules)
        first, guessed = (n_cached(key, rules + SECRET) for key in ("one", "two"))
        assert first == guessed  # no more than the rules
        assert n_rules - 2 <= first <= n_rules + 1
        assert n_cached("one", rules + SECRET) > n_rules + 40
        assert n_cached("all", rules + SECRET) <= n_rules + 1


@pytest.mark.parametrize(
    ("keys", "key", "salt", "scope"),
    [
        ((), "", None, ""),
        (("one",), "one", None, ""),
        (("one",), "one", "x", '["", "x"]'),
        (("one", "all"), "one", None, '["one"]'),
        (("*", "all"), "*", None, '["*"]'),
        (("one", "all"), "all", None, EVERYONE),
        (("one", "all"), "all", "x", '["all", "x"]'),
        (("all",), "all", None, ""),
    ],
)
def test_the_scope_of_a_request(keys: tuple[str, ...], key: str, salt: str | None, scope: str) -> None:
    settings = ServeSettings(keys=keys, shared_key="all" if "all" in keys else None)
    assert _scope_name(settings, key, salt) == scope
