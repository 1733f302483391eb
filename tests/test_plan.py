"""Names and options become a plan once; everything that opens models follows the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaspec.errors import ModelFileError, PairError
from llamaspec.llama.options import ModelOptions
from llamaspec.plan import DraftPlan, ModelFile, make_plan
from llamaspec.values import Copying
from model_store import ModelStore
from tiny_models import Recipe

OPTIONS = ModelOptions(n_ctx=256, threads=1)


@pytest.fixture
def files(store: ModelStore) -> dict[str, Path]:
    """Models by name: one with prediction heads, and some without."""
    return {
        "big": store.path("llama", Recipe()),
        "small": store.path("llama", Recipe().draft()),
        "with-heads": store.path("qwen35", Recipe()),
    }


def plan_of(
    files: dict[str, Path], target: str, draft: str | None = None, *, copying: Copying = Copying.WEIGHED
) -> DraftPlan:
    def find(name: str | Path) -> Path:
        try:
            return files[str(name)]
        except KeyError:
            raise ModelFileError(f"no {name}") from None

    return make_plan(target, draft, copying=copying, target_options=OPTIONS, draft_options=OPTIONS, find=find)


def test_one_draft(files: dict[str, Path]) -> None:
    plan = plan_of(files, "big", "small")
    assert [model.path for model in plan.models] == [files["big"], files["small"]]
    assert plan.heads is None
    assert plan.copying is Copying.WEIGHED
    assert not plan.is_plain


def test_only_copies(files: dict[str, Path]) -> None:
    plan = plan_of(files, "big", "ngram", copying=Copying.OFF)
    assert (plan.draft, plan.heads, plan.copying) == (None, None, Copying.ON)


def test_plain_decoding(files: dict[str, Path]) -> None:
    assert plan_of(files, "big", copying=Copying.OFF).is_plain
    assert not plan_of(files, "big").is_plain


def test_the_target_s_own_heads(files: dict[str, Path]) -> None:
    plan = plan_of(files, "with-heads", "mtp")
    assert plan.has_own_heads
    assert plan.target.options.heads
    assert plan.draft is None
    with pytest.raises(PairError, match="name a draft model"):
        plan_of(files, "big", "mtp")


def test_auto_means_the_target_s_own_heads(files: dict[str, Path]) -> None:
    assert plan_of(files, "with-heads", "auto") == plan_of(files, "with-heads", "mtp")


def test_auto_without_a_known_draft(files: dict[str, Path]) -> None:
    with pytest.raises(PairError, match="no draft is known for big; name one, or leave the draft out"):
        plan_of(files, "big", "auto")
    with pytest.raises(ModelFileError, match="no unknown"):
        plan_of(files, "unknown", "auto")


def test_a_name_is_resolved_once(files: dict[str, Path]) -> None:
    asked: list[str] = []

    def find(name: str | Path) -> Path:
        asked.append(str(name))
        return files[str(name)]

    make_plan("big", "small", find=find)
    assert asked == ["big", "small"]


def test_heads_and_a_draft_model_exclude_each_other() -> None:
    file = ModelFile(Path("x.gguf"), OPTIONS)
    with pytest.raises(ValueError, match="not both"):
        DraftPlan(file, file, file)
