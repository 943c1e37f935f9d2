"""Stand-ins for vLLM's engine objects: a small network that generates, and one worker that lands weights in it.

`Replica` and `Alone` are what TorchRL's Ray actors hold, over them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from torchrl.modules.llm.backends.vllm import vllm_async

from torchrl_ext.landing.loader import as_loader
from torchrl_ext.messages import Finish, Start, read
from torchrl_ext.routes import ANSWERS, TAKE_OVER
from torchrl_ext.sync.worker_end import WorkerEnd

WORDS = 16


def net(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


def follow(model, word):
    """The word that comes after ``word``."""
    with torch.no_grad():
        return int(model(torch.tensor(word)).argmax())


def says(model, word, count):
    said = [word]
    for _ in range(count):
        said.append(follow(model, said[-1]))
    return said[1:]


class Worker:
    """One worker: it has the backend that the engine was made with, until it is told to take ours."""

    def __init__(self, model, backend, plugin):
        self.end, self.open, self.plugin, self.backends = None, False, plugin, [backend]
        self._model = model

    def call(self, method, info=None):
        if method == TAKE_OVER and self.plugin:
            self.backends.append("torchrl_ext")
            self.end = WorkerEnd(as_loader(self._model), rank=0, workers=1, agree=lambda words: [words])
        elif method == TAKE_OVER:
            raise AttributeError(f"'Worker' object has no attribute {method!r}")
        elif self.end is None:
            raise RuntimeError(f"the backend {self.backends[-1]} knows nothing of {info}")
        elif method == "init_weight_transfer_engine":
            answer = self.end.handle(read(info))
            if answer:
                raise RuntimeError(ANSWERS + json.dumps(answer))
        elif method == "start_weight_update":
            self.end.handle(Start())
        elif method == "update_weights":
            self.end.handle(read(info))
        else:
            assert method == "finish_weight_update"
            self.end.handle(Finish(version=self.end.receiver.version))


class Base:
    def __init__(self, model, backend=None, *, plugin=True):
        self.model, self.worker = model, Worker(model, backend, plugin)
        parallel = SimpleNamespace(
            world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, world_size_across_dp=1
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(model="net", multimodal_config=None, enable_sleep_mode=False),
            weight_transfer_config=None if backend is None else SimpleNamespace(backend=backend),
            kv_transfer_config=None,
        )
        self.version, self.dropped = "0", 0

    def _rpc(self, method, timeout=None, args=(), kwargs=None):
        assert not args
        return [self.worker.call(method, *(kwargs or {}).values())]


class Offline(Base):
    """What `LLM` has."""

    @property
    def llm_engine(self):
        return self

    def set_weight_version(self, version):
        self.version = version

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self._rpc(method, timeout, args, kwargs)

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.dropped += 1
        return True


class Online(Base):
    """What `AsyncLLM` has: requests run on its loop, and a paused one keeps what it has."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.output_handler = asyncio.get_running_loop().create_future()
        self.runs, self.begun, self.mode = asyncio.Event(), 0, None
        self.runs.set()
        self.freed = False  # whether the memory of keys and values is given up

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self._rpc(method, timeout, args, kwargs)

    async def pause_generation(self, *, mode, clear_cache):
        self.mode = mode
        self.runs.clear()

    async def resume_generation(self):
        assert not self.freed
        self.runs.set()

    async def release_kv_cache_memory(self):
        if self.freed:
            raise RuntimeError("releasing it requires all executor memory to be resident")
        self.freed = True

    async def wake_up(self, tags):
        assert tags == ["kv_cache"]
        self.freed = False

    async def check_health(self):
        return None

    async def is_paused(self):
        return not self.runs.is_set()

    async def is_sleeping(self):
        return self.freed

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.dropped += 1
        return True

    async def update_weight_version(self, version):
        self.version = version

    async def generate(self, prompt, sampling_params, request_id):
        """Yield one output per word, until there are ``count`` words of ``version`` (of any, where that is None)."""
        said, counted = list(prompt["prompt_token_ids"]), 0
        while counted < sampling_params["count"]:
            await self.runs.wait()
            said.append(follow(self.model, said[-1]))
            self.begun += 1
            counted += sampling_params["version"] in (None, self.version)
            yield SimpleNamespace(finished=counted == sampling_params["count"], token_ids=said[1:])
            await asyncio.sleep(0)


LLM = type("LLM", (Offline,), {"__module__": "vllm.entrypoints.llm"})
AsyncLLM = type("AsyncLLM", (Online,), {"__module__": "vllm.v1.engine.async_llm"})


class Replica(vllm_async._AsyncLLMEngine):
    """A replica of TorchRL's, over a stand-in for vLLM."""

    def __init__(self, *, engine_args, bundle_indices, enable_prefix_caching):
        sys.modules["vllm"] = vllm = ModuleType("vllm")
        vllm.SamplingParams = vllm.TokensPrompt = dict
        vllm_async._has_vllm = True
        self.engine = AsyncLLM(net(0), "nccl")


def said(actor, count=8, version=None):
    """Ask a `Replica`; a reference to its answer."""
    wanted = {"count": count, "version": version}
    return actor.generate.remote(prompt_token_ids=[3], sampling_params=wanted)


class Alone(LLM):
    """What a worker of TorchRL's is: an `LLM` in an actor that does one thing at a time."""

    def __init__(self):
        super().__init__(net(0), "nccl")

    def says(self):
        return says(self.model, 3, 8)
