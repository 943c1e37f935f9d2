"""Whatever arrives from the other end of `IPCTransport`, or with a shared root: it works, or is an error of ours."""

from __future__ import annotations

import json
import math
import os
import random
import socket
from contextlib import suppress

import pytest
import torch

import torchrl_ext as tx
from tests.transports.ipc_ends import join
from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import WeightSyncError
from torchrl_ext.stores import LocalStore
from torchrl_ext.transports.base import Arrival
from torchrl_ext.transports.ipc.host_memory import attach, create
from torchrl_ext.transports.ipc.messages import (
    Announce,
    Filled,
    Handle,
    Hello,
    Leaving,
    Load,
    Refused,
    Stopped,
    Taken,
    TurnedAway,
    Welcome,
)
from torchrl_ext.transports.ipc.worker import IPCWorker
from torchrl_ext.transports.ipc.workers import ConnectedWorkers
from torchrl_ext.transports.links import Link, new_address
from torchrl_ext.transports.shared_root import Invitation, SharedRoot
from torchrl_ext.types import ParamMeta, decoded

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
ROUNDS = 400


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
    return frame(b"[" * 100_000) if draw.random() < 0.01 else data


@pytest.fixture
def pair():
    """Makes two ends of a connection: a `Link`, and the stranger's socket."""
    opened = []

    def ends():
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        opened.extend([link := Link(ours, "somebody"), theirs])
        return link, theirs

    yield ends
    for end in opened:
        end.close()


@pytest.fixture
def segment():
    own = create("cpu", 8192)
    yield own
    own.close()


def test_a_trainer_takes_any_hello_and_any_answer(pair, segment):
    draw, let_in = random.Random(1), 0
    hello = plain(Hello(rank=1, devices=["cpu"]))
    answers = [plain(one) for one in (Taken(handoff=3, bucket=1), Refused(handoff=3, why="no"), Leaving(why=""))]
    for _ in range(ROUNDS):
        connected = ConnectedWorkers(new_address(), "session", lambda devices: segment)
        link, theirs = pair()
        theirs.sendall(draw.choice([line(draw, hello), frame(json.dumps(hello).encode())]))
        accepted = [link]
        connected._listener.close()
        connected._listener.accept = lambda until, accepted=accepted: accepted.pop() if accepted else None
        with suppress(WeightSyncError):
            connected.wait_for(1, Deadline(0.0), [1])
        connected.begin(3)
        let_in += bool(connected.segments)
        if connected.segments:
            with suppress(OSError):
                theirs.sendall(b"".join(line(draw, draw.choice(answers)) for _ in range(3)))
            theirs.close()
            with suppress(WeightSyncError):
                connected.await_taken(1, Deadline(0.0))
        connected.close()
        theirs.close()
    assert ROUNDS // 4 < let_in < ROUNDS


def test_a_worker_takes_any_message_of_a_trainer(pair, segment):
    draw, welcomed = random.Random(2), 0
    welcome = plain(Welcome(session="s", segment=segment.handle))
    params = (ParamMeta("a", torch.float32, (3,)), ParamMeta("b", torch.uint8, (2, 3)))
    load = Load(session="s", handoff=5)
    filled, stopped = Filled(handoff=5, bucket=0), Stopped(handoff=5, why="no")
    others = [
        plain(one) for one in (TurnedAway(why="no"), Announce(version=1, params=params, load=load), filled, stopped)
    ]
    for _ in range(ROUNDS):
        worker = IPCWorker("", lambda: ["cpu"])
        worker._link, theirs = pair()
        first = draw.choice([line(draw, welcome), frame(json.dumps(welcome).encode())])
        theirs.sendall(first + b"".join(line(draw, draw.choice(others)) for _ in range(draw.randrange(3))))
        theirs.shutdown(socket.SHUT_WR)
        with suppress(WeightSyncError):
            for _ in range(4):
                if isinstance(worker._hear(Deadline(0.0)), Announce):
                    break
        welcomed += worker.check_connection()
        info = draw.choice([plain(load), message_of(draw, plain(load))])
        with suppress(WeightSyncError):
            list(worker.receive(Arrival(version=1, params=params, info=info), {}, Deadline(0.0)))
        worker.close()
    for _ in range(ROUNDS):
        with pytest.raises(WeightSyncError):
            join(message_of(draw, {"address": new_address(), "session": "s"}), 0.0)


def test_a_worker_takes_any_announcement(pair, segment):
    params = (ParamMeta("a", torch.float32, (3,)),)
    draw, whole = random.Random(3), plain(Announce(version=1, params=params, load=Load(session="s", handoff=5)))
    for _ in range(ROUNDS):
        transport = tx.make_transport("ipc", timeout_s=1.0)
        transport.mailbox.worker._link, theirs = pair()
        transport.mailbox.worker._welcome = Welcome(session="s", segment=segment.handle)
        announced = mutated(draw, whole)
        filled = plain(Filled(handoff=5, bucket=0))
        theirs.sendall(b"".join(frame(json.dumps(one).encode()) for one in (announced, filled)))
        theirs.shutdown(socket.SHUT_WR)
        with suppress(WeightSyncError):
            transport.receive_weights(0.0)
        transport.shutdown()


def test_any_handle_maps_what_it_says_or_nothing(segment):
    draw, before = random.Random(5), len(os.listdir("/proc/self/fd"))
    for _ in range(ROUNDS):
        with suppress(WeightSyncError):
            attach(decoded(mutated(draw, plain(segment.handle)), Handle, "a handle")).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_worker_takes_any_invitation_to_a_shared_root(tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_ext.transports.shared_root.VISIBLE_S", 0.0)
    store, draw = LocalStore(tmp_path), random.Random(6)
    (tmp_path / "secret").write_text("run")
    shared = SharedRoot(store, "run")
    info = shared.invite()
    Invitation.from_json(info).find(store, Deadline(1.0))
    for _ in range(ROUNDS // 4):
        with suppress(WeightSyncError):
            Invitation.from_json(message_of(draw, info)).find(store, Deadline(0.0))
    with pytest.raises(WeightSyncError, match="probe"):
        Invitation.from_json({**info, "probe": "secret"}).find(store, Deadline(0.0))
