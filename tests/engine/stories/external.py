"""The guides to external engines of two systems: others start the engines, and each row of its table is tried on them.

Both systems print the same guide, one for vLLM and one for SGLang: which of full and delta updates, over a process
group or over files, suits which deployment.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

import torchrl_ext as tx
from torchrl_ext.cli.demo.policy import MAX_TOKENS, read_model
from torchrl_ext.cli.demo.stage import Stage
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.compat.flags.options import WeightUpdateConfig
from torchrl_ext.compat.flags.serving import make_serving
from torchrl_ext.serving.launchers import LocalLauncher
from torchrl_ext.serving.routing import Routing
from torchrl_ext.serving.served import OwnedEngines

__all__ = ["run"]

_LEAST_SAVING = 5  # times fewer bytes than the model has, of a delta after a change of one element in a hundred
_ENCODINGS = ("deltas_zstd", "deltas", "indices")  # as the guide orders them, the smallest first
_YAML = """
{kind}:
  - name: actor
    server_groups: [{{worker_type: regular, num_gpus: 1, overrides: {{dtype: float32}}}}]
  - name: reward
    model_path: {reward}
    update_weights: false
    server_groups: [{{worker_type: regular, num_gpus: 1, overrides: {{dtype: float32}}}}]
"""


def run(stage: Stage) -> None:
    """Follow with two engines of somebody else by every row of the guide's table; then with the job's own."""
    urls = stage.engines(2)
    chosen = partial(WeightUpdateConfig, rollout_external_engine_addrs=tuple(urls))
    stage.refuses(
        "deltas to colocated engines are refused before anything is opened",
        lambda: chosen(update_weight_mode="delta", colocate=True),
        "colocated",
    )
    stage.refuses(
        "engines of others and engines of the job's own exclude each other",
        lambda: chosen(vllm_config="engines.yaml"),
        "exclude each other",
    )
    with make_serving(chosen(), **settings_for_router(stage.kind, stage.say)) as serving:
        routing = serving.model("default")
        listed = sorted(worker.url for worker in routing.router.workers())
        stage.check("the router that was started uses the engines that were named", listed, sorted(urls))
        told = [(info.kind, info.worker_type, info.world_size) for info in routing.engines]
        stage.check("roles and sizes were asked of the engines", told, [(stage.kind, "regular", 1)] * len(urls))
        full, deltas = stage.folder / "full", stage.folder / "deltas"
        files: dict[str, Any] = {"update_weight_transport": "disk", "update_weight_disk_dir": str(full)}
        small: dict[str, Any] = {"update_weight_mode": "delta"}
        _follow(stage, routing, "full updates over a group", chosen())
        _follow(stage, routing, "full updates over files", chosen(**files, update_weight_disk_keep_files=True))
        _loads(stage, full)
        _follow(stage, routing, "full updates over files", chosen(**files))
        stage.check("files: what every engine has loaded is removed", len([*full.glob("weight_v*")]), 1)
        files["update_weight_disk_dir"] = str(deltas)
        _follow(stage, routing, "deltas over files", chosen(**small, **files, update_weight_encoding="deltas_zstd"))
        _follow(stage, routing, "deltas over a group", chosen(**small, update_weight_encoding="indices"))
        stage.check("engines of others are not started again by the job", serving.recover(), ())
    stage.says_the_same("an engine, after the end of the job", urls)
    _encodings(stage)
    if not stage.given:
        _owned(stage)


def _owned(stage: Stage) -> None:
    """Follow with an engine of the job's own YAML, beside a model that does not follow."""
    path = stage.folder / "engines.yaml"
    path.write_text(_YAML.format(kind=stage.kind, reward=stage.other_model("reward", seed=99)))
    stage.say(f"starting the {stage.kind} engines of a YAML: an actor, and a reward model that stays as it is")
    with OwnedEngines(
        path,
        hf_checkpoint=stage.model_dir,
        launcher=LocalLauncher(**stage.environment),
        router=settings_for_router(stage.kind, stage.say),
    ) as serving:
        actor, frozen = serving.model("actor"), serving.model("reward")
        stage.check("of the job's own models the actor follows, and no other", sorted(serving.updatable()), ["actor"])
        stage.refuses("the frozen model has no client that sends weights", frozen.fleet, "does not follow")
        before = _through(frozen, stage)
        _follow(stage, actor, "the actor, over a group", WeightUpdateConfig())
        stage.check("the frozen model says what it said before", _through(frozen, stage), before)


def _follow(stage: Stage, routing: Routing, what: str, options: WeightUpdateConfig) -> None:
    """Send two versions the way that ``options`` name, and compare what comes through the router."""
    stock = any(info.stock for info in routing.engines)
    if stock and options.update_weight_mode == "delta":
        stage.say(f"{what}: left out, as engines without our plugin take full versions alone")
        return
    verify = "outputs" if stock else True  # such engines compare no digests
    sender = tx.WeightSender(options.make_transport(routing.engines), routing.fleet(), verify=verify)
    sender.register_model(stage.policy.model)
    update = routing.following(sender.update_weights)
    try:
        stage.policy.train()
        stage.synced(what, update())
        stage.policy.nudge()
        report = stage.synced(what, update())
        stage.check(f"{what}: tokens through the router are the policy's", _through(routing, stage), _own(stage))
        if options.update_weight_mode == "delta":
            small = report.bytes * _LEAST_SAVING < report.model_bytes
            stage.check(f"{what}: a hundredth of the elements costs less than a fifth of the bytes", small)
    finally:
        sender.shutdown()


def _own(stage: Stage) -> list[list[int]]:
    return [list(tokens) for tokens in stage.policy.says()]


def _through(routing: Routing, stage: Stage) -> Any:
    client = routing.client(timeout_s=120.0)
    try:
        found = client.generate(stage.policy.prompts, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        return [list(one.token_ids) for one in found]
    finally:
        client.close()


def _loads(stage: Stage, root: Path) -> None:
    """Read the newest version as anybody would who has never heard of us."""
    newest = max(root.glob("weight_v*"))
    held, own = read_model(newest).state_dict(), stage.policy.model.state_dict()
    equal = held.keys() == own.keys() and all(torch.equal(held[name], tensor) for name, tensor in own.items())
    stage.check(f"files: {newest.name} loads with from_pretrained, bit-equal to the policy", equal)


def _encodings(stage: Stage) -> None:
    """Encode one change in the guide's three ways, and single elements, without engines."""
    model = stage.policy.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stage.policy.nudge()
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = []
    for encoding in _ENCODINGS:
        sender = tx.WeightSender(tx.DeltaTransport(stage.folder / encoding, encoding=encoding))
        worker = tx.DeltaTransport(stage.folder / encoding, encoding=encoding)
        sender.update_weights(before)
        worker.receive_weights(timeout=60.0)
        found.append(sender.update_weights(after).bytes)
        held = worker.receive_weights(timeout=60.0)
        equal = held is not None and all(torch.equal(held[name], one) for name, one in after.items())
        stage.check(f"{encoding}: a reader gets the trainer's bits", equal)
    stage.check(f"{' <= '.join(_ENCODINGS)} in bytes ({', '.join(map(str, found))})", found, sorted(found))
    name = next(name for name, tensor in after.items() if tensor.dim() > 1)
    for old, new in ((0.0, 1.0), (0.0, -0.0)):
        sender = tx.WeightSender(tx.DeltaTransport(stage.folder / f"one{new}", encoding="indices"))
        weights = {name: after[name].clone()}
        weights[name][0, 0] = old
        sender.update_weights(weights)
        weights[name][0, 0] = new
        positions = round(sender.update_weights(weights).density * weights[name].numel())
        stage.check(f"a change of one element from {old} to {new} is one position", positions, 1)
