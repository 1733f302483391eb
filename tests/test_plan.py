"""Names and options become a plan once; everything that opens models follows the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamaspec.catalog import Entry, add_own
from llamaspec.errors import ModelFileError, PairError
from llamaspec.llama.options import ModelOptions
from llamaspec.plan import DraftPlan, ModelFile, known_draft, make_plan
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


def test_a_draft_copies_or_nothing(files: dict[str, Path]) -> None:
    plan = plan_of(files, "big", "small")
    assert [model.path for model in plan.models] == [files["big"], files["small"]]
    assert (plan.heads, plan.copying, plan.is_plain) == (None, Copying.WEIGHED, False)
    copies = plan_of(files, "big", "ngram", copying=Copying.OFF)
    assert (copies.draft, copies.heads, copies.copying) == (None, None, Copying.ON)
    assert plan_of(files, "big", copying=Copying.OFF).is_plain


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


def by_default(files: dict[str, Path], target: str, draft: str | None = None) -> DraftPlan:
    return make_plan(target, draft, by_default=True, find=lambda name: files[str(name)])


def test_without_a_draft_the_heads_are_used_by_default(files: dict[str, Path]) -> None:
    plan = by_default(files, "with-heads")
    assert plan.has_own_heads
    assert plan.is_default
    assert not plan_of(files, "with-heads", "mtp").is_default
    assert not plan.without_draft.target.options.heads
    assert plan.without_draft.heads is None
    assert plan_of(files, "with-heads").heads is None, "Python programs name a draft"
    assert by_default(files, "with-heads", "none").heads is None


@pytest.mark.usefixtures("own_list")
def test_a_listed_draft_is_used_by_default_if_memory_has_room(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_own(Entry("near", path=str(files["big"]), draft=str(files["small"])))
    assert make_plan("near").draft is None
    needed = files["big"].stat().st_size + files["small"].stat().st_size
    for free, expected in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("llamaspec.plan.available_bytes", lambda free=free: free)
        plan = make_plan("near", by_default=True)
        assert (plan.draft is not None, plan.is_default) == (expected, expected)


@pytest.mark.usefixtures("own_list")
def test_nothing_is_fetched_by_default(files: dict[str, Path]) -> None:
    add_own(Entry("far", repo="owner/far", pattern="far-{quantization}.gguf", default="Q4_0"))
    add_own(Entry("near", path=str(files["big"]), draft="far"))
    assert known_draft("near") == "far"
    assert make_plan("near", by_default=True).draft is None
    add_own(Entry("far", path=str(files["small"])))
    plan = make_plan("near", by_default=True)
    assert plan.draft is not None
    assert plan.draft.path == files["small"]


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
