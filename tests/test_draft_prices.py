"""scripts/draft_prices.py: real and random drafts of a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from draft_prices import main
from model_store import ModelStore
from tiny_hidden import DraftRecipe
from tiny_models import Recipe

TARGET = Recipe(n_layers=4)


def prices(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_every_draft_has_a_price(store: ModelStore) -> None:
    target = store.path("llama", TARGET)
    drafts = [store.path("llama", TARGET.draft(0.0)), store.draft(DraftRecipe(TARGET, "dspark"))]
    wanted = ["--random", "eagle3", "--random", "dflash:2", "-n", "9", "--threads", "1"]
    *table, last = prices(target, *drafts, *wanted).stdout.splitlines()
    found = json.loads(last)
    names = [drafts[0].name, drafts[1].name, "random-eagle3-1.gguf", "random-dflash-2.gguf"]
    assert [price["draft"] for price in found] == names
    assert [line.split()[0] for line in table[1:]] == names
    assert all(price["seconds"] > 0 and price["target_seconds"] > 0 for price in found)
    assert found[0]["acceptance"]["0"] > 0.9, "the target drafts for itself"


@pytest.mark.parametrize("wanted", ["mamba", "dflash:many"])
def test_unknown_random_drafts(store: ModelStore, wanted: str) -> None:
    answer = prices(store.path("llama", TARGET), "--random", wanted)
    assert answer.exit_code == 1
    assert "must be eagle3 or dflash:LAYERS" in answer.stderr
