"""Control calls and updates by SkyRL's names, held against servers that write down what they are asked, and SkyRL's own
tests."""

import os
import pickle
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest

import torchrl_ext as tx
from tests.compat.skyrl_client import made, routes, sent
from tests.compat.test_slime_chains import write_slime
from tests.fakes import FakeEngine
from tests.rpc.servers import CONFIG, failed, initialised, running
from tests.transports.chains import checkpoint, folder, step, weights
from torchrl_ext.compat.skyrl import PauseMode, transport_for
from torchrl_ext.errors import ConfigError, EngineError, StoreError
from torchrl_ext.messages import Reset

INIT = "init_weight_transfer_engine"
CHECKOUT = os.environ.get("TORCHRL_EXT_SKYRL")
THEIRS = "tests/backends/skyrl_train/inference_servers/test_remote_inference_client.py"
NOT_OURS = (
    "::test_build_new_inference_client_uses_served_model_name_for_chat_requests",  # reads their trainer's settings
    "::TestDataPlane::test_generate_rejects_list_routed_experts",  # replaces a private method of theirs
)


def echo(asked):
    return 200, {"asked": asked, "status": "done"}


def config(**changes):
    return 200, {"vllm_config": {**CONFIG, **changes}}


@pytest.fixture
def server():
    with running() as found:
        yield found


@pytest.fixture
def client(server):
    client = made(server)
    yield client
    client.close()


@pytest.fixture
def skyrls():
    parallel = {**CONFIG["parallel_config"], "worker_extension_cls": "skyrl.worker_wrap.NewInferenceWorkerWrap"}
    with running(get_server_info=config(parallel_config=parallel), post_collective_rpc=echo) as found:
        yield found


@pytest.fixture
def four():
    """Two deployments, each of two servers that report the four workers of both."""
    opened = [running(get_get_world_size=(200, {"world_size": 4})) for _ in range(4)]
    servers = [one.__enter__() for one in opened]
    yield servers
    for one in opened:
        one.__exit__(None, None, None)


def test_servers_of_one_deployment_share_an_offset_and_their_workers_count_once(four):
    client = made(*four, data_parallel_size=2)
    assert client.run(client.get_world_size()) == client.run(client.get_world_size()) == (8, 4)
    assert [server.counts["GET /get_world_size"] for server in four] == [1] * 4
    client.run(client.init_weight_update_communicator({"master_port": 1, "rank_offset": 1}))
    told = [sent(server, "init_weight_transfer_engine")[-1][1]["init_info"] for server in four]
    assert [one["rank_offset"] for one in told] == [1, 1, 5, 5]
    fleet = client.fleet()
    assert fleet.info().world_size == 8
    fleet.connect({"transport": "disk", "rank_offset": 1, "params": []})
    joined = [
        body["init_info"]
        for server in four
        for _, body in sent(server, "init_weight_transfer_engine")
        if body["init_info"].get("kind") == "join"
    ]
    assert [one.get("rank_offset", 1) for one in joined] == [1, 1, 5, 5]
    client.run(client.teardown())
    four[0].answers["GET /get_world_size"] = (200, {"world_size": 2})
    with pytest.raises(ConfigError, match="differ in world size"):
        client.run(client.get_world_size())
    client.close()


def test_an_object_that_knows_the_offsets_gives_each_server_its_own(four):
    class Info:
        def __init__(self, rank=0):
            self.rank = rank

        def for_servers(self, world_size_per_server, num_servers, dp_size=1):
            return [Info(1 + world_size_per_server * (i // dp_size)) for i in range(num_servers)]

        def to_api_payload(self):
            return {"master_address": "here", "rank_offset": self.rank}

    client = made(*four, data_parallel_size=2)
    client.run(client.init_weight_update_communicator(Info()))
    told = [sent(server, "init_weight_transfer_engine")[-1][1]["init_info"] for server in four]
    assert told == [{"master_address": "here", "rank_offset": rank} for rank in (1, 1, 5, 5)]
    client.close()


def test_pauses_and_sleeps_return_what_the_server_answers(server, client):
    for route in ("pause", "resume", "sleep", "wake_up"):
        server.answers[f"POST /{route}"] = echo
    server.answers |= dict.fromkeys(("GET /is_sleeping", "GET /is_paused", "GET /metrics"), (404, {}))
    for mode in (PauseMode.KEEP, "KEEP", "keep"):
        (told,) = client.run(client.pause(mode)).values()
        assert told == {"status": 200, "body": {"asked": {"mode": "keep", "clear_cache": "false"}, "status": "paused"}}
    assert client.run(client.pause_generation()) == client.run(client.pause())
    (told,) = client.run(client.resume_generation()).values()
    assert told["body"]["status"] == "serving"
    (told,) = client.run(client.sleep(1, ["weights", "kv_cache"])).values()
    assert told["body"]["asked"] == {"level": "1", "mode": "keep", "tags": ["weights", "kv_cache"]}
    (told,) = client.run(client.wake_up()).values()
    assert told["body"] == {"asked": {}, "status": "serving"}
    (told,) = client.run(client.wake_up(["weights"])).values()
    assert told["body"]["asked"] == {"tags": "weights"}


def test_each_engine_is_looked_at_once_and_none_is_called_where_one_is_a_router():
    looks = []

    def look(asked):
        looks.append(asked)
        return 404, {"detail": "Not Found"}

    with FakeEngine("vllm") as server, FakeEngine("vllm") as other:
        server.answers = {"GET /list_workers": look}
        other.answers = {"GET /list_workers": (200, {"urls": ["http://a:1"]})}
        client = made(server)
        for call in (client.pause("abort"), client.sleep(1), client.wake_up(), client.world_sizes(), client.resume()):
            client.run(call)
        assert len(looks) == server.counts["GET /server_info"] == 1
        before = len(server.calls)
        client.run(client.pause())
        assert routes(server)[before:] == ["GET /is_sleeping", "POST /pause"]
        client.close()
        before, client = len(server.calls), made(server, other)
        with pytest.raises(ConfigError, match="is a router"):
            client.run(client.pause())
        assert not [route for route in routes(server)[before:] if route.startswith("POST")]
        client.close()


def test_the_cache_is_dropped_by_the_query_that_vllm_reads_and_the_body_that_skyrl_reads(server, client):
    client.run(client.reset_prefix_cache(True))
    assert sent(server, "reset_prefix_cache") == [
        ({"reset_running_requests": "true"}, {"reset_running_requests": True})
    ]


@pytest.mark.parametrize(
    "settings", [{"uses_lora_weight_sync": True}, {"adapter": "policy"}], ids=lambda one: next(iter(one))
)
def test_base_weights_that_no_update_brings_back_are_kept_in_a_sleep(server, settings):
    server.answers["POST /sleep"] = (200, {})
    client = made(server, **settings)
    for call in (client.sleep(2), client.sleep_for_weight_sync()):
        client.run(call)
    assert [query["level"] for query, _ in sent(server, "sleep")] == ["1", "1"]
    client.close()


def test_the_sleep_around_an_update_ends_with_a_paused_engine():
    def finish(asked):
        httpx.post(f"{server.url}/{INIT}", json={"init_info": Reset(weights="reloaded").to_json()}).raise_for_status()
        return 200, {}

    with FakeEngine("vllm") as server:
        server.answers = {"POST /start_weight_update": {}, "POST /finish_weight_update": finish}
        client = made(server)
        client.run(client.sleep_for_weight_sync())
        assert server.paused and server.asleep == {"weights", "kv_cache"} and not server.whole
        client.run(client.wake_for_weight_sync(["weights"]))
        assert server.paused and server.asleep == {"kv_cache"}
        with pytest.raises(EngineError, match="holds no weights"):
            client.run(client.wake_for_weight_sync(["kv_cache"]))
        client.run(client.start_weight_update())
        client.run(client.finish_weight_update())
        client.run(client.wake_for_weight_sync(["kv_cache"]))
        assert server.paused and not server.asleep
        posted = routes(server, "POST")
        assert posted[-2:] == ["POST /wake_up", "POST /pause"] and "POST /resume" not in posted
        client.run(client.resume_generation())
        assert server.serving and not server.wrongs
        client.close()


@pytest.mark.parametrize("level", [1, 2])
def test_everything_wakes_at_once_for_an_update_only_where_a_server_without_our_backend_kept_its_weights(level):
    with FakeEngine("stock-vllm") as server:
        client = made(server)
        client.run(client.sleep(level))
        with nullcontext() if level == 1 else pytest.raises(EngineError, match="holds no weights"):
            client.run(client.wake_for_weight_sync(["weights", "kv_cache"]))
        assert server.paused and bool(server.asleep) == (level == 2)
        client.run(client.wake_for_weight_sync(["weights"]))
        client.run(client.wake_for_weight_sync(["kv_cache"]))  # by now an update may have filled them
        assert server.paused and not server.asleep
        client.close()


def test_skyrls_servers_are_told_the_methods_of_their_workers(skyrls):
    client, info = made(skyrls), {"names": ["w"], "packed": True}
    for call in (
        client.sleep_for_weight_sync(offload_kv=False),
        client.wake_for_weight_sync(["weights"]),
        client.start_weight_update(is_checkpoint_format=False),
        client.update_weights_nccl(info),
        client.update_weights_ipc({"ipc_handles_pickled": "AA=="}),
        client.finish_weight_update(),
    ):
        client.run(call)
    assert [body for _, body in sent(skyrls, "collective_rpc")] == [
        {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"offload_kv": False}},
        {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": ["weights"]}},
        {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": False}},
        {"method": "update_weights_nccl", "kwargs": {"update_info": info}},
        {"method": "update_weights_ipc", "kwargs": {"update_info": {"ipc_handles_pickled": "AA=="}}},
        {"method": "skyrl_finish_weight_update"},
    ]
    client.close()


def test_vllms_own_backend_is_told_of_packed_buffers_when_it_joins(server, client):
    server.answers["GET /server_info"] = config(weight_transfer_config={"backend": "nccl"})
    client.run(client.init_weight_update_communicator({"master_address": "here", "master_port": 1}))
    client.run(client.update_weights_nccl({"names": ["w"], "packed": True}))
    ((_, joined),) = sent(server, "init_weight_transfer_engine")
    assert joined["init_info"] == {"packed": True, "master_address": "here", "master_port": 1, "rank_offset": 1}
    assert sent(server, "update_weights") == [({}, {"update_info": {"names": ["w"]}})]


def test_what_only_skyrls_servers_can_do_is_refused_before_a_call(server, client):
    with pytest.raises(ConfigError, match="own layout"):
        client.run(client.start_weight_update(is_checkpoint_format=False))
    with pytest.raises(ConfigError, match="CUDA IPC handles"):
        client.run(client.update_weights_ipc({"ipc_handles_pickled": "AA=="}))
    assert not routes(server, "POST")


def test_single_steps_are_refused_at_sglang_whose_cache_has_a_route_of_its_own():
    with running({"POST /flush_cache": (200, b"dropped")}) as server:
        client = made(server, kind="sglang")
        for call in (client.init_weight_update_communicator({}), client.start_weight_update()):
            with pytest.raises(ConfigError, match="SGLang's weight routes"):
                client.run(call)
        assert client.run(client.reset_prefix_cache()) == {server.url: {"status": 200, "body": "dropped"}}
        assert routes(server, "POST") == ["POST /flush_cache"]
        client.close()


def test_complete_updates_are_counted_also_in_another_process(server, client):
    client.run(client.finish_weight_update())
    client.increment_weight_version()
    there = pickle.loads(pickle.dumps(client))
    assert client.weight_version == there.weight_version == 1
    there.run(there.finish_weight_update())
    labels = [body["weight_version"] for _, body in sent(server, "finish_weight_update")]
    assert labels == ["1", "2"]
    there.close()


def test_fetches_go_to_the_route_of_skyrls_servers_or_are_staged_by_our_plugin(server, client):
    client.run(client.fetch_weights(3))  # no such route here
    stages = [body["init_info"] for _, body in sent(server, "init_weight_transfer_engine")]
    assert [(one["kind"], one["version"]) for one in stages if one["kind"] == "prefetch"] == [("prefetch", 3)]
    server.answers["POST /fetch_weights"] = echo
    (told,) = client.run(client.fetch_weights(3, sync_dir="s3://a", uri="s3://a/3")).values()
    assert told["body"]["asked"] == {"target_version": 3, "sync_dir": "s3://a", "uri": "s3://a/3"}


def test_a_folder_that_is_named_is_joined_once_and_its_versions_are_staged(server, client, tmp_path):
    base, own = checkpoint(tmp_path / "base", weights()), weights()
    for version in (1, 2):
        old = {name: tensor.clone() for name, tensor in own.items()}
        step(own, version)
        write_slime(folder(tmp_path / "sync", version), version, old, own, "xor", "xxh3-128")
    init = {"base_model_path": str(base), "local_checkpoint_dir": "/nvme/x", "cloud_download_workers": 4}
    client.run(client.init_weight_update_communicator(init))
    assert not sent(server, "init_weight_transfer_engine")
    with pytest.raises(ConfigError, match=r"version 1 was not fetched.*no version"):
        client.run(client.update_named_weights({"target_version": 1, "sync_dir": str(tmp_path)}))
    with pytest.raises(StoreError, match="holds no version 3"):
        client.run(client.fetch_weights(3, sync_dir=str(tmp_path / "sync")))
    client.run(client.fetch_weights(1, sync_dir=str(tmp_path / "sync")))
    there = pickle.loads(pickle.dumps(client))
    there.run(there.fetch_weights(2, uri=f"{tmp_path}/sync/weight_v000002"))
    told = [body["init_info"] for _, body in sent(server, "init_weight_transfer_engine")]
    steps = [(one["kind"], one.get("version")) for one in told if one["kind"] in ("join", "prefetch")]
    assert steps == [("join", None), ("prefetch", 1), ("prefetch", 2)]
    (join,) = (one for one in told if one["kind"] == "join")
    assert join["transport"] == "delta" and join["offer"]["base"] == str(base) and join["offer"]["needs_base"]
    assert {row[0] for row in join["params"]} == set(own)
    there.run(there.start_weight_update())
    with pytest.raises(ConfigError, match="version 1 was not fetched"):
        there.run(there.update_named_weights({"target_version": 1}))
    there.run(there.update_named_weights({"target_version": 2, "version": 2, "sync_dir": str(tmp_path / "sync")}))
    there.run(there.finish_weight_update())
    pieces = [body["update_info"]["kind"] for _, body in sent(server, "update_weights")]
    assert pieces == ["load", "seal"]
    assert sent(server, "finish_weight_update") == [({}, {"weight_version": "2"})]
    there.close()


def test_a_folder_that_engines_left_for_another_trainer_is_joined_again(server, client, tmp_path):
    base = checkpoint(tmp_path / "base", weights())
    own = weights()
    step(own, 1)
    write_slime(folder(tmp_path / "sync", 1), 1, weights(), own, "xor", "xxh3-128")
    client.run(client.init_weight_update_communicator({"base_model_path": str(base)}))
    client.run(client.fetch_weights(1, sync_dir=str(tmp_path / "sync")))
    answers = [initialised, failed("worker 0: EngineError: no transport was joined.")]

    def refusing(asked):
        return answers.pop() if asked["init_info"]["kind"] == "prefetch" and len(answers) > 1 else initialised(asked)

    server.answers["POST /init_weight_transfer_engine"] = refusing
    client.run(client.fetch_weights(1, sync_dir=str(tmp_path / "sync")))
    told = [body["init_info"]["kind"] for _, body in sent(server, "init_weight_transfer_engine")]
    assert [kind for kind in told if kind != "poll"] == ["join", "prefetch", "prefetch", "join", "prefetch"]


def test_the_transport_for_skyrls_settings_is_the_one_that_its_trainer_would_take():
    for backend, apart, colocated in (("delta",) * 3, ("nccl", "collective", "ipc"), ("gloo",) + ("collective",) * 2):
        assert (transport_for(backend, False), transport_for(backend, True)) == (apart, colocated)
        assert {apart, colocated} <= set(tx.transports())


def test_adapters_go_to_skyrls_route_or_else_to_vllms(server, client):
    server.answers["POST /v1/load_lora_adapter"] = (200, b"Success")
    (told,) = client.run(client.load_lora_adapter("policy", "/a")).values()
    assert told == {"status": 200, "body": "Success"}
    body = {"lora_name": "policy", "lora_path": "/a"}
    assert sent(server, "v1/load_lora_adapter") == [({}, {**body, "load_inplace": True})]
    server.answers["POST /skyrl/v1/load_lora_adapter"] = (200, b"Success")
    client.run(client.load_lora_adapter("policy", "/a"))
    assert sent(server, "skyrl/v1/load_lora_adapter")[-1] == ({}, body)
    with pytest.raises(EngineError, match="404"):
        client.run(client.unload_lora_adapter("stranger"))


@pytest.mark.skipif(CHECKOUT is None, reason="TORCHRL_EXT_SKYRL names no checkout of SkyRL")
def test_skyrls_own_tests_pass_with_our_client_in_the_place_of_theirs():
    for needed in ("fastapi", "pytest_asyncio", "uvicorn"):
        pytest.importorskip(needed)
    file = Path(CHECKOUT, THEIRS)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(file.parent)]
    command += ["--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "tests.compat.skyrl_names"]
    command += ["-p", "pytest_asyncio", str(file)]
    for name in NOT_OURS:
        command += ["--deselect", file.name + name]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
    )
    assert re.search(r"^57 passed, 2 deselected", ran.stdout.splitlines()[-1]), ran.stdout[-4000:] + ran.stderr[-2000:]
