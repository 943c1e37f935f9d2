"""A stock vLLM server follows a trainer: its greedy tokens are those of the trainer's own weights."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import torchrl_ext as tx
from tests.models import greedy, tiny_model

pytestmark = pytest.mark.engine


@contextmanager
def sending(transport, tmp_path, *served, **settings):
    settings_of = {"disk": {"root": tmp_path / "updates"}, "collective": {}}
    if len(served) == 1:
        engine = tx.make_engine("vllm", url=served[0].url, **settings)
    else:
        engine = tx.connect(*(one.url for one in served), **settings)
    sender = tx.WeightSender(tx.make_transport(transport, **settings_of[transport]), engine)
    try:
        yield sender
    finally:
        sender.shutdown()


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_five_syncs_leave_the_engine_at_the_trainers_weights(vllm, tmp_path, transport):
    pid = vllm.server.pid
    with sending(transport, tmp_path, vllm) as sender:
        for seed in range(1, 6):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            assert vllm.version() == str(report.version)
            choice = vllm.generate()
            assert choice["token_ids"] == greedy(model)
            assert choice["weight_versions"] == [{"version": str(report.version), "start": 0, "end": 32}]
            assert report.verified and [row.state for row in report.engines] == ["serving"]
    assert vllm.server.pid == pid and vllm.server.alive()


@pytest.mark.parametrize("pause_mode", ["abort", "wait", "keep"])
def test_each_pause_mode_serves_the_new_weights(vllm, tmp_path, pause_mode):
    model = tiny_model(11)
    with sending("disk", tmp_path, vllm, pause_mode=pause_mode) as sender:
        sender.update_weights(tiny_model(12))
        assert vllm.tokens() == greedy(tiny_model(12))  # fills the prefix cache with what must not be used again
        sender.update_weights(model)
    assert vllm.tokens() == greedy(model) and not vllm.paused()


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_two_servers_follow_one_sender(vllm, second_vllm, tmp_path, transport):
    with sending(transport, tmp_path, vllm, second_vllm) as sender:
        for seed in (21, 22):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            expected = greedy(model)
            for served in (vllm, second_vllm):
                assert served.tokens() == expected and served.version() == str(report.version)
            assert [row.engine for row in report.engines] == [vllm.url, second_vllm.url]


def test_requests_in_flight_complete_and_name_the_versions_of_their_tokens(vllm, tmp_path):
    old, new = tiny_model(31), tiny_model(32)
    with sending("collective", tmp_path, vllm, pause_mode="keep") as sender, ThreadPoolExecutor(8) as pool:
        first = sender.update_weights(old).version
        running = [pool.submit(vllm.generate, 200, seed=i, temperature=1.0) for i in range(8)]
        second = sender.update_weights(new).version
        choices = [future.result() for future in running]
        after = vllm.generate()
    spanning = 0
    for choice in choices:
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 200
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == 200
        assert [int(span["version"]) for span in spans] in ([first], [first, second], [second])
        spanning += len(spans) == 2
    assert spanning  # else nothing was in flight, and this test says nothing
    assert after["token_ids"] == greedy(new)


def test_a_request_that_was_frozen_goes_on_as_the_new_weights_would(vllm, tmp_path):
    """Its tokens so far stay; their keys and values are computed anew."""
    old, new = tiny_model(33), tiny_model(34)
    with sending("disk", tmp_path, vllm, pause_mode="keep") as sender, ThreadPoolExecutor(1) as pool:
        sender.update_weights(old)
        running = pool.submit(vllm.generate, 200)
        sender.update_weights(new)
        choice = running.result()
    spans, tokens = choice["weight_versions"], choice["token_ids"]
    if len(spans) == 1:
        pytest.skip("the request was over before the pause")
    cut = spans[0]["end"]
    from tests.models import PROMPT

    assert tokens[:cut] == greedy(old, count=200)[:cut]
    assert tokens[cut : cut + 16] == greedy(new, PROMPT + tokens[:cut], count=16)


def test_a_tensor_parallel_engine_follows_by_disk_and_by_collective(tensor_parallel_vllm, tmp_path):
    assert tx.discover(tensor_parallel_vllm.url)[0].world_size == 2
    for transport in ("disk", "collective"):
        with sending(transport, tmp_path, tensor_parallel_vllm) as sender:
            for seed in (41, 42):
                model = tiny_model(seed)
                report = sender.update_weights(model)
                assert tensor_parallel_vllm.tokens() == greedy(model)
                assert tensor_parallel_vllm.version() == str(report.version) and report.verified


def test_a_tensor_parallel_engine_refuses_and_goes_on(tensor_parallel_vllm, tmp_path):
    """Refusals leave the workers' replies in step: each later call is answered by its own."""
    good = tiny_model(43)
    with sending("disk", tmp_path, tensor_parallel_vllm) as sender:
        sender.update_weights(good)
        state = dict(good.state_dict())
        for change in (
            {"model.layers.0.self_attn.o_proj.weight": torch.zeros(128, 130)},
            {"model.layers.0.extra.weight": torch.zeros(3)},
        ):
            with pytest.raises(tx.WeightSyncError, match=r"worker 0, 1: ManifestError"):
                sender.update_weights({**state, **change})
            assert tensor_parallel_vllm.tokens() == greedy(good)
        last = tiny_model(44)
        sender.update_weights(last)
        assert tensor_parallel_vllm.tokens() == greedy(last)


def test_an_update_that_a_trainer_left_open_is_ended_by_the_next(tensor_parallel_vllm, tmp_path):
    with sending("disk", tmp_path, tensor_parallel_vllm) as sender:
        sender.update_weights(tiny_model(45))
        sender._engine.begin(1000)  # and this trainer is never seen again
    model = tiny_model(46)
    with sending("collective", tmp_path, tensor_parallel_vllm) as sender:
        sender.update_weights(model)
    assert tensor_parallel_vllm.tokens() == greedy(model) and not tensor_parallel_vllm.paused()


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_a_bfloat16_engine_follows(bfloat16_vllm, tmp_path, transport):
    with sending(transport, tmp_path, bfloat16_vllm) as sender:
        for seed in (1, 3, 4, 8, 10):
            model = tiny_model(seed, torch.bfloat16, decided=True)
            report = sender.update_weights(model)
            assert bfloat16_vllm.tokens() == greedy(model)
            assert bfloat16_vllm.version() == str(report.version) and report.verified


def test_a_bfloat16_engine_takes_float32_weights_only_with_a_cast(bfloat16_vllm, tmp_path):
    model = tiny_model(11, decided=True)
    with sending("disk", tmp_path / "plain", bfloat16_vllm) as sender:
        with pytest.raises(tx.WeightSyncError, match=r"would round it.*dtype=torch\.bfloat16"):
            sender.update_weights(model)
        assert not bfloat16_vllm.paused()
    engine = tx.make_engine("vllm", url=bfloat16_vllm.url)
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "cast"), engine, dtype=torch.bfloat16)
    sender.update_weights(model)
    assert bfloat16_vllm.tokens() == greedy(model.bfloat16())
