"""What goes wrong is refused before the pause, or leaves the engine paused and able to take the next update."""

import subprocess
import sys
import textwrap

import pytest
import torch

import torchrl_ext as tx
from tests.models import greedy, tiny_model

pytestmark = pytest.mark.engine


def sender_to(served, transport, **settings):
    return tx.WeightSender(tx.make_transport(transport, **settings), tx.make_engine("vllm", url=served.url))


def changed(kind):
    state = dict(tiny_model(52).state_dict())
    if kind == "unknown":
        state["model.layers.0.strange.weight"] = torch.zeros(3)
    elif kind == "missing":
        del state["model.layers.1.self_attn.k_proj.weight"]
    elif kind == "misshaped":
        state["model.layers.1.mlp.down_proj.weight"] = torch.zeros(128, 300)
    elif kind == "rounded":
        state["model.norm.weight"] = state["model.norm.weight"].double()
    return state


@pytest.mark.parametrize("transport", ["disk", "collective"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unknown", r"layers\.0\.strange"),
        ("missing", r"model\.layers\.1\.self_attn\.k_proj\.weight' is missing"),
        ("misshaped", r"down_proj\.weight' arrives with shape \[128, 300\].*\[128, 256\]"),
        ("rounded", r"model\.norm\.weight' arrives as float64"),
    ],
)
def test_parameters_that_cannot_land_are_refused_before_the_pause(vllm, tmp_path, transport, kind, words):
    settings = {"root": tmp_path} if transport == "disk" else {"timeout_s": 20}
    sender, good = sender_to(vllm, transport, **settings), tiny_model(51)
    before = sender.update_weights(good).version
    with pytest.raises(tx.WeightSyncError, match=words) as error:
        sender.update_weights(changed(kind))
    assert "check the stack trace" not in str(error.value)  # the worker's words, not what vLLM wraps around them
    assert not vllm.paused() and vllm.version() == str(before)
    assert vllm.tokens() == greedy(good)
    last = tiny_model(53)
    sender.update_weights(last)
    assert vllm.tokens() == greedy(last)
    sender.shutdown()


def test_a_world_without_room_for_the_engine_is_refused(vllm):
    engine, params = tx.make_engine("vllm", url=vllm.url), [["w", "float32", [1]]]
    with pytest.raises(tx.WeightSyncError, match="do not fit into a world of 1"):
        engine.connect({"transport": "disk", "params": params, "world_size": 1})
    assert not vllm.paused()


DYING_TRAINER = """
    import os, signal, sys, threading
    sys.path.insert(0, {repo!r})
    import torch, torchrl_ext as tx
    from tests.models import tiny_model
    from torchrl_ext.types import ParamMeta
    from torchrl_ext.weights.source import WeightSource

    class Dying(WeightSource):
        def __init__(self, state):
            self.state = state
        def params(self):
            return tuple(ParamMeta.of(name, tensor) for name, tensor in self.state.items())
        def __iter__(self):
            for i, (name, tensor) in enumerate(self.state.items()):
                if i == 12:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield name, tensor

    source = Dying(dict(tiny_model(61).state_dict()))
    transport = tx.make_transport("collective", bucket_bytes=0)
    sender = tx.WeightSender(transport, tx.connect({url!r}))
    sender.update_weights(source)
"""


def kill_a_trainer_in_the_middle(served, repo):
    script = textwrap.dedent(DYING_TRAINER).format(repo=str(repo), url=served.url)
    done = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


@pytest.mark.parametrize("server", ["vllm", pytest.param("tensor_parallel_vllm", marks=pytest.mark.exhaustive)])
def test_after_a_trainer_died_in_the_middle_the_next_update_brings_the_engine_back(request, server, tmp_path):
    served, good = request.getfixturevalue(server), tiny_model(62)
    before = sender_to(served, "disk", root=tmp_path / "before")
    before.update_weights(tiny_model(60))
    label = served.version()
    kill_a_trainer_in_the_middle(served, request.config.rootpath)
    assert served.paused() and served.version() == label
    after = sender_to(served, "disk", root=tmp_path / "after")
    after.update_weights(good)
    assert served.tokens() == greedy(good) and not served.paused()
    collective = sender_to(served, "collective")
    collective.update_weights(tiny_model(63))
    assert served.tokens() == greedy(tiny_model(63))
    collective.shutdown()


def test_damaged_files_leave_the_engine_paused_and_the_error_says_so(vllm, tmp_path):
    """The file is overwritten after the engine checked it, while it is paused."""
    good, root = tiny_model(71), tmp_path / "damaged"

    class Damaging(tx.DiskTransport):
        def prepare(self, source, version):
            handoffs = list(super().prepare(source, version))  # published, and read by engines from here on

            def in_the_pause():
                for shard in root.glob(f"weight_v{version:06d}/*.safetensors"):
                    with shard.open("r+b") as file:
                        file.seek(-64, 2)
                        file.write(b"\xff" * 64)
                yield from handoffs

            return in_the_pause()

    damaging = tx.WeightSender(Damaging(root=root), tx.make_engine("vllm", url=vllm.url))
    with pytest.raises(tx.WeightSyncError, match="is paused, serves nobody, and holds") as error:
        damaging.update_weights(good)
    assert error.value.rows[0].state == "paused" and vllm.paused()
    last = sender_to(vllm, "disk", root=tmp_path / "last")
    last.update_weights(good)
    assert vllm.tokens() == greedy(good) and not vllm.paused()


def test_damaged_files_are_refused_before_the_pause(vllm, tmp_path):
    good, root = tiny_model(72), tmp_path / "damaged"
    sender_to(vllm, "disk", root=tmp_path / "good").update_weights(good)

    class Damaging(tx.DiskTransport):
        def prepare(self, source, version):
            handoffs = list(super().prepare(source, version))
            for shard in root.glob(f"weight_v{version:06d}/*.safetensors"):
                with shard.open("r+b") as file:
                    file.truncate(shard.stat().st_size - 64)
            return handoffs

    damaging = tx.WeightSender(Damaging(root=root), tx.make_engine("vllm", url=vllm.url))
    with pytest.raises(tx.WeightSyncError, match="did not prefetch version"):
        damaging.update_weights(tiny_model(73))
    assert not vllm.paused() and vllm.tokens() == greedy(good)
