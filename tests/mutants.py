"""Whether the tests notice: one line of the package is changed at a time, and the tests that run this line are run.

``python -m tests.mutants --count 50 --seed 0`` changes copies of the tree, never the tree itself. It prints each change
that they did not notice, and as its last line how many were noticed. The changes depend on the package and the seed
alone, so that two states of the tests can be compared. A line that is compiled or that only child processes run has no
tests of its own in the record of coverage: all tests of its folder stand for them.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
FOLDERS = ("transports", "codecs", "sync")
TREE = ("torchrl_ext", "tests", "docs", "tutorials", "setup.py", "pyproject.toml", "README.md", "LICENSE")
MOST_TESTS = 40
"""Of a line that more tests run: spread evenly over them, those of the line's own folder if they are enough."""
TIMEOUT_S = 600.0

_SWAPS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "+"),
    ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One line of a file, changed."""

    path: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every change that this module knows for one file."""
    text = path.read_text()
    lines = text.splitlines()
    for node in _statements_and_values(ast.parse(text)):
        for first, last, new in _changes(node, lines):
            (line, start), (same, end) = first, last
            if line == same:
                raw = lines[line - 1].encode()
                after = (raw[:start] + new.encode() + raw[end:]).decode()
                if after != lines[line - 1]:
                    yield Mutant(str(path.relative_to(ROOT)), line, lines[line - 1], after)


def _statements_and_values(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs: no annotations, decorators, texts or exported names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__"):
            continue
        yield node
        for field in ("annotation", "returns", "decorator_list"):
            if field in node._fields:
                setattr(node, field, [] if field == "decorator_list" else None)
        yield from _statements_and_values(node)


def _changes(node: ast.AST, lines: list[str]) -> Iterator[tuple]:
    """``(from, to, text)``: ends are a line (from 1) and a byte in it."""
    gap = None
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        gap = (node.left, node.ops[0], node.comparators[0])
    elif isinstance(node, ast.BoolOp):
        gap = (node.values[0], node.op, node.values[1])
    elif isinstance(node, ast.BinOp):
        gap = (node.left, node.op, node.right)
    if gap is not None:
        left, operator, right = gap
        if type(operator) in _SWAPS and left.end_lineno == right.lineno:
            old, new = _SWAPS[type(operator)]
            between = lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
            yield _end(left), _begin(right), between.replace(old, new, 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield _begin(node), _end(node), str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield _begin(node), _end(node), str(node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _begin(node), _begin(node.operand), ""
    elif isinstance(node, ast.Return) and node.value is not None:
        yield _begin(node.value), _end(node.value), "None"
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield _begin(node), _end(node), "pass"


def _begin(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def chosen(count: int, seed: int) -> list[Mutant]:
    """``count`` of all changes in `FOLDERS`."""
    files = sorted(path for folder in FOLDERS for path in (ROOT / "torchrl_ext" / folder).rglob("*.py"))
    return random.Random(seed).sample([mutant for path in files for mutant in mutants_of(path)], count)


def tests_of(mutant: Mutant, record: Path) -> list[str]:
    """Names of tests that run the line, at most `MOST_TESTS`; else the folder of tests for the line's own folder."""
    from coverage import CoverageData

    data = CoverageData(str(record))
    data.read()
    file = next((name for name in data.measured_files() if name.endswith(f"/{mutant.path}")), None)
    contexts = data.contexts_by_lineno(file).get(mutant.line, []) if file else []
    found = {context.partition("|")[0] for context in contexts if "::" in context}
    folder = f"tests/{Path(mutant.path).parts[1]}"
    near = {name for name in found if name.startswith(folder)}
    listed = sorted(near if len(near) >= MOST_TESTS else found)
    return listed[:: -(-len(listed) // MOST_TESTS)] if listed else [folder]


def copied(where: Path) -> Path:
    """A copy of the tree that tests can run in."""
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, where / name, ignore=shutil.ignore_patterns("*.egg-info", "_build"))
        else:
            shutil.copy(source, where / name)
    return where


def pytest_in(tree: Path, *args: str, timeout_s: float) -> int:
    """The exit status of the tests in a copy; a deadline counts as a failure."""
    code = "import sys; sys.path.insert(0, ''); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *args]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # which is compared by the second, and by size
    try:
        return subprocess.run(
            command, cwd=tree, env=environ, timeout=timeout_s, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ).returncode
    except subprocess.TimeoutExpired:
        return 1


def main() -> int:
    """Run it; the exit status is 0 whatever was noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=50, help="how many lines to change")
    parser.add_argument("--seed", type=int, default=0, help="which lines")
    parser.add_argument("--jobs", type=int, default=2, help="changes that are tried at the same time")
    parser.add_argument("--record", type=Path, help="a .coverage file with contexts; by default it is made first")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the changes to try")
    args = parser.parse_args()
    mutants = list(enumerate(chosen(args.count, args.seed)))
    if args.only:
        mutants = [mutants[number] for number in args.only]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(args.jobs):
            trees.put(copied(Path(folder) / str(job)))
        record = args.record
        if record is None:
            tree = copied(Path(folder) / "whole")
            settings = ("-n", "0", "--cov=torchrl_ext", "--cov-context=test", "--cov-report=")
            if pytest_in(tree, *settings, timeout_s=3600) != 0:
                parser.error("the tests fail without any change")
            record = tree / ".coverage"

        def alive(numbered: tuple[int, Mutant]) -> bool:
            number, mutant = numbered
            tree = trees.get()
            file = tree / mutant.path
            original = file.read_text()
            lines = original.splitlines(keepends=True)
            lines[mutant.line - 1] = mutant.after + "\n"
            try:
                file.write_text("".join(lines))
                survived = pytest_in(tree, "-x", *tests_of(mutant, record), timeout_s=TIMEOUT_S) == 0
            finally:
                file.write_text(original)
                trees.put(tree)
            print(f"{'ALIVE ' if survived else 'caught'} {number:3d} {mutant}", flush=True)
            return survived

        with ThreadPoolExecutor(args.jobs) as pool:
            left = sum(pool.map(alive, mutants))
    print(f"{len(mutants) - left} of {len(mutants)} changes were noticed, {left} were not")
    return 0


if __name__ == "__main__":
    sys.exit(main())
