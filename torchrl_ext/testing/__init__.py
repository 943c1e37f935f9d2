"""Suites of tests of what transports promise, to be run over a new one.

    from torchrl_ext.testing import TransportContract  # or StandaloneContract, without a control layer

pytest is needed here, and nowhere else in this package: ``pip install torchrl_ext[testing]``.
"""

import pytest

pytest.register_assert_rewrite("torchrl_ext.testing.transports")

from torchrl_ext.testing.transports import (  # noqa: E402 - whose assertions explain themselves from here on
    DTYPES,
    SMALL_BYTES,
    WAIT_S,
    Ends,
    StandaloneContract,
    TransportContract,
    any_bits,
    assert_arrived,
    assert_held,
    free_port,
    same_bits,
)

__all__ = [
    "DTYPES",
    "SMALL_BYTES",
    "WAIT_S",
    "Ends",
    "StandaloneContract",
    "TransportContract",
    "any_bits",
    "assert_arrived",
    "assert_held",
    "free_port",
    "same_bits",
]
