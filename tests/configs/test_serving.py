"""Options that name engines lead to them."""

import pytest

from tests.embedded import EmbeddedServer
from tests.models import tiny_checkpoint
from torchrl_ext.configs.serving import make_serving
from torchrl_ext.configs.update import WeightUpdateConfig
from torchrl_ext.errors import ConfigError, EngineError
from torchrl_ext.launch.router import RouterProcess
from torchrl_ext.rpc.router import RouterClient


@pytest.mark.engine
def test_external_engines_are_registered_with_the_router_of_the_options(tmp_path):
    with EmbeddedServer(tiny_checkpoint(tmp_path), threads=1) as engine, RouterProcess() as router:
        ip, _, port = router.url.removeprefix("http://").partition(":")
        config = WeightUpdateConfig(
            rollout_external_engine_addrs=(engine.url,), vllm_router_ip=ip, vllm_router_port=int(port)
        )
        with make_serving(config) as serving:
            assert serving.model("default").url == router.url
            assert [worker.url for worker in RouterClient(router.url).workers()] == [engine.url]
        assert engine.alive() and router.alive()


def test_options_without_an_engine_or_with_two_kinds_are_refused():
    with pytest.raises(ConfigError, match="name no engine"):
        make_serving(WeightUpdateConfig())
    with pytest.raises(ConfigError, match="both kinds"):
        make_serving(WeightUpdateConfig(vllm_config="a.yaml", sglang_config="b.yaml"))
    with pytest.raises(ConfigError, match="a router per model"):
        make_serving(WeightUpdateConfig(vllm_config="a.yaml", vllm_router_ip="host", vllm_router_port=1))


def test_a_yaml_of_the_other_kind_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "engines.yaml"
    path.write_text("sglang: [{name: a}]")
    with pytest.raises(ConfigError, match="describes engines of kind 'sglang'"):
        make_serving(WeightUpdateConfig(vllm_config=str(path)))


def test_a_yaml_leads_to_engines_that_are_started(tmp_path):
    path = tmp_path / "engines.yaml"
    path.write_text("vllm: [{name: a, model_path: /nowhere, server_groups: [{worker_type: regular, num_gpus: 1}]}]")
    with pytest.raises((ConfigError, EngineError), match="/nowhere"):
        make_serving(WeightUpdateConfig(vllm_config=str(path)))
