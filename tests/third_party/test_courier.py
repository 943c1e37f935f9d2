"""The courier keeps what `torchrl_ext` asks of a transport."""

from courier import CourierTransport
from hypothesis import settings

from torchrl_ext.testing import WAIT_S, Ends, StandaloneContract, TransportLife, free_port


class TestCourier(StandaloneContract):
    name = "courier"

    def make_ends(self, tmp_path):
        port = free_port()
        return Ends(*(CourierTransport(port=port, token="known-to-both", timeout_s=WAIT_S) for _ in range(2)))

    def make_trainer(self, tmp_path):
        return CourierTransport()


class CourierLife(TransportLife):
    def make_trainer(self, folder):
        return CourierTransport()


TestCourierLife = CourierLife.TestCase
TestCourierLife.settings = settings(max_examples=4, stateful_step_count=12, deadline=None, derandomize=True)
