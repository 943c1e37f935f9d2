"""A stock SGLang server follows a trainer: the suite, what SGLang alone has, and engines of both makes together."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torchrl_ext as tx
from tests.engine.following import Follows, FollowsInBfloat16, sending
from tests.engine.served import assert_spans, until_met
from tests.models import PROMPT, greedy, tiny_model
from tests.pages import on_servers
from tests.processes import WAIT_S
from torchrl_ext.deadline import Deadline
from torchrl_ext.transports.base import Update

pytestmark = pytest.mark.engine


class TestFollowing(Follows):
    kind = "sglang"


@pytest.mark.exhaustive
class TestFollowingInBfloat16(FollowsInBfloat16):
    kind = "sglang"


def test_discovery_tells_what_it_is_and_what_it_follows(sglang):
    (info,) = tx.discover(sglang.url)
    assert (info.kind, info.worker_type, info.tp_size, info.pp_size, info.dp_size) == ("sglang", "regular", 1, 1, 1)
    assert info.world_size == info.num_gpus == 1 and info.version.startswith("0.5.")
    assert info.weight_version == sglang.version() and {"disk", "collective", "delta"} <= set(info.transports)
    engine = tx.make_engine("sglang", url=sglang.url)
    assert engine.info() == info
    assert engine.port.loads() == [{"dp_rank": 0, "running": 0, "waiting": 0}]


@pytest.mark.parametrize("pause_mode", ["abort", "retract", "in_place"])
def test_each_pause_mode_serves_the_new_weights(sglang, tmp_path, pause_mode):
    old, new = tiny_model(12), tiny_model(11)
    with sending("disk", tmp_path, sglang, pause_mode=pause_mode) as sender:
        sender.update_weights(old)
        assert sglang.says(old)  # fills the prefix cache with what must not be used again
        sender.update_weights(new)
    assert sglang.says(new) and not sglang.paused()


def running(served, pool, count, tokens=220):
    """``count`` requests that the server is at work on."""
    engine, until = tx.make_engine("sglang", url=served.url), time.monotonic() + WAIT_S
    while time.monotonic() < until:
        futures = [pool.submit(served.generate, tokens, temperature=1.0) for _ in range(count)]
        while not all(future.done() for future in futures):
            if sum(row["running"] for row in engine.port.loads()) >= count:
                return futures
    raise AssertionError(f"never were {count} requests running at the same time")


def test_requests_in_flight_complete_and_name_the_versions_of_their_tokens(sglang, tmp_path):
    old, new = tiny_model(31), tiny_model(32)
    with sending("collective", tmp_path, sglang) as sender, ThreadPoolExecutor(4) as pool:

        def crossed():
            first = sender.update_weights(old).version
            futures = running(sglang, pool, 4)
            second = sender.update_weights(new).version
            choices = [future.result() for future in futures]
            for choice in choices:
                assert_spans(choice, 220, [first, second])
            return 1 in [choice["retractions"] for choice in choices if len(choice["weight_versions"]) == 2]

        until_met(crossed)
        assert sglang.says(new)


def test_a_request_that_was_retracted_goes_on_as_the_new_weights_would(sglang, tmp_path):
    """Its tokens so far stay; their keys and values are computed anew."""
    old, new = tiny_model(33), tiny_model(34)
    with sending("disk", tmp_path, sglang) as sender, ThreadPoolExecutor(1) as pool:
        sender.update_weights(old)
        update, engine = Update(source=tx.as_source(new), version=1000), sender.engine
        handoff = sender._transport.prepare(update, Deadline(WAIT_S))
        params = [meta.to_json() for meta in update.source.params()]
        engine.prefetch(1000)
        future = pool.submit(sglang.generate, 220)
        with engine.updating(1000):
            engine.load({"transport": "disk", "version": 1000, "params": params, **handoff.info})
        choice = future.result()
    spans, tokens = choice["weight_versions"], choice["token_ids"]
    cut = spans[0]["end"] if spans[0]["version"] != "1000" else 0
    assert tokens[:cut] == greedy(old, count=220)[:cut]
    assert tokens[cut : cut + 16] == greedy(new, PROMPT + tokens[:cut], count=16)


def test_abort_ends_running_requests_and_says_so(sglang, tmp_path):
    with sending("disk", tmp_path, sglang, pause_mode="abort") as sender, ThreadPoolExecutor(2) as pool:

        def aborted():
            sender.update_weights(tiny_model(35))
            futures = running(sglang, pool, 2)
            sender.update_weights(tiny_model(36))
            return "abort" in {future.result()["finish_reason"] for future in futures}

        until_met(aborted)
    assert sglang.says(tiny_model(36))


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_engines_of_both_makes_follow_one_sender(vllm, sglang, tmp_path, transport):
    with sending(transport, tmp_path, vllm, sglang, pause_mode="keep") as sender:
        for seed in (61, 62):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            assert vllm.tokens() == sglang.tokens() == greedy(model)
            assert vllm.version() == sglang.version() == str(report.version)
            assert [row.kind for row in report.engines] == ["vllm", "sglang"] and report.verified


@pytest.mark.parametrize("transport", ["collective", "delta", "ipc"])
def test_engines_of_both_makes_and_of_different_sizes_follow_one_sender(
    vllm, tensor_parallel_sglang, tmp_path, transport
):
    served = (tensor_parallel_sglang, vllm)
    with sending(transport, tmp_path, *served) as sender:
        model = tiny_model(63)
        for _ in range(3):
            report = sender.update_weights(model)
            assert all(one.says(model) for one in served)
            assert [one.version() for one in served] == [str(report.version)] * 2 and report.verified
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight.mul_(-1)


def test_the_block_about_sglang_of_the_page_for_those_who_come_from_torchrl(tensor_parallel_sglang, checkpoint):
    on_servers("from_torchrl_vllm", checkpoint, tensor_parallel_sglang.url)
    assert tensor_parallel_sglang.says(tiny_model(0))


def test_a_server_without_the_plugin_follows_by_full_files_and_says_what_it_cannot(stock_sglang, tmp_path):
    served = stock_sglang
    assert tx.discover(served.url)[0].transports == ("disk", "native")
    pid = served.server.pid
    with sending("disk", tmp_path, served) as sender:
        for seed in range(71, 76):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            assert served.says(model) and served.version() == str(report.version)
            assert not report.verified  # nobody could hold what it has against the trainer's digests
    with sending("collective", tmp_path, served) as sender:
        with pytest.raises(tx.WeightSyncError, match=r"(?s)without our plugin.*collective.*sglang\.srt\.plugins.*disk"):
            sender.update_weights(tiny_model(76))
        assert served.says(tiny_model(75))
    assert served.server.pid == pid and served.server.alive()
