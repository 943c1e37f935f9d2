"""The requests of an update, as `exchanges.json` has them for each make: what vLLM 0.32 and SGLang 0.5.23 are sent.

Questions are left out, of which engines may be asked as many as need be; "*" stands for any value. After a change of
the protocol, ``python -m tests.control.test_exchanges`` writes the file anew.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

import torchrl_ext as tx
from tests.control.engines import Trainer, client, running, weights
from tests.control.servers import asked_of, bare
from tests.processes import WAIT_S
from torchrl_ext.base.routes import CHANNEL

FILE = Path(__file__).with_suffix("").with_name("exchanges.json")
QUESTIONS = ("state", "poll", "inspect")
VARY = ("path", "root", "probe", "run_id", "trainer", "connection", "weights_path", "model_path", "a", "b")
PARAMS = [["a", "bfloat16", [2, 3]], ["none", "float32", [0, 4]], ["b", "float32", [5]]]
LOAD = {"version": 8, "params": PARAMS, "handoff": {"calls": [[0, 1], [1, 2], [2, 3]]}}
GROUP = {"master_address": "10.0.0.1", "master_port": 29500, "world_size": 3}
GROUPS = {
    "sglang": {"make": "sglang", "group": {**GROUP, "group_name": "torchrl_ext", "backend": "gloo"}},
    "vllm": {"make": "vllm", "group": {**GROUP, "nccl_unique_id_b64": "QUJD"}},
}
PATIENT = {"timeout_s": WAIT_S, "load_timeout_s": WAIT_S}  # loops that code deltas are compiled, or loaded, first
SCENARIOS = {
    "vllm": ("vllm", {"pause_mode": "wait"}),
    "vllm, keep_cache": ("vllm", {"keep_cache": True}),
    "vllm, live": ("vllm", PATIENT | {"keep_cache": True}),
    "embedded, live": ("embedded", PATIENT),
    "sglang": ("sglang", {}),
    "sglang, keep_cache": ("sglang", {"keep_cache": True}),
    "stock vllm": ("stock-vllm", {}),
    "stock vllm by broadcasts": ("stock-vllm", {}),
    "stock sglang": ("stock-sglang", {"pause_mode": "abort"}),
    "stock sglang by broadcasts": ("stock-sglang", {}),
}


def joining(make):
    """How engines of a make join a `native` transport."""
    offer = {"bucket_bytes": 4096, **GROUPS[make]}
    return {"transport": "native", "params": [], "rank_offset": 2, "world_size": 3, "offer": offer}


def exchanges(scenario, trainer):
    """Requests of an update that change something, of two where a group is kept: route with query, and body."""
    port, settings = SCENARIOS[scenario]
    versions = (1, 2) if "broadcasts" in scenario else (2,)
    with running(port) as fake:
        engine = client(fake, **settings)
        if "live" in scenario:
            return live(fake, engine)
        if "broadcasts" in scenario:
            engine.join(joining(fake.kind))
            for version in versions:
                update = engine.update(version)
                update.stage()
                with update.begun():
                    update.load({**LOAD, "version": version})
                    update.commit()
        else:
            for version in versions:
                trainer.update(engine, version)
        if not fake.stock:
            engine.logprobs([[17, 3, 42]])
        engine.close()
        assert fake.serving and fake.label == "2" and not fake.wrongs
        return [row for call in fake.calls if (row := told(call)) is not None]


def live(fake, engine):
    """Of an update that lands while the engine serves, after a first one, which is whole."""
    trained = weights(1)
    with tempfile.TemporaryDirectory() as root:
        sender = tx.WeightSender(tx.DeltaTransport(root, keyframe_every=0), engine)
        sender.update_weights(trained)
        fake.calls.clear()
        trained["b"][1, 2] += 1
        sender.update_weights(trained)
        assert fake.serving and fake.label == "2" and not fake.wrongs
        found = [row for call in fake.calls if (row := told(call)) is not None]
        sender.shutdown()
    return found


def told(call):
    """A request in the form of the file; None for a question."""
    body = call.body
    if isinstance(body, dict):
        message = asked_of(body)
        if str(body.get("action")).startswith(CHANNEL):
            message = json.loads(body["action"].removeprefix(CHANNEL))
        if message is not None:
            if message["kind"] in QUESTIONS:
                return None
            body = bare(message)
    elif call.route.startswith("GET"):
        return None
    query = "&".join(f"{name}={value}" for name, value in call.query.items())
    return [call.route + (f"?{query}" if query else ""), json.loads(json.dumps(body, sort_keys=True))]


def masked(value, name=""):
    """The same, with "*" for what differs from run to run."""
    if isinstance(value, dict):
        return {key: masked(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [masked(one) for one in value]
    return "*" if name in VARY else value


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return Trainer(tmp_path_factory.mktemp("versions") / "trainer", (1, 2))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_update_sends_what_the_file_says(scenario, trainer):
    found = masked(exchanges(scenario, trainer))
    assert found == json.loads(FILE.read_text())[scenario]


def write():
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(Path(root) / "trainer", (1, 2))
        rows = {scenario: masked(exchanges(scenario, trainer)) for scenario in SCENARIOS}
    blocks = (
        f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, found)) + "\n]" for name, found in rows.items()
    )
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    sys.exit(write())
