"""The options under the names that slime and vime gave them."""

import argparse

import pytest

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint
from tests.routers import settings_for_router
from torchrl_ext.base.errors import ConfigError, EngineError
from torchrl_ext.base.types import EngineInfo
from torchrl_ext.compat.flags.options import WeightUpdateConfig
from torchrl_ext.compat.flags.serving import make_serving
from torchrl_ext.control.serving.router import RouterClient
from torchrl_ext.control.serving.server import RouterProcess

PLUGGED = EngineInfo(url="http://p:1", kind="sglang", transports=("collective", "disk", "native"))
STOCK_SGLANG = EngineInfo(url="http://s:1", kind="sglang", transports=("disk", "native"))
STOCK_VLLM = EngineInfo(url="http://v:1", kind="vllm", transports=("disk", "native"))
FILES_ALONE = EngineInfo(url="http://f:1", kind="sglang", transports=("disk",))


def test_full_update_uses_native_broadcast_without_plugin():
    config = WeightUpdateConfig()
    assert isinstance(config.make_transport([PLUGGED]), tx.VLLMCollectiveTransport)
    for engines in ([STOCK_SGLANG], [PLUGGED, STOCK_SGLANG]):
        transport = config.make_transport(engines, timeout_s=3.0)
        assert (transport.name, transport.make, transport.timeout_s) == ("native", "sglang", 3.0)
        assert config.transport_config(engines).settings == {"make": "sglang"}
    assert config.make_transport([STOCK_VLLM], backend="gloo").make == "vllm"


def test_engines_without_common_broadcast_are_refused():
    for engines, named in (
        ([PLUGGED, FILES_ALONE], "http://f:1 has no broadcast of its own"),
        ([STOCK_SGLANG, STOCK_VLLM], "engines of sglang and vllm share none"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s){named}.*install the plugin.*'disk'"):
            WeightUpdateConfig().make_transport(engines)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"update_weight_mode": "delta", "colocate": True}, "colocated"),
        ({"update_weight_transport": "disk"}, "no directory"),
        ({"update_weight_mode": "half"}, "'full' or 'delta'"),
        ({"update_weight_transport": "pigeon"}, "'nccl' or 'disk' or 'sharded'"),
        ({"update_weight_transport": "sharded", "update_weight_mode": "delta"}, "full updates"),
        ({"update_weight_disk_keep_files": True}, "writes no files"),
        ({"update_weight_transport": "disk", "update_weight_disk_dir": "s3://bucket/a"}, "object store"),
        ({"update_weight_encoding": "morse"}, "deltas_zstd"),
        ({"rollout_external_engine_addrs": ("h:1",), "vllm_config": "e.yaml"}, "exclude each other"),
        ({"rollout_external_engine_addrs": "h:1"}, "sequence of host:port"),
        ({"rollout_external_engine_addrs": ("ftp://h:1",)}, "not an engine address"),
        ({"rollout_external_engine_addrs": ("h:1", "http://h:1/")}, "twice"),
        ({"vllm_router_ip": "10.0.0.1"}, "vllm_router_port"),
        ({"sglang_router_ip": "10.0.0.1"}, "sglang_router_port"),
        ({"sglang_router_ip": "10.0.0.1", "sglang_router_port": 0}, "router_port is 0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(options, reason):
    with pytest.raises(ConfigError, match=reason):
        WeightUpdateConfig(**options)


DISK = {"update_weight_transport": "disk", "update_weight_disk_dir": "/s"}
DELTA = {"encoding": "auto"}
FILES = {"root": "/s", "keep_files": False}


@pytest.mark.parametrize(
    ("options", "name", "settings"),
    [
        ({}, "collective", {}),
        ({"colocate": True}, "ipc", {}),
        ({"update_weight_transport": "sharded"}, "sharded", {}),
        ({**DISK, "update_weight_disk_keep_files": True}, "disk", {"root": "/s", "keep_files": True}),
        ({**DISK, "update_weight_mode": "delta"}, "delta", DELTA | FILES),
        (
            {"update_weight_mode": "delta", "update_weight_encoding": "indices"},
            "delta",
            DELTA | {"carrier": "collective", "encoding": "indices"},
        ),
    ],
)  # fmt: skip
def test_options_are_settings_of_a_transport_under_other_names(options, name, settings):
    chosen = WeightUpdateConfig(**options).transport_config()
    assert (chosen.name, chosen.settings) == (name, settings)


def test_two_option_names_with_different_values_are_refused():
    own, other = "vllm_router_port", "sglang_router_port"
    for given in ({own: 2}, {other: 2}, {own: 2, other: 2}):
        assert WeightUpdateConfig(vllm_router_ip="h", **given).vllm_router_port == 2
    with pytest.raises(ConfigError, match=f"{own} is 1, and {other} is 2(.|\n)*one of the two"):
        WeightUpdateConfig(vllm_router_ip="h", **{own: 1, other: 2})


def test_flags_have_the_same_names():
    parser = argparse.ArgumentParser()
    WeightUpdateConfig.add_arguments(parser)
    line = "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir /shared"
    args = parser.parse_args(
        [*line.split(), "--rollout-external-engine-addrs", "h1:1", "h2:2", "--update-weight-disk-keep-files"]
    )
    assert WeightUpdateConfig.from_arguments(args) == WeightUpdateConfig(
        update_weight_mode="delta",
        update_weight_transport="disk",
        update_weight_disk_dir="/shared",
        update_weight_disk_keep_files=True,
        rollout_external_engine_addrs=("h1:1", "h2:2"),
    )


@pytest.mark.engine
def test_external_engines_are_registered_with_given_router(tmp_path):
    with (
        EmbeddedServer(tiny_checkpoint(tmp_path), threads=1) as engine,
        RouterProcess(**settings_for_router("vllm")) as router,
    ):
        ip, _, port = router.url.removeprefix("http://").partition(":")
        config = WeightUpdateConfig(
            rollout_external_engine_addrs=(engine.url,), vllm_router_ip=ip, vllm_router_port=int(port)
        )
        with make_serving(config) as serving:
            assert serving.model("default").url == router.url
            assert [*RouterClient(router.url).workers()] == [engine.url]
        assert engine.alive() and router.alive()


GROUP = "server_groups: [{worker_type: regular, num_gpus: 1}]"
ONE = f"vllm: [{{name: a, model_path: /nowhere, {GROUP}}}]"
TWO = f"vllm: [{{name: a, model_path: /nowhere, {GROUP}}}, {{name: b, model_path: /nowhere, {GROUP}}}]"


@pytest.mark.parametrize(
    ("yaml", "options", "reason"),
    [
        (None, {}, "name no engine"),
        ("", {"vllm_config": "a.yaml", "sglang_config": "b.yaml"}, "both kinds"),
        ("sglang: [{name: a}]", {"vllm_config": None}, "describes engines of kind 'sglang'"),
        (TWO, {"vllm_config": None, "vllm_router_ip": "host", "vllm_router_port": 1}, "a, b each need a router"),
        (ONE, {"vllm_config": None}, "/nowhere"),  # as far as the start
    ],
)
def test_unreachable_or_unstartable_engines_are_refused(tmp_path, yaml, options, reason):
    if yaml:
        (tmp_path / "engines.yaml").write_text(yaml)
        options |= {"vllm_config": str(tmp_path / "engines.yaml")}
    with pytest.raises((ConfigError, EngineError), match=reason):
        make_serving(WeightUpdateConfig(**options))


@pytest.fixture
def owned(monkeypatch):
    """What engines would be started, and with which settings."""
    made = []
    monkeypatch.setattr(
        "torchrl_ext.control.serving.topology.OwnedEngines",
        lambda models, **settings: made.append((models, settings)),
    )
    return made


def planned(models):
    return [(plan.name, plan.gpus) for model in models for plan in model.engines]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_yaml_of_either_kind_plans_the_engines(tmp_path, owned, kind):
    path = tmp_path / "engines.yaml"
    path.write_text(f"{kind}: [{{name: a, server_groups: [{{worker_type: regular, num_gpus: 2}}]}}]")
    config = WeightUpdateConfig(**{f"{kind}_config": str(path)}, vllm_router_ip="host", vllm_router_port=7)
    make_serving(config, hf_checkpoint="/policy", router={"api_key": "secret"})
    ((models, settings),) = owned
    assert planned(models) == [("a/regular/0", (0,)), ("a/regular/1", (1,))] and models[0].kind == kind
    assert settings == {"router": {"api_key": "secret", "router": "host:7"}}
