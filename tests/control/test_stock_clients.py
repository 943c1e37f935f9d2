"""Servers that run nothing of ours: which follow and by what, and what they are sent after a failure."""

import pytest

import torchrl_ext as tx
from tests.control.engines import client, running
from tests.control.servers import CONFIG
from tests.control.test_exchanges import GROUP, LOAD, joining
from torchrl_ext.base.errors import ConfigError, EngineRefusedError
from torchrl_ext.base.types import Part

FILES = {"transport": "disk", "params": [], "rank_offset": 1, "offer": {}}
TENSORS = {**FILES, "transport": "collective"}
VLLM, SGLANG = (joining(make) for make in ("vllm", "sglang"))
NONE = {**CONFIG, "additional_config": {}}
NCCL = {**NONE, "weight_transfer_config": {"backend": "nccl"}}
SOLE = {"model_path": "/models/policy", "disaggregation_mode": "null", "tp_size": 2}


def described(fake, facts):
    fake.answers["GET /server_info"] = 200, facts if fake.kind == "sglang" else {"vllm_config": facts}


def follow(engine, info, load=LOAD):
    engine.join(info)
    update = engine.update(8)
    update.stage()
    with update.begun():
        update.load(load)
        update.commit()


def meeting(join, **group):
    return {**join, "offer": {**join["offer"], "group": group}}


def posts(fake, start=0):
    return [call.route.removeprefix("POST /") for call in fake.calls[start:] if call.route.startswith("POST")]


PLUGIN = "install torchrl_ext in the engine's environment"
FOREIGN = {"weight_transfer_config": {"backend": "ipc"}}


@pytest.mark.parametrize(
    ("make", "facts", "transports", "refused"),
    [
        ("vllm", NCCL, ("disk", "native"), (SGLANG, f"speaks to 'sglang'.*{PLUGIN}")),
        ("vllm", NONE, ("disk",), (VLLM, f"backend None.*{PLUGIN}")),
        ("vllm", {**NONE, **FOREIGN}, ("disk",), (TENSORS, f"cannot follow by 'collective'.*{PLUGIN}")),
        ("vllm", {**NCCL, "load_config": {"load_format": "dummy"}}, (), (FILES, "cannot follow by 'disk'")),
        ("vllm", {**NONE, "load_config": {"load_format": "ipc_cache"}}, (), (FILES, "cannot follow by 'disk'")),
        ("sglang", SOLE, ("disk", "native"), (TENSORS, r"without our plugin.*'collective'.*sglang\.srt\.plugins")),
        ("sglang", SOLE, ("disk", "native"), (VLLM, "speaks to 'vllm'")),
        ("sglang", {**SOLE, "pp_size": 2}, ("disk",), (SGLANG, "one pipeline stage")),
        ("sglang", {**SOLE, "dp_size": 2}, ("disk",), (SGLANG, "2 data-parallel replicas")),
        ("sglang", {**SOLE, "weight_cache_mode": "cpu"}, ("disk",), (SGLANG, "no weight cache")),
    ],
)
def test_stock_server_lists_transports_and_refuses_the_others(make, facts, transports, refused):
    with running(f"stock-{make}") as fake:
        described(fake, facts)
        (info,) = tx.discover(fake.url)
        assert (info.transports, info.stock) == (transports, bool(transports))
        join, words = refused
        with pytest.raises(EngineRefusedError, match=f"(?s){words}"):
            client(fake).join(join)
        assert set(posts(fake)) <= {"weights_checker"}
    with running(make) as fake:
        assert not tx.discover(fake.url)[0].stock


@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_stock_server_refuses_partial_version_and_verification(make):
    with running(f"stock-{make}") as fake:
        engine = client(fake)
        engine.join(FILES)
        with pytest.raises(EngineRefusedError, match=r"whole versions only.*still serves its previous weights"):
            engine.update(8).stage(Part(names=frozenset({"a"}), base=7))
        with pytest.raises(ConfigError, match="cannot prove which weights it holds"):
            engine.update(8).verify({"a": "0"})
        assert not engine.verifies and fake.serving


def test_stock_sglang_leaves_group_and_session_after_failed_load():
    with running("stock-sglang") as fake:
        engine, words = client(fake), r"it fails here.*is paused.*part of an update"
        fake.inject("fail", "POST /update_weights_from_distributed")
        with pytest.raises(EngineRefusedError, match=words):
            follow(engine, SGLANG)
        assert posts(fake)[-2:] == ["update_weights_from_distributed", "destroy_weights_update_group"]
        follow(engine, meeting(SGLANG, **SGLANG["offer"]["group"] | {"group_name": "torchrl_ext-1"}))
        left = [call.body["group_name"] for call in fake.calls if call.route == "POST /destroy_weights_update_group"]
        assert left == ["torchrl_ext", "torchrl_ext", "torchrl_ext-1"]
        sessions = [route.partition("_")[0] for route in posts(fake) if route.endswith("_weight_update")]
        assert sessions == ["begin", "begin", "end", "begin", "end"] and fake.serving


def test_a_stock_vllm_without_a_unique_id_meets_at_the_store():
    with running("stock-vllm") as fake:
        follow(client(fake), meeting(VLLM, **GROUP))
        (init,) = [call.body["init_info"] for call in fake.calls if "init_weight" in call.route]
        assert {"rank_offset", "world_size", "packed", *GROUP} <= init.keys() and "nccl_unique_id_b64" not in init


@pytest.mark.parametrize("failed", [True, False])
def test_stock_vllm_clears_failed_or_active_update_before_next(failed):
    with running("stock-vllm") as fake:
        engine = client(fake)
        if failed:
            fake.inject("fail", "POST /update_weights")
            with pytest.raises(EngineRefusedError, match=r"it fails here.*is paused.*part of an update"):
                follow(engine, VLLM)
        else:
            engine.join(VLLM)
            engine.update(7).begin()
        tried = len(fake.calls)
        follow(engine, VLLM)
        again = [route for route in posts(fake, tried) if "weight" in route]
        left = ["shutdown_weight_transfer_engine"] * 2
        cleared = ["start_weight_update", "finish_weight_update", "start_weight_update"]
        assert again[:6] == [*left, "init_weight_transfer_engine", *cleared] and fake.serving
