"""An engine that shares a machine with its trainer: weights by shared memory, and sleep while the trainer works."""

import gc
import os
from pathlib import Path

import httpx
import pytest

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import PROMPT, greedy, tiny_model
from tests.processes import files_of, maps_of
from tests.sync.by_hand import invitation, prepared, told
from torchrl_ext.base.errors import EngineError
from torchrl_ext.base.messages import Finish, Start, State
from torchrl_ext.compat.skyrl import RemoteInferenceClient
from torchrl_ext.control.requests.client import InferenceClient

BUCKET_BYTES = 1 << 20
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 512}
"""19 M parameters: much more than a staging buffer."""


@pytest.fixture
def engine(server):
    engine = tx.make_engine("embedded", url=server.url)
    yield engine
    engine.close()


@pytest.fixture
def sender(engine):
    sender = tx.WeightSender(tx.make_transport("ipc", bucket_bytes=BUCKET_BYTES), engine)
    yield sender
    sender.update_weights(tiny_model(0))  # whatever a test left there
    sender.shutdown()


def tokens(server, count=32, **sampling):
    client = InferenceClient(server.url, timeout_s=60)
    (found,) = client.generate([PROMPT], max_tokens=count, temperature=0.0, **sampling)
    return list(found.token_ids)


def ask(server, route):
    return httpx.get(f"{server.url}{route}").json()


def say(server, message):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        return told(http, message)


def asleep(server):
    return say(server, State())["asleep"]


def resident_bytes(pid, row="VmRSS:"):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(row))


def segments(pid):
    """Staging buffers that a process maps or holds open."""
    return maps_of(pid).count("memfd:torchrl_ext") + sum("memfd:torchrl_ext" in file for file in files_of(pid))


def test_many_syncs_match_a_cold_load_and_leak_no_segments(server, sender):
    gc.collect()
    before = segments("self")  # which ends of other tests in this process still hold
    for seed in range(1, 21):
        model = tiny_model(seed)
        report = sender.update_weights(model)
        assert report.verified
        if seed % 10 == 0:
            assert tokens(server) == greedy(model)
    assert segments(server.pid) == 0
    sender.shutdown()
    assert segments("self") <= before
    assert not [name for name in os.listdir("/dev/shm") if "torchrl_ext" in name]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_a_sync_takes_a_buffer_and_level_two_gives_weights_back(tmp_path):
    model = tiny_model(0, **WIDE)
    model.save_pretrained(tmp_path / "wide")
    nbytes, more = sum(parameter.nbytes for parameter in model.parameters()), []
    with EmbeddedServer(tmp_path / "wide") as server:
        engine = tx.make_engine("embedded", url=server.url)
        with tx.WeightSender(tx.make_transport("ipc", bucket_bytes=8 << 20), engine) as sender:
            sender.update_weights(model)  # loads code as well; none of the weights is a page of a file then
            for _ in range(5):  # what else lives in the process only ever adds to a round
                Path(f"/proc/{server.pid}/clear_refs").write_text("5")
                before = resident_bytes(server.pid)
                sender.update_weights(model)
                more.append(resident_bytes(server.pid, "VmHWM:") - before)
            assert min(more) <= 8 << 20 < nbytes
            before = resident_bytes(server.pid)
            engine.sleep(2)
            assert before - resident_bytes(server.pid) > 0.8 * nbytes
            sender.update_weights(model)
            assert resident_bytes(server.pid) - before < 0.2 * nbytes


def test_colocated_steps_work_from_separate_clients(server, sender):
    """`RemoteInferenceClient` sleeps and wakes, `WeightSender` updates by its own clients: SkyRL's order."""
    client = RemoteInferenceClient(proxy_url=server.url, server_urls=[server.url], kind="embedded")
    sender.update_weights(tiny_model(3))
    for seed in (4, 5):
        model = tiny_model(seed)
        assert client.run(client.sleep(level=2)) == {server.url: {"status": 200, "body": {"status": "paused"}}}
        with pytest.raises(EngineError, match="holds no weights"):
            client.run(client.resume())
        client.run(client.wake_up(tags=["weights"]))
        assert asleep(server) == ["kv_cache"] and ask(server, "/is_paused")["is_paused"]
        report = sender.update_weights(model)
        assert client.run(client.wake_up(tags=["kv_cache"])) == {
            server.url: {"status": 200, "body": {"status": "serving"}}
        }
        assert report.verified and tokens(server) == greedy(model)
    client.close()


def test_an_update_of_only_some_weights_does_not_wake_it(server, engine, sender, tmp_path):
    sender.update_weights(tiny_model(3))
    engine.sleep(2)
    engine.wake_up(["weights"])
    first, *_ = tiny_model(4).state_dict().items()
    with tx.DiskTransport(tmp_path) as transport:
        answers = [say(server, invitation(transport, tiny_model(4))), say(server, Start())]
        load = prepared(transport, dict([first]), 9)
        answers += [say(server, message) for message in (load, Finish(version=9))]
    assert "missing" in answers[-1]["error"]["what"] and not any("error" in one for one in answers[:-1]), answers
    assert ask(server, "/is_paused")["is_paused"]
