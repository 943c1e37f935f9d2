"""``python -m tests.bench WHAT``: measurements for developers of the package, each beside a reference in the same run.

Each module of this folder that is named here has ``measure(*, ...) -> dict``, whose parameters are the options. With
``--json`` the result is one document. With ``--out docs/benchmarks.json`` it is a record of that file, from which
``docs/draw_benchmarks.py`` draws the page: it replaces the last record of the same subject and engine.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

import torchrl_ext as tx
from torchrl_ext.cli.bench import figures

SUBJECTS = {
    "digest": "digests of weights on a device, beside a plain read of the same memory",
    "gaps": "the longest gap between two tokens, by how an engine takes an update",
    "landing": "the commit of a delta in vLLM's own model, beside a scatter, a reload and vLLM's own patches",
    "memory": "what each way adds to a trainer of a model of more than 1 GB",
    "names": "37,000 names through an engine's own loader and through ours",
    "peers": "our transports and layouts, beside what a user would choose instead, in real engines",
    "small": "an update of 60,000 small tensors, beside a clone of each",
    "transport": "`torchrl-ext bench transport`: transports between two processes, beside a broadcast and a file",
}
LIBRARIES = ("torch", "torchrl", "transformers", "numba", "zstandard")


def main(argv=None):
    """Measure, and print every figure, or with ``--json`` one document; with ``--out FILE`` keep the record."""
    words = list(sys.argv[1:] if argv is None else argv)
    command, out, began = shlex.join(["python", "-m", "tests.bench", *words]), "", time.monotonic()
    if "--out" in words[:-1]:
        place = words.index("--out")
        out = words[place + 1]
        del words[place : place + 2]
    program = typer.Typer(add_completion=False, help=__doc__)
    for name, line in SUBJECTS.items():
        measure = importlib.import_module(f"tests.bench.{name}").measure if name in words else lambda: None
        program.command(name, help=None if name in words else line)(measure)
    program_command = typer.main.get_command(program)
    try:
        results = program_command([word for word in words if word != "--json"] or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        sys.exit(error.format_message())
    if not isinstance(results, dict):
        return 0
    if out:
        name = " ".join([words[0], *([results["engine"]] if "engine" in results else [])])
        keep(Path(out), name, {"command": command, "seconds": round(time.monotonic() - began), **results})
    if "--json" in words:
        print(json.dumps(results))
    else:
        for name, figure in figures(results):
            print(f"{name}: {figure}")
    return 0


def keep(path: Path, name: str, results: dict[str, Any]) -> None:
    """Write a record into a file of records, with the date, the machine and the versions."""
    document = json.loads(path.read_text()) if path.exists() else {}
    versions = {library: version(library) for library in LIBRARIES}
    versions |= {"torchrl_ext": tx.__version__, "python": platform.python_version()}
    document[name] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
        **results,
        "versions": versions | results.get("versions", {}),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return the processor, and the cores and the memory of this machine."""
    known = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"processor": known[0].partition(": ")[2] if known else platform.machine()}
    return found | {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30)}


if __name__ == "__main__":
    sys.exit(main())
