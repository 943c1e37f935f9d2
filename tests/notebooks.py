"""Executes the notebooks of ``tutorials/`` and keeps their outputs: ``python -m tests.notebooks [NAME ...]``.

It writes each notebook back with its outputs, and its first plot to ``docs/img/tutorials/`` for the gallery. With
``--check`` it executes the notebooks and writes nothing. (nbmake executes and stores notebooks, too, but keeps what
differs from run to run, and makes no gallery.)
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER, PLOTS = ROOT / "tutorials", ROOT / "docs" / "img" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LIMIT_KB = 150
CELL_S = 600  # the first start of a real engine installs it
# progress bars write to stderr, and tqdm complains where a kernel has no ipywidgets
QUIET = {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
_HINT = re.compile(r".*Missing packages: \['ipywidgets'\].*\n")  # Ray's, which no setting turns off
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
# a folder of this machine, or an address that the next run does not have
_MACHINE = re.compile(r"/(?:tmp|work|home|root|var|Users|private)/|127\.0\.0\.1:\d+|localhost:\d+|\b0x[0-9a-f]{6,}")


def cells(path: Path, kind: str) -> list[dict]:
    """The cells of one kind. Read without nbformat, which the tests' environment need not have."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def outputs(path: Path) -> list[dict]:
    """The outputs of all cells."""
    return [output for cell in cells(path, "code") for output in cell["outputs"]]


def plots(path: Path) -> list[bytes]:
    """The PNG pictures among the outputs."""
    pictures = (output.get("data", {}).get("image/png") for output in outputs(path))
    return [base64.b64decode(picture) for picture in pictures if picture]


def faults(path: Path) -> list[str]:
    """Why the stored outputs of a notebook should not be shown; empty if they can be."""
    counts = [cell["execution_count"] for cell in cells(path, "code")]
    found = [] if counts == list(range(1, len(counts) + 1)) else ["a cell was not executed, or not in order"]
    found += [] if plots(path) else ["there is no plot"]
    for output in outputs(path):
        if output["output_type"] == "error" or output.get("name") == "stderr":
            found.append(f"a cell raised, or wrote to stderr: {str(output)[:200]}")
        shown = [output.get("text", ""), *(text for kind, text in output.get("data", {}).items() if "text" in kind)]
        found += [f"an output holds {match[0]!r}" for text in shown for match in _MACHINE.finditer("".join(text))]
    if path.stat().st_size > LIMIT_KB * 1000:
        found.append(f"it has {path.stat().st_size // 1000} kB, more than {LIMIT_KB}")
    return found


def execute(path: Path) -> str:
    """Run a notebook in a fresh kernel and return it as a file holds it, with only what a reader sees."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    settings = {"timeout": CELL_S, "record_timing": False, "coalesce_streams": True}
    client = NotebookClient(notebook, kernel_name="python3", extra_arguments=["--log-level=ERROR"], **settings)
    client.execute(env=os.environ | QUIET)
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells):
        cell.id, tags = f"cell-{number:02}", cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not _HINT.fullmatch(output.get("text", ""))]
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = {}
    return nbformat.writes(notebook) + "\n"


def main() -> int:
    words = sys.argv[1:]
    named = [FOLDER / f"{name}.ipynb" for name in words if name != "--check"]
    for path in named or NOTEBOOKS:
        began = time.monotonic()
        executed = execute(path)
        print(f"{path.stem}: {time.monotonic() - began:.0f} s", flush=True)
        if "--check" in words:
            continue
        path.write_text(executed)
        if found := faults(path):
            print(f"{path.stem}: {'; '.join(found)}", file=sys.stderr)
            return 1
        PLOTS.mkdir(parents=True, exist_ok=True)
        (PLOTS / f"{path.stem}.png").write_bytes(plots(path)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
