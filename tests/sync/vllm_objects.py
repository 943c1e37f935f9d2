"""vLLM's engine objects over a `FakeEngine`, whose tensors are those of a small network that generates.

`Replica` and `Alone` are what TorchRL's Ray actors hold, over them.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from types import ModuleType, SimpleNamespace

import httpx
import torch
from torch import nn
from torchrl.modules.llm.backends.vllm import vllm_async

from tests.fakes import FakeEngine
from tests.processes import WAIT_S
from torchrl_ext.base.routes import CALL

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


class Base:
    """An engine whose workers are a `FakeEngine` over the tensors of the network."""

    def __init__(self, model, *, plugin=True):
        self.model = model
        self.fake, self.dropped = FakeEngine("vllm", dict(model.state_dict())), 0
        weakref.finalize(self, self.fake.close)
        parallel = SimpleNamespace(
            world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, world_size_across_dp=1
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(model="net", multimodal_config=None),
            additional_config={CALL: True} if plugin else {},
            kv_transfer_config=None,
        )

    @property
    def version(self):
        return self.fake.label

    def _post(self, route, body=None, **query):
        """Ask the fake engine; what it refuses raises RuntimeError, as what a worker of vLLM's raises does."""
        try:
            answer = httpx.post(f"{self.fake.url}/{route}", json=body, params=query, timeout=WAIT_S, verify=False)
        except httpx.TransportError as error:
            raise RuntimeError("it broke half-way") from error
        if answer.is_error:
            error = answer.json()["error"]
            raise RuntimeError(error["message"] if isinstance(error, dict) else error)
        return answer.json()

    def _rpc(self, method, timeout=None, args=(), kwargs=None):
        assert not kwargs
        return self._post("collective_rpc", {"method": method, "args": [*args]})["results"]

    def _label(self, version):
        self._post("update_weight_version", {"new_version": version})

    def _drop(self):
        self.dropped += 1
        return True


class Offline(Base):
    """What `LLM` has: it generates only while its caller waits."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._post("pause", mode="keep")

    @property
    def llm_engine(self):
        return self

    def set_weight_version(self, version):
        self._label(version)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self._rpc(method, timeout, args, kwargs)

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self._drop()


class Online(Base):
    """What `AsyncLLM` has: requests run on its loop, and a paused one keeps what it has."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.output_handler = asyncio.get_running_loop().create_future()
        self.begun, self.mode = 0, None

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self._rpc(method, timeout, args, kwargs)

    async def pause_generation(self, *, mode, clear_cache):
        self.mode = mode
        self._post("pause", mode=mode, clear_cache=str(clear_cache).lower())

    async def resume_generation(self):
        self._post("resume")

    async def check_health(self):
        return None

    async def is_paused(self):
        return self.fake.paused

    async def is_sleeping(self):
        return bool(self.fake.asleep)

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return self._drop()

    async def update_weight_version(self, version):
        self._label(version)

    async def generate(self, prompt, sampling_params, request_id):
        """Yield one output per word, until there are ``count`` words of ``version`` (of any, where that is None)."""
        said, counted = list(prompt["prompt_token_ids"]), 0
        while counted < sampling_params["count"]:
            while not self.fake.serving:
                await asyncio.sleep(0.005)
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
        self.engine = AsyncLLM(net(0))


def said(actor, count=8, version=None):
    """Ask a `Replica`; a reference to its answer."""
    wanted = {"count": count, "version": version}
    return actor.generate.remote(prompt_token_ids=[3], sampling_params=wanted)


class Alone(LLM):
    """What a worker of TorchRL's is: an `LLM` in an actor that does one thing at a time."""

    def __init__(self):
        super().__init__(net(0))

    def says(self):
        return says(self.model, 3, 8)
