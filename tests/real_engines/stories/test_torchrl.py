"""TorchRL's own surface on a vLLM server: a sender in its trainer, an updater in its collector."""

import pytest
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector

import torchrl_ext as tx
from tests.models import tiny_model
from tests.rl.grpo import trained
from torchrl_ext.cli.training import DigitsTask
from torchrl_ext.testing.tiny import make_tokenizer

pytestmark = pytest.mark.engine


@pytest.mark.filterwarnings("ignore:GRPOTrainer is an experimental")
@pytest.mark.parametrize("transport", ["delta", "collective"])
def test_grpo_trainer_keeps_the_server_at_its_policy(vllm, checkpoint, transport, tmp_path):
    root = {"root": str(tmp_path)} if transport == "delta" else {}
    model, _, report = trained(vllm.url, checkpoint, tx.make_transport(transport, **root))
    vllm.assert_serves(model, report)


def test_llm_collector_updates_engine_and_tags_token_versions(vllm, tmp_path):
    tokenizer, made_by, reports = make_tokenizer(), [], []
    task = DigitsTask(tokenizer, 512, group=1)
    settings = {"generate_kwargs": {"max_new_tokens": 8, "ignore_eos": True}}
    updater = tx.TransportWeightUpdater("disk", vllm.url, root=str(tmp_path))
    with set_list_to_stack(True):  # as TorchRL's chat environments want it
        collector = LLMCollector(
            task.env(),
            policy=tx.RemoteLLMPolicy(vllm.url, tokenizer=tokenizer, input_mode="text", **settings),
            dialog_turns_per_batch=task.turns,
            total_dialog_turns=2 * task.turns,
            weight_updater=updater,
            track_policy_version=True,
        )
        try:
            for seed, batch in enumerate(collector, 91):
                made_by.append({*batch["token_versions", "response"].flatten().tolist()})
                model = tiny_model(seed)
                collector.update_policy_weights_(model)
                reports.append(updater.report)
                vllm.assert_serves(model, updater.report)
        finally:
            collector.shutdown()
    assert len(reports) == 2 and made_by[1] == {reports[0].version}
