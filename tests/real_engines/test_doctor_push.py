"""`torchrl-ext doctor` and `push` at real servers and a real router; `test_native` has those without our plugin."""

import pytest

from tests.models import greedy, tiny_checkpoint, tiny_model
from tests.real_engines.served import command
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.control.serving.server import RouterProcess

pytestmark = pytest.mark.engine


def test_a_real_router_is_recognised(vllm, capsys):
    with RouterProcess([vllm.url], **settings_for_router("vllm")) as router:
        told = command(capsys, "doctor", router.url, status=1)
    (row,) = [row for row in told["findings"] if row["check"] == "router"]
    assert row["level"] == "failure" and vllm.url in row["remedy"]


@pytest.mark.parametrize("transport", ["disk", "delta", "collective"])
def test_a_checkpoint_is_pushed(transport, served, checkpoint, tmp_path, capsys):
    other = tiny_checkpoint(tmp_path / "other", seed=3)
    command(capsys, "push", checkpoint, "--engines", served.url)
    assert served.tokens() == greedy(tiny_model(0))
    extra = ["--base", checkpoint] if transport == "delta" else []
    told = command(capsys, "push", other, "--engines", served.url, "--transport", transport, *extra)
    assert told["pushed"] and told["report"]["verified"]
    assert served.tokens() == greedy(tiny_model(3))
    assert served.version() == str(told["report"]["version"])


def test_push_of_another_models_checkpoint_is_refused(vllm, tmp_path, capsys):
    """A push of another model's checkpoint is refused, and the server goes on generating as before."""
    before, version = vllm.tokens(), vllm.version()
    strange = tiny_checkpoint(tmp_path / "strange", hidden_size=64)
    told = command(capsys, "push", strange, "--engines", vllm.url, status=3)
    assert told["report"]["engines"][0]["state"] == "serving"
    assert not vllm.paused() and vllm.version() == version and vllm.tokens() == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor_parallel", ["vllm"], indirect=True)
def test_each_of_two_workers_answers_for_itself(tensor_parallel, tmp_path, capsys):
    told = command(capsys, "doctor", tensor_parallel.url, "--root", tmp_path, "--transport", "collective")
    seen = [row["found"] for row in told["findings"] if row["check"] == "shared root" and "sides" in row["found"]]
    assert sorted(seen) == ["seen from both sides (worker 0)", "seen from both sides (worker 1)"]
    assert len([row for row in told["findings"] if row["check"] == "group"]) == 2
    assert list(tmp_path.iterdir()) == []
