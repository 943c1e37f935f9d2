"""Test suites that others run: the contract of a transport, the judge of an engine; and tiny models.

    from torchrl_ext.testing import TransportContract, engines

Here belongs what judges the code of others. Fakes and helpers of our own tests are in ``tests/``.

The suites need pytest: ``pip install torchrl_ext[testing]``. `engines` starts engines, without pytest. Everything is
imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_ext.testing.running import Engines as Engines
    from torchrl_ext.testing.running import engines as engines
    from torchrl_ext.testing.transports import *  # noqa: F403

__all__ = [  # noqa: F405
    "DTYPES", "SMALL_BYTES", "WAIT_S", "Engines", "TransportContract", "any_bits", "assert_held", "engines",
    "every_bit", "free_port", "same_bits",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("Engines", "engines"):
        return getattr(importlib.import_module(f"{__name__}.running"), name)
    module = f"{__name__}.transports"
    importlib.import_module("pytest").register_assert_rewrite(module)  # asserts show values
    return getattr(importlib.import_module(module), name)
