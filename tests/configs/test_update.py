"""The options under the names that slime and vime gave them."""

import argparse

import pytest

import torchrl_ext as tx
from torchrl_ext.configs.derived import transport_config
from torchrl_ext.configs.update import WeightUpdateConfig
from torchrl_ext.errors import ConfigError


def test_full_over_a_process_group_is_the_default():
    assert isinstance(WeightUpdateConfig().make_transport(), tx.VLLMCollectiveTransport)


def test_full_over_disk_is_the_disk_transport(tmp_path):
    config = WeightUpdateConfig(update_weight_transport="disk", update_weight_disk_dir=str(tmp_path))
    assert isinstance(config.make_transport(), tx.DiskTransport)


@pytest.mark.parametrize("encoding", tx.DeltaTransport.encodings())
def test_delta_over_disk_takes_every_encoding(tmp_path, encoding):
    config = WeightUpdateConfig(
        update_weight_mode="delta",
        update_weight_transport="disk",
        update_weight_encoding=encoding,
        update_weight_disk_dir=str(tmp_path),
    )
    transport = config.make_transport()
    assert isinstance(transport, tx.DeltaTransport)
    assert transport.root == str(tmp_path)


def test_delta_over_a_group_broadcasts():
    config = WeightUpdateConfig(update_weight_mode="delta", update_weight_encoding="indices")
    assert isinstance(config.make_transport(), tx.DeltaTransport)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"update_weight_mode": "delta", "colocate": True}, "colocated"),
        ({"update_weight_transport": "disk"}, "no directory"),
        ({"update_weight_disk_dir": "/shared"}, "writes no files"),
        ({"update_weight_mode": "half"}, "'full' or 'delta'"),
        ({"update_weight_transport": "pigeon"}, "'nccl' or 'disk'"),
        ({"update_weight_mode": "delta", "update_weight_encoding": "morse"}, "deltas_zstd"),
        ({"rollout_external_engine_addrs": ("h:1",), "vllm_config": "e.yaml"}, "exclude each other"),
        ({"rollout_external_engine_addrs": ("h:1",), "sglang_config": "e.yaml"}, "exclude each other"),
        ({"vllm_router_ip": "10.0.0.1"}, "vllm_router_port"),
        ({"update_weight_local_checkpoint_dir": "/local"}, "no use in full mode"),
        ({"update_weight_disk_keep_files": True}, "writes no files"),
        ({"update_weight_encoding": "morse"}, "deltas_zstd"),
        ({"update_weight_mode": "delta", "update_weight_transport": "disk"}, "no directory"),
        ({"update_weight_transport": "disk", "update_weight_disk_dir": "s3://bucket/a"}, "object store"),
        ({"rollout_external_engine_addrs": "h:1"}, "sequence of host:port"),
        ({"rollout_external_engine_addrs": ("ftp://h:1",)}, "no engine address"),
        ({"rollout_external_engine_addrs": ("h:1", "http://h:1/")}, "twice"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(options, reason):
    with pytest.raises(ConfigError, match=reason):
        WeightUpdateConfig(**options)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, transport_config("collective")()),
        ({"colocate": True}, transport_config("ipc")()),
        (
            {"update_weight_transport": "disk", "update_weight_disk_dir": "/s", "update_weight_disk_keep_files": True},
            transport_config("disk")(root="/s", keep_files=True),
        ),
        (
            {"update_weight_mode": "delta", "update_weight_transport": "disk", "update_weight_disk_dir": "/s"},
            transport_config("delta")(root="/s"),
        ),
        (
            {"update_weight_mode": "delta", "update_weight_encoding": "indices"},
            transport_config("delta")(carrier="collective", encoding="indices"),
        ),
    ],
)
def test_options_are_settings_of_a_transport_under_other_names(options, settings):
    assert WeightUpdateConfig(**options).transport_config() == settings


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
