"""``torchrl-ext discover ADDRESS...``: say which engines run at the given addresses."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer

from torchrl_ext.cli.frame import APIKey, answer, table

if TYPE_CHECKING:
    from torchrl_ext.base.types import EngineInfo

__all__ = ["app"]

app = typer.Typer()


@app.command()
def discover(
    addresses: Annotated[list[str], typer.Argument(metavar="ADDRESS...", help="host:port or URL of an engine.")],
    api_key: APIKey = None,
    timeout_s: Annotated[float, typer.Option(help="Deadline of each call, in seconds.")] = 30.0,
) -> int:
    """List the engines at the given addresses.

    An address without an engine gets a row with the reason, and the exit status is 3.

    Examples:
    * `torchrl-ext discover host1:8000 host2:8000`
    * `torchrl-ext discover host:8000 --json`
    """
    from torchrl_ext.base.errors import WeightSyncError
    from torchrl_ext.control import discovery
    from torchrl_ext.control.http import normalise_urls

    def ask(address: str) -> EngineInfo | WeightSyncError:
        try:
            return discovery.discover(address, timeout_s=timeout_s, api_key=api_key)[0]
        except WeightSyncError as error:
            return error

    urls = normalise_urls(addresses)
    with ThreadPoolExecutor(min(64, len(urls))) as pool:
        answers = dict(zip(urls, pool.map(ask, urls), strict=True))
    shown = table("engine", "kind", "weights", "details")
    rows, errors = [], {}
    for url, found in answers.items():
        if isinstance(found, WeightSyncError):
            errors[url] = str(found)
            shown.add_row(url, "none", "", found.what, style="red")
            continue
        rows.append(dataclasses.asdict(found))
        role = "" if found.worker_type == "regular" else found.worker_type
        kind = " ".join(filter(None, (found.kind, found.version, role)))
        transports = ", ".join(found.transports) or "none"
        details = f"{found.model}; workers: {found.world_size}; transports: {transports}"
        shown.add_row(url, kind, found.weight_version, details)
    return answer({"engines": rows, "errors": errors}, shown, status=3 if errors else 0)
