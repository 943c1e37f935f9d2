"""What every engine does that follows a trainer: one suite over each make."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch

import torchrl_ext as tx
from tests.models import PROMPT, greedy, greedy_over_kept_keys, tiny_model
from tests.real_engines.served import assert_spans, at_work, command, sending, until_met

pytestmark = pytest.mark.engine

TRANSPORTS = ["disk", "collective", "ipc"]
PAUSES = {"vllm": ("abort", "wait", "keep"), "sglang": ("abort", "retract", "in_place")}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_syncs_leave_the_engine_at_the_trainers_weights(served, tmp_path, transport):
    pid = served.server.pid
    with sending(transport, tmp_path, served) as sender:
        for seed in range(1, 51 if transport == "ipc" else 6):  # ipc could leak mappings
            model = tiny_model(seed)
            served.assert_serves(model, sender.update_weights(model))
            assert served.mapping() == []
    assert served.server.pid == pid and served.server.alive()


def assert_lands_a_layer(sender, served):
    model, other = tiny_model(61), tiny_model(62).state_dict()
    layer = {name: tensor for name, tensor in other.items() if ".layers.1." in name}
    served.assert_serves(model, sender.update_weights(model))
    model.load_state_dict({**model.state_dict(), **layer})
    report = sender.update_weights(model, only=[*layer])
    assert report.part and report.tensors == len(layer)
    assert report.bytes == sum(tensor.nbytes for tensor in layer.values())
    served.assert_serves(model, report)
    last = tiny_model(63)
    served.assert_serves(last, sender.update_weights(last))


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "disk"])
def test_a_layer_alone_lands_beside_the_others(served, tmp_path, transport):
    with sending(transport, tmp_path, served) as sender:
        assert_lands_a_layer(sender, served)


def test_each_pause_mode_serves_the_new_weights(served, tmp_path):
    for i, mode in enumerate(PAUSES[served.kind]):
        old, new = tiny_model(100 + 2 * i), tiny_model(101 + 2 * i)
        with sending("disk", tmp_path / mode, served, pause_mode=mode) as sender:
            sender.update_weights(old)
            assert served.says(old)  # fills the prefix cache with what must not be used again
            sender.update_weights(new)
        assert served.says(new) and not served.paused()


def test_abort_ends_running_requests_and_says_so(served, tmp_path):
    with sending("disk", tmp_path, served, pause_mode="abort") as sender, ThreadPoolExecutor(2) as pool:

        def aborted():
            sender.update_weights(tiny_model(35))
            futures = at_work(served, pool, 2)
            sender.update_weights(tiny_model(36))
            return "abort" in {future.result()["finish_reason"] for future in futures}

        until_met(aborted)
    assert served.says(tiny_model(36))


def test_in_flight_requests_complete_with_version_spans(served, tmp_path):
    old, new = tiny_model(31), tiny_model(32)
    with sending("collective", tmp_path, served) as sender, ThreadPoolExecutor(4) as pool:

        def crossed():
            first = sender.update_weights(old).version
            futures = at_work(served, pool, 4)
            second = sender.update_weights(new).version
            choices = [future.result() for future in futures]
            for choice in choices:
                assert_spans(choice, 220, [first, second])
            met = [choice for choice in choices if len(choice["weight_versions"]) == 2]
            return any(choice.get("retractions", 1) == 1 for choice in met)

        until_met(crossed)
        assert served.says(new)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_frozen_request_continues_with_new_weights(served, tmp_path, keep_cache):
    """A frozen request continues with new weights over recomputed keys, or kept ones with keep_cache."""
    old, new, attempts = tiny_model(71), tiny_model(72), count(20 if keep_cache else 120)
    with sending("disk", tmp_path, served, keep_cache=keep_cache) as sender, ThreadPoolExecutor(1) as pool:

        def frozen():
            sender.update_weights(old)
            prompt = [next(attempts), *PROMPT]  # of which nothing is cached yet
            running = pool.submit(served.generate, 200, prompt)
            report = sender.update_weights(new)
            choice = running.result()
            spans, tokens = choice["weight_versions"], choice["token_ids"]
            if len(spans) == 1:  # it had not begun, or was over
                return False
            assert [span["version"] for span in spans] == [str(report.version - 1), str(report.version)]
            cut = spans[0]["end"]
            end = min(cut + 16, 200)
            over_old_keys = greedy_over_kept_keys([old, new], [cut], prompt, end)
            over_new_keys = greedy(old, prompt, cut) + greedy(new, prompt + tokens[:cut], end - cut)
            assert tokens[:end] == (over_old_keys if keep_cache else over_new_keys)
            return over_old_keys != over_new_keys  # else nothing was shown

        until_met(frozen)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_workers_follow(tensor_parallel, tmp_path, transport):
    assert tx.discover(tensor_parallel.url)[0].world_size == 2
    with sending(transport, tmp_path, tensor_parallel) as sender:
        for seed in (41, 42, 43):
            model = tiny_model(seed)
            tensor_parallel.assert_serves(model, sender.update_weights(model))
        if transport == "collective":
            assert_lands_a_layer(sender, tensor_parallel)
    assert tensor_parallel.mapping() == []


def test_two_workers_refuse_and_go_on(tensor_parallel, tmp_path):
    """Refusals leave the workers' replies in step: each later call is answered by its own."""
    good, last = tiny_model(47), tiny_model(48)
    with sending("disk", tmp_path, tensor_parallel) as sender:
        sender.update_weights(good)
        state = dict(good.state_dict())
        for change in (
            {"model.layers.0.self_attn.o_proj.weight": torch.zeros(128, 130)},
            {"model.layers.0.extra.weight": torch.zeros(3)},
        ):
            with pytest.raises(tx.WeightSyncError, match=r"worker 0, 1: ManifestError"):
                sender.update_weights({**state, **change})
            assert tensor_parallel.says(good)
        tensor_parallel.assert_serves(last, sender.update_weights(last))


@pytest.mark.parametrize("transport", ["disk", "collective", "delta", "ipc"])
@pytest.mark.parametrize("tensor_parallel", ["sglang"], indirect=True)
def test_sglang_and_vllm_engines_follow_one_sender(tensor_parallel, vllm, transport, tmp_path):
    model, fleet = tiny_model(63), [tensor_parallel, vllm]
    with sending(transport, tmp_path, *fleet) as sender:
        for _ in range(3):
            report = sender.update_weights(model)
            assert report.verified and [row.engine for row in report.engines] == [one.url for one in fleet]
            assert [row.kind for row in report.engines] == [one.kind for one in fleet]
            assert all(one.says(model) and one.version() == str(report.version) for one in fleet)
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight.mul_(-1)


def test_discovery_tells_the_release_and_what_it_follows(served):
    (info,) = tx.discover(served.url)
    assert (info.kind, info.worker_type, info.tp_size, info.pp_size, info.dp_size) == (served.kind, "regular", 1, 1, 1)
    assert info.world_size == info.num_gpus == 1 and served.is_called(info.weight_version)
    assert {"disk", "collective", "delta", "ipc"} <= set(info.transports)
    engine = tx.make_engine(served.kind, url=served.url)
    assert engine.info() == info and served.running() == 0


def test_doctor_reports_ok_on_a_generating_server(served, checkpoint, tmp_path, capsys):
    before = served.tokens()

    def found(*settings):
        rows = command(capsys, "doctor", served.url, *settings)["findings"]
        assert {row["level"] for row in rows} == {"ok"}, rows
        return {(row["check"], row["where"]): row["found"] for row in rows}

    rows = found("--root", tmp_path, "--transport", "delta", "--model", checkpoint)
    assert rows["shared root", served.url].endswith(f"reads {tmp_path}")
    assert "torchrl_ext" in rows["versions", served.url]
    assert list(tmp_path.iterdir()) == []
    assert served.tokens() == before and not served.paused()


def test_vllm_log_has_tracebacks_only_for_failures(vllm, tmp_path):
    log = vllm.server.log_path
    begun = len(log.read_text())
    with sending("delta", tmp_path, vllm) as sender:
        for seed in (0, 1):
            assert sender.update_weights(tiny_model(seed)).verified
    assert vllm.says(tiny_model(1))
    told = log.read_text()[begun:]
    assert "/collective_rpc" in told and "Traceback" not in told and "Exception caught" not in told
    assert not vllm.http.call("POST", "/collective_rpc", {"method": "unknown"}).ok
    until_met(lambda: "ERROR:    Exception in ASGI application" in log.read_text()[begun:])
    assert log.read_text()[begun:].count("Traceback") >= 3, "of the worker, the core and the API server"
