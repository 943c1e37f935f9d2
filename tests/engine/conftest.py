"""Real engines, started once per session through the launcher that users have."""

import pytest

from tests.models import PROMPT, tiny_checkpoint
from torchrl_ext.launch.vllm import VLLMServer
from torchrl_ext.rpc.http import HTTPSession


class Served:
    """A running server and a few ways to look at it."""

    def __init__(self, server):
        self.server, self.url = server, server.url
        self.http = HTTPSession(server.url, timeout_s=120)

    def generate(self, count=32, prompt=None, **sampling):
        """One greedy choice of ``/inference/v1/generate``."""
        body = {
            "token_ids": prompt or PROMPT,
            "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True, **sampling},
        }
        return self.http.post("/inference/v1/generate", body)["choices"][0]

    def tokens(self, count=32):
        return self.generate(count)["token_ids"]

    def version(self):
        return self.http.get("/weight_info")["weight_version"]

    def paused(self):
        return self.http.get("/is_paused")["is_paused"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "seed0")


def _serve(checkpoint, tmp_path_factory, **settings):
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    return VLLMServer(checkpoint, max_model_len=256, log_path=log, **settings)


@pytest.fixture(scope="session")
def vllm(checkpoint, tmp_path_factory):
    with _serve(checkpoint, tmp_path_factory, dtype="float32") as server:
        yield Served(server)


@pytest.fixture(scope="session")
def second_vllm(checkpoint, tmp_path_factory):
    with _serve(checkpoint, tmp_path_factory, dtype="float32") as server:
        yield Served(server)


@pytest.fixture(scope="module")
def tensor_parallel_vllm(checkpoint, tmp_path_factory):
    with _serve(checkpoint, tmp_path_factory, dtype="float32", tensor_parallel_size=2) as server:
        yield Served(server)


@pytest.fixture(scope="module")
def bfloat16_vllm(checkpoint, tmp_path_factory):
    with _serve(checkpoint, tmp_path_factory, dtype="bfloat16") as server:
        yield Served(server)
