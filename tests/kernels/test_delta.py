"""The delta transport over each implementation: the same files, and engines that hold the same bits."""

import pytest

import torchrl_ext as tx
from tests.transports.chains import folder, same, step, trainer_at, weights
from torchrl_ext.kernels.base import kernels_on
from torchrl_ext.stores import LocalStore
from torchrl_ext.stores.chain import Chain
from torchrl_ext.sync.engines.inprocess import InProcessEngine


@pytest.fixture
def working(way, monkeypatch):
    """The device to put tensors on; what is chosen for it is the implementation under test."""
    own, device = way
    for module in ("codecs.streams", "landing.patcher"):
        monkeypatch.setattr(
            f"torchrl_ext.{module}.kernels_on", lambda where: own if where == device else kernels_on(where)
        )
    return device


CASES = [
    ("ulp", True),
    ("bitmap", True),
    ("ulp", False),
    ("context", True),
    ("xor", False),
]


@pytest.mark.parametrize(("encoding", "beside"), CASES)
def test_an_engine_follows_and_the_files_are_those_of_the_host(working, tmp_path, monkeypatch, encoding, beside):
    """``beside``: the baseline is where the weights are, else on the host."""
    own, served = ({name: tensor.to(working) for name, tensor in weights(seed).items()} for seed in (0, 9))
    device = working if beside else None
    trainer = trainer_at(tmp_path / "own", encoding=encoding, keyframe_every=0, keep_files=True, baseline_device=device)
    sender = tx.WeightSender(trainer, InProcessEngine(served))
    history = []
    for version in range(1, 5):
        assert sender.update_weights(own).verified
        assert same({k: v.cpu() for k, v in served.items()}, {k: v.cpu() for k, v in own.items()})
        history.append({name: tensor.cpu().clone() for name, tensor in own.items()})
        host = {name: tensor.cpu() for name, tensor in own.items()}
        step(host, version)
        for name, tensor in host.items():
            own[name].copy_(tensor)
    sender.shutdown()
    monkeypatch.undo()
    plain = trainer_at(tmp_path / "host", encoding=encoding, keyframe_every=0, keep_files=True)
    for version, held in enumerate(history, 1):
        plain.send_weights("policy", held)
        rows = [Chain(LocalStore(tmp_path / side)).version(version).delta for side in ("own", "host")]
        if version > 1:
            assert rows[0].digests.tolist() == rows[1].digests.tolist() and rows[0].changed.any()
        for file in folder(tmp_path / "host", version).iterdir():
            if file.name != "manifest.json":  # which names the run
                assert file.read_bytes() == (folder(tmp_path / "own", version) / file.name).read_bytes(), file
    plain.shutdown()
