"""Stock servers, with nothing of ours, follow a trainer by broadcasts, and come back after failures of all kinds."""

from __future__ import annotations

import importlib.util
import json
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torchrl_ext as tx
from tests.engine.conftest import small
from tests.engine.served import ServedSGLang, spec_of
from tests.models import tiny_checkpoint, tiny_model
from tests.processes import COMMAND, WAIT_S, finished, running_python
from tests.transports.test_native import SHAPES
from torchrl_ext.cli.main import main
from torchrl_ext.errors import UpdateError
from torchrl_ext.testing import DTYPES, any_bits, same_bits
from torchrl_ext.transports.native.transport import layout_of
from torchrl_ext.types import ParamMeta
from torchrl_ext.weights.source import MappingSource, as_source

pytestmark = pytest.mark.engine

SMALL = 1 << 14  # bytes of a bucket: an update takes many calls


def some_params(seed, count=60):
    chance = random.Random(seed)
    return [ParamMeta(f"p{i}", chance.choice(DTYPES), chance.choice(SHAPES)) for i in range(count)]


stock = small(ServedSGLang, "module", dtype="float32", plugin=False)
two_stock_workers = small(ServedSGLang, "module", dtype="float32", plugin=False, tensor_parallel_size=2)


def module_of(kind, *names):
    """A module of an engine's environment that needs torch alone, by its file."""
    (path,) = spec_of(kind).interpreter.parents[1].glob("/".join(["lib/python*/site-packages", *names]))
    spec = importlib.util.spec_from_file_location(f"theirs_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(params, seed=0):
    return {meta.name: any_bits(meta.dtype, *meta.shape, seed=seed + at) for at, meta in enumerate(params)}


def as_sent(params, make, bucket_bytes):
    """Each call's parameters, and the broadcasts that it is carried by."""
    found, (buckets, calls) = tensors(params), layout_of(params, make, bucket_bytes)
    flat = [
        b"".join(found[m.name].view(-1).view(torch.uint8).numpy().tobytes() for m in params[a:b])
        for a, b in ((bucket.spans[0].first, bucket.spans[-1].stop) for bucket in buckets)
    ]
    for first, stop in calls:
        carried = [
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for bucket, data in zip(buckets, flat, strict=True)
            if first <= bucket.spans[0].first < stop and data
        ]
        yield [meta for meta in params[first:stop] if meta.nbytes], carried


# SGLang


@pytest.mark.parametrize("seed", range(4))
def test_sglangs_own_reader_takes_every_call_apart_into_the_same_bits(seed):
    bucket = module_of("sglang", "sglang", "srt", "weight_sync", "tensor_bucket.py").FlattenedTensorBucket
    params = some_params(seed)
    sent, seen = tensors(params), 0
    for metas, carried in as_sent(params, "sglang", 512):
        if not metas:
            continue
        (flat,) = carried
        held = bucket.empty([m.name for m in metas], [m.dtype for m in metas], [m.shape for m in metas], "cpu")
        held.get_flattened_tensor().copy_(flat)
        for name, tensor in held.reconstruct_tensors():
            assert same_bits(tensor, sent[name]), name
            seen += 1
    assert seen == sum(meta.numel > 0 for meta in params)
    with pytest.raises(ValueError, match="Unaligned"):  # without our cuts
        bucket.empty(["a", "b"], ["int8", "float32"], [[3], [2]], "cpu")


def sending(*served, **settings):
    engine = tx.connect(*(one.url for one in served))
    transport = tx.make_transport("native", make="sglang", bucket_bytes=SMALL, timeout_s=WAIT_S)
    return tx.WeightSender(transport, engine, **settings)


def test_a_stock_server_says_what_the_trainer_would_after_each_of_five_updates(stock):
    (info,) = tx.discover(stock.url)
    assert info.transports == ("disk", "native") and info.stock
    pid, sender = stock.server.pid, sending(stock)
    for seed in range(1, 6):
        model = tiny_model(seed)
        report = sender.update_weights(model)
        assert stock.says(model) and stock.version() == str(report.version)
        assert (report.verified, report.proof, report.transport) == (False, "sent", "native")
    sender.shutdown()
    assert stock.server.pid == pid and stock.server.alive() and stock.says(tiny_model(5))


def test_doctor_says_how_it_follows_and_push_reaches_it(stock, tmp_path, capsys):
    assert main(["doctor", stock.url, "--transport", "native", "--json"]) == 0
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)["findings"] if row["where"] == stock.url}
    assert {rows[check]["level"] for check in ("plugin", "proof", "group")} == {"warning"}
    assert main(["doctor", stock.url, "--transport", "delta", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert "failure" in {row["level"] for row in found if row["check"] == "plugin"}
    assert rows["routes"]["level"] == "ok" and "disk, native" in rows["plugin"]["found"]
    other = tiny_checkpoint(tmp_path / "other", seed=6)
    assert main(["push", str(other), "--engines", stock.url, "--transport", "native", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["proof"] == "sent" and stock.says(tiny_model(6))


def test_the_demo_takes_its_own_wire(stock, checkpoint):
    arguments = ["--json", "--steps", "2", "--engines", stock.url, "--model", checkpoint]
    done = finished(COMMAND, "demo", *map(str, arguments), timeout_s=400)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["transport"] == "native" and told["verified"]
    assert {report["proof"] for report in told["syncs"]} == {"outputs"}


def test_its_outputs_prove_an_update(stock):
    sender = sending(stock, verify="outputs")
    model = tiny_model(7)
    sender.register_model(model)
    report = sender.update_weights()
    assert report.proof == "outputs" and report.engines[0].max_gap < 1e-3
    sender.shutdown()


def test_two_workers_of_one_server_follow(two_stock_workers):
    sender = sending(two_stock_workers)
    for seed in (11, 12):
        model = tiny_model(seed)
        sender.update_weights(model)
        assert two_stock_workers.says(model)
    with pytest.raises(UpdateError, match="it broke"):
        sender.update_weights(Breaking(dict(as_source(tiny_model(13)))))
    model = tiny_model(14)
    sender.update_weights(model)
    assert two_stock_workers.says(model)
    sender.shutdown()


def test_requests_that_run_across_an_update_come_to_their_end(stock):
    sender = sending(stock)
    sender.update_weights(tiny_model(21))
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(stock.generate, 200, temperature=1.0) for _ in range(4)]
        report = sender.update_weights(tiny_model(22))
        for future in futures:
            choice = future.result(WAIT_S)
            assert len(choice["token_ids"]) == 200 and choice["finish_reason"] == "length"
            versions = {int(span["version"]) for span in choice["weight_versions"]}
            assert versions <= {report.version - 1, report.version}
    assert stock.says(tiny_model(22))
    sender.shutdown()


class Breaking(MappingSource):
    """A source that fails in the middle."""

    def __iter__(self):
        for number, pair in enumerate(super().__iter__()):
            if number == 9:
                raise RuntimeError("it broke")
            yield pair


def test_a_source_that_breaks_half_way_leaves_the_server_paused_and_the_next_update_mends_it(stock):
    pid, sender = stock.server.pid, sending(stock)
    sender.update_weights(tiny_model(31))
    with pytest.raises(UpdateError, match="it broke"):
        sender.update_weights(Breaking(dict(as_source(tiny_model(32)))))
    assert [row.state for row in sender.engine.rows()] == ["paused"]
    model = tiny_model(33)
    report = sender.update_weights(model)
    assert stock.says(model) and stock.version() == str(report.version) and stock.server.pid == pid
    sender.shutdown()


_TRAINER = """
import sys, threading
from tests.engine.test_native import SMALL
from tests.models import tiny_checkpoint, tiny_model
import torchrl_ext as tx
from torchrl_ext.weights.source import MappingSource, as_source

class Stuck(MappingSource):
    def __iter__(self):
        for number, pair in enumerate(super().__iter__()):
            if number == 9:
                print("half-way", flush=True)
                threading.Event().wait()
            yield pair

transport = tx.make_transport("native", make="sglang", bucket_bytes=SMALL)
sender = tx.WeightSender(transport, tx.connect(sys.argv[1]))
sender.update_weights(Stuck(dict(as_source(tiny_model(41)))))
"""


def test_a_trainer_that_is_killed_half_way_is_followed_by_another_one(stock):
    with running_python(_TRAINER, stock.url) as trainer:
        assert trainer.stdout.readline() == "half-way\n"
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(WAIT_S)
    model, pid = tiny_model(42), stock.server.pid
    sender = sending(stock)
    sender.update_weights(model)
    assert stock.says(model) and stock.server.pid == pid
    sender.shutdown()
