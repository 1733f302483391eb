"""The search finds the copy that is worth most, and says so of none that cannot be used."""

from __future__ import annotations

from llamaspec.pruning.search import Candidate, Found, search


class Worth:
    """Copies whose worth is known: it rises to a number of layers and falls behind it."""

    def __init__(self, best: int, n_layers: int = 48, refused: tuple[str, ...] = ()) -> None:
        self.best, self.n_layers, self.refused = best, n_layers, refused
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> Found | None:
        self.asked.append(candidate)
        if candidate.file_type in self.refused:
            return None
        n_left = self.n_layers - len(candidate.pruned)
        speed_up = 2.0 - abs(n_left - self.best) / 10 + (candidate.file_type == "B") / 100
        return Found(candidate, n_left, n_left, n_left / self.n_layers, 0.5, 1, speed_up)


def test_layers_that_change_nothing_are_left_out_first() -> None:
    influence = [1.0, 0.2, 0.0, 0.0, 0.3, 0.0]
    worth = Worth(best=3, n_layers=6)
    best = search(influence, ["A"], worth)[0]
    assert worth.asked[0].pruned == best.candidate.pruned == (2, 3, 5)


def test_the_best_number_of_layers_is_found_with_few_questions() -> None:
    influence = [1.0 - layer / 100 for layer in range(48)]
    for best in (1, 7, 20, 33, 47):
        worth = Worth(best)
        found = search(influence, ["A"], worth)
        assert found[0].n_layers == best
        assert len(worth.asked) == len(set(worth.asked)) <= 22
        assert found[0].candidate.pruned == tuple(range(best, 48)), "the least influential layers go"


def test_other_types_are_tried_with_the_best_number_of_layers() -> None:
    found = search([1.0] * 48, ["A", "B"], Worth(30))
    assert found[0].candidate.file_type == "B"
    assert found[0].n_layers == 30


def test_what_cannot_be_used_is_not_found() -> None:
    found = search([1.0] * 8, ["A", "B"], Worth(4, 8, refused=("A",)))
    assert {each.candidate.file_type for each in found} == {"B"}
    assert search([1.0], ["A"], Worth(1, 1, refused=("A",))) == []
