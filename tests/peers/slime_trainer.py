"""slime's own trainer code in a process of its own: its writer of deltas, its reader, and its client of an engine.

Run as ``python slime_trainer.py SETTINGS``, the JSON of ``{"slime", "url", "args", "reader"}``: a checkout of
THUDM/slime, an engine, what slime's ``args`` hold, and slime's file of the reader, which runs here and not behind the
engine. Each line of standard input is a file of tensors under their checkpoint names, to which the weights are set
before an update; each answer is a line of JSON, with what the update took. Ray, Megatron and SGLang are stood in for:
the first by calls in a thread, the second by tensors that have checkpoint names already; of the last nothing is used.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace


def stub(name, **members):
    """Put a module in the place of one that slime imports."""
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    return module


class Handle:
    """An engine as slime holds it: a Ray actor, which takes its calls one by one."""

    def __init__(self, engine):
        self._engine, self._calls = engine, ThreadPoolExecutor(1)

    def __getattr__(self, name):
        method = getattr(self._engine, name)
        return SimpleNamespace(remote=lambda *args, **settings: self._calls.submit(method, *args, **settings))


def get(calls):
    return [call.result(120) for call in calls] if isinstance(calls, list) else calls.result(120)


def stand_in(slime, weights):
    """Make slime's modules importable where Ray, Megatron and SGLang are not, and its weights those of ``weights``."""
    import torch

    sys.path.insert(0, slime)
    stub("ray", get=get, ObjectRef=object)
    stub("ray.actor", ActorHandle=object)
    for name in ("megatron", "megatron.core", "sglang", "sglang.srt"):
        stub(name, __path__=[])
    sys.modules["megatron.core"].mpu = SimpleNamespace(
        get_data_parallel_rank=lambda **_: 0, get_tensor_model_parallel_rank=lambda: 0
    )
    stub("sglang.srt.server_args", ServerArgs=type("ServerArgs", (), {}))
    stub("sglang.srt.utils", kill_process_tree=None)
    stream = SimpleNamespace(synchronize=lambda: None)
    members = {"current_device": lambda: "cpu", "current_stream": lambda: stream}
    sys.modules["slime.utils.accelerator"] = accelerator = stub("slime.utils.accelerator", **members)
    import slime.utils

    slime.utils.accelerator = accelerator
    backends = f"{slime.__path__[0]}/backends"
    for name in ("", ".megatron_utils", ".megatron_utils.update_weight", ".sglang_utils"):
        stub(f"slime.backends{name}", __path__=[backends + name.replace(".", "/")])

    class Gathers:
        """What gathers tensors from Megatron's ranks."""

        def __init__(self, args, model, weights_getter, *, model_name, quantization_config):
            self.args, self.weight_version, self.update_weight_metrics = args, 0, {}

        def _iter_non_expert_chunks(self):
            yield [(name, tensor) for name, tensor in weights.items()]

        def _iter_expert_chunks(self):
            return iter(())

    stub(
        "slime.backends.megatron_utils.update_weight.update_weight_from_distributed",
        UpdateWeightFromDistributed=Gathers,
    )
    empty = torch.empty  # a host without a GPU has no pinned memory
    torch.empty = lambda *sizes, pin_memory=False, **settings: empty(*sizes, **settings)


class Measures:
    """What updates take with slime's own reader, whose file ``path`` is."""

    def __init__(self, engine, updater, path):
        spec = importlib.util.spec_from_file_location("local_checkpoint", path)
        reader = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(reader)
        args = updater.args
        held = (args.update_weight_local_checkpoint_dir, args.hf_checkpoint, args.update_weight_disk_dir)
        engine.pull_weights = lambda target_version: reader.pull(*held, target_version)
        self._updater, self._publish = updater, updater._publish
        updater._publish = self._published
        self._encode_s, self._began, self._held = 0.0, 0.0, None

    def _published(self):
        began = time.perf_counter()
        self._publish()
        self._encode_s = time.perf_counter() - began

    def begin(self):
        if self._held is None:
            with open("/proc/self/clear_refs", "w") as file:  # the peak begins anew
                file.write("5")
            self._held = self._resident("VmRSS")
        self._began = time.perf_counter()

    def end(self):
        total_s, peak = time.perf_counter() - self._began, self._resident("VmHWM") - self._held
        sent = getattr(self._updater, "wire_bytes", 0)  # its first update only takes its baseline
        return {"bytes": sent, "encode_s": self._encode_s, "total_s": total_s, "peak_bytes": peak}

    @staticmethod
    def _resident(field):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(field + ":"))


def main(told):
    import torch.distributed as dist
    from safetensors.torch import load_file

    weights, args = {}, SimpleNamespace(**told["args"])
    stand_in(told["slime"], weights)
    from slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta import UpdateWeightFromDiskDelta
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine
    from slime.utils.distributed_utils import init_gloo_group

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_gloo_group()
    engine = SGLangEngine(args, rank=0)
    engine.node_rank = 0
    engine.server_host, _, engine.server_port = told["url"].removeprefix("http://").partition(":")
    updater = UpdateWeightFromDiskDelta(
        args, [], weights_getter=lambda: None, model_name="qwen3", quantization_config=None
    )
    updater.connect_rollout_engines([Handle(engine)], None)
    measures = Measures(engine, updater, told["reader"])
    for line in sys.stdin:
        weights.clear()
        weights.update(load_file(line.strip()))
        measures.begin()
        updater.update_weights()
        print(json.dumps(measures.end()), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
