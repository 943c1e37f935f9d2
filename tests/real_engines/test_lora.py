"""LoRA adapters in stock engines, loaded by routes of their own: log-probabilities are PEFT's."""

import pytest
import torch

import torchrl_ext as tx
from tests.adapters import lora_policy, randomise
from tests.models import tiny_model
from tests.pages import on_servers
from tests.real_engines.served import LONG, ServedSGLang, ServedVLLM, serving
from torchrl_ext.base.errors import EngineRefusedError
from torchrl_ext.sync.outputs import score

pytestmark = pytest.mark.engine

NAME = "policy-lora"
NATS = 2e-3
STARTS = {
    "vllm": (
        ServedVLLM,
        ["--enable-lora", "--max-lora-rank=16", '--weight-transfer-config={"backend": "nccl"}'],
        {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    ),
    "sglang": (
        ServedSGLang,
        ["--enable-lora", "--max-lora-rank=16", "--lora-target-modules=all", "--lora-backend=torch_native"],
        {},
    ),
}


def stock(kind):
    """A fixture with a server that runs nothing of ours."""

    @pytest.fixture(scope="module")
    def engine(checkpoint, tmp_path_factory):
        served, flags, environ = STARTS[kind]
        settings = {"max_model_len": 256, "dtype": "float32", "log_path": tmp_path_factory.mktemp("log") / "log"}
        with serving(served, checkpoint, extra_args=flags, environ=environ, plugin=False, **settings) as found:
            yield found

    return engine


stock_vllm, stock_sglang = map(stock, STARTS)


def logprobs(engine, prompt, adapter):
    """Of each token after the first, with an adapter or with the base weights."""
    if engine.kind == "vllm":
        sampling = {"max_tokens": 1, "prompt_logprobs": 0}
        body = {"token_ids": prompt, "sampling_params": sampling} | ({"model": adapter} if adapter else {})
        rows = engine.http.post("/inference/v1/generate", body)["prompt_logprobs"]
        return torch.tensor([row[str(token)]["logprob"] for token, row in zip(prompt, rows, strict=True) if row])
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "lora_path": adapter}
    answer = engine.http.post("/generate", {**body, "return_logprob": True, "logprob_start_len": 0})
    return torch.tensor([row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]])


def gap(engine, model, adapter=NAME):
    """The largest difference of a token's log-probability, in nats."""
    expected = torch.tensor(score(model, [LONG])[0])
    return (logprobs(engine, LONG, adapter) - expected).abs().max().item()


@pytest.mark.parametrize("kind", STARTS)
def test_two_versions_and_one_that_is_refused(kind, request, tmp_path):
    policy, base, engine = lora_policy(0), tiny_model(0), request.getfixturevalue(f"stock_{kind}")
    adapters = tx.LoraPublisher(tmp_path, tx.connect(engine.url))
    for seed in (1, 2):
        randomise(policy, seed)
        version = adapters.publish(NAME, policy)
        assert gap(engine, policy) < NATS and gap(engine, base, None) < NATS
        assert gap(engine, base) > 10 * NATS, "the adapter changes what is said"
    with pytest.raises(EngineRefusedError, match=f"(?s){engine.url} serves '{NAME}' from {version}"):
        adapters.publish(NAME, lora_policy(3, rank=32))
    assert gap(engine, policy) < NATS
    adapters.unload(NAME)
    assert gap(engine, base, None) < NATS
    if kind == "vllm":  # SGLang loads it again for a request that names it
        with pytest.raises(EngineRefusedError):
            logprobs(engine, LONG, NAME)


def test_the_block_about_adapters(stock_vllm, stock_sglang, checkpoint):
    on_servers("transports", checkpoint, stock_vllm.url, stock_sglang.url, what="vllm and sglang with lora")
