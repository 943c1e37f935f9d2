"""Two clients of one engine, whose calls and failures mix in any order: nobody serves a part of an update.

A third one asks everything all the time. The engine is a fake one over HTTP, a module of this process, or a real one
behind a proxy.
"""

import threading
from contextlib import nullcontext, suppress

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.control.engines import RealEngine, Trainer, client, running
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint, tiny_model
from torchrl_ext.base.errors import WeightSyncError

VERSIONS = {0: 2, 1: 3}  # of each client's trainer
FAULTS = ("fail", "cut", "lose", "junk", "twice")
WHO = st.sampled_from((0, 1))
EXAMPLES = 8
PAUSE_S = 0.002  # between two rounds of questions


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    return [Trainer(root / f"trainer {who}", (version,)) for who, version in VERSIONS.items()]


class TwoClients(RuleBasedStateMachine):
    """Calls of two clients, each of which has an own trainer; subclasses say of which make the engine is."""

    port, trainers, engine = "", (), staticmethod(running)

    @initialize()
    def start(self):
        self.running = self.engine(self.port)
        self.fake = self.running.__enter__()
        self.clients = [client(self.fake) for _ in VERSIONS]
        self.over = threading.Event()
        self.asking = threading.Thread(target=self.ask)
        self.asking.start()

    def ask(self):
        """Ask everything until the run is over; faults that hit a question are not what this is about."""
        asker = client(self.fake)
        while not self.over.wait(PAUSE_S):
            for question in (asker.info, asker.look, asker.paused, asker.state, asker.members):
                with suppress(WeightSyncError):
                    question()

    def inject(self, how, **more):
        """SGLang's scheduler ends where memory is given up, or taken back, twice: no client can mend that."""
        self.fake.inject("lose" if how == "twice" and self.fake.kind == "sglang" else how, **more)

    def take(self, call, *given):
        """Make a call; what it raises is ours."""
        try:
            call(*given)
        except WeightSyncError:
            return False
        return True

    @rule(
        who=WHO,
        first=st.sampled_from((0, 0, 2, 3)),
        count=st.integers(1, 6),
        fault=st.sampled_from((None, *FAULTS)),
        impatient=st.sampled_from((None, 0, 1)),
    )
    def steps(self, who, first, count, fault, impatient):
        """Take some steps of an update in their order, whether those before them were taken or not; then some client
        is impatient, and resumes the engine."""
        steps = list(self.trainers[who].steps(self.clients[who], VERSIONS[who]).values())[first : first + count]
        for number, step in enumerate(steps):
            if fault and number == len(steps) - 1:
                self.inject(fault)
            self.take(step)
        if impatient is not None:
            self.take(self.clients[impatient].resume)

    @rule(who=WHO, call=st.sampled_from(("pause", "resume", "rehearse", "look")))
    def control(self, who, call):
        self.take(getattr(self.clients[who], call))

    @rule(
        who=WHO,
        level=st.sampled_from((0, 1, 2)),
        wake=st.sampled_from((None, ["weights"], ["kv_cache"])),
    )
    def sleep(self, who, level, wake):
        if self.port != "module" and self.take(self.clients[who].sleep, level):
            self.take(self.clients[1 - who].wake_up, wake)

    @rule(how=st.sampled_from(FAULTS), after=st.integers(0, 4))
    def fault(self, how, after):
        self.inject(how, after=after)

    @rule(who=WHO)
    def good_update(self, who):
        """Whatever was before: a good update of a client that knows nothing of it heals the engine."""
        self.fake.heal()
        self.trainers[who].update(client(self.fake), VERSIONS[who])
        assert self.fake.serving and not self.fake.wrongs and set(self.fake.versions.values()) == {VERSIONS[who]}

    @invariant()
    def nothing_but_whole_versions_is_served(self):
        if hasattr(self, "fake") and (wrongs := list(self.fake.wrongs)):
            print(wrongs)  # a second run of the same calls, by which hypothesis reports, can find an engine otherwise
            raise AssertionError(wrongs)

    def teardown(self):
        if hasattr(self, "fake"):
            self.over.set()
            self.asking.join()
            self.good_update(0)
            self.running.__exit__(None, None, None)


def run(request, port, trainers, examples=EXAMPLES, **more):
    """Let a machine run; ``more`` are further members of it."""
    exhaustive = request.config.getoption("--exhaustive")
    run_state_machine_as_test(
        type("Machine", (TwoClients,), {"port": port, "trainers": trainers, **more}),
        settings=settings(
            max_examples=300 if exhaustive else examples,
            stateful_step_count=30 if exhaustive else 20,
            suppress_health_check=list(HealthCheck),
            phases=list(Phase) if exhaustive else [Phase.generate],
        ),
    )


@pytest.mark.parametrize("port", ["vllm", "sglang", "embedded", "module"])
def test_no_order_of_calls_serves_a_part_of_an_update(port, trainers, request):
    run(request, port, trainers)


@pytest.fixture
def seeds(tmp_path):
    return [Trainer(tmp_path / f"trainer {who}", (version,), tiny_model) for who, version in VERSIONS.items()]


def run_real(request, kind, url, seeds):
    """Let a machine run on a real engine."""
    with RealEngine(kind, url, {version: tiny_model(version) for version in VERSIONS.values()}) as engine:
        seeds[0].update(client(engine), VERSIONS[0])
        run(request, kind, seeds, engine=staticmethod(lambda port: nullcontext(engine)), examples=3)


def test_nor_does_a_real_engine(request, seeds, tmp_path):
    with EmbeddedServer(tiny_checkpoint(tmp_path / "model"), dtype="float32") as server:
        run_real(request, "embedded", server.url, seeds)
