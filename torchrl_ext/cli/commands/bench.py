"""``torchrl-ext bench``: measure encodings on this machine, in one run, side by side."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from torchrl_ext.cli.frame import answer, table

__all__ = ["app"]

app = typer.Typer()


@app.command()
def bench(
    size: Annotated[
        Literal["full", "small", "tiny"],
        typer.Option(help="full has 418 M parameters; tiny is there to try the command."),
    ] = "small",
    density: Annotated[
        list[float], typer.Option(min=0, max=1, help="Share of the elements that change; repeat it for several.")
    ] = [0.001, 0.01, 0.03, 0.1, 0.5, 1.0],  # noqa: B006 - read only
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each comparison.")] = 7,
) -> int:
    """Measure size and speed of encodings, beside a copy, xor with zstd, and int32 with bf16.

    Example: `torchrl-ext bench --density 0.01 --density 0.03`
    """
    from torchrl_ext.cli.bench import figures, measure_encodings

    results = measure_encodings(size, density, repeats)
    shown = table("figure", "value")
    for name, figure in figures(results):
        shown.add_row(name, figure)
    return answer(results, shown)
