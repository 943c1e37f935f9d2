"""Every transport with tensors on the lagging device at either end, on its default stream and on others.

Each end works on its own stream from the making of its weights to the look at them, as an optimizer and an engine do,
and the trainer overwrites what it sent as soon as it may.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue

import pytest
import torch

from tests.data.transports import test_contract as contract
from tests.lag.carrier import carried
from torchrl_ext.testing import DTYPES, SMALL_BYTES, WAIT_S, any_bits, same_bits

VERSIONS = 3
HOST, DEFAULT, SIDE, BOTH = "host", "default stream", "side stream", "two devices"
PLACES = [(SIDE, DEFAULT), (SIDE, SIDE), (HOST, SIDE), (SIDE, HOST), (BOTH, BOTH)]


def state(version):
    """Tensors of a version on the host: of every dtype, small, large and odd; each version changes a few elements."""
    made = {f"{dtype}": any_bits(dtype, 37, 11, seed=number) for number, dtype in enumerate(DTYPES)}
    made |= {f"small.{number:02}": any_bits(torch.bfloat16, 33, seed=number) for number in range(40)}
    made |= {"large": any_bits(torch.bfloat16, 9 * SMALL_BYTES, seed=1), "scalar": torch.tensor(1.0 + version)}
    for tensor in made.values():
        tensor.view(-1)[version % tensor.numel()] = version
    return made


def stream_of(place):
    return torch.Stream("lag:0") if place == SIDE else nullcontext()


def put(place, tensors):
    """Tensors where they belong, computed by the stream that is current: a copy of a copy, which is late."""
    where = {HOST: ["cpu"], BOTH: ["lag:0", "lag:1"]}.get(place, ["lag:0"])
    return {
        name: tensor.to(where[number % len(where)]).clone() for number, (name, tensor) in enumerate(tensors.items())
    }


def trained(end, place, landed):
    """Send every version, and overwrite it as soon as the call has returned; the next one once the last has landed."""
    with stream_of(place):
        for version in range(1, VERSIONS + 1):
            weights = put(place, state(version))
            end.send_weights(weights)
            for tensor in weights.values():
                tensor.view(-1).view(torch.uint8).fill_(7)
            assert landed.get(timeout=WAIT_S) == version


def followed(end, place, landed):
    """Receive every version; returns which tensors of each are not the trainer's."""
    wrong = []
    with stream_of(place):
        held = put(place, state(0))
        addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
        for version in range(1, VERSIONS + 1):
            got = end.receive_weights(WAIT_S, weights=held)
            assert got is not None, f"version {version} did not come"
            for name, tensor in state(version).items():
                if not same_bits(held[name].cpu(), tensor) or not same_bits(got[name].cpu(), tensor):
                    wrong.append((version, name))
            landed.put(version)
        assert {name: tensor.data_ptr() for name, tensor in held.items()} == addresses
    return wrong


def exchanged(suite, sending, receiving, folder):
    """Which tensors of which versions did not arrive as they were sent."""
    ends, landed = suite().make_ends(folder), SimpleQueue()
    try:
        if ends.in_group:
            ends.connect(state(0))
        with ThreadPoolExecutor(1) as pool:
            arriving = pool.submit(followed, ends.worker, receiving, landed)
            try:
                trained(ends.trainer, sending, landed)
            except BaseException:
                ends.worker.abort()
                raise
            return arriving.result(WAIT_S)
    finally:
        ends.trainer.shutdown()
        ends.worker.shutdown()


def named(suites):
    return pytest.mark.parametrize("suite", suites, ids=[suite.__name__[4:] for suite in suites])


@pytest.mark.parametrize(("sending", "receiving"), PLACES, ids=[f"from {one} to {other}" for one, other in PLACES])
@named(contract.SUITES)
def test_every_version_arrives_whatever_stream_it_is_on(lag, suite, sending, receiving, tmp_path):
    assert exchanged(suite, sending, receiving, tmp_path) == []


@pytest.mark.parametrize(("sending", "receiving"), [(SIDE, DEFAULT), (DEFAULT, SIDE), (HOST, BOTH)])
@named([contract.TestCollective, contract.TestDeltaByBroadcast, contract.TestSharded])
def test_every_version_arrives_by_a_carrier_of_the_device(lag, suite, sending, receiving, tmp_path):
    with carried():
        assert exchanged(suite, sending, receiving, tmp_path) == []
