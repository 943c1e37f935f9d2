"""Whether the tests notice the faults that this package once had: each is put back by a change of a line or two.

``python -m tests.faults [NUMBER ...]`` changes a copy of the tree, never the tree itself. It first runs all tests that
``faults.txt`` names on the unchanged copy, where they have to pass; then, for each fault, the one that notices it.
It prints the test that failed and why, and as its last line how many faults were noticed. A test that does not end
notices nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TREE = ("torchrl_ext", "tests", "docs", "tutorials", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TIMEOUT_S = 300.0  # for each fault; less than a single test has


class Fault(NamedTuple):
    """A fault: the file and the text in it that keep it away, that text with the fault, and the test that notices."""

    what: str
    path: str
    good: str
    bad: str
    test: str


def faults() -> Iterator[Fault]:
    """Yield the faults of ``faults.txt``, whose first lines say how it is written."""
    path, what, changed = "", "", {"-": "", "+": ""}
    for line in Path(__file__).with_suffix(".txt").read_text().partition("\n\n")[2].splitlines():
        if not line.startswith("  "):
            path = f"torchrl_ext/{line}"
        elif line[2] in changed:
            changed[line[2]] += f"{line[3:]}\n"
        elif "::" not in line:
            what = line.strip()
        else:
            good, bad = (text.strip() for text in changed.values())
            yield Fault(what, path, good, bad, f"tests/{line.strip()}")
            changed = {"-": "", "+": ""}


@contextmanager
def put_back(fault: Fault, tree: Path) -> Iterator[None]:
    """Have a tree show a fault within the block."""
    path = tree / fault.path
    text = path.read_text()
    if text.count(fault.good) != 1:
        raise SystemExit(f"{fault.path} has {fault.good!r} {text.count(fault.good)} times")
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(text.replace(fault.good, fault.bad))
        compiled.unlink(missing_ok=True)  # two texts of one length and second would be taken for the same
        yield
    finally:
        path.write_text(text)
        compiled.unlink(missing_ok=True)


def why_not(tree: Path, tests: Collection[str], timeout_s: float | None = None) -> str:
    """Return why tests of a tree do not pass, "" where they do.

    Raises:
        subprocess.TimeoutExpired: they did not end.
        SystemExit: pytest could not run all of them.
    """
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "--no-header", "-n", "0", *tests]
    environ = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "300"}
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, timeout=timeout_s)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+)", done.stdout, re.MULTILINE)  # not a line of a log
    if failed is None and (done.returncode or "skipped" in done.stdout.splitlines()[-1]):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1] if failed else ""


def main() -> int:
    """Put every fault back, or those of the numbers given; return 1 where one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="which faults; by default all")
    wanted = parser.parse_args().numbers
    chosen = {number: fault for number, fault in enumerate(faults(), 1) if number in wanted or not wanted}
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in TREE:
            source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, tree / name, ignore=ignored) if source.is_dir() else shutil.copy(source, tree)
        began, tests = time.monotonic(), {fault.test: None for fault in chosen.values()}
        if why := why_not(tree, tests):
            raise SystemExit(f"without any fault the tests do not pass: {why}")
        print(f"without any fault all {len(tests)} tests pass ({time.monotonic() - began:.0f} s)", flush=True)
        for number, fault in chosen.items():
            began, found = time.monotonic(), f"NOT NOTICED: no end within {TIMEOUT_S:g} s"
            with put_back(fault, tree), suppress(subprocess.TimeoutExpired):
                why = why_not(tree, [fault.test], TIMEOUT_S)
                noticed += bool(why)
                found = why or "NOT NOTICED"
            print(f"{number}. {fault.what} ({time.monotonic() - began:.0f} s): {found}", flush=True)
    print(f"{noticed} of {len(chosen)} faults were noticed")
    return int(noticed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
