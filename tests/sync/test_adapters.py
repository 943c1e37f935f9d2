"""`AdapterSender` over engines that only remember what they were told."""

import pytest
import torch
from safetensors.torch import load_file

import torchrl_ext as tx
from tests.adapters import lora_policy, randomise
from tests.models import greedy, tiny_model
from tests.rpc.adapter_servers import serving_adapters
from torchrl_ext.errors import ConfigError, EngineError, StoreError, UpdateError
from torchrl_ext.rpc.makes.vllm import vllm_engine


@pytest.fixture(scope="module")
def policy():
    return lora_policy(0)


@pytest.fixture
def pair():
    with serving_adapters() as first, serving_adapters() as second:
        yield first, second


def versions(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_published_is_an_adapter_that_peft_loads(dtype, policy, tmp_path, pair):
    from peft import PeftModel

    adapters = tx.AdapterSender(tmp_path, vllm_engine(pair[0].url), dtype=dtype)
    randomise(policy, 1)
    report = adapters.load("a", policy)
    folder = tmp_path / "a" / "weight_v000001"
    assert pair[0].adapters.files[1] == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    sent = {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()}
    assert sent == {dtype or torch.float32}
    assert dtype or greedy(PeftModel.from_pretrained(tiny_model(0), folder).eval()) == greedy(policy)
    model_bytes = sum(p.numel() * p.element_size() for p in policy.base_model.parameters() if not p.requires_grad)
    assert report.version == adapters.version("a") == 1 and 0 < report.bytes < model_bytes
    adapters.shutdown()


def test_every_engine_serves_each_version_and_files_that_nobody_reads_go(policy, tmp_path, pair):
    adapters = tx.AdapterSender(tmp_path, tx.connect(*(server.url for server in pair)))
    for version in (1, 2, 3):
        report = adapters.load("a", policy)
        assert [(row.state, row.version) for row in report.engines] == [("serving", version)] * 2
        assert [server.adapters.served for server in pair] == [{"a": version}] * 2
    assert versions(tmp_path / "a") == ["weight_v000002", "weight_v000003"], "the last one before may just be read"
    pair[1].adapters.in_use = [3]
    adapters.load("a", policy)
    pair[1].adapters.in_use = [3, 5]
    adapters.load("a", policy)
    assert versions(tmp_path / "a") == [f"weight_v00000{n}" for n in (3, 4, 5)], "requests are at work with version 3"
    assert not {"POST /pause", "POST /reset_prefix_cache"} & {*pair[0].counts, *pair[1].counts}
    adapters.shutdown()


def test_an_engine_that_refuses_keeps_its_version_and_takes_part_in_the_next(policy, tmp_path, pair):
    adapters = tx.AdapterSender(tmp_path, tx.connect(*(server.url for server in pair)))
    adapters.load("a", policy)
    pair[1].adapters.refusal = "no room"
    with pytest.raises(UpdateError, match="no room") as error:
        adapters.load("a", policy)
    assert [(row.version, row.error is None) for row in error.value.rows] == [(2, True), (1, False)]
    assert versions(tmp_path / "a") == ["weight_v000001", "weight_v000002"], "somebody serves version 1"
    pair[1].adapters.refusal = None
    assert [row.version for row in adapters.load("a", policy).engines] == [3, 3]
    adapters.shutdown()


def test_an_engine_that_died_is_told_in_its_row_while_the_others_go_on(policy, tmp_path):
    with serving_adapters() as first:
        with serving_adapters() as second:
            adapters = tx.AdapterSender(tmp_path, tx.connect(first.url, second.url))
            adapters.load("a", policy)
        with pytest.raises(UpdateError) as error:
            adapters.load("a", policy)
        assert [row.state for row in error.value.rows] == ["serving", "unreachable"]
        report = adapters.load("a", policy)  # it was told once
        assert [row.state for row in report.engines] == ["serving", "unreachable"]
        assert first.adapters.served["a"] == report.version
        adapters.shutdown()


def test_names_have_versions_and_roots_of_their_own(policy, tmp_path, pair):
    adapters = tx.AdapterSender(tmp_path, vllm_engine(pair[0].url))
    for name in ("a", "b", "a"):
        adapters.load(name, policy)
    assert pair[0].adapters.served == {"a": 2, "b": 1}
    adapters.unload("a")
    assert pair[0].adapters.served == {"b": 1}
    with pytest.raises(EngineError, match="no adapter 'a' is loaded"):
        adapters.unload("a")
    assert adapters.load("a", policy).version == 3, "no number is used twice"
    with pytest.raises(ConfigError, match="not loaded an adapter 'c'"):
        adapters.version("c")
    adapters.shutdown()


def test_a_trainer_in_an_emptied_root_goes_on_behind_what_the_engine_serves(policy, tmp_path, pair):
    pair[0].adapters.served["a"] = 41
    adapters = tx.AdapterSender(tmp_path, vllm_engine(pair[0].url))
    assert adapters.load("a", policy).version == 42
    other = tx.AdapterSender(tmp_path, vllm_engine(pair[1].url))
    with pytest.raises(UpdateError, match="another trainer") as error:
        other.load("a", policy)
    assert isinstance(error.value.__cause__, StoreError)
    adapters.shutdown()
    assert other.load("a", policy).version == 43
    other.shutdown()


def test_nothing_is_sent_of_what_is_no_adapter_or_by_another_rank_than_0(policy, tmp_path, pair):
    adapters = tx.AdapterSender(tmp_path, vllm_engine(pair[0].url))
    with pytest.raises(ConfigError, match="holds no LoRA adapter"):
        adapters.load("a", tiny_model(0))
    other = tx.AdapterSender(tmp_path, vllm_engine(pair[0].url), rank=1)
    assert other.load("a", policy).version == 1
    other.unload("a")
    assert not {route for route in pair[0].counts if route.startswith("POST")} and not (tmp_path / "a").exists()
