"""The lagging carrier under the contract of carriers, and every transport of a group over it."""

from __future__ import annotations

import pytest

from tests.data.group.contract import CarrierContract
from tests.lag import device
from tests.lag.carrier import LagCarrier


class TestLagCarrier(CarrierContract):
    backend = "lag"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def world(cls):
        with device.here() as found:
            cls.device = found
            yield

    def carrier(self, seat):
        return LagCarrier(seat)
