"""Breaks the code in small ways, one at a time, and names the breaks that no test notices.

A test that passes whatever the code does proves nothing. Here a comparison is turned, a sum made a
difference, a constant moved, a condition negated, a statement, a keyword or a returned value left out; then
the tests that concern the file run in a copy of the working tree. What survives is either a missing test or
changes nothing that can be seen: which of the two, somebody has to judge. Too slow for every change.

    python scripts/mutate.py llamaspec/sampling/random_streams.py --tests tests/sampling -n 40
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OTHER: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
UNSEEN = (ast.arguments, ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """A file with one break."""

    kind: str
    line: int
    source: str  # of the whole file
    was: str  # the broken part
    now: str


def mutants(source: str) -> Iterator[Mutant]:
    """Every break of a file, in the order of its syntax tree."""
    tree = ast.parse(source)
    return (_mutant(tree, *place) for place in places(tree))


def places(tree: ast.AST) -> Iterator[tuple[int, str, int]]:
    """What can be broken: the number of a node, how, and where of several places of the node."""
    return ((at, *kind) for at, node in enumerate(_seen(tree)) for kind in _kinds(node))


def _mutant(tree: ast.Module, at: int, kind: str, n: int) -> Mutant:
    broken = copy.deepcopy(tree)
    node, old = (next(itertools.islice(_seen(of), at, None)) for of in (tree, broken))
    new = _break(old, kind, n)
    if new is not old:
        _Replace(old, new).visit(broken)
    source = ast.unparse(ast.fix_missing_locations(broken))
    return Mutant(kind, getattr(node, "lineno", 0), source, _told(node), _told(new))


def _told(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _seen(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that decide what the code does: no annotations, messages, decorators or docstrings."""
    if isinstance(tree, UNSEEN):
        return
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("decorator_list", "returns", "annotation", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _seen(child)


def _kinds(node: ast.AST) -> Iterator[tuple[str, int]]:
    """What can be broken at a node, and where of several places."""
    if isinstance(node, ast.Compare):
        yield from (("comparison", n) for n in range(len(node.ops)))
    elif isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)) and type(node.op) in OTHER:
        yield "operator", 0
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield "sign", 0
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield "constant", 0
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "condition", 0
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "return", 0
    elif isinstance(node, ast.Call):
        yield from (("keyword", n) for n, keyword in enumerate(node.keywords) if keyword.arg)
    if isinstance(node, (ast.Assign, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
    ):
        yield "statement", 0


def _break(node: ast.AST, kind: str, n: int) -> ast.AST:
    """Break a node in place, or answer what stands in its place."""
    if isinstance(node, ast.Compare):
        node.ops[n] = OTHER[type(node.ops[n])]()
    elif kind == "operator" and isinstance(node, (ast.BoolOp, ast.BinOp, ast.AugAssign)):
        node.op = OTHER[type(node.op)]()
    elif isinstance(node, ast.UnaryOp):
        return node.operand
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.Call):
        del node.keywords[n]
    else:
        return ast.Pass()
    return node


@dataclass(frozen=True)
class Workplace:
    """A copy of the working tree, where tests run against broken code."""

    root: Path
    tests: list[str]
    seconds: float | None = None  # more than the tests may take

    def notices(self, path: Path, source: str) -> bool:
        """Whether some test fails, or does not end, with other content of a file."""
        place = self.root / path.resolve().relative_to(ROOT)
        before = place.read_text()
        place.write_text(source)
        try:
            return self.run() != 0
        finally:
            place.write_text(before)

    def run(self) -> int:
        """The exit status of the tests."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--randomly-dont-reorganize",
            "-p",
            "no:cacheprovider",
        ]
        try:
            return subprocess.run(
                [*command, *self.tests], cwd=self.root, env={**os.environ, "PYTHONPATH": str(self.root)},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=self.seconds, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return -1


def sample(files: list[Path], n: int | None, seed: int) -> Iterator[tuple[Path, Mutant]]:
    """Some breaks of some files, or all of them."""
    trees = {path: ast.parse(path.read_text()) for path in files}
    found = [(path, place) for path, tree in trees.items() for place in places(tree)]
    chosen = found if n is None or n >= len(found) else random.Random(seed).sample(found, n)
    return ((path, _mutant(trees[path], *place)) for path, place in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="what is broken")
    parser.add_argument("--tests", nargs="+", required=True, help="files and folders; quick ones first")
    parser.add_argument("-n", type=int, help="a sample of so many; default: every break")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        begin = time.monotonic()
        if Workplace(root, wanted.tests).run() != 0:
            sys.exit("the tests fail with the code as it is")
        place = Workplace(root, wanted.tests, 30 + 5 * (time.monotonic() - begin))
        counts: Counter[str] = Counter()
        with suppress(KeyboardInterrupt):  # the rate up to there is told
            for path, mutant in sample(wanted.files, wanted.n, wanted.seed):
                is_killed = place.notices(path, mutant.source)
                counts["killed" if is_killed else "survived"] += 1
                if not is_killed:
                    print(f"{path}:{mutant.line}: {mutant.kind}: {mutant.was}  ->  {mutant.now}", flush=True)
    print(json.dumps({**counts, "rate": counts["killed"] / max(1, counts.total())}))


if __name__ == "__main__":
    main()
