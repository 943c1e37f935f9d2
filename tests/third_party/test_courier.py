"""The courier keeps what `torchrl_ext` asks of a transport."""

from courier import CourierTransport

from torchrl_ext.testing import WAIT_S, Ends, StandaloneContract, free_port


class TestCourier(StandaloneContract):
    name = "courier"

    def make_ends(self, tmp_path):
        port = free_port()
        return Ends(*(CourierTransport(port=port, token="known-to-both", timeout_s=WAIT_S) for _ in range(2)))

    def make_trainer(self, tmp_path):
        return CourierTransport()
