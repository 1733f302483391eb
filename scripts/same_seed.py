"""Ask `llamaspec serve --exact` for the same completions in five situations, and count differences.

\b
    python scripts/same_seed.py --target big-q4_0.gguf --draft small.gguf
    python scripts/same_seed.py --target big-q4_0.gguf --draft small.gguf --seeds 20 --default

For each seed, a random prompt is continued: alone and without a draft, alone with a draft, behind a cached
prefix, beside three other completions, and beside three of which one shares the prefix. With `--default` the
server runs without `--exact`: then some differ, which shows that the comparison can fail. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from llamaspec.measure.served_arms import ServerCommand, serving
from serve_load import FILE

LONGEST = 1_960  # tokens of a prompt
SHORTEST = 40
N_BESIDE = 3
SITUATIONS = ("with a draft", "behind a prefix", "beside three", "sharing a prefix with one of three")


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--target", type=FILE, required=True)
@click.option("--draft", type=FILE, required=True)
@click.option("--seeds", default=200, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--tokens", default=32, show_default=True, type=click.IntRange(min=1), help="Tokens of each completion."
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the server; default: its own choice.")
@click.option("--default", "by_default", is_flag=True, help="Leave --exact out.")
def main(target: Path, draft: Path, seeds: int, tokens: int, threads: int | None, by_default: bool) -> None:
    """Compare the completions, and print how many differ."""
    command = [sys.executable, "-m", "llamaspec", "serve", "--target", str(target), "--draft", str(draft)]
    command += ["-c", "10000", "--parallel", str(N_BESIDE + 1), "--cache-ram", "0"]
    command += [] if threads is None else ["--threads", str(threads)]
    command += [] if by_default else ["--exact"]
    with serving([ServerCommand("llamaspec serve", tuple(command))]) as servers:
        url = str(servers["llamaspec serve"].client.base_url)
        different, deepest = asyncio.run(_compare(url, seeds, tokens))
    found = {"exact": not by_default, "seeds": seeds, "tokens": tokens, "deepest": deepest}
    click.echo(json.dumps({**found, "different": different}))


async def _compare(url: str, n_seeds: int, n_tokens: int) -> tuple[dict[str, int], int]:
    different, deepest = dict.fromkeys(SITUATIONS, 0), 0
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        for seed in range(n_seeds):
            case = _Case(client, seed, n_tokens)
            plain = await case.alone(drafts=False)
            situations = case.alone(), case.behind_prefix(), case.beside(), case.beside(shares=True)
            for name, completion in zip(SITUATIONS, situations, strict=True):
                different[name] += await completion != plain
            deepest = max(deepest, len(case.prompt) + n_tokens)
            click.echo(f"{seed + 1}/{n_seeds} {different}", err=True)
    return different, deepest


@dataclass(frozen=True, slots=True)
class _Case:
    """One seed: a prompt of random tokens and how it is continued in each situation."""

    client: httpx.AsyncClient
    seed: int
    n_tokens: int

    @property
    def prompt(self) -> list[int]:
        """Return random tokens; one seed in four has a long prompt."""
        longest = LONGEST if self.seed % 4 == 3 else LONGEST // 8
        return self._tokens(random.Random(self.seed).randint(SHORTEST, longest), self.seed)

    async def alone(self, *, drafts: bool = True) -> str:
        """Complete with nothing cached and nothing beside."""
        await self._forget()
        return await self._ask(self.prompt, drafts=drafts, is_cached=False)

    async def behind_prefix(self) -> str:
        """Complete while the beginning of the prompt is cached."""
        await self._forget()
        await self._ask(self._prefix, n_tokens=1)
        return await self._ask(self.prompt, is_cached=True)

    async def beside(self, *, shares: bool = False) -> str:
        """Complete beside three others; if `shares`, the first of them begins as this one does."""
        await self._forget()
        prompts = [self._tokens(SHORTEST * (i + 1), -1 - i - 10 * self.seed) for i in range(N_BESIDE)]
        if shares:
            prompts[0] = self._prefix
        others = [asyncio.create_task(self._ask(prompt, n_tokens=3 * self.n_tokens)) for prompt in prompts]
        await asyncio.sleep(0.3 if shares else 0.05)
        completion = await self._ask(self.prompt)  # how much is cached depends on how far the others are
        await asyncio.gather(*others)
        return completion

    @property
    def _prefix(self) -> list[int]:
        return self.prompt[: random.Random(self.seed).randint(SHORTEST - 4, len(self.prompt) - 2)]

    async def _forget(self) -> None:
        """Empty the cache: without a prefix store, a prompt that begins otherwise does that."""
        await self._ask(self._tokens(4, 1_000_003), n_tokens=1)

    async def _ask(
        self,
        prompt: list[int],
        *,
        n_tokens: int | None = None,
        drafts: bool = True,
        is_cached: bool | None = None,
    ) -> str:
        body: dict[str, Any] = {"prompt": prompt, "seed": self.seed, "temperature": 0.8, "ignore_eos": True}
        body |= {"max_tokens": n_tokens or self.n_tokens, "speculative": {"enabled": drafts}}
        response = await self.client.post("/v1/completions", json=body)
        answer = response.raise_for_status().json()
        n_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if is_cached is not None and is_cached != (n_cached > 0):
            raise click.ClickException(f"{n_cached} tokens of the prompt were cached, seed {self.seed}")
        return str(answer["choices"][0]["text"])

    def _tokens(self, n: int, seed: int) -> list[int]:
        """Return random token ids of frequent words."""
        chance = random.Random(seed)
        return [chance.randrange(300, 20_000) for _ in range(n)]


if __name__ == "__main__":
    main()
