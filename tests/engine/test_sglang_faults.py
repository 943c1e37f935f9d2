"""What goes wrong on SGLang is refused before the pause, or leaves it paused and able to take the next update."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import torchrl_ext as tx
from tests.engine.test_sglang_sync import running
from tests.engine.test_vllm_faults import changed, kill_a_trainer_in_the_middle
from tests.models import greedy, tiny_model
from torchrl_ext.launch.processes import free_port
from torchrl_ext.types import CHANNEL, ParamMeta

pytestmark = pytest.mark.engine


def sender_to(served, transport, engine=None, **settings):
    engine = engine or tx.make_engine("sglang", url=served.url)
    return tx.WeightSender(tx.make_transport(transport, **settings), engine)


@pytest.fixture
def serving(sglang, tmp_path):
    """The server with known weights in service, and a look at its process afterwards."""
    pid, model = sglang.server.pid, tiny_model(51)
    sglang.report = sender_to(sglang, "disk", root=tmp_path / "before").update_weights(model)
    sglang.model = model
    yield sglang
    assert sglang.server.pid == pid and sglang.server.alive()


def assert_untouched(served):
    assert served.tokens() == greedy(served.model) and served.version() == str(served.report.version)


def assert_recovers(served, tmp_path, seed=53):
    last = tiny_model(seed)
    report = sender_to(served, "disk", root=tmp_path / "after").update_weights(last)
    assert served.tokens() == greedy(last) and served.version() == str(report.version)


def load_from_disk(served, path, expected=200, **body):
    answer = served.http.call("POST", "/update_weights_from_disk", {"model_path": str(path), **body})
    assert answer.status == expected, answer
    return answer.json()["message"]


@pytest.mark.parametrize("transport", ["disk", "collective"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unknown", r"layers\.0\.strange"),
        ("missing", r"model\.layers\.1\.self_attn\.k_proj\.weight' is missing"),
        ("misshaped", r"down_proj\.weight' arrives with shape \[128, 300\].*\[128, 256\]"),
        ("rounded", r"model\.norm\.weight' arrives as float64"),
    ],
)
def test_parameters_that_cannot_land_are_refused_before_the_pause(serving, tmp_path, transport, kind, words):
    """SGLang itself would skip an unknown name, and keep old values under a missing one, without a word."""
    settings = {"root": tmp_path / "bad"} if transport == "disk" else {"timeout_s": 20}
    sender = sender_to(serving, transport, **settings)
    with pytest.raises(tx.WeightSyncError, match=words):
        sender.update_weights(changed(kind))
    assert_untouched(serving)
    last = tiny_model(53)
    sender.update_weights(last)
    assert serving.tokens() == greedy(last)
    sender.shutdown()


def test_sglang_itself_accepts_unknown_names_in_silence(serving, tmp_path):
    """Why parameters are checked ahead of an update; should this ever fail, the docs have a line to lose."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "strange"
    tiny_model(54).save_pretrained(folder)
    shard = folder / "model.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.strange.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, shard, {"format": "pt"})
    load_from_disk(serving, folder, load_format="auto", weight_version="strange")
    assert serving.tokens() == greedy(tiny_model(54))


def test_a_load_format_that_nobody_knows_does_not_end_the_server(serving, tmp_path):
    message = load_from_disk(serving, tmp_path, 400, load_format="strange", weight_version="x")
    assert "strange" in message
    assert_untouched(serving)


def test_whatever_is_said_to_the_plugin_does_not_end_the_server(serving):
    for text in (
        "",
        "no json",
        "[]",
        "{}",
        '{"load": 3}',
        '{"load": {"verify": {"x": "0"}}}',
        '{"connect": {}}',
        '{"poll": true}',
    ):
        answer = serving.http.call("POST", "/weights_checker", {"action": CHANNEL + text})
        assert answer.status == 400 and answer.json()["message"], text
    assert_untouched(serving)


def test_a_checkpoint_that_sglang_cannot_load_does_not_end_the_server(serving, tmp_path):
    folder = tmp_path / "broken"
    tiny_model(55).save_pretrained(folder)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    load_from_disk(serving, folder, 400, load_format="auto", weight_version="broken")
    load_from_disk(serving, tmp_path / "nothing", 400, load_format="auto", weight_version="nothing")
    assert_recovers(serving, tmp_path)


def test_a_400_can_mean_that_the_weights_did_change(serving, tmp_path):
    """Loading and flushing in one call, as SGLang offers it: the reason why the client flushes first."""
    engine, folder = tx.make_engine("sglang", url=serving.url, pause_mode="in_place"), tmp_path / "other"
    tiny_model(56).save_pretrained(folder)
    before = engine.checksum()
    with ThreadPoolExecutor(1) as pool:
        (future,) = running(serving, pool, 1)
        engine.pause()
        message = load_from_disk(
            serving, folder, 400, load_format="auto", weight_version="half", flush_cache=True, abort_all_requests=False
        )
        assert "not flushed" in message and engine.checksum() != before
        engine.resume()
        future.result()
    assert_recovers(serving, tmp_path)


def test_requests_that_are_paused_in_place_keep_the_update_away_unless_the_old_cache_is_accepted(serving, tmp_path):
    engine = tx.make_engine("sglang", url=serving.url, pause_mode="in_place")
    sender, model = sender_to(serving, "disk", engine, root=tmp_path / "refused"), tiny_model(57)
    with ThreadPoolExecutor(1) as pool:
        (future,) = running(serving, pool, 1)
        with pytest.raises(tx.WeightSyncError, match=r"(?s)paused in place.*1 running.*serves again.*keep_cache=True"):
            sender.update_weights(model)
        assert future.result()["weight_versions"][0]["version"] == str(serving.report.version)
        assert_untouched(serving)
    engine = tx.make_engine("sglang", url=serving.url, pause_mode="in_place", keep_cache=True)
    sender = sender_to(serving, "disk", engine, root=tmp_path / "accepted")
    with ThreadPoolExecutor(1) as pool:
        (future,) = running(serving, pool, 1)
        report = sender.update_weights(model)
        choice = future.result()
        assert choice["finish_reason"] == "length" and choice["retractions"] == 0
        assert choice["weight_versions"][-1]["version"] == str(report.version)
    assert_recovers(serving, tmp_path)


def test_the_load_format_is_sticky_and_ours_is_always_sent(serving, tmp_path):
    transport, model = tx.make_transport("delta", root=tmp_path / "chain"), tiny_model(58)
    transport.send_weights(model)
    load_from_disk(serving, tmp_path / "chain", load_format="delta", weight_version="delta")
    assert serving.http.get("/model_info")["load_format"] == "delta" and serving.tokens() == greedy(model)
    folder = tmp_path / "checkpoint"
    tiny_model(59).save_pretrained(folder)
    assert "holds no version" in load_from_disk(serving, folder, 400, weight_version="x")  # still "delta"
    load_from_disk(serving, folder, load_format="auto", weight_version="x")
    assert serving.tokens() == greedy(tiny_model(59))
    transport.shutdown()


def test_the_label_is_sticky_and_ours_is_always_sent(serving, tmp_path):
    folder = tmp_path / "checkpoint"
    tiny_model(60).save_pretrained(folder)
    load_from_disk(serving, folder, load_format="auto")
    assert serving.tokens() == greedy(tiny_model(60)) and serving.version() == str(serving.report.version)
    assert_recovers(serving, tmp_path)


def test_a_master_that_cannot_be_reached_ends_in_an_error_and_meanwhile_the_server_serves(serving):
    model = tiny_model(51)
    params = [ParamMeta.of(name, tensor).to_json() for name, tensor in model.state_dict().items()]
    transport = tx.make_transport("collective", timeout_s=5)
    info = transport.open(1, tuple(ParamMeta.from_json(row) for row in params)).info
    info = {key: free_port() if key.endswith("port") else value for key, value in info.items()}
    engine, told = tx.make_engine("sglang", url=serving.url, load_timeout_s=60), []

    def joining():
        try:
            engine.connect({**info, "params": params, "world_size": 2})
        except tx.WeightSyncError as error:
            told.append(error)

    thread = threading.Thread(target=joining)
    thread.start()
    generated = 0
    while thread.is_alive():
        assert_untouched(serving)
        generated += 1
    thread.join()
    transport.shutdown()
    assert generated and "did not join the transport" in str(told[0])
    assert_untouched(serving)


@pytest.mark.parametrize("server", ["sglang", pytest.param("tensor_parallel_sglang", marks=pytest.mark.exhaustive)])
def test_after_a_trainer_died_in_the_middle_the_next_update_brings_the_engine_back(request, server, tmp_path):
    served, good = request.getfixturevalue(server), tiny_model(62)
    before = sender_to(served, "disk", root=tmp_path / "before")
    before.update_weights(tiny_model(60))
    label = served.version()
    kill_a_trainer_in_the_middle(served, request.config.rootpath)
    assert served.paused() and served.version() == label
    after = sender_to(served, "disk", root=tmp_path / "after")
    after.update_weights(good)
    assert served.tokens() == greedy(good) and not served.paused()
    collective = sender_to(served, "collective")
    collective.update_weights(tiny_model(63))
    assert served.tokens() == greedy(tiny_model(63))
    collective.shutdown()


def test_an_update_that_a_trainer_left_open_is_ended_by_the_next(serving, tmp_path):
    sender = sender_to(serving, "disk", root=tmp_path / "left")
    sender.update_weights(tiny_model(45))
    sender._engine.begin(1000)  # and this trainer is never seen again
    model = tiny_model(46)
    sender = sender_to(serving, "collective")
    sender.update_weights(model)
    assert serving.tokens() == greedy(model)
    sender.shutdown()


class Damaging(tx.DiskTransport):
    """Damages what it published: cut off before engines look at it, or overwritten after they did."""

    def __init__(self, root, *, early):
        super().__init__(root=root)
        self.folder, self.early = root, early

    def prepare(self, source, version):
        handoffs = list(super().prepare(source, version))

        def damage():
            for shard in self.folder.glob(f"weight_v{version:06d}/*.safetensors"):
                with shard.open("r+b") as file:
                    if self.early:
                        file.truncate(shard.stat().st_size - 64)
                    else:
                        file.seek(-64, 2)
                        file.write(b"\xff" * 64)

        def in_the_pause():
            damage()
            yield from handoffs

        if not self.early:
            return in_the_pause()
        damage()
        return handoffs


@contextmanager
def damaging(served, root, early):
    sender = tx.WeightSender(Damaging(root, early=early), tx.make_engine("sglang", url=served.url))
    yield sender
    sender.shutdown()


def test_damaged_files_are_refused_before_the_pause(serving, tmp_path):
    with damaging(serving, tmp_path / "damaged", early=True) as sender:
        with pytest.raises(tx.WeightSyncError, match="did not prefetch version"):
            sender.update_weights(tiny_model(73))
        assert_untouched(serving)


def test_files_damaged_in_the_pause_leave_the_engine_paused_and_the_error_says_so(serving, tmp_path):
    with damaging(serving, tmp_path / "damaged", early=False) as sender:
        with pytest.raises(tx.WeightSyncError, match="is paused, serves nobody, and holds") as error:
            sender.update_weights(tiny_model(71))
        assert error.value.rows[0].state == "paused" and serving.paused()
    assert_recovers(serving, tmp_path)
    assert not serving.paused()
