"""Devices that are not there are refused by name, wherever one can be asked for; memory for copies is pinned."""

import gc
from types import SimpleNamespace

import pytest
import torch

import torchrl_ext as tx
from tests.models import tiny_checkpoint
from torchrl_ext.base import devices
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.engines.embedded.engine import EmbeddedEngine

ABSENT = f"cuda:{torch.cuda.device_count()}"


SEES = rf"{ABSENT}.*this process sees \d+ devices of type 'cuda'"


@pytest.mark.parametrize(("device", "words"), [(ABSENT, SEES), ("abacus", "'abacus' is not a device")])
def test_absent_or_invalid_device_is_refused_first(tmp_path, device, words):
    model = tiny_checkpoint(tmp_path / "model")
    for ask in (
        lambda: tx.VLLMCollectiveTransport("127.0.0.1", 29500, 0, 2, device=device),
        lambda: tx.make_transport("ipc", device=device),
        lambda: EmbeddedEngine(str(model), device=device),
    ):
        with pytest.raises(ConfigError, match=words):
            ask()


class TestAccelerator:
    """A device of whatever vendor, by what torch says of it."""

    def test_its_devices_are_known_by_type_and_index(self, lag):
        assert devices.accelerator() == "lag" and devices.current_device() == lag
        with devices.current(torch.device("lag:1")):
            assert devices.current_device() == torch.device("lag:1")
        assert devices.current_device() == lag
        assert devices.visible_devices() == ("", ["0", "1"]) and len(set(devices.uuids())) == 2
        assert devices.usable_device("lag:1").index == 1
        for absent in ("lag:7", "cuda:0"):
            with pytest.raises(ConfigError, match=rf"{absent}.*this process sees [02] devices of type"):
                devices.usable_device(absent)

    def test_cached_memory_is_asked_for_where_nothing_is_kept(self, lag, monkeypatch):
        """Torch's own call fails where a vendor's allocator is none of its kind; theirs may as well."""
        devices.free_cached()
        monkeypatch.setattr(torch.lag, "empty_cache", lambda: (_ for _ in ()).throw(RuntimeError("no cache")))
        devices.free_cached()

    def test_a_worker_stages_on_the_device_of_its_model(self, lag):
        """Not on the current one of whichever thread handles its messages."""
        held, policy = {"x": torch.zeros(5, device="lag:1")}, {"x": torch.ones(5, device=lag)}
        transport = tx.make_transport("ipc")
        with tx.WeightSender(transport, tx.make_engine("inprocess", engine=held)) as sender:
            assert sender.update_weights(policy).proof == "in place"
            assert [segment.flat.device for segment in transport._segments.values()] == [torch.device("lag:1")]
            assert held["x"].tolist() == [1.0] * 5


def accelerated(monkeypatch, kind):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))


@pytest.mark.parametrize("refused", [False, True])
def test_cuda_pins_as_much_as_is_asked_for_until_it_is_freed(refused, monkeypatch, caplog):
    accelerated(monkeypatch, "cuda")
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append(("register", address, nbytes)) or int(refused),
        cudaHostUnregister=lambda address: calls.append(("unregister", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = devices.pinned_memory(5000)
    address, view = memory.data_ptr(), memory[100:].view(torch.bfloat16)
    assert (memory.numel(), calls) == (5000, [("register", address, 5000)])
    del memory
    gc.collect()
    assert len(calls) == 1
    view.fill_(1)
    del view
    gc.collect()
    assert calls[1:] == ([] if refused else [("unregister", address)])
    assert refused is ("5000 bytes of host memory cannot be pinned" in caplog.text)


@pytest.mark.parametrize(("nbytes", "pinned"), [(1000, True), (4096, True), (1100, False), (3640, False), (3641, True)])
def test_elsewhere_pinned_memory_wastes_an_eighth_at_most(nbytes, pinned, monkeypatch):
    accelerated(monkeypatch, "xpu")
    empty, asked = torch.empty, []
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, pin_memory, **how: asked.append(pin_memory) or empty(*sizes, **how)
    )
    assert devices.pinned_memory(nbytes).shape == (nbytes,) and asked == [pinned]
