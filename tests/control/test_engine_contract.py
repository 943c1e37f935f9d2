"""What every port of engines promises of each step, whatever goes wrong with each of its requests.

A step that fails says so with its name and the engine's; an engine whose weights were not touched serves again, one
whose weights were touched stays paused until they are whole, and the next good update heals it.
"""

import re
import threading
from contextlib import ExitStack, suppress
from functools import partial

import pytest

import torchrl_ext as tx
from tests.control.engines import PORTS, Trainer, client, running, weights
from tests.fakes import FakeEngine
from torchrl_ext.base.errors import ConfigError, EngineError, EngineRefusedError, WeightSyncError

FIRST, NEXT, RIVAL = 1, 2, 7
UPDATE = ("connect", "prefetch", "begin", "load", "verify", "commit")
OTHERS = ("pause", "resume", "sleep", "wake_up", "rehearse")
FAULTS = ("fail", "cut", "lose", "junk", "twice", "between")  # and "hang", which takes its time
MOST = 40  # more than the requests of any step
NAMED = {  # words of errors, beside "did not"
    "connect": "join the transport|describe itself",
    "prefetch": "prefetch|wake",
    "begin": "pause|drop|wake|start",
    "load": "load",
    "verify": "keep the digests",
    "commit": "finish|resume",
    "pause": "pause",
    "resume": "resume",
    "sleep": "sleep|pause",
    "wake_up": "wake up",
    "rehearse": "rehearse|wake|compute|pause|resume",
}


JUNK = [
    "words",
    None,
    5,
    [[3]],
    {},
    {"message": 3},
    {"message": "5 | {}"},
    {"message": '{"needed": 3, "proof": "none that is known", "working": [], "flushed": null}'},
    {"message": '{"torchrl_ext": 1, "asleep": 5, "empty": "x", "paused": []}'},
    {"loads": [3, {"num_waiting_reqs": "many"}]},
    {"world_size": "many"},
    {"weight_version": []},
    {"is_sleeping": True, "tags": 7},
    {"is_sleeping": "maybe", "tags": [[1], None]},
    {"is_paused": {}},
    {"vllm_config": {"model_config": 3, "kv_transfer_config": {"kv_connector_extra_config": 4}}},
    {"prompt_logprobs": [None, {"4": 3}]},
    {"answer": {"needed": 1}},
    {"status": []},
    {"success": "?"},
]
"""Answers that no engine gives."""

DEADLY = {("sglang", step, fault) for step in ("sleep", "wake_up") for fault in ("twice", "between")}
"""SGLang's scheduler ends where memory is given up, or taken back, twice: no client can mend that."""


START = {port: "start" for port in ("vllm", "embedded")}
START |= {"sglang": "POST /begin_weight_update", "stock-vllm": "POST /pause", "stock-sglang": "POST /flush_cache"}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    return Trainer(root / "trainer", (FIRST, NEXT)), Trainer(root / "rival", (RIVAL,))


def prepared(engine, fake, step, trainer):
    """Bring an engine to where ``step`` comes next; return the calls from there on."""
    if step in UPDATE:
        steps = trainer.steps(engine, NEXT)
        for name in UPDATE[: UPDATE.index(step)]:
            steps.pop(name)()
        return steps
    trainer.steps(engine, NEXT)["connect"]()
    {"resume": engine.pause, "wake_up": lambda: engine.sleep(1)}.get(step, lambda: None)()
    fake.unrehearsed = step == "rehearse"
    return {step: getattr(engine, step)}


def scenario(fake, step, fault, number, trainers):
    """Let one request of a step of an engine at `FIRST` go wrong; return whether the step makes as many."""
    trainer, rival = trainers
    engine = client(fake, **({"timeout_s": 0.5, "load_timeout_s": 0.5} if fault == "hang" else {}))
    steps = prepared(engine, fake, step, trainer)
    before, error, made = len(fake.calls), None, 0
    fake.inject(
        "pass" if fault == "between" else fault,
        after=number,
        junk=JUNK[number % len(JUNK)],
        first=(lambda: rival.update(client(fake), RIVAL)) if fault == "between" else None,
    )
    for name, call in steps.items():
        try:
            call()
        except WeightSyncError as failure:
            error = failure
            break
        finally:
            if name == step:
                fake.heal()
                made = len(fake.calls) - before
    if made > number:
        where = f"{fault} at request {number} of {step}, {fake.calls[before + number].route}: {error}"
        check(fake, step, fault, error, where)
    heal(fake, trainer, f"after {fault} at request {number} of {step}: {error}")
    return made > number


def check(fake, step, fault, error, where):
    """Hold an engine, and what its client said, against the promises."""
    versions = set(fake.versions.values())
    assert not fake.wrongs, (where, fake.wrongs)
    if error is None:
        assert step not in UPDATE or (fake.serving and versions in ({NEXT}, {RIVAL})), (where, fake.versions)
    elif fault == "between":
        assert fake.whole or not fake.serving, where
    else:
        assert fake.whole or "part of an update" in str(error) or step == "begin", where
        assert fake.url in str(error) and re.search(f"did not ({NAMED[step]})", str(error)), where
        if step in ("connect", "prefetch", "begin", "pause", "rehearse"):  # no weight was written
            excused = "did not resume" in str(error) or (step == "rehearse" and "still be working" in str(error))
            assert versions == {FIRST} and (fake.serving or not fake.whole or excused), where
        else:
            assert not fake.serving or (fake.whole and len(versions) == 1), (where, fake.versions)


def heal(fake, trainer, where=""):
    """Send the next good update by a new client."""
    fake.unrehearsed = False
    trainer.update(client(fake), FIRST)
    assert fake.serving and fake.whole and set(fake.versions.values()) == {FIRST} and not fake.wrongs, where
    assert all((tensor == FIRST).all() for tensor in fake.tensors.values()), where


def follows(port, step):
    if step in ("verify", "rehearse", "sleep", "wake_up"):
        return not port.startswith("stock") and (port, step) not in {("module", "sleep"), ("module", "wake_up")}
    return True


STEPS = [(port, step) for port in PORTS for step in (*UPDATE, *OTHERS) if follows(port, step)]


@pytest.mark.parametrize(
    "way", ["in turn", *(pytest.param(fault, marks=pytest.mark.exhaustive) for fault in (*FAULTS, "hang"))]
)
@pytest.mark.parametrize(("port", "step"), STEPS)
def test_each_request_of_a_step_goes_wrong(port, step, way, trainers):
    turn = STEPS.index((port, step))
    with running(port) as fake:
        heal(fake, trainers[0])
        for number in range(MOST):
            fault = FAULTS[(number + turn) % len(FAULTS)] if way == "in turn" else way
            if (port, step, fault) not in DEADLY and not scenario(fake, step, fault, number, trainers):
                return
        assert way != "in turn" and (port, step, way) in DEADLY, "a step of more requests"


@pytest.mark.parametrize("step", ["begin", "load", "commit", "pause"])
@pytest.mark.parametrize("port", ["vllm", "sglang"])
def test_an_answer_never_comes(port, step, trainers):
    with running(port) as fake:
        heal(fake, trainers[0])
        for number in (0, 1):
            scenario(fake, step, "hang", number, trainers)


@pytest.mark.parametrize("port", PORTS)
def test_engine_paused_by_others_stays_paused_if_start_fails(port, trainers):
    with running(port) as fake:
        heal(fake, trainers[0])
        engine = client(fake)
        steps = prepared(engine, fake, "begin", trainers[0])
        client(fake).pause()
        fake.inject("fail", START.get(port, "start"))
        with pytest.raises(EngineError, match="it fails here") as caught:
            steps["begin"]()
        assert not fake.serving and fake.whole and caught.value.rows[0].state == "paused"
        client(fake).resume()
        assert fake.serving


@pytest.mark.parametrize("port", ["vllm", "embedded", "sglang"])
def test_partial_version_of_a_rival_sender_is_never_served(port, trainers):
    """Neither a failed pause nor a resume makes an engine serve a part of another sender's version."""
    with running(port) as fake:
        heal(fake, trainers[0])
        rival = trainers[1].steps(client(fake), RIVAL)

        def lands_a_part():
            for step in ("connect", "prefetch", "begin", "load"):
                rival[step]()

        fake.inject("fail", PAUSES[port], first=lands_a_part)
        with pytest.raises(WeightSyncError, match="a part of another sender's version"):
            prepared(client(fake), fake, "begin", trainers[0])["begin"]()
        with pytest.raises(EngineRefusedError, match="holds a part of a version"):
            client(fake).resume()
        assert not fake.serving and not fake.wrongs
        rival["commit"]()
        assert fake.serving and set(fake.versions.values()) == {RIVAL}


@pytest.mark.parametrize("port", [port for port in PORTS if port != "module"])
def test_whatever_an_engine_answers_the_error_is_ours(port, trainers):
    with running(port) as fake:
        for number, junk in enumerate(JUNK):
            engine = client(fake, load_timeout_s=0.05, **({"flush_timeout_s": 0.05} if fake.kind == "sglang" else {}))
            steps = [step for name, step in trainers[0].steps(engine, NEXT).items() if name != "verify"]
            others = [partial(engine.logprobs, [[3, 4]]), partial(engine.rehearse)]
            others += [partial(engine.sleep, 2)] if follows(port, "sleep") else []
            calls = (engine.info, *steps, *others, engine.pause, engine.resume, engine.wake_up, engine.look)
            for turn, call in enumerate(calls):
                fake.inject("junk", junk=junk, after=(number + turn) % 3)
                with suppress(WeightSyncError):
                    call()
                fake.heal()
        fake.wrongs.clear()  # to some lies a client has to listen
        heal(fake, trainers[0])


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("vllm", {"pause_mode": "freeze"}, "abort, wait, keep"),
        *(("vllm", {"pause_mode": mode, "keep_cache": True}, "keep_cache means nothing") for mode in ("wait", "abort")),
        ("sglang", {"pause_mode": "wait"}, "abort, retract, in_place"),
        ("sglang", {"pause_mode": "retract", "keep_cache": True}, "in_place"),
        ("inprocess", {"pause_mode": "abort", "keep_cache": True}, "pause mode 'abort'"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind, settings, words):
    where = {"engine": weights(0)} if kind == "inprocess" else {"url": "host:1"}
    with pytest.raises(ConfigError, match=words):
        tx.make_engine(kind, **where, **settings)


RESUME = {"vllm": "POST /resume", "embedded": "POST /resume", "sglang": "POST /continue_generation"}


@pytest.mark.parametrize(
    ("status", "words"),
    [(200, "was asked to resume but reports that it is paused"), (500, "may still be paused: ")],
)
@pytest.mark.parametrize("port", RESUME)
def test_an_engine_that_does_not_resume_is_not_said_to_serve(port, status, words, trainers):
    with running(port) as fake:
        heal(fake, trainers[0])
        engine = client(fake)
        steps = prepared(engine, fake, "begin", trainers[0])
        fake.answers[RESUME[port]] = status, {"status": "resumed", "message": "done"}
        fake.inject("fail", START[port])
        with pytest.raises(EngineError, match=f"it fails here.*{words}") as caught:
            steps["begin"]()
        assert not fake.serving and caught.value.rows[0].state == "paused"
        fake.answers.clear()
        heal(fake, trainers[0])


@pytest.mark.parametrize(("how", "holds"), [("fail", "is paused and holds"), ("hang", "may hold"), ("cut", "may hold")])
def test_a_sender_says_only_what_an_engine_that_answers_holds(how, holds, trainers):
    with running("embedded") as fake:
        engine = client(fake, **({"timeout_s": 0.5, "load_timeout_s": 0.5} if how == "hang" else {}))
        steps = prepared(engine, fake, "load", trainers[0])
        for _ in range(2):  # a request whose connection breaks may be sent once more
            fake.inject(how, "load")
        with pytest.raises(WeightSyncError) as caught:
            steps["load"]()
        assert f"{holds} part of an update" in caught.value.state


@pytest.mark.parametrize("port", RESUME)
def test_another_engine_that_resumes_did_not_take_the_version(port, trainers):
    with running(port) as fake, running(port) as other:
        engine = client(fake)
        steps = prepared(engine, fake, "commit", trainers[0])
        resume = engine.port.resume

        def moved():  # the name means another engine now
            engine.port.http = client(other).port.http
            resume()

        engine.port.resume = moved
        with pytest.raises(EngineRefusedError, match=r"no sender has joined.*did not resume") as caught:
            steps["commit"]()
        assert other.serving and set(other.versions.values()) == {0}
        assert not fake.serving and set(fake.versions.values()) == {NEXT}
        assert [(row.state, row.version) for row in caught.value.rows] == [("unreachable", None)]


@pytest.mark.parametrize("port", RESUME)
def test_look_reports_the_state_that_the_engine_answers(port, trainers):
    with running(port) as fake:
        engine = client(fake)
        trainers[0].steps(engine, NEXT)["connect"]()
        client(fake).pause()
        assert [row.state for row in engine.look()] == ["paused"]
        client(fake).resume()
        for how, state in (("pass", "serving"), ("fail", "paused"), ("cut", "unreachable")):
            for _ in range(2):  # a question whose connection breaks is asked once more
                fake.inject(how)
            found = engine.look()
            fake.heal()
            assert found[0].state == state


MANY = 64
PAUSES = {"vllm": "POST /pause", "embedded": "POST /pause", "sglang": "POST /pause_generation"}


def test_all_engines_of_a_fleet_are_paused_concurrently():
    """Each of them pauses only when the request of the last one is there, too."""
    with ExitStack() as ends:
        fakes = [ends.enter_context(FakeEngine("embedded")) for _ in range(MANY)]
        fleet = tx.connect(*(fake.url for fake in fakes))
        together = threading.Barrier(MANY)
        for fake in fakes:
            fake.inject("pass", PAUSES["embedded"], first=lambda: together.wait(30))
        assert fleet.pause()
        assert not any(fake.serving for fake in fakes)
        fleet.resume()
        assert all(fake.serving for fake in fakes)
        fleet.close()
