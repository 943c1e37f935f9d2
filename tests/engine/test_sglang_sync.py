"""A stock SGLang server follows a trainer: its greedy tokens are those of the trainer's own weights."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import torchrl_ext as tx
from tests.models import PROMPT, greedy, tiny_model

pytestmark = pytest.mark.engine


@contextmanager
def sending(transport, tmp_path, *served, **settings):
    root = {"root": tmp_path / "updates"}
    settings_of = {"disk": root, "delta": root, "collective": {}, "ipc": {"bucket_bytes": 256 << 10}}
    fleet = tx.connect(*(one.url for one in served), **settings)
    sender = tx.WeightSender(tx.make_transport(transport, **settings_of[transport]), fleet)
    try:
        yield sender
    finally:
        sender.shutdown()


def assert_serves(served, model, report):
    choice = served.generate()
    assert choice["token_ids"] == greedy(model)
    assert choice["weight_versions"] == [{"version": str(report.version), "start": 0, "end": 32}]
    assert served.version() == str(report.version)
    assert report.verified and [row.state for row in report.engines] == ["serving"]


@pytest.mark.parametrize("transport", ["disk", "collective", "ipc"])
def test_five_syncs_leave_the_engine_at_the_trainers_weights(sglang, tmp_path, transport):
    pid = sglang.server.pid
    with sending(transport, tmp_path, sglang) as sender:
        for seed in range(1, 6):
            model = tiny_model(seed)
            assert_serves(sglang, model, sender.update_weights(model))
    assert sglang.server.pid == pid and sglang.server.alive()


def test_discovery_tells_what_it_is_and_what_it_follows(sglang):
    (info,) = tx.discover(sglang.url)
    assert (info.kind, info.worker_type, info.tp_size, info.pp_size, info.dp_size) == ("sglang", "regular", 1, 1, 1)
    assert info.world_size == info.num_gpus == 1 and info.version.startswith("0.5.")
    assert info.weight_version == sglang.version() and {"disk", "collective", "delta"} <= set(info.transports)
    engine = tx.make_engine("sglang", url=sglang.url)
    assert engine.info() == info
    assert engine.loads() == [{"dp_rank": 0, "running": 0, "waiting": 0}]


@pytest.mark.parametrize("pause_mode", ["abort", "retract", "in_place"])
def test_each_pause_mode_serves_the_new_weights(sglang, tmp_path, pause_mode):
    model = tiny_model(11)
    with sending("disk", tmp_path, sglang, pause_mode=pause_mode) as sender:
        sender.update_weights(tiny_model(12))
        assert sglang.tokens() == greedy(tiny_model(12))  # fills the prefix cache with what must not be used again
        sender.update_weights(model)
    assert sglang.tokens() == greedy(model) and not sglang.paused()


def running(served, pool, count, tokens=220):
    """``count`` requests that the server is at work on."""
    futures = [pool.submit(served.generate, tokens, temperature=1.0) for _ in range(count)]
    engine = tx.make_engine("sglang", url=served.url)
    while sum(row["running"] for row in engine.loads()) < count:
        assert not all(future.done() for future in futures)
    return futures


def test_requests_in_flight_complete_and_name_the_versions_of_their_tokens(sglang, tmp_path):
    old, new = tiny_model(31), tiny_model(32)
    with sending("collective", tmp_path, sglang) as sender, ThreadPoolExecutor(4) as pool:
        first = sender.update_weights(old).version
        futures = running(sglang, pool, 4)
        second = sender.update_weights(new).version
        choices = [future.result() for future in futures]
        after = sglang.generate()
    spanning = 0
    for choice in choices:
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 220
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == 220
        assert [int(span["version"]) for span in spans] in ([first], [first, second], [second])
        spanning += len(spans) == 2 and choice["retractions"] == 1
    assert spanning  # else nothing was in flight, and this test says nothing
    assert after["token_ids"] == greedy(new)


def test_a_request_that_was_retracted_goes_on_as_the_new_weights_would(sglang, tmp_path):
    """Its tokens so far stay; their keys and values are computed anew."""
    old, new = tiny_model(33), tiny_model(34)
    with sending("disk", tmp_path, sglang) as sender, ThreadPoolExecutor(1) as pool:
        sender.update_weights(old)
        transport, engine = sender._transport, sender._engine
        (handoff,) = transport.prepare(tx.as_source(new), 1000)
        engine.prefetch(1000)
        future = pool.submit(sglang.generate, 220)
        with engine.updating(1000):
            engine.load(handoff.info)
        choice = future.result()
    spans, tokens = choice["weight_versions"], choice["token_ids"]
    cut = spans[0]["end"] if spans[0]["version"] != "1000" else 0
    assert tokens[:cut] == greedy(old, count=220)[:cut]
    assert tokens[cut : cut + 16] == greedy(new, PROMPT + tokens[:cut], count=16)


def test_abort_ends_running_requests_and_says_so(sglang, tmp_path):
    with sending("disk", tmp_path, sglang, pause_mode="abort") as sender, ThreadPoolExecutor(2) as pool:
        sender.update_weights(tiny_model(35))
        futures = running(sglang, pool, 2)
        sender.update_weights(tiny_model(36))
        assert "abort" in {future.result()["finish_reason"] for future in futures}
    assert sglang.tokens() == greedy(tiny_model(36))


def test_a_tensor_parallel_engine_follows_by_each_transport(tensor_parallel_sglang, tmp_path):
    assert tx.discover(tensor_parallel_sglang.url)[0].world_size == 2
    for transport in ("disk", "collective", "ipc"):
        with sending(transport, tmp_path, tensor_parallel_sglang) as sender:
            for seed in range(41, 46):
                model = tiny_model(seed)
                assert_serves(tensor_parallel_sglang, model, sender.update_weights(model))


def test_a_tensor_parallel_engine_refuses_and_goes_on(tensor_parallel_sglang, tmp_path):
    good = tiny_model(47)
    with sending("disk", tmp_path, tensor_parallel_sglang) as sender:
        sender.update_weights(good)
        state = dict(good.state_dict())
        for change in (
            {"model.layers.0.self_attn.o_proj.weight": torch.zeros(128, 130)},
            {"model.layers.0.extra.weight": torch.zeros(3)},
        ):
            with pytest.raises(tx.WeightSyncError, match=r"worker 0, 1: ManifestError"):
                sender.update_weights({**state, **change})
            assert tensor_parallel_sglang.tokens() == greedy(good)
        last = tiny_model(48)
        assert_serves(tensor_parallel_sglang, last, sender.update_weights(last))


@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_a_bfloat16_engine_follows(bfloat16_sglang, tmp_path, transport):
    with sending(transport, tmp_path, bfloat16_sglang) as sender:
        for seed in (1, 3, 4, 8, 10):
            model = tiny_model(seed, torch.bfloat16, decided=True)
            assert_serves(bfloat16_sglang, model, sender.update_weights(model))


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
            assert [one.tokens() for one in served] == [greedy(model)] * 2
            assert [one.version() for one in served] == [str(report.version)] * 2 and report.verified
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight.mul_(-1)


def test_a_server_without_the_plugin_follows_by_full_files_and_says_what_it_cannot(stock_sglang, tmp_path):
    served = stock_sglang
    assert tx.discover(served.url)[0].transports == ("disk",)
    pid = served.server.pid
    with sending("disk", tmp_path, served) as sender:
        for seed in range(71, 76):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            choice = served.generate()
            assert choice["token_ids"] == greedy(model)
            assert choice["weight_versions"] == [{"version": str(report.version), "start": 0, "end": 32}]
            assert not report.verified  # nobody could hold what it has against the trainer's digests
    with sending("collective", tmp_path, served) as sender:
        with pytest.raises(tx.WeightSyncError, match=r"(?s)without our plugin.*collective.*sglang\.srt\.plugins.*disk"):
            sender.update_weights(tiny_model(76))
        assert served.tokens() == greedy(tiny_model(75))
    assert served.server.pid == pid and served.server.alive()
