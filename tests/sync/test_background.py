"""`update_weights(wait=False)`: engines get the weights as they were at the call, in order, and no error is lost."""

import random
import threading
import time
from contextlib import nullcontext

import pytest
import torch

import torchrl_ext as tx
from tests.embedded import EmbeddedServer
from tests.models import tiny_checkpoint, tiny_model
from tests.processes import finished
from tests.sync.test_each_step_fails import BEFORE_THE_PAUSE, IN_THE_PAUSE, Trained
from torchrl_ext.errors import (
    ConcurrentUpdateError,
    ConfigError,
    DeadlineError,
    EngineError,
    ManifestError,
    UpdateError,
)
from torchrl_ext.proof.outputs import Probe
from torchrl_ext.proof.scoring import score
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.testing import WAIT_S, same_bits

NAMES = ["delta", "disk", "sharded"]


def made(name, folder, **settings):
    return tx.make_transport(name, **({} if name == "sharded" else {"root": folder}), **settings)


def tensors(value):
    """Weights of two tensors, with bits that a cast or a sum would lose."""
    special = torch.tensor([float("nan"), -0.0, 1e-42, value])
    return {"a": torch.full((700,), float(value)), "b": special}


def copied(weights):
    return {name: tensor.clone() for name, tensor in weights.items()}


def equal(left, right):
    return all(same_bits(left[name], tensor) for name, tensor in right.items())


class HeldEngine(InProcessEngine):
    """An engine that takes no version before it may; it remembers what it served after each update."""

    broken = False

    def __init__(self, served, **settings):
        super().__init__(served, **settings)
        self.may, self.served, self.steps = threading.Event(), served, []
        self.may.set()

    def prefetch(self, *given):
        assert self.may.wait(WAIT_S)
        broken, self.broken = self.broken, False
        if broken:
            raise RuntimeError("the prefetch broke")
        super().prefetch(*given)

    def commit(self, version):
        super().commit(version)
        self.steps.append((version, copied(self.served)))


class Collector:
    version = 0

    def increment_version(self):
        self.version += 1


@pytest.fixture
def policy():
    return tensors(1)


@pytest.fixture(params=NAMES)
def sender(request, tmp_path, policy):
    sender = tx.WeightSender(made(request.param, tmp_path), HeldEngine(tensors(0)), finite=False)
    sender.register_model(policy)
    with sender:
        yield sender
        sender.engine.may.set()


def train(policy):
    for tensor in policy.values():
        tensor.add_(1)


def test_the_engine_gets_the_weights_of_the_call_although_the_trainer_goes_on(sender, policy):
    collector = Collector()
    sender.register_collector(collector)
    for version in (1, 2, 3):
        before, serves = copied(policy), copied(sender.engine.served)
        sender.engine.may.clear()
        future = sender.update_weights(wait=False)
        train(policy)
        assert not future.done() and equal(sender.engine.served, serves) and collector.version == version - 1
        sender.engine.may.set()
        report = future.result(WAIT_S)
        assert report.verified and report.version == sender.version == collector.version == version
        assert equal(sender.engine.served, before) and not equal(sender.engine.served, policy)
        assert 0 < report.spans["copy"] < report.spans["total"]
    assert sender.update_weights().version == 4 and equal(sender.engine.served, policy)


def test_a_part_is_sent_as_it_was(sender, policy):
    sender.update_weights(wait=False).result(WAIT_S)
    before = copied(policy)
    policy["b"].add_(1)
    wanted = copied(policy)
    future = sender.update_weights(only="b", wait=False)
    train(policy)
    assert future.result(WAIT_S).part and equal(sender.engine.served, wanted) and not equal(wanted, before)


def test_weights_that_are_given_are_copied_in_the_dtype_that_is_sent(tmp_path):
    given, held = {"a": torch.rand(9)}, {"a": torch.zeros(9, dtype=torch.bfloat16)}
    with tx.WeightSender(made("disk", tmp_path), InProcessEngine(held), dtype=torch.bfloat16) as sender:
        wanted = {"a": given["a"].bfloat16()}
        future = sender.update_weights(given, wait=False)
        given["a"].zero_()
        assert future.result(WAIT_S).verified and equal(held, wanted)


def test_the_next_update_waits_for_the_running_one_and_the_order_is_kept(sender, policy):
    first, second = copied(policy), None
    sender.engine.may.clear()
    sender.update_weights(wait=False)
    threading.Timer(0.2, sender.engine.may.set).start()
    train(policy)
    second = copied(policy)
    assert sender.update_weights().version == 2
    assert [version for version, _ in sender.engine.steps] == [1, 2]
    assert equal(sender.engine.steps[0][1], first) and equal(sender.engine.steps[1][1], second)


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(10, 50))]
)
def test_in_any_schedule_versions_are_served_in_order_as_they_were(seed, tmp_path):
    drawn, policy, sent = random.Random(seed), tensors(0), []

    class Slow(HeldEngine):
        def load(self, *given):
            time.sleep(drawn.choice([0, 0, 0.01]))
            super().load(*given)

    with tx.WeightSender(made(("delta", "disk")[seed % 2], tmp_path), engine := Slow(tensors(0))) as sender:
        sender._finite = False
        sender.register_model(policy)
        future = None
        for _ in range(6):
            train(policy)
            sent.append(copied(policy))
            wait, only = drawn.random() < 0.3, drawn.choice([None, None, "a", ["a", "b"]])
            if only == "a":
                policy["b"].copy_(sent[-2]["b"] if len(sent) > 1 else policy["b"])
                sent[-1] = copied(policy)
            future = sender.update_weights(wait=wait, only=only)
            if not wait and drawn.random() < 0.3:
                future.result(WAIT_S)
            if drawn.random() < 0.3:
                time.sleep(0.005)
    assert [version for version, _ in engine.steps] == [1, 2, 3, 4, 5, 6]
    assert all(equal(served, weights) for (_, served), weights in zip(engine.steps, sent, strict=True))


@pytest.mark.parametrize("name", ["delta", "disk"])
@pytest.mark.parametrize("step", [*BEFORE_THE_PAUSE, *IN_THE_PAUSE])
def test_a_step_that_fails_leaves_the_same_as_in_an_update_that_waits(name, step, tmp_path):
    told = []
    for wait in (True, False):
        trained = Trained(name, tmp_path / str(wait))
        trained.update("a", "b")
        if step in ("open", "connect"):
            trained.fails("prepare", "before")  # after which engines join anew
        trained.fault.step, trained.fault.moment, trained.fault.error = step, "before", RuntimeError
        with pytest.raises(UpdateError) as error:
            update = trained.sender.update_weights(wait=wait)
            if not wait:
                update.result(WAIT_S)
        told.append((str(error.value), trained.row, trained.sender.version, copied(trained.served)))
        trained.recovers()
        trained.sender.shutdown()
    (one, row, version, served), (other, *_) = told
    assert one == other and told[1][1:3] == (row, version) and equal(told[1][3], served)


@pytest.fixture
def failing(tmp_path):
    """A sender whose next update fails in the background, and nobody has asked for its error."""
    trained = Trained("delta", tmp_path)
    trained.fault.step, trained.fault.moment, trained.fault.error = "load", "before", RuntimeError
    trained.future = trained.sender.update_weights(wait=False)
    return trained


class TestErrors:
    @pytest.mark.parametrize("wait", [True, False])
    def test_the_next_update_raises_it_once_and_sends_nothing(self, failing, wait, caplog):
        with pytest.raises(UpdateError, match="the load broke"):
            failing.sender.update_weights(wait=wait)
        assert "an update in the background failed: RuntimeError: the load broke" in caplog.text
        assert failing.sender.version == 0
        failing.recovers()

    def test_the_shutdown_raises_it_and_shuts_down(self, failing):
        with pytest.raises(UpdateError, match="the load broke"):
            failing.sender.shutdown()
        assert not failing.sender.check_connection()
        failing.sender.shutdown()

    def test_the_end_of_the_block_raises_it_unless_another_error_leaves_the_block(self, failing, tmp_path, caplog):
        with pytest.raises(UpdateError, match="the load broke"), failing.sender:
            pass
        trained = Trained("disk", tmp_path / "other")
        trained.fault.step, trained.fault.moment, trained.fault.error = "load", "before", RuntimeError
        with pytest.raises(ZeroDivisionError), trained.sender:
            trained.sender.update_weights(wait=False)
            raise ZeroDivisionError
        assert "was shut down after another error" in caplog.text

    @pytest.mark.parametrize("ask", ["result", "exception"])
    def test_the_caller_who_took_it_from_the_future_is_not_given_it_again(self, failing, ask):
        with pytest.raises(UpdateError) if ask == "result" else nullcontext():
            getattr(failing.future, ask)(WAIT_S)
        failing.recovers()
        failing.sender.shutdown()

    def test_a_wait_for_the_future_that_ends_early_takes_no_error(self, sender, policy):
        sender.engine.broken = True
        sender.engine.may.clear()
        future = sender.update_weights(wait=False)
        with pytest.raises(TimeoutError):
            future.result(0.01)
        assert not future.cancel()
        sender.engine.may.set()
        with pytest.raises(UpdateError, match="the prefetch broke"):
            sender.update_weights()
        assert sender.update_weights().verified and equal(sender.engine.served, policy)

    def test_arguments_that_are_wrong_are_refused_at_once(self, sender):
        with pytest.raises(ManifestError, match="no tensor or module of the update is called"):
            sender.update_weights(only=["no such tensor"], wait=False)
        with pytest.raises(ConfigError, match="holds no weights"):
            sender.update_weights(3, wait=False)
        assert sender.update_weights(wait=False).result(WAIT_S).version == 1

    @pytest.mark.parametrize("name", ["collective", "ipc", "memory"])
    def test_other_transports_name_the_ones_that_can(self, name):
        sender = tx.WeightSender(tx.make_transport(name), InProcessEngine(tensors(0)))
        with sender, pytest.raises(ConfigError, match="disk, delta, sharded") as told:
            sender.update_weights(tensors(1), wait=False)
        assert name in told.value.what

    def test_a_trainer_with_several_ranks_is_refused(self, tmp_path):
        sender = tx.WeightSender(made("disk", tmp_path), rank=1, engine="127.0.0.1:1")
        with pytest.raises(ConfigError, match="one trainer rank"):
            sender.update_weights(tensors(1), wait=False)


class TestWaits:
    @pytest.fixture
    def stuck(self, tmp_path):
        """A sender whose update waits for its engine, longer than the transport's deadline."""
        sender = tx.WeightSender(made("disk", tmp_path, timeout_s=0.2), HeldEngine(tensors(0)), finite=False)
        sender.engine.may.clear()
        sender.future = sender.update_weights(tensors(1), wait=False)
        yield sender
        sender.engine.may.set()
        sender.future.exception(WAIT_S)

    def test_an_update_that_does_not_end_is_waited_for_until_the_deadline_and_goes_on(self, stuck):
        with pytest.raises(DeadlineError, match=r"in the background did not end within 0\.2 s.*goes on"):
            stuck.update_weights(tensors(2))
        stuck.engine.may.set()
        assert stuck.future.result(WAIT_S).version == 1
        assert stuck.update_weights(tensors(2)).version == 2
        stuck.shutdown()

    def test_a_shutdown_ends_by_the_deadline(self, stuck):
        began = time.monotonic()
        with pytest.raises(DeadlineError):
            stuck.shutdown()
        assert time.monotonic() - began < 10

    def test_a_shutdown_waits_for_the_running_one(self, sender, policy):
        before = copied(policy)
        sender.engine.may.clear()
        future = sender.update_weights(wait=False)
        threading.Timer(0.2, sender.engine.may.set).start()
        sender.shutdown()
        assert future.done() and equal(sender.engine.served, before)

    def test_what_belongs_to_the_running_one_is_refused_to_others(self, sender, policy, tmp_path):
        sender.engine.may.clear()
        future = sender.update_weights(wait=False)
        other = tx.WeightSender(made("disk", tmp_path / "other"), sender.engine)
        for wait in (True, False):
            with pytest.raises(ConcurrentUpdateError, match="another sender of this process is updating"):
                other.update_weights(policy, wait=wait)
        with pytest.raises(ConcurrentUpdateError):
            sender.init_all_workers_group()
        with pytest.raises(ConcurrentUpdateError):
            sender._transport.send_weights(policy)
        sender.engine.may.set()
        assert future.result(WAIT_S).verified
        assert other.update_weights(policy, wait=False).result(WAIT_S).verified

    def test_a_second_thread_is_refused_as_ever_or_comes_after(self, sender, policy):
        found = []

        def update():
            try:
                found.append(sender.update_weights(policy, wait=False).result(WAIT_S).version)
            except ConcurrentUpdateError:
                found.append(None)

        threads = [threading.Thread(target=update) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        versions = [version for version, _ in sender.engine.steps]
        assert len(found) == 6 and versions == sorted({*found} - {None}) == list(range(1, 1 + len(versions)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), 1)


@torch.no_grad()
def step(model):
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn(parameter.shape)


class TestServers:
    @pytest.mark.parametrize(
        "name", ["disk", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES if name != "disk")]
    )
    def test_outputs_are_compared_with_those_of_the_model_that_was_sent(self, name, checkpoint, tmp_path):
        model, prompts = tiny_model(1), ((3, 5, 7, 11),)
        with EmbeddedServer(checkpoint) as server, tx.connect(server.url) as engine:
            settings = {"verify": "outputs", "probe": Probe(prompts=prompts), "max_gap": 1e-4}
            with tx.WeightSender(made(name, tmp_path), engine, **settings) as sender:
                for _ in range(2):
                    step(model)
                    reference = score(model, prompts)
                    future = sender.update_weights(model, wait=False)
                    step(model)
                    assert future.result(WAIT_S).proof == "outputs"
                    (one,) = engine.each()
                    assert one.logprobs(prompts)[0] == pytest.approx(reference[0], abs=1e-4)

    @pytest.mark.parametrize("name", NAMES)
    def test_an_engine_that_is_killed_meanwhile_is_an_error_that_the_next_call_raises(self, name, checkpoint, tmp_path):
        model = tiny_model(1)
        transport = made(name, tmp_path, timeout_s=5.0)
        with EmbeddedServer(checkpoint) as server, tx.WeightSender(transport, tx.connect(server.url)) as sender:
            sender.update_weights(model)
            prepare = transport.prepare

            def killed(*given):
                server.stop()
                return prepare(*given)

            transport.prepare = killed
            sender.update_weights(model, wait=False)
            with pytest.raises(EngineError):
                sender.update_weights(model)
            assert sender.version == 1


RUNNING = """
import sys, threading, torch, torchrl_ext as tx
from torchrl_ext.sync.engines.inprocess import InProcessEngine

running = threading.Event()

class Stuck(InProcessEngine):
    def prefetch(self, *given):
        running.set()
        threading.Event().wait(float(sys.argv[2]))
        super().prefetch(*given)

held = {"a": torch.zeros(4)}
sender = tx.WeightSender(tx.make_transport("disk", root=sys.argv[1]), Stuck(held))
if sys.argv[3] == "with":
    with sender:
        sender.update_weights({"a": torch.ones(4)}, wait=False)
    print(held["a"].sum().item())
else:
    future = sender.update_weights({"a": torch.ones(4)}, wait=False)
    assert running.wait(60)
"""


@pytest.mark.parametrize(("wait_s", "how", "said"), [(1000, "without", ""), (0.5, "with", "4.0\n")])
def test_a_process_ends_while_an_update_runs(wait_s, how, said, tmp_path):
    done = finished(RUNNING, tmp_path, wait_s, how, timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_ends_are_closed_with_their_block(tmp_path):
    policy, held = tensors(1), tensors(0)
    with tx.DiskTransport(tmp_path) as trainer, tx.WeightReceiver(held, tx.DiskTransport(tmp_path)) as receiver:
        trainer.send_weights(policy)
        assert receiver.poll_and_apply(WAIT_S) and trainer.check_connection()
    assert not trainer.check_connection()
    with InProcessEngine(held) as engine, tx.WeightSender(tx.make_transport("memory"), engine, finite=False) as sender:
        assert sender.update_weights(policy).verified
    assert not sender.check_connection()
    with tx.AdapterSender(tmp_path, engine) as adapters:
        assert adapters is not None
