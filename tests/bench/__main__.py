"""``python -m tests.bench WHAT``: measurements for developers of the package, each beside a reference in the same run.

Each module of this folder that is named here has ``measure(*, ...) -> dict``, whose parameters are the options.
"""

from __future__ import annotations

import importlib
import json
import sys

import typer

from torchrl_ext.cli.bench import figures

SUBJECTS = {
    "digest": "digests of weights on a device, beside a plain read of the same memory",
    "gaps": "the longest gap between two tokens, by how an engine takes an update",
    "landing": "the commit of a delta in vLLM's own model, beside a scatter, a reload and vLLM's own patches",
    "names": "37,000 names through an engine's own loader and through ours",
    "peers": "our transports and layouts, beside what a user would choose instead, in real engines",
    "small": "an update of 60,000 small tensors, beside a clone of each",
}


def main(argv=None):
    """Measure, and print every figure, or with ``--json`` one document."""
    words = sys.argv[1:] if argv is None else argv
    program = typer.Typer(add_completion=False, help=__doc__)
    for name, line in SUBJECTS.items():
        measure = importlib.import_module(f"tests.bench.{name}").measure if name in words else lambda: None
        program.command(name, help=None if name in words else line)(measure)
    command = typer.main.get_command(program)
    try:
        results = command([word for word in words if word != "--json"] or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        sys.exit(error.format_message())
    if "--json" in words:
        print(json.dumps(results))
    elif isinstance(results, dict):
        for name, figure in figures(results):
            print(f"{name}: {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
