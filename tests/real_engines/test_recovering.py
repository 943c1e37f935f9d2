"""What goes wrong is refused before the pause, or leaves an engine paused and able to take the next update.

Without a check ahead SGLang skips an unknown name, and keeps old values under a missing one, in silence.
"""

import signal
from pathlib import Path

import pytest
import torch

import torchrl_ext as tx
from tests.models import tiny_model
from tests.processes import calling, finished
from tests.real_engines.served import sending
from tests.sync.ends import before
from tests.turns import CLOSE, PROMPTS, die, gap
from torchrl_ext.base.messages import Inspect
from torchrl_ext.base.routes import called

pytestmark = pytest.mark.engine


def changed(kind):
    """Weights that cannot land in the small model."""
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
def test_unfit_parameters_are_refused_before_pause(served, tmp_path, transport, kind, words):
    good, last = tiny_model(51), tiny_model(53)
    with sending(transport, tmp_path, served) as sender:
        before = sender.update_weights(good).version
        with pytest.raises(tx.WeightSyncError, match=words) as error:
            sender.update_weights(changed(kind))
        assert "check the stack trace" not in str(error.value)  # the worker's words, not what is wrapped around
        assert served.is_called(str(before)) and served.says(good)
        served.assert_serves(last, sender.update_weights(last))


def assert_recovers_from_a_death(served, transport, root):
    with sending("disk", root / "before", served) as sender:
        before = sender.update_weights(tiny_model(60)).version
    died = finished(calling(die, served.url, transport, str(root), 60, "tensor:12"))
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert served.paused() and served.is_called(str(before + 1))  # the version before the one in which it died
    for seed, road in ((62, "disk"), (63, transport)):
        with sending(road, root / "after", served) as sender:
            served.assert_serves(tiny_model(seed), sender.update_weights(tiny_model(seed)))
    assert not served.paused()
    assert served.mapping() == [] and not list(Path("/dev/shm").glob("*torchrl_ext-ipc*"))


@pytest.mark.parametrize("transport", ["collective", "ipc"])
def test_next_update_recovers_engine_after_trainer_death(served, transport, tmp_path):
    assert_recovers_from_a_death(served, transport, tmp_path)


def test_files_damaged_during_pause_leave_engine_paused(served, tmp_path):
    """Files damaged during the pause leave the engine paused, as the error says, until the next update."""
    good, folder = tiny_model(71), tmp_path / "damaged"
    engine = tx.make_engine(served.kind, url=served.url)

    def damage():  # what the engine has looked at is overwritten before it loads it
        for shard in folder.glob("weight_v*/*.safetensors"):
            with shard.open("r+b") as file:
                file.seek(-64, 2)
                file.write(b"\xff" * 64)

    before(engine, "load", damage)
    with pytest.raises(tx.WeightSyncError, match="is paused and holds") as error:
        tx.WeightSender(tx.DiskTransport(folder), engine).update_weights(good)
    assert error.value.rows[0].state == "paused" and served.paused()
    with sending("disk", tmp_path / "last", served) as sender:
        served.assert_serves(good, sender.update_weights(good))
    assert not served.paused()


@pytest.mark.parametrize("tensor_parallel", ["vllm"], indirect=True)
def test_calls_of_others_that_fail_disturb_no_update(tensor_parallel, tmp_path):
    served, engine = tensor_parallel, tx.make_engine("vllm", url=tensor_parallel.url)
    for transport, seeds in {"delta": (80, 81, 82), "collective": (83, 84)}.items():
        with sending(transport, tmp_path, served) as sender:
            for seed in seeds:
                model = tiny_model(seed)
                served.assert_serves(model, sender.update_weights(model))
                assert gap(model, engine.logprobs(PROMPTS)) < CLOSE
                for method in ("nobody_has_this", "add_lora"):  # without LoRA, every worker raises
                    assert served.http.call("POST", "/collective_rpc", {"method": method, "args": ["x"]}).status >= 400
                held = served.http.post("/collective_rpc", called(Inspect()))["results"]
                assert [row["worker"] for row in held] == [0, 1]
