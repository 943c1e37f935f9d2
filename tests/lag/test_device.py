"""The lagging device does what the tests on it rely on."""

import signal

import pytest
import torch

from tests.lag import device
from tests.processes import finished

POISON = 0xA5
PREPARED = """
import faulthandler; faulthandler.disable()
import torch
from tests.lag import device
with device.here() as lag:
    held = torch.arange(8, device=lag)
"""


def poisoned(tensor):
    return bool((tensor.cpu().view(torch.uint8) == POISON).all())


def test_what_another_stream_makes_is_poison_without_a_wait(lag):
    side = torch.Stream(lag)
    with side:
        made = torch.arange(4).to(lag) + 1
    assert poisoned(made)
    torch.accelerator.current_stream(lag).wait_stream(side)
    assert made.tolist() == [1, 2, 3, 4]


def test_memory_is_poison_when_freed_and_used_again(lag):
    first, side = torch.ones(4, device=lag), torch.Stream(lag)
    torch.accelerator.synchronize(lag)
    with side:
        copy = torch.empty(4, device=lag).copy_(first)
    where = first.data_ptr()
    del first
    again = torch.empty(4, device=lag)
    assert again.data_ptr() == where and poisoned(again)
    side.synchronize()
    assert poisoned(copy)  # of `first`, which nobody recorded on `side`


def test_copies_to_pinned_memory_alone_are_late(lag):
    there, plain, pinned = torch.ones(4, device=lag), torch.zeros(4), torch.zeros(4, pin_memory=True)
    assert pinned.is_pinned() and not plain.is_pinned()
    before = device.waits()
    pinned.copy_(there, non_blocking=True)
    assert (pinned.tolist(), device.waits()) == ([0.0] * 4, before)
    plain.copy_(there, non_blocking=True)
    assert plain.tolist() == pinned.tolist() == [1.0] * 4
    assert device.waits() == before + 1


def test_every_way_to_wait_is_counted(lag):
    there, before = torch.ones(4, device=lag), device.waits()
    assert there.sum().item() == 4
    there.tolist()
    there.copy_(torch.zeros(4))
    torch.accelerator.synchronize(lag)
    torch.accelerator.current_stream(lag).record_event().synchronize()
    assert device.waits() == before + 5


@pytest.mark.parametrize(
    "touch",
    [
        "import ctypes; ctypes.string_at(held.data_ptr(), 8)",
        "with device.sleeping(held): held.tolist()",
        "with device.sleeping(held): held.add_(1); torch.accelerator.synchronize()",
    ],
    ids=["by the host", "read unmapped", "written unmapped"],
)
def test_a_touch_of_memory_without_access_ends_the_process(lag, touch):
    assert finished(f"{PREPARED}    {touch}").returncode == -signal.SIGSEGV


def test_memory_whose_contents_are_not_kept_is_poison(lag):
    held = torch.arange(4, device=lag)
    with device.sleeping(held, kept=False):
        pass
    assert poisoned(held)
