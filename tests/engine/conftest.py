"""Real engines, started once per session through the launcher that users have."""

import pytest

from tests.models import PROMPT, tiny_checkpoint
from torchrl_ext.errors import DeadlineError
from torchrl_ext.launch.sglang import SGLangServer
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


class ServedSGLang:
    """As `Served`, for SGLang."""

    def __init__(self, server):
        self.server, self.url = server, server.url
        self.http = HTTPSession(server.url, timeout_s=120)

    def generate(self, count=32, prompt=None, timeout_s=120, **sampling):
        """One greedy choice of ``/generate``, in vLLM's words."""
        body = {
            "input_ids": prompt or PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling},
        }
        told = self.http.post("/generate", body, timeout_s=timeout_s)
        meta = told["meta_info"]
        return {
            "token_ids": told["output_ids"],
            "weight_versions": meta["weight_versions"],
            "finish_reason": meta["finish_reason"]["type"],
            "retractions": meta["num_retractions"],
        }

    def tokens(self, count=32):
        return self.generate(count)["token_ids"]

    def version(self):
        return self.http.get("/model_info")["weight_version"]

    def paused(self):
        """It has no route that says so; a request that gets no token tells."""
        try:
            self.generate(1, timeout_s=2)
        except DeadlineError:
            return True
        return False


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


def serve_sglang(checkpoint, tmp_path_factory, **settings):
    log = tmp_path_factory.mktemp("log") / "sglang.log"
    return SGLangServer(checkpoint, max_model_len=256, log_path=log, **settings)


@pytest.fixture(scope="session")
def sglang(checkpoint, tmp_path_factory):
    with serve_sglang(checkpoint, tmp_path_factory, dtype="float32") as server:
        yield ServedSGLang(server)


@pytest.fixture(scope="module")
def tensor_parallel_sglang(checkpoint, tmp_path_factory):
    with serve_sglang(checkpoint, tmp_path_factory, dtype="float32", tensor_parallel_size=2) as server:
        yield ServedSGLang(server)


@pytest.fixture(scope="module")
def bfloat16_sglang(checkpoint, tmp_path_factory):
    with serve_sglang(checkpoint, tmp_path_factory, dtype="bfloat16") as server:
        yield ServedSGLang(server)


@pytest.fixture
def stock_sglang(checkpoint, tmp_path_factory):
    """Without our plugin."""
    with serve_sglang(checkpoint, tmp_path_factory, dtype="float32", plugin=False) as server:
        yield ServedSGLang(server)
