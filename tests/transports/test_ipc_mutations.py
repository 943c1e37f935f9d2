"""Whatever arrives from the other end of `IPCTransport`, or with a shared root: it works, or is an error of ours."""

from __future__ import annotations

import json
import math
import os
import random
import socket
from contextlib import closing, suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import randoms

from tests.transports.ipc_ends import join
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import DeadlineError, WeightSyncError
from torchrl_ext.stores import LocalStore
from torchrl_ext.transports.base import Arrival
from torchrl_ext.transports.ipc.memory import HostHandle, create
from torchrl_ext.transports.ipc.messages import Announce, Done, GivenUp, Hello, Load, Welcome
from torchrl_ext.transports.ipc.worker import IPCWorker
from torchrl_ext.transports.ipc.workers import ConnectedWorkers
from torchrl_ext.transports.links import new_address
from torchrl_ext.transports.shared_root import Invitation, SharedRoot
from torchrl_ext.types import ParamMeta

ODD = (
    None,
    True,
    False,
    0,
    1,
    -1,
    1 << 70,
    0.5,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "x",
    "\0",
    "../x",
    [],
    [[]],
    {},
    {"": []},
)
ROUNDS = 100


def mutated(draw, value):
    """``value`` with one odd thing in it, somewhere."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice([*value])
        if draw.random() < 0.2:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: mutated(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        return [*value[:at], *draw.choice([[], [mutated(draw, value[at])], [value[at], value[at]]]), *value[at + 1 :]]
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 4096, -4096, 1 << 50])
    return draw.choice(ODD)


def message_of(draw, message):
    """As `mutated`; what a control layer hands over is a map at least."""
    found = mutated(draw, message)
    return found if isinstance(found, dict) else {}


def plain(message):
    """A message as the JSON object that travels."""
    return json.loads(json.dumps(message.to_json()))


def frame(data):
    return len(data).to_bytes(4, "big") + data


def line(draw, message):
    """A message on the wire, damaged in one of several ways."""
    data = frame(json.dumps(mutated(draw, message)).encode())
    if draw.random() < 0.1:
        at = draw.randrange(len(data))
        data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    return frame(b"[" * 10_000) if draw.random() < 0.01 else data


PARAMS = (ParamMeta("a", torch.float32, (3,)), ParamMeta("b", torch.uint8, (2, 3)))
LOAD = Load(session="s", handoff=3)
REFUSALS = (GivenUp(handoff=3, why="no"), GivenUp(why=""))


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


@settings(deadline=None)
@given(randoms(use_true_random=False))
def test_a_trainer_takes_any_hello_and_any_answer(draw):
    address = new_address()
    with (
        closing(create("cpu", 8192)) as segment,
        closing(ConnectedWorkers(address, "s", lambda devices: segment)) as connected,
        socket.socket(socket.AF_UNIX) as stranger,
    ):
        stranger.connect("\0" + address)
        for _ in send(draw, stranger, Hello(rank=1, devices=["cpu"]), (Done(handoff=3, bucket=1), *REFUSALS)):
            with suppress(WeightSyncError):
                connected.wait_for(1, Deadline(0.0), [1])
                connected.begin(3)
            with suppress(WeightSyncError):
                connected.await_taken(1, Deadline(0.0))


@settings(deadline=None)
@given(randoms(use_true_random=False))
def test_a_worker_takes_any_message_of_a_trainer(draw):
    worker = IPCWorker(address := new_address(), lambda: ["cpu"])
    orders = (Announce(version=1, params=PARAMS, load=LOAD), Done(handoff=3, bucket=0), *REFUSALS)
    with closing(create("cpu", 8192)) as segment, closing(worker), socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen()
        with suppress(DeadlineError):
            worker.enter("s", Deadline(0.0))  # connects, and hears nothing yet
        with listener.accept()[0] as stranger:
            for _ in send(draw, stranger, Welcome(session="s", segment=segment.handle), orders):
                info = draw.choice([plain(LOAD), message_of(draw, plain(LOAD))])
                arrival = Arrival(version=1, params=PARAMS, info=info)
                with suppress(WeightSyncError):
                    worker.enter("s", Deadline(0.0))
                    arrival = draw.choice([arrival, worker.get(Deadline(0.0)) or arrival])
                with suppress(WeightSyncError):
                    list(worker.receive(arrival, {}, Deadline(0.0)))


@settings(deadline=None)
@given(randoms(use_true_random=False))
def test_any_invitation_and_any_handle_is_an_error_or_what_it_says(draw):
    with pytest.raises(WeightSyncError):
        join(message_of(draw, {"address": new_address(), "session": "s"}), 0.0)
    with closing(create("cpu", 8192)) as segment:
        before = len(os.listdir("/proc/self/fd"))
        with suppress(WeightSyncError):
            HostHandle.from_json(mutated(draw, plain(segment.handle))).attach().close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_takes_any_invitation_to_a_shared_root(tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_ext.transports.shared_root.VISIBLE_S", 0.0)
    store, draw = LocalStore(tmp_path), random.Random(6)
    (tmp_path / "secret").write_text("run")
    shared = SharedRoot(store, "run")
    info = shared.invite()
    Invitation.from_json(info).find(store, Deadline(1.0))
    for _ in range(ROUNDS):
        with suppress(WeightSyncError):
            Invitation.from_json(message_of(draw, info)).find(store, Deadline(0.0))
    with pytest.raises(WeightSyncError, match="probe"):
        Invitation.from_json({**info, "probe": "secret"}).find(store, Deadline(0.0))
