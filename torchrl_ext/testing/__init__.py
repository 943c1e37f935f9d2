"""Suites of tests of what transports promise, to be run over a new one, and fake engines to drive.

    from torchrl_ext.testing import TransportContract  # or StandaloneContract, without a control layer
    from torchrl_ext.testing import FakeEngine  # an HTTP server with the routes of one make

pytest is needed here, and nowhere else in this package: ``pip install torchrl_ext[testing]``.
"""

import pytest

pytest.register_assert_rewrite("torchrl_ext.testing.transports")

from torchrl_ext.testing.engines import FAULTS, MAKES, Call, FakeEngine, Fault  # noqa: E402
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
    "FAULTS",
    "MAKES",
    "SMALL_BYTES",
    "WAIT_S",
    "Call",
    "Ends",
    "FakeEngine",
    "Fault",
    "StandaloneContract",
    "TransportContract",
    "any_bits",
    "assert_arrived",
    "assert_held",
    "free_port",
    "same_bits",
]
