"""TorchRL's own surface on a vLLM server: a sender in its trainer."""

import pytest

import torchrl_ext as tx
from tests.rl.grpo import trained

pytestmark = pytest.mark.engine


@pytest.mark.filterwarnings("ignore:GRPOTrainer is an experimental")
@pytest.mark.parametrize("transport", ["delta", "collective"])
def test_grpo_trainer_keeps_the_server_at_its_policy(vllm, checkpoint, transport, tmp_path):
    root = {"root": str(tmp_path)} if transport == "delta" else {}
    model, _, report = trained(vllm.url, checkpoint, tx.make_transport(transport, **root))
    vllm.assert_serves(model, report)
