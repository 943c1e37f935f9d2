"""Whatever arrives from the other end of `IPCTransport`: it works, or is an error of ours."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing, suppress

import torch
from hypothesis import given
from hypothesis.strategies import randoms

from tests.hostile import worse_bytes, worse_json
from tests.transports.ipc_ends import frame
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, WeightSyncError
from torchrl_ext.transports.base import Arrival
from torchrl_ext.transports.ipc.memory import HostHandle, create
from torchrl_ext.transports.ipc.messages import Announce, Done, Hello, Load, Welcome
from torchrl_ext.transports.ipc.worker import IPCWorker
from torchrl_ext.transports.ipc.workers import ConnectedWorkers
from torchrl_ext.transports.links import new_address
from torchrl_ext.types import ParamMeta


def plain(message):
    """A message as the JSON object that travels."""
    return json.loads(json.dumps(message.to_json()))


def line(draw, message):
    """A message on the wire, damaged in one of several ways."""
    data = frame(b"[" * 10_000 if draw.random() < 0.01 else json.dumps(worse_json(message, draw)).encode())
    return worse_bytes(data, draw) if draw.random() < 0.1 else data


def offered(draw, message):
    """What a control layer hands over is a map at least."""
    found = worse_json(message, draw)
    return found if isinstance(found, dict) else {}


PARAMS = (ParamMeta("a", torch.float32, (3,)), ParamMeta("b", torch.uint8, (2, 3)))
LOAD = Load(session="s", handoff=3)


def send(draw, stranger, first, others):
    """Send a first message, which is sound half of the time, and then damaged ones, or none after a damaged one."""
    with suppress(OSError):  # the other end had enough
        if draw.random() < 0.5:
            stranger.sendall(line(draw, plain(first)))
        else:
            stranger.sendall(frame(json.dumps(plain(first)).encode()))
            yield
            stranger.sendall(b"".join(line(draw, plain(one)) for one in draw.choices(others, k=3)))
        stranger.shutdown(socket.SHUT_WR)
    yield


@given(randoms(use_true_random=False))
def test_a_trainer_takes_any_hello_and_any_answer(draw):
    address = new_address()
    with (
        closing(create("cpu", 8192)) as segment,
        closing(ConnectedWorkers(address, "s", lambda devices: segment)) as connected,
        socket.socket(socket.AF_UNIX) as stranger,
    ):
        stranger.connect("\0" + address)
        for _ in send(draw, stranger, Hello(rank=1, devices=["cpu"]), (Done(handoff=3, bucket=1),)):
            with suppress(WeightSyncError):
                connected.wait_for(1, Deadline(0.0), [1])
                connected.begin(3)
            with suppress(WeightSyncError):
                connected.await_taken(1, Deadline(0.0))


@given(randoms(use_true_random=False))
def test_a_worker_takes_any_message_of_a_trainer(draw):
    worker = IPCWorker(address := new_address(), lambda: ["cpu"])
    orders = (Announce(version=1, params=PARAMS, load=LOAD), Done(handoff=3, bucket=0))
    with closing(create("cpu", 8192)) as segment, closing(worker), socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen()
        with suppress(DeadlineError):
            worker.enter("s", Deadline(0.0))  # connects, and hears nothing yet
        with listener.accept()[0] as stranger:
            for _ in send(draw, stranger, Welcome(session="s", segment=segment.handle), orders):
                info = draw.choice([plain(LOAD), offered(draw, plain(LOAD))])
                arrival = Arrival(version=1, params=PARAMS, info=info)
                with suppress(WeightSyncError):
                    worker.enter("s", Deadline(0.0))
                    arrival = draw.choice([arrival, worker.get(Deadline(0.0)) or arrival])
                with suppress(WeightSyncError):
                    list(worker.receive(arrival, {}, Deadline(0.0)))


@given(randoms(use_true_random=False))
def test_any_handle_is_an_error_or_what_it_says(draw):
    with closing(create("cpu", 8192)) as segment:
        before = len(os.listdir("/proc/self/fd"))
        with suppress(WeightSyncError):
            HostHandle.from_json(worse_json(plain(segment.handle), draw)).attach().close()
        assert len(os.listdir("/proc/self/fd")) == before
