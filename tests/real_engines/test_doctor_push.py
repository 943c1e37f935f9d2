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
