"""An engine whose weights are unmapped while it sleeps: no step of an update touches them, and no join reads any.

A touch would end the process, so each program is a process of its own.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torchrl_ext as tx
from tests.engines.embedded import served_here
from tests.engines.processed import Unprocessed
from tests.lag import device
from tests.models import tiny_checkpoint, tiny_model
from tests.processes import python
from tests.sync.by_hand import invitation, prepared
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import EngineError
from torchrl_ext.base.messages import Finish, Poll, Prefetch, Rehearse, Start
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.engines import loader as engine_loader
from torchrl_ext.engines.embedded.engine import EmbeddedEngine
from torchrl_ext.engines.loader import EngineLoader
from torchrl_ext.sync.engine_worker import EngineWorker
from torchrl_ext.testing import WAIT_S, same_bits


def weights(version):
    generator = torch.Generator().manual_seed(0)
    made = {f"layers.{number}": torch.randn(40, 30, generator=generator) for number in range(3)}
    for tensor in made.values():
        tensor[version % 40] = version
    return made


class Model(nn.Module):
    """An engine's model on the device, which keeps its weights as they are loaded."""

    def __init__(self):
        super().__init__()
        made = (nn.Parameter(tensor.to("lag:0"), requires_grad=False) for tensor in weights(0).values())
        self.layers = nn.ParameterList(made)

    def load_weights(self, pairs):
        own = dict(self.named_parameters())
        for name, tensor in pairs:
            own[name].copy_(tensor)


class Seen(Unprocessed):
    """What a loader of engines sees of a `Model`."""

    def __init__(self, folder):
        save_file(weights(0), folder / "model.safetensors")
        super().__init__(Model(), folder)

    @contextlib.contextmanager
    def sleeping(self):
        """Sleep as vLLM does at level 1: what the weights were comes back."""
        self.asleep = True
        with device.sleeping(*self.module.parameters()):
            yield
        self.asleep = False


def worker(folder):
    model = Seen(folder)
    return model, EngineWorker(EngineLoader(model), rank=0, workers=1, agree=lambda words: [words])


def idle(end):
    Deadline(WAIT_S).poll(lambda: "working" not in end.handle(Poll()))


def follow(end, trainer, version):
    """Take the steps of an update, and return how sure the worker is of it."""
    load = prepared(trainer, weights(version), version)
    end.handle(Prefetch(version=version))
    idle(end)
    for message in (Start(), load, Finish(version=version)):
        end.handle(message)
    return end.receiver.rehearse(Rehearse(how="never"))["proof"]


def holds(model, version):
    held = dict(model.module.named_parameters())
    return all(same_bits(held[name].cpu(), tensor) for name, tensor in weights(version).items())


@pytest.mark.parametrize("name", ["delta", "disk"])
def test_an_engine_that_sleeps_is_joined_and_follows_when_awake(lag, name, tmp_path):
    """The joining reads no weight; staging is refused; awake, the engine follows as one that never slept."""
    python(f"from tests.lag.test_sleep import joined_asleep; joined_asleep({name!r}, {str(tmp_path)!r})")


def joined_asleep(name, folder):
    import pathlib

    folder = pathlib.Path(folder)
    with device.here():
        model, end = worker(folder)
        trainer = tx.make_transport(name, root=folder / "root", **({"base": str(folder)} if name == "delta" else {}))
        with model.sleeping():
            end.handle(invitation(trainer, weights(0)))
            idle(end)
            for message in (Rehearse(how="auto"), Start()):
                with pytest.raises(EngineError, match="the engine's weights are asleep"):
                    end.handle(message)
        end.handle(Rehearse(how="auto"))
        for version in (1, 2):
            assert follow(end, trainer, version) == "in place"
            assert holds(model, version)
        if name == "delta":
            load = prepared(trainer, weights(3), 3)
            with model.sleeping():
                end.handle(Prefetch(version=3))
                with pytest.raises(EngineError, match="the engine's weights are asleep"):
                    idle(end)
            assert holds(model, 2) and load
        end.close()
        trainer.shutdown()


def test_sleep_waits_for_the_thread_that_reads_weights(lag, tmp_path):
    """An engine that is put to sleep while it joins ends the reading first, and reads on when it is awake."""
    python(f"from tests.lag.test_sleep import slept_while_joining; slept_while_joining({str(tmp_path)!r})")


def slept_while_joining(folder):
    import pathlib

    folder, reading, go_on, found = pathlib.Path(folder), threading.Event(), threading.Event(), []
    with device.here():
        model, end = worker(folder)
        original = engine_loader.holds

        def slow(*of):
            reading.set()
            assert go_on.wait(WAIT_S)
            found.append(threading.get_ident())
            return original(*of)

        engine_loader.holds = slow
        trainer = tx.DiskTransport(folder / "root")
        end.handle(invitation(trainer, weights(0)))
        assert reading.wait(WAIT_S)
        threading.Timer(0.2, go_on.set).start()
        end.stop()
        with model.sleeping():
            torch.accelerator.synchronize()
        assert len(found) == 1 and found[0] != threading.get_ident()  # of three tensors, and not where it generates
        end.handle(invitation(trainer, weights(0)))
        idle(end)
        assert follow(end, trainer, 1) == "sent" and holds(model, 1)
        assert all(map(end.receiver._require_loader().patchable, weights(0)))
        end.close()


NAMES = ("delta", "delta by broadcast", "disk", "ipc", "collective", "sharded")


@pytest.mark.parametrize(("name", "level"), [("delta", 1), *((name, 2) for name in NAMES)])
def test_a_sender_joins_an_embedded_engine_that_sleeps(lag, level, name, tmp_path):
    """And the engine follows on another device, from the default stream or from another one."""
    engine = EmbeddedEngine(str(tiny_checkpoint(tmp_path / "model")), device="lag:1")
    engine.sleep(level, "abort", WAIT_S)
    policy = tiny_model(1).to(lag)
    settings = {"carrier": "collective"} if "broadcast" in name else {}
    settings |= {"root": tmp_path / "root"} if name in ("delta", "disk") else {}
    transport = tx.make_transport(name.split()[0], timeout_s=WAIT_S, **settings)
    with (
        torch.Stream(lag) if level == 2 else contextlib.nullcontext(),
        served_here(engine) as server,
        tx.WeightSender(transport, tx.connect(server.url)) as sender,
    ):
        sender.init_all_workers_group({name: (one.dtype, one.shape) for name, one in as_source(policy)})
        for _ in range(2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter[:1].neg_()  # queued on the current stream
            assert sender.update_weights(policy).proof == "in place"
            for index in (0, 1):
                torch.accelerator.synchronize(f"lag:{index}")
            held = dict(engine._model.named_parameters())
            assert all(same_bits(one.detach().cpu(), held[name].cpu()) for name, one in policy.named_parameters())
