"""Where ranks meet: addresses, secrets, notes that say anything, and locks of the process."""

import re
import sqlite3
from contextlib import closing

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.group.members import WAIT_S, beside, group, member, same, weights
from tests.hostile import refused_or_right, worse_json
from tests.processes import calling, finished
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, TransportError, WeightSyncError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group import group as group_module
from torchrl_ext.data.group.group import Member
from torchrl_ext.data.group.store import HostedStore, RemoteStore
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport


@pytest.fixture(scope="module")
def kept():
    """The trainer's store and a worker's, for tests that leave notes of their own."""
    with closing(HostedStore("127.0.0.1", 0, "s")) as trainer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "LAST_WORDS_S", 0.0)  # nobody reads what is refused here
        with closing(RemoteStore("127.0.0.1", trainer.port, "s", Deadline(WAIT_S))) as worker:
            yield trainer, worker


# those that may not


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_trainer_on_loopback_address_listens_on_loopback_only(address):
    trainer = VLLMCollectiveTransport(address, 0, 0, None, "cpu")
    port = trainer.open(1, (), Deadline(WAIT_S)).info["master_port"]
    found = [one.laddr.ip for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port]
    assert found == ["127.0.0.1"]
    trainer.shutdown()


@pytest.mark.parametrize(
    ("address", "secret", "private", "warned"),
    [
        ("0.0.0.0", "", False, 1),
        ("0.0.0.0", "rose", False, 0),
        ("127.0.0.1", "", False, 0),
        ("0.0.0.0", "", True, 0),  # a control layer passes a secret on
    ],
)
def test_trainer_without_secret_warns_unless_on_loopback(caplog, address, secret, private, warned):
    own = Member(address, 0, secret, device=torch.device("cpu"), backend="gloo", timeout_s=WAIT_S)
    own.open(2, private=private)
    own.close()
    assert caplog.text.count("set secret=") == warned


def test_each_trainer_draws_a_random_secret_for_its_workers():
    trainers = [member(0, 0, None) for _ in range(2)]
    infos = [trainer.open(1, (), Deadline(WAIT_S)).info for trainer in trainers]
    assert len({info["secret"] for info in infos}) == 2 and all(len(info["secret"]) >= 32 for info in infos)
    for trainer in trainers:
        trainer.shutdown()


# notes that say anything


def note(**changes):
    own = {"world_size": 2, "process": "pid 1", "params": (ParamMeta("p", torch.int8, (3,)),), "backend": "gloo"}
    return group_module._Note(**{**own, "library": "torch", **changes})


def admit(kept):
    return group_module._admit(kept[0], 2, note(), Deadline(WAIT_S))


def wait_for_admission(kept):
    return group_module._wait_for_admission(kept[1], 1, note(), Deadline(WAIT_S))


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_any_note_of_the_other_end_gives_an_error_or_a_group(kept, draw):
    answer = draw.choice([{"peers": ["a", "pid 1"]}, {"kind": "ConfigError", "error": "no"}])
    for key, value, read in (("note/1", note().to_json(), admit), ("answer", answer, wait_for_admission)):
        damaged = worse_json(value, draw)
        kept[0].set(key, "null" if damaged is None else damaged)
        kept[0].set("ready/1", True)
        refused_or_right(read, kept)


def test_trainer_answer_raises_only_known_errors_in_workers(kept):
    others = dict.fromkeys(("WeightSyncError", "annotations", "__builtins__", "Any", ""), TransportError)
    for kind, raised in {"ConfigError": ConfigError, **others}.items():
        kept[0].set("answer", {"kind": kind, "error": "boo"})
        with pytest.raises(raised, match="the trainer formed no group: boo"):
            wait_for_admission(kept)
    kept[0].set("answer", {"peers": ["the trainer", "pid 2"]})  # of another process that has this one's rank
    with pytest.raises(ConfigError, match="pid 2 is rank 1 of world_size 2"):
        wait_for_admission(kept)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": -1}, r"an announcement of the trainer, rank 0 \(pid \d+ on .*version"),
        ({"params": [["p", "int8", [-3]]]}, r"params\[0\]"),
        ({"handoff": "7"}, r"the handoff of weights version 1 is malformed: .*handoff"),
    ],
)
def test_unreadable_handoff_fails_worker_and_trainer_at_once(changes, words, monkeypatch):
    own = HostedStore.set

    def told(self, key, value, **how):
        own(self, key, {**value, **changes} if key.startswith("announced/") else value, **how)

    monkeypatch.setattr(HostedStore, "set", told)
    with group(2) as (trainer, worker):
        sent, received = beside(lambda: trainer.send_weights("policy", weights()), worker.receive_weights)
        assert isinstance(received, WeightSyncError) and re.search(words, str(received))
        assert isinstance(sent, TransportError) and re.search(words, str(sent))
        assert re.search(r"rank 1 \(pid \d+ on .*\) could not read a handoff: ", str(sent))
        assert not trainer.check_connection() and not worker.check_connection()


# what ranks must have in common


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 3}, "3 as world_size, and rank 0 has 2"),
        ({"backend": "nccl"}, "nccl as backend, and rank 0 has gloo"),
        ({"library": "nccl4py"}, "nccl4py as the library that carries its bytes, and rank 0 has torch"),
        ({"params": (ParamMeta("q", torch.int8, (3,)),)}, "nothing as parameter 'p', and rank 0 has p int8"),
    ],
)
def test_ranks_that_disagree_are_named_with_what_each_has(changes, words, kept):
    kept[0].set("note/1", note(**changes).to_json())
    with pytest.raises(WeightSyncError, match=f"rank 1 has {words}"):
        admit(kept)


def writer(path):
    database = sqlite3.connect(path, timeout=0, isolation_level=None)
    database.execute("begin immediate")
    return database


def test_group_keeps_sqlite_lock_of_its_process(tmp_path):
    path = str(tmp_path / "runs.db")
    with closing(writer(path)), group(2) as (trainer, worker):
        assert "database is locked" in finished(calling(writer, path)).stderr
        _, received = beside(lambda: trainer.send_weights("policy", weights()), worker.receive_weights)
        assert same(received, weights())
        assert "database is locked" in finished(calling(writer, path)).stderr
