"""``python -m tests.bench first_use``: first versions by delta of fresh processes, and how much of that is compiling.

Trainer and engine are processes of their own, each with its own cache for compiled loops: empty at first, then warm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from tests.bench.frame import say

_VERSIONS = {1: "keyframe", 2: "delta", 3: "later"}
_DEADLINE_S = 600.0


def measure(*, repeats: int = 1) -> dict[str, Any]:
    """Time each step once with an empty cache and with a warm one; and say where this machine keeps compiled loops.

    The model has a fixed size, and --repeats means nothing.
    """
    from torchrl_ext.versions.warm import cache_folder

    found: dict[str, Any] = {"cache": cache_folder()}
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as cache:
        for state in ("empty", "warm"):
            say(f"first updates of fresh processes, {state} cache")
            found[state] = _both(cache)
    return found


def _both(cache: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="torchrl-ext-bench-") as root:
        module = [sys.executable, "-m", "tests.bench.first_use"]
        trains, serves = (["env", f"NUMBA_CACHE_DIR={cache}/{end}", *module, end] for end in ("trainer", "engine"))
        with subprocess.Popen([*trains, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
            try:
                told = json.loads(trainer.stdout.readline() or "null")  # type: ignore[union-attr]
                if told is None:
                    raise RuntimeError("the trainer of the measurement ended; it says why above")
                engine = subprocess.run(
                    [*serves, json.dumps(told["info"])],
                    stdout=subprocess.PIPE, text=True, check=True, timeout=_DEADLINE_S,
                )  # fmt: skip
            finally:
                trainer.kill()
    return {"trainer": told["seconds"], "engine": json.loads(engine.stdout)}


# the two processes


def _model() -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (1000, 128), "up": (512, 256), "down": (256, 512), "norm": (256,)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


class _Clock:
    """Times steps that follow each other; it imports numba beforehand, so that the first step is without that."""

    def __init__(self) -> None:
        from numba.core import event

        self.seconds: dict[str, float] = {}
        self._compiler = event.TimingListener()  # type: ignore[no-untyped-call]  # numba has no types
        event.register("numba:compile", self._compiler)  # type: ignore[no-untyped-call]
        self._began = time.perf_counter()

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step], self._began = now - self._began, now

    def compiled(self) -> None:
        self.seconds["compiled"] = self._compiler.duration if self._compiler.done else 0.0


def _trainer(root: str) -> None:
    from torchrl_ext.deadline import Deadline
    from torchrl_ext.transports.base import Update
    from torchrl_ext.transports.delta.transport import DeltaTransport
    from torchrl_ext.weights.source import MappingSource

    weights = _model()
    source, clock = MappingSource(weights), _Clock()
    transport = DeltaTransport(root, timeout_s=_DEADLINE_S)
    within = Deadline(_DEADLINE_S, "the engine")
    opening = transport.open(1, source.params(), within)
    clock.lap("connect")
    opening.transfer(within)
    clock.lap("ready")
    clock.compiled()
    for version, step in _VERSIONS.items():
        for tensor in weights.values():
            tensor.view(-1)[::100] *= 1.01 if version > 1 else 1
        transport.prepare(Update(source=source, version=version), within.again()).served(version - 1)
        clock.lap(step)
    opening = transport.open(1, source.params(), within)  # publishing took the probe away
    info = {
        **opening.info,
        "transport": transport.name,
        "params": [meta.to_json() for meta in source.params()],
        "world_size": 2,
    }
    print(json.dumps({"info": info, "seconds": clock.seconds}), flush=True)
    sys.stdin.readline()


def _engine(info: Mapping[str, Any]) -> None:
    from torchrl_ext.codecs.base import codec_from_json
    from torchrl_ext.messages import Finish, Join, Load, Prefetch
    from torchrl_ext.sync.receiver import WeightReceiver
    from torchrl_ext.versions.warm import Warming
    from torchrl_ext.weights.source import MappingSource

    served = _model()
    receiver, clock = WeightReceiver(served), _Clock()
    receiver.connect(Join.of(info))
    clock.lap("connect")
    codec = codec_from_json(info["codec"])
    Warming(codec, MappingSource(served).params(), beside=True).wait(_DEADLINE_S)  # for what `connect` started
    clock.lap("ready")
    clock.compiled()
    for version, step in _VERSIONS.items():
        clock.lap("between")
        receiver.prefetch(Prefetch(version=version))
        clock.lap(step)
        receiver.start()
        receiver.load(Load(version=version, handoff={"params": info["params"]}))
        receiver.finish(Finish(version=version))
    print(json.dumps(clock.seconds))


if __name__ == "__main__":
    _trainer(sys.argv[2]) if sys.argv[1] == "trainer" else _engine(json.loads(sys.argv[2]))
