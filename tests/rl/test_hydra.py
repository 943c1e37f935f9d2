"""Hydra groups beside TorchRL's, and a training script whose user picks a transport by name."""

import dataclasses
import inspect
import json
import re

import pytest

pytest.importorskip("hydra")

import torch
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, InstantiationException, MissingConfigException
from hydra.utils import instantiate
from omegaconf import MISSING

import torchrl_ext as tx
import torchrl_ext.rl.hydra as groups
from tests.processes import ROOT, finished
from torchrl_ext.base.registry import transports
from torchrl_ext.control.client import Manner
from torchrl_ext.rl.scheme import TransportWeightSyncScheme
from torchrl_ext.rl.updater import TransportWeightUpdater

TRAINER_S = 300
groups.register()
SCRIPT = """
import os, runpy, sys
runpy.run_path("tests/real_engines/site/sitecustomize.py")["fork_from_a_helper"](())  # it imported all
os.chdir(sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ConfigStore.instance().store(
    name="torchrl_ext_test",
    node={"defaults": [{"weight_sync_scheme": "multiprocess"}, {"weight_updater": "vanilla"}, "_self_"]},
)


def composed(*overrides):
    with initialize(version_base=None):
        return compose("torchrl_ext_test", overrides=list(overrides))


def test_hydra_scheme_of_each_transport_name_is_built():
    assert composed().weight_sync_scheme._target_ == "torchrl.weight_update.MultiProcessWeightSyncScheme"
    for name in tx.transports():
        scheme = instantiate(composed(f"weight_sync_scheme={name}").weight_sync_scheme)
        assert isinstance(scheme, TransportWeightSyncScheme)
        assert scheme.transport == name


def test_config_fields_equal_settings_of_their_class():
    hydras = {"_target_", "_partial_", "_convert_"}
    by_the_scheme = {"master_address", "rank", "world_size", "vllm_engine"}
    moved = set().union(*(inspect.signature(transports.load(name)).parameters for name in tx.transports()))
    for config, cls, further in (
        (groups.TransportWeightSyncSchemeConfig, TransportWeightSyncScheme, moved - by_the_scheme),
        (groups.TransportWeightUpdaterConfig, TransportWeightUpdater, moved),
    ):
        own = inspect.signature(cls).parameters
        fields = {field.name: field.default for field in dataclasses.fields(config)}
        assert set(fields) - hydras == set(own) - {"settings"} | further
        assert all(
            default == (own[name].default if name in own and name != "settings" else None)
            for name, default in fields.items()
            if name not in hydras and default != MISSING
        )


@pytest.mark.parametrize("name", sorted(tx.transports()))
def test_a_transports_class_explains_every_setting(name):
    cls = transports.load(name)
    explained = {
        one.strip() for names in re.findall(r"^ {4}(\w[\w, ]*):", inspect.getdoc(cls), re.M) for one in names.split(",")
    }
    assert set(inspect.signature(cls).parameters) <= explained


def test_settings_reach_the_transport_as_plain_values(tmp_path):
    config = composed(
        "weight_sync_scheme=delta",
        f"weight_sync_scheme.root={tmp_path}",
        "weight_sync_scheme.encoding=auto",
        "weight_sync_scheme.files={note: words}",
        "weight_sync_scheme.timeout_s=7",
    )
    scheme = instantiate(config.weight_sync_scheme)
    assert type(scheme.settings["files"]) is dict
    transport = scheme.create_transport()
    assert (transport.root, transport.timeout_s) == (str(tmp_path), 7.0)
    transport.shutdown()


SCHEME, UPDATER = "weight_sync_scheme", "weight_updater"


@pytest.mark.parametrize(
    ("group", "overrides", "error", "reason"),
    [
        (SCHEME, ["=dleta"], MissingConfigException, r"dleta(.|\n)*collective(.|\n)*delta(.|\n)*disk"),
        (SCHEME, ["=delta", ".rooot=/shared"], ConfigCompositionException, r"weight_sync_scheme\.rooot"),
        (SCHEME, ["=delta", ".timeout_s=soon"], ConfigCompositionException, r"weight_sync_scheme\.timeout_s=soon"),
        (SCHEME, ["=memory", ".root=/shared"], InstantiationException, r"'memory' has no setting 'root'.*channel"),
        (UPDATER, [".engine=[ftp://h:1]"], InstantiationException, "not an engine address"),
        (UPDATER, [".sender={dtype: bf17}"], InstantiationException, "not a dtype"),
        (UPDATER, [".encoding=auto"], InstantiationException, "'disk' has no setting 'encoding'"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_the_reason(group, overrides, error, reason):
    default = ["weight_updater=transport", "weight_updater._partial_=false"] if group == UPDATER else []
    with pytest.raises(error, match=reason):
        instantiate(composed(*default, *(group + override for override in overrides))[group])


def test_an_updater_of_a_config_opens_nothing_before_it_pushes(tmp_path):
    root = tmp_path / "updates"
    config = composed(
        "weight_updater=transport",
        f"weight_updater.root={root}",
        "weight_updater.sender={dtype: bfloat16, commit: paused, policy: all}",
    )
    updater = instantiate(config.weight_updater)()  # as a collector makes it
    assert isinstance(updater, TransportWeightUpdater) and not root.exists()
    assert updater.sender._manner == Manner(commit="paused", policy="all")
    updater.push_weights({"w": torch.arange(4.0)})
    found = tx.DiskTransport(root).receive_weights(1.0)["w"]
    assert found.tolist() == [0, 1, 2, 3] and found.dtype == torch.bfloat16
    updater.shutdown()


@pytest.mark.parametrize("transport", ["delta", pytest.param("ipc", marks=pytest.mark.exhaustive)])
def test_a_trainer_of_torchrls_configs_changes_transport_by_name(transport, tmp_path):
    root = tmp_path / "updates"
    place = [f"weight_sync_scheme.root={root}"] if transport == "delta" else []
    script = ROOT / "tests" / "rl" / "trainer" / "trainer.py"
    done = finished(SCRIPT, tmp_path, script, f"weight_sync_scheme={transport}", *place, timeout_s=TRAINER_S)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["scheme"] == "TransportWeightSyncScheme"
    assert [step["equal"] for step in told["steps"]] == [True] * 3
    assert len({step["first"] for step in told["steps"]}) == 3
    if transport == "delta":
        assert len(list(root.glob("weight_v*"))) == 4
