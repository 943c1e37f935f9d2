"""What ``torchrl-ext doctor --rehearse`` finds: does an update bring all that an engine computes with to its place?"""

from __future__ import annotations

from collections.abc import Iterator

from torchrl_ext import registry
from torchrl_ext.cli.doctor.engines import Examined
from torchrl_ext.cli.doctor.findings import Finding
from torchrl_ext.errors import WeightSyncError
from torchrl_ext.types import PROOFS, Info

__all__ = ["rehearsed"]

_EXPECTED = "every layer as a cold start makes it"


def rehearsed(one: Examined, api_key: str | None) -> Iterator[Finding]:
    """Rehearse one engine; a finding per verdict of its layers.

    Args:
        one: the engine, looked at before; nothing where it could not be reached.
        api_key: sent as a bearer token.
    """
    bare = one.info is not None and (one.info.kind, one.info.transports) == ("sglang", ("disk",))
    if one.info is None or not one.info.transports or bare:  # other findings say what is missing there
        return
    client = registry.engines.make(one.info.kind, url=one.info.url, api_key=api_key)
    try:
        client.info()
        client.rehearse("once")
    except WeightSyncError as error:
        yield Finding(
            where=one.address,
            check="rehearsal",
            level="failure",
            found=f"{error.what}. State: {error.state or 'unknown'}",
            expected=_EXPECTED,
            remedy=error.hint or "",
        )
        return
    finally:
        client.close()
    level = "warning" if client.proof == PROOFS[0] else "ok"
    for told in client.rehearsed or ({},):
        where = f"{one.address} worker {told['worker']}" if told.get("worker") else one.address
        words = {} if level == "ok" else {"expected": _EXPECTED, "remedy": str(told.get("why", ""))}
        yield Finding(where=where, check="rehearsal", level=level, found=_words(told), **words)


def _words(told: Info) -> str:
    rows = [
        f"{row['layers']} {row['kernel']} {row['verdict']}" + (f" ({row['why']})" if row["why"] else "")
        for row in told.get("layers", ())
    ]
    return f"proof {told.get('proof', PROOFS[0])!r}; " + ("; ".join(rows) if rows else "nothing was rehearsed")
