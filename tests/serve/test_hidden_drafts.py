"""A server whose draft reads the target's hidden rows: texts as without a draft, for two requests at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from llamaspec import ModelOptions, NoDrafter, Sampling, open_pair
from model_store import ModelStore
from patience import until
from serving import Gate, counters, served
from tiny_hidden import DraftRecipe
from tiny_models import Recipe

FLAT = Recipe(dtype="q8_0", spread=0.02)  # noise decides, so drafts are accepted
CPU = ModelOptions(threads=1, gpu_layers=0, cache_type_v="bf16")
NOT_TRUNCATED = Sampling(temperature=1.0, top_k=None, top_p=None, min_p=None)
PROMPTS = ("the end of", "in the beginning")


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_two_requests_at_once(store: ModelStore, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = DraftRecipe(FLAT, kind)
    files = store.path("llama", FLAT), store.draft(draft)
    with open_pair(*files, target_options=CPU) as pair, served(pair) as server:
        gate = Gate(pair, monkeypatch)

        def ask(seed: int) -> str:
            body = {"prompt": PROMPTS[seed], "seed": seed, "max_tokens": 60, "temperature": 1}
            body |= {"top_k": 0, "top_p": 1, "min_p": 0}
            answer: str = server.post("/v1/completions", body).json()["choices"][0]["text"]
            return answer

        with ThreadPoolExecutor(2) as clients:
            answers = clients.map(ask, range(2))
            until(lambda: server.n_running() == 2)
            gate.open()
            texts = list(answers)
        count = counters(server.client.get("/metrics").text)
    assert count['draft_tokens_by_rows_total{rows="2"}'] > 60
    assert count["spec_decode_num_accepted_tokens_total"] > 10
    with open_pair(files[0], target_options=CPU) as pair:
        alone = [
            pair.stream(
                prompt, seed=seed, sampling=NOT_TRUNCATED, max_tokens=60, drafter=NoDrafter()
            ).run().text
            for seed, prompt in enumerate(PROMPTS)
        ]  # fmt: skip
    assert texts == alone
