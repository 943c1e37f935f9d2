"""`WeightSender` over in-process engines: reports, versions, registration, failures."""

from __future__ import annotations

import gc
import json
import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import torchrl_ext as tx
from tests.fakes import FakeEngine
from tests.sync.ends import change, same
from torchrl_ext.base.errors import ConcurrentUpdateError, ConfigError, NotConnectedError, TransportError, UpdateError
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S


class Stubborn(TensorsLoader):
    """Refuses in the middle of loading as long as it is told to."""

    refusing = False

    def load(self, pairs):
        if self.refusing:
            super().load([next(iter(pairs))])
            raise RuntimeError("the engine ran out of memory")
        super().load(pairs)


def stubborn_engine(model, url="stubborn"):
    loader = Stubborn(model)
    return loader, InProcessEngine(tx.WeightReceiver(loader), url=url)


class TestReport:
    def test_it_says_what_was_done(self):
        policy, served = nn.Linear(30, 20), nn.Linear(30, 20)
        report = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(served, url="engine one")).update_weights(policy)
        assert same(served, policy) and report.verified
        assert (report.version, report.transport, report.tensors, report.density) == (1, "memory", 2, 1.0)
        assert report.bytes == report.model_bytes == 4 * (30 * 20 + 20)
        assert {"connect", "prepare", "prefetch", "commit", "total"} <= set(report.spans)
        (row,) = report.engines
        assert (row.engine, row.kind, row.state, row.version) == ("engine one", "inprocess", "serving", 1)
        assert row.error is None and 0 < row.pause_s <= report.spans["total"]
        assert json.loads(json.dumps(report.to_json()))["engines"][0]["state"] == "serving"

    def test_failed_update_has_a_report_of_its_own(self, tmp_path):
        policy = {"w": torch.randn(100_000)}
        engine = InProcessEngine({"w": torch.zeros(100_000)})
        with tx.WeightSender(tx.DeltaTransport(tmp_path), Fleet([engine])) as sender:
            sender.update_weights(policy)
            policy["w"][::1000] += 1
            assert 0 < sender.update_weights(policy).density < 0.01
            with pytest.raises(UpdateError) as told:
                sender.update_weights({"other": torch.zeros(3)})
        failed = told.value.report
        assert (failed.bytes, failed.density, failed.model_bytes) == (0, 0.0, 12)
        assert "publish" not in failed.spans and str(told.value).count("State:") == 1


class TestRegistration:
    def test_a_model_is_held_weakly(self):
        policy = nn.Linear(2, 2)
        sender = tx.WeightSender(tx.MemoryTransport(), InProcessEngine(nn.Linear(2, 2)))
        with pytest.raises(NotConnectedError, match=r"register_model\(policy\)"):
            sender.update_weights()
        sender.register_model(policy)
        del policy
        gc.collect()
        with pytest.raises(NotConnectedError, match="keep the policy alive"):
            sender.update_weights()

    def test_collectors_count_accepted_updates_and_are_weakly_held(self, caplog):
        class Collector:
            version = 0

            def increment_version(self):
                self.version += 1

        class Broken(Collector):
            def increment_version(self):
                raise RuntimeError("this collector was shut down")

        loader, engine = stubborn_engine(nn.Linear(2, 2))
        sender = tx.WeightSender(tx.MemoryTransport(), engine)
        collector, other, broken = Collector(), Collector(), Broken()
        for registered in (broken, collector, other, collector):
            sender.register_collector(registered)
        with caplog.at_level(logging.INFO, "torchrl_ext"):
            for refusing, version in ((True, 0), (False, 1), (False, 2)):
                loader.refusing = refusing
                with pytest.raises(UpdateError) if refusing else nullcontext():
                    assert sender.update_weights(nn.Linear(2, 2)).engines[0].state == "serving"
                assert collector.version == version and ("accepted by 1 engine" in caplog.text) is not refusing
                assert other is None or other.version == version
                other = other if refusing else None
                gc.collect()
        assert "this collector was shut down" in caplog.text


class TestFailures:
    def test_a_root_that_is_no_directory_is_named(self, tmp_path):
        (tmp_path / "file").touch()
        sender = tx.WeightSender(tx.DeltaTransport(tmp_path / "file"), InProcessEngine(nn.Linear(3, 2)))
        with sender, pytest.raises(UpdateError, match=r"latest: Not a directory; the weights did") as told:
            sender.update_weights(nn.Linear(3, 2))
        assert told.value.report.version == 1

    def test_engine_with_bytes_unlike_the_trainers_does_not_serve(self):
        class Forgetful(TensorsLoader):
            def load(self, pairs):
                super().load(pairs)
                self.targets()["bias"].detach()[0] += 1

        engine = InProcessEngine(tx.WeightReceiver(Forgetful(nn.Linear(3, 2))))
        with pytest.raises(UpdateError, match="'bias' of the model differs from what the trainer sent"):
            tx.WeightSender(tx.MemoryTransport(), engine).update_weights(nn.Linear(3, 2))
        assert not engine.serving.is_set()

    def test_shutdown_frees_the_transport_when_the_engine_fails(self, tmp_path):
        class Stuck(InProcessEngine):
            def close(self):
                raise TransportError("the engine does not answer")

        sender = tx.WeightSender(tx.DiskTransport(tmp_path), Stuck(nn.Linear(2, 2)))
        sender.update_weights(nn.Linear(2, 2))
        with pytest.raises(TransportError, match="does not answer"):
            sender.shutdown()
        assert not sender.check_connection()
        with tx.WeightSender(tx.DiskTransport(tmp_path), InProcessEngine(nn.Linear(2, 2))) as other:
            assert other.update_weights(nn.Linear(2, 2)).version == 2

    def test_engine_that_refuses_to_join_keeps_version_in_its_row(self, tmp_path):
        with FakeEngine("embedded") as fake:
            fake.label = "84"
            with tx.WeightSender(tx.DiskTransport(tmp_path), tx.connect(fake.url)) as sender:
                with pytest.raises(UpdateError, match="did not join the transport") as told:
                    sender.update_weights({"unknown": torch.ones(3)})
                assert [(row.state, row.version) for row in told.value.rows] == [("serving", 84)]
                assert sender.update_weights(fake.tensors).version == 85


class TestAlone:
    """A trainer of one process: nobody waits in a gather, so that a failed update reads nothing for nobody."""

    def test_a_delta_is_published_without_an_engine(self, tmp_path):
        model = nn.Linear(3, 2)
        with tx.WeightSender(tx.DeltaTransport(tmp_path)) as sender:
            for _ in range(2):
                change(model)
                report = sender.update_weights(model)
                assert not report.verified and report.engines == ()
        with tx.DeltaTransport(tmp_path) as transport:
            assert same(transport.receive_weights(WAIT_S), model) and transport.received_version == 2

    def test_concurrent_update_is_refused_and_reads_no_weights(self):
        read = []

        class Unread(tx.WeightSource):
            def params(self):
                return as_source({"w": torch.zeros(3)}).params()

            def __iter__(self):
                read.append(self)
                yield "w", torch.ones(3)

        class Beside(Unread):
            def __iter__(self):
                with pytest.raises(ConcurrentUpdateError):
                    sender.update_weights(Unread())
                with pytest.raises(ConcurrentUpdateError):
                    sender.init_all_workers_group(vllm_engine=InProcessEngine(nn.Linear(2, 2)))
                yield from super().__iter__()

        sender, source = tx.WeightSender(tx.MemoryTransport()), Beside()
        report = sender.update_weights(source)
        assert read == [source] and (report.version, report.tensors, sender.version) == (1, 1, 1)
        assert report.spans["prepare"] > 0


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (lambda: (InProcessEngine(nn.Linear(2, 2)), tx.MemoryTransport()), "engine is a MemoryTransport"),
            (lambda: ("memory", None), "transport is a str"),
            (lambda: (tx.MemoryTransport(), nn.Linear(2, 2)), "engine is a Linear"),
        ],
    )
    def test_wrong_transport_or_engine_type_is_refused_by_name(self, arguments, words):
        with pytest.raises(ConfigError, match=words):
            tx.WeightSender(*arguments())

    @pytest.mark.parametrize(("rank", "connects"), [(0, True), (1, False)])
    def test_only_rank_0_connects_to_an_engine_address(self, monkeypatch, rank, connects):
        engine, asked = InProcessEngine(nn.Linear(2, 2)), []
        monkeypatch.setattr("torchrl_ext.sync.sender.connect", lambda *urls: asked.append(urls) or engine)
        sender = tx.WeightSender(tx.MemoryTransport(), "host:8000", rank=rank)
        assert (asked, sender.engine is engine) == ([("host:8000",)] if connects else [], connects)


class TestFleet:
    def test_a_fleet_among_its_engines_stands_for_its_members(self):
        served, policy = [nn.Linear(3, 2) for _ in range(3)], nn.Linear(3, 2)
        a, b, c = (InProcessEngine(model, url=f"engine {i}") for i, model in enumerate(served))
        fleet = Fleet([Fleet([a, b]), c])
        report = tx.WeightSender(tx.MemoryTransport(), fleet).update_weights(policy)
        assert [row.engine for row in report.engines] == ["engine 0", "engine 1", "engine 2"]
        assert all(same(model, policy) for model in served) and fleet.each() == (a, b, c)
        with pytest.raises(ConfigError, match="engine 1 is listed twice"):
            Fleet([Fleet([a, b]), b])


@pytest.mark.parametrize("shared", [True, False])
def test_shutdown_of_a_replaced_sender_keeps_the_new_one_joined(shared, tmp_path, caplog):
    served, policy = nn.Linear(3, 2), nn.Linear(3, 2)
    receiver = tx.WeightReceiver(served)
    client = InProcessEngine(receiver)
    client.close()  # it joined nothing
    clients = client, client if shared else InProcessEngine(receiver)
    old, new = (tx.WeightSender(tx.DeltaTransport(tmp_path / str(n)), one) for n, one in enumerate(clients))
    for sender in (old, new):
        sender.update_weights(policy)
    old.shutdown()
    caplog.clear()
    assert new.update_weights(policy, only="bias").part and not caplog.records
    new.shutdown()
    with pytest.raises(NotConnectedError):
        receiver.start()
    assert same(served, policy) and client.serving.is_set()
