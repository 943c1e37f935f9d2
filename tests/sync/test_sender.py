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
from torchrl_ext.base.errors import ConcurrentUpdateError, ConfigError, NotConnectedError, TransportError, UpdateError
from torchrl_ext.control.fleet import Fleet
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.sync.local.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S, same_bits


@pytest.fixture(params=["memory", "disk"])
def transport(request, tmp_path):
    settings = {"root": tmp_path / "updates"} if request.param == "disk" else {}
    transport = tx.make_transport(request.param, **settings)
    yield transport
    transport.shutdown()


def equal(left, right):
    pairs = zip(as_source(left), as_source(right), strict=True)
    return all(name == other and same_bits(a, b) for (name, a), (other, b) in pairs)


class Collector:
    def __init__(self):
        self.version = 0

    def increment_version(self):
        self.version += 1


class Stubborn(TensorsLoader):
    """A loader that refuses in the middle of loading as long as it is told to."""

    def __init__(self, target):
        super().__init__(target)
        self.refusing = False

    def load(self, pairs):
        if self.refusing:
            super().load([next(iter(pairs))])
            raise RuntimeError("the engine ran out of memory")
        super().load(pairs)


def stubborn_engine(model, url="stubborn"):
    loader = Stubborn(model)
    return loader, InProcessEngine(tx.WeightReceiver(loader), url=url)


class TestReport:
    def test_it_says_what_was_done(self, transport):
        policy, served = nn.Linear(30, 20), nn.Linear(30, 20)
        sender = tx.WeightSender(transport, InProcessEngine(served, url="engine one"))
        report = sender.update_weights(policy)
        assert equal(policy, served)
        assert (report.version, report.transport, report.tensors) == (1, transport.name, 2)
        assert report.bytes == report.model_bytes == 4 * (30 * 20 + 20)
        assert report.density == 1.0
        assert report.verified
        assert {"connect", "prepare", "prefetch", "pause", "total"} <= set(report.spans)
        (row,) = report.engines
        assert (row.engine, row.kind, row.state, row.version) == ("engine one", "inprocess", "serving", 1)
        assert row.error is None
        assert 0 < row.pause_s <= report.spans["total"]
        assert json.loads(json.dumps(report.to_json()))["engines"][0]["state"] == "serving"

    def test_update_without_an_engine_is_unverified_but_received(self, transport):
        """A sender without an engine reports nothing as verified, and a receiver gets the version."""
        policy, held = nn.Linear(3, 2), nn.Linear(3, 2)
        report = tx.WeightSender(transport).update_weights(policy)
        assert not report.verified
        assert report.engines == ()
        receiver = tx.WeightReceiver(held, transport)
        assert receiver.poll_and_apply(WAIT_S)
        assert receiver.version == 1
        assert equal(policy, held)
        assert not receiver.poll_and_apply()


class TestRegistration:
    def test_a_model_is_held_weakly(self, transport):
        policy = nn.Linear(2, 2)
        sender = tx.WeightSender(transport, InProcessEngine(nn.Linear(2, 2)))
        with pytest.raises(NotConnectedError, match=r"register_model\(policy\)"):
            sender.update_weights()
        sender.register_model(policy)
        del policy
        gc.collect()
        with pytest.raises(NotConnectedError, match="keep the policy alive"):
            sender.update_weights()

    def test_collectors_count_accepted_updates_and_are_weakly_held(self, transport, caplog):
        """Collectors count only updates that an engine accepted, and the sender does not keep them alive."""

        class Broken(Collector):
            def increment_version(self):
                raise RuntimeError("this collector was shut down")

        loader, engine = stubborn_engine(nn.Linear(2, 2))
        sender, collector, other, broken = tx.WeightSender(transport, engine), Collector(), Collector(), Broken()
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

    def test_init_group_derives_metadata_and_takes_a_late_engine(self, transport):
        """Metadata may be given or derived from the model, and an engine may be given after construction."""
        policy = nn.Linear(2, 3)
        for metadata in ({"weight": (torch.float32, (3, 2)), "bias": (torch.float32, torch.Size([3]))}, None):
            sender = tx.WeightSender(transport, verify=False)
            sender.register_model(policy)
            sender.init_all_workers_group(metadata, vllm_engine=InProcessEngine(nn.Linear(2, 3)))
            assert sender.check_connection()
            assert not sender.update_weights().verified


class TestFailures:
    @pytest.mark.parametrize("name", ["disk", "delta"])
    def test_a_root_that_is_no_directory_is_named(self, name, tmp_path):
        (tmp_path / "file").touch()
        sender = tx.WeightSender(tx.make_transport(name, root=tmp_path / "file"), InProcessEngine(nn.Linear(3, 2)))
        with sender, pytest.raises(UpdateError, match=r"latest: Not a directory; the weights did") as told:
            sender.update_weights(nn.Linear(3, 2))
        assert told.value.report.version == 1

    def test_engine_with_bytes_unlike_the_trainers_does_not_serve(self, transport):
        """An engine whose weights differ from what the trainer sent fails the update and stays paused."""

        class Forgetful(TensorsLoader):
            def finish(self):
                with torch.no_grad():
                    self.targets()["bias"][0] += 1

            def load(self, pairs):
                super().load(pairs)
                self.finish()

        engine = InProcessEngine(tx.WeightReceiver(Forgetful(nn.Linear(3, 2))))
        with pytest.raises(UpdateError, match="'bias' of the model differs from what the trainer sent"):
            tx.WeightSender(transport, engine).update_weights(nn.Linear(3, 2))
        assert not engine.serving.is_set()

    def test_a_model_that_cannot_land_is_refused_before_any_pause(self, transport):
        served = nn.Linear(3, 2)
        before = served.weight.detach().clone()
        engine = InProcessEngine(served)
        sender = tx.WeightSender(transport, engine)
        for wrong, said in (
            (nn.Linear(2, 2), "'weight' arrives as"),
            (nn.Linear(3, 2, bias=False), "missing from the update, first 'bias'"),
            (nn.Linear(3, 2).double(), "float64"),
            (nn.Sequential(nn.Linear(3, 2)), r"no parameter '0\.weight'"),
        ):
            with pytest.raises(tx.WeightSyncError, match=said):
                sender.update_weights(wrong)
            assert engine.serving.is_set()
        assert same_bits(served.weight.detach(), before)


class Passes(tx.WeightSource):
    """Counts the tensors that are read."""

    read = 0

    def params(self):
        return as_source({f"w{i}": torch.zeros(3) for i in range(8)}).params()

    def __iter__(self):
        for i in range(8):
            self.read += 1
            yield f"w{i}", torch.full((3,), float(i))


def test_failed_update_has_a_report_of_its_own(tmp_path):
    """A failed update's report holds no figures of the update before, and its error names one state."""
    policy = {"w": torch.randn(100_000)}
    _, engine = stubborn_engine({"w": torch.zeros(100_000)})
    sender = tx.WeightSender(tx.DeltaTransport(tmp_path), Fleet([engine]))
    sender.update_weights(policy)
    policy["w"][::1000] += 1
    report = sender.update_weights(policy)
    assert 0 < report.density < 0.01
    with pytest.raises(UpdateError) as told:
        sender.update_weights({"other": torch.zeros(3)})
    failed = told.value.report
    assert (failed.bytes, failed.density, failed.model_bytes) == (0, 0.0, 12)
    assert "publish" not in failed.spans and str(told.value).count("State:") == 1
    sender.shutdown()


class TestAlone:
    """A trainer of one process: nobody waits in a gather, so that a failed update reads nothing for nobody."""

    def test_a_delta_is_published_without_an_engine(self, tmp_path):
        model = nn.Linear(3, 2)
        with tx.WeightSender(tx.DeltaTransport(tmp_path)) as sender:
            for _ in range(2):
                with torch.no_grad():
                    model.weight += 1
                sender.update_weights(model)
        with tx.DeltaTransport(tmp_path) as transport:
            received = transport.receive_weights(WAIT_S)
            assert all(torch.equal(received[name], tensor) for name, tensor in model.named_parameters())
            assert transport.received_version == 2

    def test_concurrent_update_is_refused_and_reads_no_weights(self, transport):
        """An update refused during another one reads no weights and leaves the other one's report alone."""
        refused = Passes()

        class Beside(Passes):
            def __iter__(self):
                with pytest.raises(ConcurrentUpdateError):
                    sender.update_weights(refused)
                with pytest.raises(ConcurrentUpdateError):
                    sender.init_all_workers_group(vllm_engine=InProcessEngine(nn.Linear(2, 2)))
                yield from super().__iter__()

        sender = tx.WeightSender(transport)
        report = sender.update_weights(Beside())
        assert (refused.read, report.version, report.tensors, sender.version) == (0, 1, 8, 1)
        assert report.spans["prepare"] > 0


def test_shutdown_frees_the_transport_when_the_engine_fails(tmp_path):
    """A sender whose engine fails to close still shuts down its transport, and another may publish."""

    class Stuck(InProcessEngine):
        def close(self):
            raise TransportError("the engine does not answer")

    sender = tx.WeightSender(tx.DiskTransport(tmp_path), Stuck(nn.Linear(2, 2)))
    sender.update_weights(nn.Linear(2, 2))
    with pytest.raises(TransportError, match="does not answer"):
        sender.shutdown()
    assert not sender.check_connection()
    other = tx.WeightSender(tx.DiskTransport(tmp_path), InProcessEngine(nn.Linear(2, 2)))
    assert other.update_weights(nn.Linear(2, 2)).version == 2
    other.shutdown()


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
    def test_a_fleet_among_its_engines_stands_for_its_members(self, transport):
        served = [nn.Linear(3, 2) for _ in range(3)]
        a, b, c = (InProcessEngine(model, url=f"engine {i}") for i, model in enumerate(served))
        fleet = Fleet([Fleet([a, b]), c])
        policy = nn.Linear(3, 2)
        report = tx.WeightSender(transport, fleet).update_weights(policy)
        assert [row.engine for row in report.engines] == ["engine 0", "engine 1", "engine 2"]
        assert all(equal(policy, model) for model in served) and fleet.each() == (a, b, c)
        with pytest.raises(ConfigError, match="engine 1 is listed twice"):
            Fleet([Fleet([a, b]), b])

    def test_failed_fleet_member_has_a_row_and_the_others_serve(self, tmp_path):
        """A failed engine has its own row, the others serve, and no version in service is pruned."""
        served = [nn.Linear(3, 2) for _ in range(3)]
        loader, stubborn = stubborn_engine(served[1], url="engine 1")
        others = (InProcessEngine(served[n], url=f"engine {n}") for n in (0, 2))
        sender = tx.WeightSender(tx.DiskTransport(tmp_path), Fleet([stubborn, *others]))
        sender.update_weights(nn.Linear(3, 2))
        loader.refusing = True
        policy = nn.Linear(3, 2)
        with pytest.raises(UpdateError, match=r"the engine ran out of memory \(engine 1\)") as told:
            sender.update_weights(policy)
        rows = told.value.rows
        assert [(row.state, row.version) for row in rows] == [("paused", 1), ("serving", 2), ("serving", 2)]
        assert "ran out of memory" in rows[0].error
        assert equal(policy, served[0]) and equal(policy, served[2])
        assert all((tmp_path / f"weight_v00000{version}").is_dir() for version in (1, 2))
        loader.refusing = False
        report = sender.update_weights(policy)
        assert {(row.state, row.version) for row in report.engines} == {("serving", report.version)}
        assert all(equal(policy, model) for model in served)
        sender.shutdown()


@pytest.mark.parametrize("shared", [True, False])
def test_shutdown_of_a_replaced_sender_keeps_the_new_one_joined(shared, tmp_path, caplog):
    """A replaced sender that shuts down leaves the engine joined to the new sender."""
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
    assert equal(policy, served) and client.serving.is_set()


def test_engine_that_refuses_to_join_keeps_version_in_its_row(tmp_path):
    with FakeEngine("embedded") as fake:
        fake.label = "84"
        with tx.WeightSender(tx.DiskTransport(tmp_path), tx.connect(fake.url)) as sender:
            with pytest.raises(UpdateError, match="the weights did not reach every engine") as told:
                sender.update_weights({"unknown": torch.ones(3)})
            assert [(row.state, row.version) for row in told.value.rows] == [("serving", 84)]
            assert sender.update_weights(fake.tensors).version == 85


def test_an_engine_that_ended_between_updates_missed_the_version(tmp_path):
    with (
        FakeEngine("vllm") as well,
        FakeEngine("vllm") as ended,
        tx.WeightSender(tx.DeltaTransport(root=tmp_path), tx.connect(well.url, ended.url)) as sender,
    ):
        sender.update_weights(well.tensors)
        ended.close()
        with pytest.raises(UpdateError) as told:
            sender.update_weights(well.tensors)
        clauses = told.value.what.split("; ")
        assert clauses[0].startswith(f"{ended.url}: ")
        assert clauses[1:] == [
            f"{ended.url} did not prefetch version 2",
            "1 of 2 engines did not take version 2",
        ]
        assert [(row.state, row.version) for row in told.value.rows] == [("serving", 2), ("unreachable", 1)]
