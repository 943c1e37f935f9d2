"""The courier keeps what `torchrl_ext` asks of a transport."""

from courier import CourierTransport

from torchrl_ext.testing import TransportContract


class TestCourier(TransportContract):
    name = "courier"

    def make_trainer(self, tmp_path):
        return CourierTransport()
