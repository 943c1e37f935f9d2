"""What config nodes call, where a constructor takes objects that a config cannot spell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_ext.errors import ConfigError, ManifestError
from torchrl_ext.types import dtype_from_name

__all__ = ["transport_weight_updater"]


def transport_weight_updater(
    transport: str = "disk",
    engine: Any = None,
    mapper: Any = None,
    dtype: str | None = None,
    verify: bool | str = True,
    rehearse: str = "once",
    max_gap: float | str | None = "dtype",
    **settings: Any,
) -> Any:
    """A `TransportWeightUpdater`, with every setting checked and nothing opened.

    Args:
        transport: name of the transport.
        engine: ``host:port`` of one engine, a list of them, or an engine client; None for the data layer alone.
        mapper: a table of regular expressions, trainer name -> checkpoint name.
        dtype: name of the dtype to which floating-point tensors are cast.
        verify, rehearse, max_gap: what an update has to prove, as for `WeightSender`.
        settings: of the transport; those that are None are left to their defaults.

    Raises:
        ConfigError: no such transport, a setting that it does not take, or addresses or a dtype that are none.
    """
    from torchrl_ext.collectors.scheme import check_settings
    from torchrl_ext.collectors.updater import TransportWeightUpdater  # its base class warns of its deprecation
    from torchrl_ext.rpc.http import normalise_url

    given = {name: value for name, value in settings.items() if value is not None}
    check_settings(transport, given)
    addresses = [engine] if isinstance(engine, str) else engine
    if isinstance(addresses, Sequence):
        if not addresses:
            raise ConfigError("the list of engines is empty", hint="give host:port of each, or no engine at all")
        engine = [normalise_url(address) for address in addresses]
    try:
        cast = None if dtype is None else dtype_from_name(dtype)
    except ManifestError as error:
        raise ConfigError(f"dtype: {error}", expected="a name such as bfloat16") from None
    proof = {"verify": verify, "rehearse": rehearse, "max_gap": max_gap}
    return TransportWeightUpdater(transport, engine, mapper=mapper, dtype=cast, **proof, **given)
