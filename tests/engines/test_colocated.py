"""An engine that shares a machine with its trainer: weights by shared memory, and sleep while the trainer works."""

from pathlib import Path

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

BUCKET_BYTES = 8 << 20
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 512}
"""19 M parameters: much more than a staging buffer."""


def sending(url):
    return tx.WeightSender(tx.make_transport("ipc", bucket_bytes=BUCKET_BYTES), tx.make_engine("embedded", url=url))


def resident_bytes(pid, row="VmRSS:"):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(row))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_a_sync_takes_a_buffer_and_level_two_gives_weights_back(tmp_path):
    model = tiny_model(0, **WIDE)
    model.save_pretrained(tmp_path / "wide")
    nbytes, more = sum(parameter.nbytes for parameter in model.parameters()), []
    with EmbeddedServer(tmp_path / "wide") as server, sending(server.url) as sender:
        sender.update_weights(model)  # loads code as well; none of the weights is a page of a file then
        for _ in range(5):  # what else lives in the process only ever adds to a round
            Path(f"/proc/{server.pid}/clear_refs").write_text("5")
            before = resident_bytes(server.pid)
            sender.update_weights(model)
            more.append(resident_bytes(server.pid, "VmHWM:") - before)
        assert min(more) <= BUCKET_BYTES < nbytes
        before = resident_bytes(server.pid)
        sender.engine.sleep(2)
        assert before - resident_bytes(server.pid) > 0.8 * nbytes
        sender.update_weights(model)
        assert resident_bytes(server.pid) - before < 0.2 * nbytes
        files = [*files_of(server.pid), maps_of(server.pid)]
        assert not any("memfd:torchrl_ext" in file for file in files)  # the buffer is given back


def test_colocated_steps_work_from_separate_clients(server, http):
    """`RemoteInferenceClient` sleeps and wakes, `WeightSender` updates by its own clients: SkyRL's order."""
    client = RemoteInferenceClient(proxy_url=server.url, server_urls=[server.url], kind="embedded")

    def answered(status):
        return {server.url: {"status": 200, "body": {"status": status}}}

    requests = InferenceClient(server.url, timeout_s=60)
    with sending(server.url) as sender:
        for seed in (4, 5):
            assert client.run(client.sleep(level=2)) == answered("paused")
            with pytest.raises(EngineError, match="holds no weights"):
                client.run(client.resume())
            client.run(client.wake_up(tags=["weights"]))
            assert told(http, State())["asleep"] == ["kv_cache"] and http.get("/is_paused").json()["is_paused"]
            assert sender.update_weights(tiny_model(seed)).verified
            assert client.run(client.wake_up(tags=["kv_cache"])) == answered("serving")
            (found,) = requests.generate([PROMPT], max_tokens=32, temperature=0.0)
            assert list(found.token_ids) == greedy(tiny_model(seed))


def test_an_update_of_only_some_weights_does_not_wake_it(server, http, tmp_path):
    with sending(server.url) as sender, tx.DiskTransport(tmp_path) as transport:
        sender.engine.sleep(2)
        sender.engine.wake_up(["weights"])
        first, *_ = tiny_model(4).state_dict().items()
        answers = [told(http, invitation(transport, tiny_model(4))), told(http, Start())]
        load = prepared(transport, dict([first]), 9)
        answers += [told(http, message) for message in (load, Finish(version=9))]
        assert "missing" in answers[-1]["error"]["what"] and not any("error" in one for one in answers[:-1]), answers
        assert http.get("/is_paused").json()["is_paused"]
        assert sender.update_weights(tiny_model(0)).verified
