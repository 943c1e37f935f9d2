"""``torchrl-ext bench WHAT``: measure on this machine, in one run, side by side."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from torchrl_ext.cli.frame import answer, table

__all__ = ["app"]

app = typer.Typer(help="Measure transports on this machine, each beside a reference in the same run.")

Repeats = Annotated[int, typer.Option(min=1, help="Rounds of each comparison.")]
Size = Annotated[
    Literal["full", "small", "tiny"], typer.Option(help="full has 418 M parameters; tiny is there to try the command.")
]


@app.command()
def transport(size: Size = "full", repeats: Repeats = 7) -> int:
    """Measure full updates by collective and disk, beside the plainest ways to move the same bytes.

    Files are written into the system's temporary directory, which `TMPDIR` names.

    Example: `torchrl-ext bench transport --size small`
    """
    from torchrl_ext.cli.bench import measure_transports

    return _shown(measure_transports(size, repeats))


@app.command()
def delta(
    size: Size = "small",
    density: Annotated[
        list[float], typer.Option(min=0, max=1, help="Share of the elements that change; repeat it for several.")
    ] = [0.001, 0.01, 0.03, 0.1, 0.5, 1.0],  # noqa: B006 - read only
    repeats: Repeats = 7,
) -> int:
    """Measure size and speed of encodings, beside a copy, xor with zstd, and int32 with bf16.

    Example: `torchrl-ext bench delta --density 0.01 --density 0.03`
    """
    from torchrl_ext.cli.bench import measure_encodings

    return _shown(measure_encodings(size, density, repeats))


def _shown(results: dict[str, Any]) -> int:
    from torchrl_ext.cli.bench import figures

    shown = table("figure", "value")
    for name, figure in figures(results):
        shown.add_row(name, figure)
    return answer(results, shown)
