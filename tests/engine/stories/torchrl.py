"""TorchRL's own surface: its transport alone, a scheme by name in a collector, rollouts on engines in another one."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from tensordict import set_list_to_stack
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.collectors.llm import LLMCollector
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv
from torchrl.weight_update import WeightSyncScheme

import torchrl_ext as tx
from torchrl_ext.cli.demo.stage import Stage
from torchrl_ext.collectors import backends
from torchrl_ext.compat.torchrl_llm.schemes import VLLMWeightSyncScheme, get_model_metadata
from torchrl_ext.serving.processes import free_port
from torchrl_ext.testing.tiny import make_tokenizer

__all__ = ["run"]

_WAIT_S = 120.0
_TURNS = 8


def run(stage: Stage) -> None:
    """Bring weights to another process, to the workers of a collector, and to engines behind one."""
    _transport_alone(stage)
    _workers_of_a_collector(stage)
    url = stage.engines(1)[0]
    _rollouts(stage, url)
    _scheme_under_torchrls_name(stage, url)
    stage.says_the_same("the engine, at the end", [url])


def _transport_alone(stage: Stage) -> None:
    """Broadcast to another process with `VLLMCollectiveTransport`, as its signature says, and nothing else of ours."""
    weights = {name: tensor.detach().clone() for name, tensor in stage.policy.model.state_dict().items()}
    shapes, port = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}, free_port()
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    worker = spawning.Process(target=_rank_one, args=(port, shapes, theirs), daemon=True)
    stage.say("starting rank 1 of a group of two")
    worker.start()
    theirs.close()
    transport = tx.VLLMCollectiveTransport("127.0.0.1", port, 0, 2, "cpu", timeout_s=_WAIT_S)
    connected = [transport.check_connection()]
    try:
        transport.init_all_workers_group(shapes)
        connected.append(transport.check_connection())
        transport.send_weights("policy", weights)
        held = ours.recv() if ours.poll(_WAIT_S) else {}
    finally:
        transport.shutdown()
        worker.join(_WAIT_S)
        worker.kill()
    connected.append(transport.check_connection())
    stage.check("a transport alone is connected after init_all_workers_group", connected, [False, True, False])
    equal = held.keys() == weights.keys() and all(torch.equal(held[name], one) for name, one in weights.items())
    stage.check("a transport alone: rank 1, another process, holds the bits of rank 0", equal)


def _rank_one(port: int, shapes: Any, pipe: Any) -> None:
    transport = tx.VLLMCollectiveTransport("127.0.0.1", port, 1, 2, "cpu", timeout_s=_WAIT_S)
    transport.init_all_workers_group(shapes)
    pipe.send(transport.receive_weights())
    transport.shutdown()


def _workers_of_a_collector(stage: Stage) -> None:
    """Let the two workers of a `MultiSyncCollector` follow by a scheme that TorchRL finds by its name."""
    backends.register()
    stage.say("starting a collector of two workers")
    observed, acted = (spec.shape[-1] for spec in _specs())
    policy = TensorDictModule(nn.Linear(observed, acted), in_keys=["observation"], out_keys=["action"])
    scheme = WeightSyncScheme.from_backend("delta", root=str(stage.folder / "workers"))
    collector = MultiSyncCollector(
        [ContinuousActionVecMockEnv] * 2,
        policy,
        frames_per_batch=20,
        total_frames=10_000,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )
    try:
        batches = iter(collector)
        first = next(batches)["policy_version"].unique().tolist()
        with torch.no_grad():
            policy.module.weight.add_(1.0)
        before = _held(collector)
        collector.update_policy_weights_()
        after = _held(collector)
        second = next(batches)["policy_version"].max().item()
        weight = policy.module.weight
        shared = any(torch.equal(one, weight) for one in before)
        stage.check("workers share nothing with the trainer: its step alone did not reach them", shared, False)
        stage.check(
            "workers hold the trainer's bits after update_policy_weights_",
            [torch.equal(one, weight) for one in after],
            [True, True],
        )
        stage.check("frames say which version made them", (first, second), ([0], 1))
    finally:
        collector.shutdown()
        scheme.shutdown()


def _specs() -> tuple[Any, Any]:
    env = ContinuousActionVecMockEnv()
    return env.observation_spec["observation"], env.action_spec


def _held(collector: Any) -> list[torch.Tensor]:
    state = collector.state_dict()
    names = sorted(name for name in state if name.startswith("worker"))
    return [state[name]["policy_state_dict"]["module.weight"] for name in names]


def _rollouts(stage: Stage, url: str) -> None:
    """Collect on the engine with an `LLMCollector`, and update the engine through the collector in between."""
    from torchrl_ext.cli.demo.training import DigitsTask

    tokenizer = make_tokenizer()
    known = stage.policy.model.get_input_embeddings().weight.shape[0]
    task = DigitsTask(tokenizer, known, group=1)
    actor = tx.RemoteLLMPolicy(
        url, tokenizer=tokenizer, input_mode="text", generate_kwargs={"max_new_tokens": 8, "ignore_eos": True}
    )
    updater = tx.TransportWeightUpdater("disk", url, root=str(stage.folder / "collector"))
    with set_list_to_stack(True):  # as TorchRL's chat environments want it
        collector = LLMCollector(
            task.env(),
            policy=actor,
            dialog_turns_per_batch=task.turns,
            total_dialog_turns=2 * task.turns,
            weight_updater=updater,
            track_policy_version=True,
        )
        made_by, serving = [], []
        try:
            for batch in collector:
                made_by.append({*batch["token_versions", "response"].flatten().tolist()})
                stage.policy.train()
                collector.update_policy_weights_(stage.policy.model)
                if updater.report is not None:
                    serving.append(stage.synced("a collector's update_policy_weights_", updater.report).version)
        finally:
            collector.shutdown()
    stage.check("every token of a rollout has the version that sampled it", made_by[1:], [{serving[0]}])


def _scheme_under_torchrls_name(stage: Stage, url: str) -> None:
    """Send with code that was written for TorchRL's own scheme, but for one import."""
    scheme = VLLMWeightSyncScheme(gpus_per_replica=1, num_replicas=1)
    sender = scheme.create_sender()
    sender.register_model(stage.policy.model)
    sender.init_all_workers_group(get_model_metadata(stage.policy.model), vllm_engine=url)
    stage.policy.train()
    try:
        stage.synced("VLLMWeightSyncScheme, by its signature in TorchRL", sender.update_weights())
    finally:
        sender.shutdown()
