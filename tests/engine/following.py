"""What every engine does that follows a trainer: one suite, over the servers of each make.

A subclass names its ``kind``, by which `conftest` has a server with one worker, with two, and one in bfloat16.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import pytest
import torch

import torchrl_ext as tx
from tests.engine.served import until_met
from tests.models import PROMPT, VOCAB, greedy, greedy_over_kept_keys, tiny_model
from tests.processes import finished

TRANSPORTS = ["disk", "collective", "ipc"]


@contextmanager
def sending(transport, root, *served, **settings):
    """A sender to some servers."""
    files = {"root": root}
    settings_of = {"disk": files, "delta": files, "collective": {}, "ipc": {"bucket_bytes": 256 << 10}}
    if len(served) == 1:
        engine = tx.make_engine(served[0].kind, url=served[0].url, **settings)
    else:
        engine = tx.connect(*(one.url for one in served), **settings)
    sender = tx.WeightSender(tx.make_transport(transport, **settings_of[transport]), engine)
    try:
        yield sender
    finally:
        sender.shutdown()


class OfOneKind:
    """The servers of one make."""

    kind = ""

    @pytest.fixture
    def served(self, request):
        return request.getfixturevalue(self.kind)

    @pytest.fixture
    def tensor_parallel(self, request):
        return request.getfixturevalue(f"tensor_parallel_{self.kind}")

    @pytest.fixture
    def bfloat16(self, request):
        return request.getfixturevalue(f"bfloat16_{self.kind}")


class Follows(OfOneKind):
    """Its greedy tokens are those of the trainer's own weights."""

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_five_syncs_leave_the_engine_at_the_trainers_weights(self, served, tmp_path, transport):
        pid = served.server.pid
        with sending(transport, tmp_path, served) as sender:
            for seed in range(1, 6):
                model = tiny_model(seed)
                served.assert_serves(model, sender.update_weights(model))
        assert served.server.pid == pid and served.server.alive()

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_a_layer_alone_lands_beside_the_others(self, served, tmp_path, transport):
        self._layer_alone(served, tmp_path, transport)

    def test_a_layer_alone_lands_on_two_workers(self, tensor_parallel, tmp_path):
        self._layer_alone(tensor_parallel, tmp_path, "collective")

    def _layer_alone(self, served, tmp_path, transport):
        model, other = tiny_model(61), tiny_model(62).state_dict()
        layer = {name: tensor for name, tensor in other.items() if ".layers.1." in name}
        with sending(transport, tmp_path, served) as sender:
            served.assert_serves(model, sender.update_weights(model))
            model.load_state_dict({**model.state_dict(), **layer})
            report = sender.update_weights(model, only="model.layers.1")
            assert report.part and report.tensors == len(layer)
            assert transport == "disk" or report.bytes == sum(tensor.nbytes for tensor in layer.values())
            served.assert_serves(model, report)
            last = tiny_model(63)
            served.assert_serves(last, sender.update_weights(last))

    def test_a_tensor_alone_lands_or_what_its_layer_lacks_is_named(self, served, tmp_path):
        name, model = "model.layers.1.self_attn.q_proj.weight", tiny_model(64)
        with sending("ipc", tmp_path, served) as sender:
            sender.update_weights(model)
            changed = {**model.state_dict(), name: tiny_model(65).state_dict()[name]}
            try:
                report = sender.update_weights(changed, only=name)
            except tx.WeightSyncError as error:  # packed with the others, so that it has to be built anew
                assert "model.layers.1.self_attn.k_proj.weight" in str(error) and served.says(model)
                changed = model.state_dict()
                report = sender.update_weights(changed, only="model.layers.1.self_attn")
                assert not report.part, "after a failure everything is sent"
            model.load_state_dict(changed)
            served.assert_serves(model, report)

    def test_a_frozen_request_goes_on_with_its_keys_where_they_are_to_be_kept(self, served, tmp_path):
        if not served.tells:
            pytest.skip("it does not say which weights sampled a token")
        old, new, attempts = tiny_model(71), tiny_model(72), count()
        with sending("disk", tmp_path, served, keep_cache=True) as sender, ThreadPoolExecutor(1) as pool:

            def frozen():
                sender.update_weights(old)
                prompt = [20 + next(attempts), *PROMPT]  # of which nothing is cached yet
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
                assert tokens[:end] == over_old_keys
                return over_old_keys[cut:] != greedy(new, prompt + tokens[:cut], end - cut)  # else nothing was shown

            until_met(frozen)

    def test_a_cached_prefix_is_used_again_where_it_is_to_be_kept_and_else_never(self, served, tmp_path):
        old, new = tiny_model(73), tiny_model(74)
        prompt = [50, *((7 * i + 3) % (VOCAB - 3) + 3 for i in range(180))]  # longer than a block of the cache
        with sending("disk", tmp_path / "kept", served, keep_cache=True) as sender:
            sender.update_weights(old)
            assert served.generate(8, prompt)["token_ids"] == greedy(old, prompt, 8)
            sender.update_weights(new)
            assert served.generate(24, prompt)["token_ids"] != greedy(new, prompt, 24)
        with sending("disk", tmp_path / "dropped", served) as sender:
            sender.update_weights(new)
            assert served.generate(24, prompt)["token_ids"] == greedy(new, prompt, 24)

    def test_full_versions_are_copied_to_the_host_and_loaded_from_there(self, served, tmp_path):
        transport = tx.make_transport("disk", root=tmp_path / "updates", local_dir=tmp_path / "copy")
        sender = tx.WeightSender(transport, tx.make_engine(served.kind, url=served.url))
        for seed in (75, 76):
            model = tiny_model(seed)
            report = sender.update_weights(model)
            served.assert_serves(model, report)
            state = json.loads((tmp_path / "copy" / ".weight_sync" / "state.json").read_bytes())
            assert int(state["version"]) == report.version
        sender.shutdown()

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_two_workers_follow(self, tensor_parallel, tmp_path, transport):
        assert tx.discover(tensor_parallel.url)[0].world_size == 2
        with sending(transport, tmp_path, tensor_parallel) as sender:
            for seed in (41, 42, 43):
                model = tiny_model(seed)
                tensor_parallel.assert_serves(model, sender.update_weights(model))

    def test_two_workers_refuse_and_go_on(self, tensor_parallel, tmp_path):
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

    def test_an_update_that_a_trainer_left_open_is_ended_by_the_next(self, tensor_parallel, tmp_path):
        with sending("disk", tmp_path, tensor_parallel) as sender:
            sender.update_weights(tiny_model(45))
            sender.engine.begin(1000)  # and this trainer is never seen again
        model = tiny_model(46)
        with sending("collective", tmp_path, tensor_parallel) as sender:
            tensor_parallel.assert_serves(model, sender.update_weights(model))
        assert not tensor_parallel.paused()


class FollowsInBfloat16(OfOneKind):
    """As `Follows`, in the dtype that engines mostly compute in."""

    @pytest.mark.parametrize("transport", ["disk", "collective"])
    def test_bfloat16_weights_are_followed(self, bfloat16, tmp_path, transport):
        with sending(transport, tmp_path, bfloat16) as sender:
            for seed in (1, 3, 4, 8, 10):
                model = tiny_model(seed, torch.bfloat16, decided=True)
                bfloat16.assert_serves(model, sender.update_weights(model))
                assert bfloat16.says(model)

    def test_a_bfloat16_engine_takes_float32_weights_only_with_a_cast(self, bfloat16, tmp_path):
        model = tiny_model(11, decided=True)
        with sending("disk", tmp_path / "plain", bfloat16) as sender:
            with pytest.raises(tx.WeightSyncError, match=r"would round it.*dtype=torch\.bfloat16"):
                sender.update_weights(model)
            assert not bfloat16.paused()
        engine = tx.make_engine(bfloat16.kind, url=bfloat16.url)
        sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "cast"), engine, dtype=torch.bfloat16)
        bfloat16.assert_serves(model.bfloat16(), sender.update_weights(model))


def changed(kind):
    """Weights that cannot land in the small model."""
    state = dict(tiny_model(52).state_dict())
    if kind == "unknown":
        state["model.layers.0.strange.weight"] = torch.zeros(3)
    elif kind == "missing":
        del state["model.layers.1.self_attn.k_proj.weight"]
    elif kind == "misshaped":
        state["model.layers.1.mlp.down_proj.weight"] = torch.zeros(128, 300)
    elif kind == "rounded":
        state["model.norm.weight"] = state["model.norm.weight"].double()
    return state


DYING_TRAINER = """
import os, signal, sys
import torchrl_ext as tx
from tests.models import tiny_model
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.source import WeightSource

class Dying(WeightSource):
    def __init__(self, state):
        self.state = state
    def params(self):
        return tuple(ParamMeta.of(name, tensor) for name, tensor in self.state.items())
    def __iter__(self):
        for i, (name, tensor) in enumerate(self.state.items()):
            if i == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor

source = Dying(dict(tiny_model(61).state_dict()))
transport = tx.make_transport("collective", bucket_bytes=0)
sender = tx.WeightSender(transport, tx.connect(sys.argv[1]))
sender.update_weights(source)
"""


class Damaging(tx.DiskTransport):
    """Cuts off what it published, before engines look at it."""

    def __init__(self, root):
        super().__init__(root=root)
        self.folder = root

    def prepare(self, update, within):
        handoff = super().prepare(update, within)  # published, and read by engines from here on
        for shard in self.folder.glob(f"weight_v{update.version:06d}/*.safetensors"):
            with shard.open("r+b") as file:
                file.truncate(shard.stat().st_size - 64)
        return handoff


class Recovers(OfOneKind):
    """What goes wrong is refused before the pause, or leaves the engine paused and able to take the next update."""

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
    def test_parameters_that_cannot_land_are_refused_before_the_pause(self, served, tmp_path, transport, kind, words):
        good, last = tiny_model(51), tiny_model(53)
        with sending(transport, tmp_path, served) as sender:
            before = sender.update_weights(good).version
            with pytest.raises(tx.WeightSyncError, match=words) as error:
                sender.update_weights(changed(kind))
            assert "check the stack trace" not in str(error.value)  # the worker's words, not what is wrapped around
            assert served.is_called(str(before)) and served.says(good)
            served.assert_serves(last, sender.update_weights(last))

    @pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
    def test_after_a_trainer_died_in_the_middle_the_next_update_brings_the_engine_back(
        self, request, workers, tmp_path
    ):
        served = request.getfixturevalue(self.kind if workers == 1 else f"tensor_parallel_{self.kind}")
        with sending("disk", tmp_path / "before", served) as sender:
            sender.update_weights(tiny_model(60))
        label = served.version()
        done = finished(DYING_TRAINER, served.url)
        assert done.returncode == -9, done.stderr
        assert served.paused() and served.version() == label
        for seed, transport in ((62, "disk"), (63, "collective")):
            with sending(transport, tmp_path / "after", served) as sender:
                served.assert_serves(tiny_model(seed), sender.update_weights(tiny_model(seed)))
        assert not served.paused()

    def test_damaged_files_are_refused_before_the_pause(self, served, tmp_path):
        good = tiny_model(72)
        with sending("disk", tmp_path / "good", served) as sender:
            sender.update_weights(good)
        engine = tx.make_engine(served.kind, url=served.url)
        with pytest.raises(tx.WeightSyncError, match="did not prefetch version"):
            tx.WeightSender(Damaging(tmp_path / "damaged"), engine).update_weights(tiny_model(73))
        assert served.says(good) and not served.paused()

    def test_files_damaged_in_the_pause_leave_the_engine_paused_and_the_error_says_so(
        self, served, tmp_path, monkeypatch
    ):
        good, folder = tiny_model(71), tmp_path / "damaged"
        engine = tx.make_engine(served.kind, url=served.url)
        begin = engine.begin

        def begin_and_damage(version):  # what the engine has looked at is overwritten before it loads it
            begin(version)
            for shard in folder.glob(f"weight_v{version:06d}/*.safetensors"):
                with shard.open("r+b") as file:
                    file.seek(-64, 2)
                    file.write(b"\xff" * 64)

        monkeypatch.setattr(engine, "begin", begin_and_damage)
        with pytest.raises(tx.WeightSyncError, match="is paused, serves nobody, and holds") as error:
            tx.WeightSender(tx.DiskTransport(folder), engine).update_weights(good)
        assert error.value.rows[0].state == "paused" and served.paused()
        with sending("disk", tmp_path / "last", served) as sender:
            served.assert_serves(good, sender.update_weights(good))
        assert not served.paused()
