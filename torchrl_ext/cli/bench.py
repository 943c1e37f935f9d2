"""``torchrl-ext bench WHAT``: measure on this machine, in one run, side by side."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from torchrl_ext.bench.runner import figures
from torchrl_ext.cli.frame import answer, note, table

__all__ = ["app"]

app = typer.Typer(help="Measure transports on this machine, each beside a reference in the same run.")

Repeats = Annotated[int, typer.Option(min=1, help="Rounds of each comparison.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir", exists=True, file_okay=False, help="Where files are written. Default: the temporary directory."
    ),
]
Size = Annotated[
    Literal["full", "small", "tiny"], typer.Option(help="full has 418 M parameters; tiny is there to try the command.")
]


@app.command()
def transport(
    size: Size = "full",
    bucket_bytes: Annotated[int, typer.Option(min=0, help="Size of a bucket of the collective.")] = 8 << 20,
    repeats: Repeats = 7,
    folder: Folder = None,
) -> int:
    """Measure full updates by collective, ipc and disk, beside the plainest ways to move the same bytes.

    Examples:
    * `torchrl-ext bench transport`
    * `torchrl-ext bench transport --size small`
    """
    return _run("transport", size=size, bucket_bytes=bucket_bytes, repeats=repeats, folder=folder)


@app.command()
def delta(
    size: Size = "small",
    density: Annotated[
        list[float], typer.Option(min=0, max=1, help="Share of the elements that change; repeat it for several.")
    ] = [0.001, 0.01, 0.03, 0.1, 0.5, 1.0],  # noqa: B006 - read only
    threads: Annotated[int | None, typer.Option(min=1, help="Worker threads. Default: as in an update.")] = None,
    repeats: Repeats = 7,
    folder: Folder = None,
) -> int:
    """Measure size and speed of every encoding, beside a copy, xor with zstd, and int32 with bf16.

    Examples:
    * `torchrl-ext bench delta`
    * `torchrl-ext bench delta --density 0.01 --density 0.03`
    """
    return _run("delta", size=size, densities=density, threads=threads, repeats=repeats, folder=folder)


def _run(subject: str, *, folder: Path | None, **settings: Any) -> int:
    place = None if folder is None else str(folder)
    results = importlib.import_module(f"torchrl_ext.bench.{subject}").measure(note, folder=place, **settings)
    shown = table("figure", "value")
    for name, figure in figures(results):
        shown.add_row(name, figure)
    return answer(results, shown)
