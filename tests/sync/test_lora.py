"""LoRA adapters are published as PEFT directories, and engines load them by routes of their own."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import torchrl_ext as tx
from tests.adapters import lora_policy, randomise
from tests.control import sockets
from tests.models import tiny_model
from tests.sync.ends import same
from torchrl_ext.base.errors import ConfigError, EngineError, EngineRefusedError
from torchrl_ext.control.fleet import Fleet

peft = pytest.importorskip("peft")

NAME = "policy-lora"


@contextmanager
def serving(kind):
    """A server that serves adapters as ``kind`` does; it refuses what is in ``bad``."""
    held, prefix = {}, "/v1" if kind == "vllm" else ""

    def answer(asked):
        if asked.path == "/v1/models":
            rows = [{"id": name, "root": path, "parent": "policy"} for name, path in held.items()]
            return 200, {"data": [{"id": "policy", "root": "/base", "parent": None}, *rows]}
        body = asked.body or {}
        if asked.path == f"{prefix}/unload_lora_adapter":
            return (200, "done") if held.pop(body["lora_name"], None) else (400, {"message": "it is not loaded"})
        if asked.path == f"{prefix}/load_lora_adapter":
            if body["lora_path"] in server.bad or not Path(body["lora_path"], "adapter_config.json").is_file():
                return 400, {"message": "the adapter has the wrong rank"}
            if body["lora_name"] in held and not body.get("load_inplace"):
                return 400, {"message": "it is loaded already"}
            held[body["lora_name"]] = body["lora_path"]
            return 200, "Success: it was loaded"
        return 404, {}

    with sockets.serving(answer) as server:
        server.held, server.bad, server.client = held, set(), tx.make_engine(kind, url=server.url)
        yield server


@pytest.fixture
def server():
    with serving("vllm") as found:
        yield found


@pytest.fixture(scope="module")
def policy():
    return lora_policy(0)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_adapter_version_equals_peft_files_and_newest_is_served(kind, policy, tmp_path):
    policy.save_pretrained(tmp_path / "saved")
    expected = load_file(tmp_path / "saved/adapter_model.safetensors")
    with serving(kind) as server:
        adapters = tx.LoraPublisher(tmp_path / "root", server.client)
        first = adapters.publish(NAME, torch.nn.Sequential(policy))
        assert server.held == {NAME: str(first)} and first.name == "weight_v000001"
        assert same(load_file(first / "adapter_model.safetensors"), expected)
        assert peft.LoraConfig.from_pretrained(first).lora_alpha == 16
        for number in (2, 3):
            assert adapters.publish(NAME, policy).name == f"weight_v{number:06d}"
        assert [path.name for path in sorted(first.parent.iterdir())] == ["weight_v000002", "weight_v000003"]
        again = tx.LoraPublisher(tmp_path / "root", server.client)
        assert again.publish(NAME, policy).name == "weight_v000004"
        again.unload(NAME)
        assert server.held == {}
        with pytest.raises(EngineRefusedError, match="not loaded"):
            again.unload(NAME)


def test_engine_that_fails_adapter_is_named_and_keeps_its_files(policy, tmp_path):
    with serving("vllm") as good, serving("sglang") as bad:
        adapters = tx.LoraPublisher(tmp_path, Fleet([good.client, bad.client]), keep=1)
        first = adapters.publish(NAME, policy)
        bad.bad.add(str(first.with_name("weight_v000002")))
        with pytest.raises(EngineError, match=f"(?s)wrong rank.*{bad.url} did not serve adapter.*1 of 2 engines"):
            adapters.publish(NAME, policy)
        assert good.held[NAME].endswith("2") and bad.held[NAME] == str(first), "it has its older one back"
        assert first.is_dir()
        with pytest.raises(EngineRefusedError, match=f"(?s)serves '{NAME}' from {first}.*--enable-lora"):
            bad.client.load_adapter(NAME, "/nothing")
        third = adapters.publish(NAME, policy)
        assert bad.held == good.held == {NAME: str(third)} and [*third.parent.iterdir()] == [third]
        bad.bad.add(str(third))
        with pytest.raises(EngineRefusedError, match=f"(?s)serves no adapter '{NAME}'"):
            bad.client.load_adapter(NAME, "/nothing")  # and it lost what it had


def test_one_of_several_adapters_is_named(server, tmp_path):
    model = lora_policy(0)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    randomise(model, 1)
    adapters = tx.LoraPublisher(tmp_path, server.client)
    first, second = (
        load_file(adapters.publish(NAME, model, adapter=name) / "adapter_model.safetensors") for name in (None, "other")
    )
    assert len(first) > len(second) > 0 and not any("other" in name for name in second)
    with pytest.raises(ConfigError, match="no adapter 'third'"):
        adapters.publish(NAME, model, adapter="third")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: tiny_model(0), r"no LoRA adapter.*get_peft_model"),
        (lambda: peft.get_peft_model(tiny_model(0), peft.IA3Config(target_modules=["k_proj"])), "IA3"),
        (lambda: lora_policy(0, init_lora_weights="pissa"), r"pissa.*base weights"),
        (lambda: lora_policy(0, use_rslora=True), r"use_rslora.*lora_alpha / r"),
    ],
)
def test_what_engines_would_not_apply_as_trained_is_refused(made, words, server, tmp_path):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        tx.LoraPublisher(tmp_path, server.client).publish(NAME, made())
    assert not [*tmp_path.iterdir()]


def test_names_and_engines_that_cannot_serve_are_refused(server, policy, tmp_path):
    for name in ("", "../a", ".a", "a/b"):
        with pytest.raises(ConfigError, match="not a valid name"):
            tx.LoraPublisher(tmp_path, server.client).publish(name, policy)
    engine = tx.make_engine("inprocess", engine=policy)
    with pytest.raises(ConfigError, match="serve no LoRA adapters"):
        tx.LoraPublisher(tmp_path, engine).publish(NAME, policy)
    with pytest.raises(ConfigError, match="keep is 0"):
        tx.LoraPublisher(tmp_path, engine, keep=0)
