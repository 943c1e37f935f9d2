"""A stock vLLM server follows a trainer, and lands or refuses what comes: the suite, and what vLLM alone has."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import torchrl_ext as tx
from tests.compat.test_slime_chains import write_slime
from tests.engine.following import Follows, FollowsInBfloat16, Recovers, sending
from tests.engine.served import assert_spans, until_met
from tests.models import PROMPT, greedy, tiny_model
from tests.transports.chains import folder
from torchrl_ext.compat.skyrl import RemoteInferenceClient

pytestmark = pytest.mark.engine


class TestFollowing(Follows):
    kind = "vllm"


class TestFollowingInBfloat16(FollowsInBfloat16):
    kind = "vllm"


class TestRecovering(Recovers):
    kind = "vllm"


@pytest.mark.parametrize("pause_mode", ["abort", "wait", "keep"])
def test_each_pause_mode_serves_the_new_weights(vllm, tmp_path, pause_mode):
    old, new = tiny_model(12), tiny_model(11)
    with sending("disk", tmp_path, vllm, pause_mode=pause_mode) as sender:
        sender.update_weights(old)
        assert vllm.says(old)  # fills the prefix cache with what must not be used again
        sender.update_weights(new)
    assert vllm.says(new) and not vllm.paused()


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_two_servers_follow_one_sender(vllm, second_vllm, tmp_path, transport):
    with sending(transport, tmp_path, vllm, second_vllm) as sender:
        for seed in (21, 22):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            for served in (vllm, second_vllm):
                assert served.says(model) and served.version() == str(report.version)
            assert [row.engine for row in report.engines] == [vllm.url, second_vllm.url]


def test_requests_in_flight_complete_and_name_the_versions_of_their_tokens(vllm, tmp_path):
    old, new = tiny_model(31), tiny_model(32)
    with sending("collective", tmp_path, vllm, pause_mode="keep") as sender, ThreadPoolExecutor(8) as pool:

        def crossed():
            first = sender.update_weights(old).version
            running = [pool.submit(vllm.generate, 200, seed=i, temperature=1.0) for i in range(8)]
            second = sender.update_weights(new).version
            choices = [future.result() for future in running]
            for choice in choices:
                assert_spans(choice, 200, [first, second])
            return any(len(choice["weight_versions"]) == 2 for choice in choices)

        until_met(crossed)
        assert vllm.says(new)


def test_a_request_that_was_frozen_goes_on_as_the_new_weights_would(vllm, tmp_path):
    """Its tokens so far stay; their keys and values are computed anew."""
    old, new = tiny_model(33), tiny_model(34)
    with sending("disk", tmp_path, vllm, pause_mode="keep") as sender, ThreadPoolExecutor(1) as pool:

        def frozen():
            sender.update_weights(old)
            running = pool.submit(vllm.generate, 200)
            sender.update_weights(new)
            choice = running.result()
            spans, tokens = choice["weight_versions"], choice["token_ids"]
            if len(spans) == 1:
                return False
            cut = spans[0]["end"]
            assert tokens[:cut] == greedy(old, count=200)[:cut]
            assert tokens[cut : cut + 16] == greedy(new, PROMPT + tokens[:cut], count=16)[: 200 - cut]
            return True

        until_met(frozen)


def test_versions_of_a_folder_are_served_by_skyrls_own_order_of_calls(vllm, checkpoint, tmp_path):
    held, root = dict(tiny_model(0).state_dict()), tmp_path / "sync"
    with sending("disk", tmp_path / "other", vllm) as sender:
        sender.update_weights(held)  # the folder's versions begin with what the server was started with
    client = RemoteInferenceClient(proxy_url=vllm.url, server_urls=[vllm.url], kind="vllm")
    client.run(client.init_weight_update_communicator({"base_model_path": str(checkpoint)}))
    for version, seed in ((1, 36), (2, 37)):
        model = tiny_model(seed)
        write_slime(folder(root, version), version, held, model.state_dict(), "xor", "xxh3-128")
        held = dict(model.state_dict())
        client.run(client.fetch_weights(version, sync_dir=str(root)))
        assert not vllm.paused()
        client.run(client.pause_generation())
        client.run(client.reset_prefix_cache(True))
        client.run(client.start_weight_update())
        client.run(client.update_named_weights({"target_version": version, "sync_dir": str(root)}))
        client.run(client.finish_weight_update())
        client.run(client.resume_generation())
        client.increment_weight_version()
        assert vllm.says(model) and vllm.version() == str(version)
    client.close()


def test_a_world_without_room_for_the_engine_is_refused(vllm):
    engine, params = tx.make_engine("vllm", url=vllm.url), [["w", "float32", [1]]]
    with pytest.raises(tx.WeightSyncError, match="do not fit into a world of 1"):
        engine.connect({"transport": "disk", "params": params, "world_size": 1})
    assert not vllm.paused()
