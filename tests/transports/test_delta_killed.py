"""Trainers that are killed, and collection beside readers at work."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from tests.processes import calling, running_python
from tests.transports.chains import same, step, trainer_at, weights
from tests.transports.members import stop
from torchrl_ext.stores import Chain, local
from torchrl_ext.testing import WAIT_S
from torchrl_ext.versions import checkpoint_writer


class TestKilled:
    @pytest.mark.parametrize("point", ["in a delta", "in a keyframe", "before the rename", "before the pointer"])
    def test_a_trainer_killed_leaves_a_chain_that_reads_and_goes_on(self, root, point):
        with running_python(calling(killed_trainer, str(root), point)) as child:
            assert child.stdout.readline() == "now\n"
            child.send_signal(signal.SIGKILL)
            child.wait(WAIT_S)
        expected = {"x": torch.full((500,), 2.0), "y": torch.arange(500.0)}
        assert same(trainer_at(root).receive_weights(WAIT_S), expected)
        trainer, reader = trainer_at(root), trainer_at(root)
        reader.receive_weights(WAIT_S)
        expected["x"] += 5
        trainer.send_weights("policy", expected)
        assert same(reader.receive_weights(WAIT_S), expected)
        assert same(trainer_at(root).receive_weights(WAIT_S), expected)
        assert not [path for path in root.rglob("*") if ".tmp-" in path.name]


def killed_trainer(root, point):
    own = {"x": torch.full((500,), 1.0), "y": torch.arange(500.0)}
    trainer = trainer_at(root, keyframe_every=2 if point == "in a keyframe" else 0)
    for _ in range(2):
        trainer.send_weights(own)
        own["x"] += 1
    if point == "in a delta":
        local._LocalDraft.write = stop
    elif point == "in a keyframe":
        checkpoint_writer.write_shards = stop
    elif point == "before the rename":
        os.rename = stop
    else:
        Chain.advance = stop
    trainer.send_weights(own)


class TestCollection:
    def test_never_races_readers_that_join_and_follow(self, root):
        own, stop, failures, seen = weights(), threading.Event(), [], []
        trainer = trainer_at(root, keyframe_every=3)

        def read():
            reader = trainer_at(root)
            try:
                while not stop.is_set():
                    reader = trainer_at(root) if len(seen) % 2 else reader
                    received = reader.receive_weights(0.2)
                    if received is not None:
                        assert int(received["c.count"][0]) == reader.received_version
                        seen.append(reader.received_version)
            except Exception as error:  # noqa: BLE001 - a thread hands everything on
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for version in range(1, 60):
            if version == 4:
                for thread in threads:
                    thread.start()
            own["c.count"][0] = version
            trainer.send_weights("policy", own)
            step(own, version)
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures, failures
        assert len(set(seen)) > 3
        assert len(list(root.glob("weight_v*"))) <= 6
