"""Where ranks meet: silent listeners, wrong secrets, notes that say anything, and locks of the process."""

from __future__ import annotations

import re
import socket
import sqlite3
import threading
import time
from contextlib import closing, contextmanager, suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.sockets import talking
from tests.data.group.members import SHORT_S, WAIT_S, beside, group, member, same, weights
from tests.hostile import refused_or_right, worse_json
from tests.processes import calling, finished
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError, TransportError, WeightSyncError
from torchrl_ext.base.types import ParamMeta
from torchrl_ext.data.group import group as group_module
from torchrl_ext.data.group.group import Member
from torchrl_ext.data.group.store import HostedStore, RemoteStore
from torchrl_ext.data.transports.base import Worker
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport


@contextmanager
def silent_port():
    """Somebody who listens, and never says a word; he is gone after a third of `WAIT_S`, so that nobody hangs."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        leaves = threading.Timer(WAIT_S / 3, silent.close)
        leaves.start()
        yield silent.getsockname()[1]
        leaves.cancel()


@contextmanager
def stores(secret="s"):
    """The trainer's store and a worker's."""
    trainer = HostedStore("127.0.0.1", 0, secret)
    worker = RemoteStore("127.0.0.1", trainer.port, secret, Deadline(WAIT_S))
    yield trainer, worker
    worker.close()
    trainer.close()


@pytest.fixture(scope="module")
def kept():
    """Stores for tests that leave notes of their own."""
    with stores() as ends, pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "LAST_WORDS_S", 0.0)  # nobody reads what is refused here
        yield ends


# those that do not answer


def test_join_at_silent_port_ends_at_deadline():
    """Joining a group at a port that accepts but never answers raises DeadlineError."""
    began = time.monotonic()
    with silent_port() as port, pytest.raises(DeadlineError, match=rf"127.0.0.1:{port} did not answer within 1 s"):
        member(port, 1, 2, timeout_s=SHORT_S).init_all_workers_group({})
    assert time.monotonic() - began < WAIT_S / 4


def test_why_the_last_attempt_failed_is_in_the_error():
    said = [""]
    with talking(lambda connection, _: None) as port:
        while "it closed the connection" not in said[-1] and len(said) < 9:  # an attempt may be open at the deadline
            with pytest.raises(DeadlineError) as error:
                member(port.port, 1, 2, timeout_s=2 * SHORT_S).init_all_workers_group({})
            said.append(str(error.value))
    assert "it closed the connection" in said[-1], said


# those that may not


def listened_at(port):
    """Addresses, as the kernel writes them, at which anybody listens on ``port``."""
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            rows = [line.split() for line in lines][1:]
        found += [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_trainer_on_loopback_address_listens_on_loopback_only(address):
    trainer = VLLMCollectiveTransport(address, 0, 0, None, "cpu")
    port = trainer.open(1, (), Deadline(WAIT_S)).info["master_port"]
    assert listened_at(port) == ["0100007F"]
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


def has_ipv6():
    with socket.socket(socket.AF_INET6) as probe, suppress(OSError):
        probe.bind(("::1", 0))
        return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_ipv6_address_may_have_brackets_as_in_a_url():
    with group(2, in_brackets) as (trainer, worker):
        _, received = beside(lambda: trainer.send_weights("policy", weights()), worker.receive_weights)
        assert same(received, weights()) and trainer.master_address == "::1"


def in_brackets(port, rank, size):
    return VLLMCollectiveTransport("[::1]", port, rank, size, "cpu", timeout_s=WAIT_S)


def test_each_trainer_draws_a_random_secret_for_its_workers():
    """A trainer without a secret draws a long random one, and a worker with another one is refused."""
    trainers = [member(0, 0, None) for _ in range(2)]
    infos = [trainer.open(1, (), Deadline(WAIT_S)).info for trainer in trainers]
    assert len({info["secret"] for info in infos}) == 2 and all(len(info["secret"]) >= 32 for info in infos)
    with pytest.raises(TransportError, match="refused this worker"):
        VLLMCollectiveTransport.join({**infos[0], "secret": "a guess"}, Worker(rank=1), Deadline(WAIT_S))
    for trainer in trainers:
        trainer.shutdown()


# notes that say anything


def note(**changes):
    own = {"world_size": 2, "process": "pid 1", "params": (ParamMeta("p", torch.int8, (3,)),), "backend": "gloo"}
    return group_module._Note(**{**own, "library": "torch", "settings": {"A": "1"}, **changes})


def admit(store):
    return group_module._admit(store, 2, note(), Deadline(WAIT_S))


def wait_for_admission(store):
    return group_module._wait_for_admission(store, 1, note(), Deadline(WAIT_S))


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_damaged_worker_note_gives_trainer_an_error_or_a_group(kept, draw):
    """Whatever JSON a worker's note holds, the trainer forms the group or raises an error of the package."""
    damaged = worse_json(note().to_json(), draw)
    kept[0].set("note/1", "null" if damaged is None else damaged)
    kept[0].set("ready/1", True)
    refused_or_right(admit, kept[0])


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_damaged_trainer_answer_gives_worker_an_error_or_a_group(kept, draw):
    """Whatever JSON the trainer answers, the worker goes on or raises an error of the package."""
    answer = draw.choice([{"peers": ["a", "pid 1"]}, {"kind": "ConfigError", "error": "no"}])
    damaged = worse_json(answer, draw)
    kept[0].set("answer", "null" if damaged is None else damaged)
    refused_or_right(wait_for_admission, kept[1])


def test_trainer_answer_raises_only_known_errors_in_workers(kept):
    """An error kind outside the allowed ones in the trainer's answer becomes a TransportError."""
    for kind, raised in {
        "ConfigError": ConfigError,
        **dict.fromkeys(("WeightSyncError", "annotations", "__builtins__", "Any", ""), TransportError),
    }.items():
        kept[0].set("answer", {"kind": kind, "error": "boo"})
        with pytest.raises(raised, match="the trainer formed no group: boo"):
            wait_for_admission(kept[1])


def test_two_processes_of_one_rank_are_told_apart(kept):
    kept[0].set("answer", {"peers": ["the trainer", "pid 2"]})
    with pytest.raises(ConfigError, match="pid 2 is rank 1, too"):
        wait_for_admission(kept[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": -1}, r"an announcement of the trainer, rank 0 \(pid \d+ on .*version"),
        ({"params": [["p", "int8", [-3]]]}, r"params\[0\]"),
        ({"handoff": "7"}, r"the handoff of weights version 1 is malformed: .*handoff"),
    ],
)
def test_unreadable_handoff_fails_worker_and_trainer_at_once(changes, words, monkeypatch):
    """A worker that cannot read a handoff names the bad field, and the trainer's send fails at once."""
    own = HostedStore.set

    def told(self, key, value, **how):
        own(self, key, {**value, **changes} if key.startswith("announced/") else value, **how)

    monkeypatch.setattr(HostedStore, "set", told)
    with group(2) as (trainer, worker):
        began = time.monotonic()
        sent, received = beside(lambda: trainer.send_weights("policy", weights()), worker.receive_weights)
        assert isinstance(received, WeightSyncError) and re.search(words, str(received))
        assert isinstance(sent, TransportError) and re.search(words, str(sent))
        assert re.search(r"rank 1 \(pid \d+ on .*\) could not read a handoff: ", str(sent))
        assert time.monotonic() - began < WAIT_S / 2
        assert not trainer.check_connection() and not worker.check_connection()


# what ranks must have in common


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 3}, "3 as world_size, and rank 0 has 2"),
        ({"backend": "nccl"}, "nccl as backend, and rank 0 has gloo"),
        ({"library": "nccl4py"}, "nccl4py as the library that carries its bytes, and rank 0 has torch"),
        ({"settings": {"A": "1", "B": "0"}}, "0 as the environment variable B, and rank 0 has nothing"),
        ({"params": (ParamMeta("q", torch.int8, (3,)),)}, "nothing as parameter 'p', and rank 0 has p int8"),
    ],
)
def test_ranks_that_disagree_are_named_with_what_each_has(changes, words, kept):
    kept[0].set("note/1", note(**changes).to_json())
    with pytest.raises(WeightSyncError, match=f"rank 1 has {words}"):
        admit(kept[0])


def writer(path):
    database = sqlite3.connect(path, timeout=0, isolation_level=None)
    database.execute("begin immediate")
    return database


def test_group_keeps_sqlite_lock_of_its_process(tmp_path):
    """Forming a group and moving weights does not release a database lock that the process holds."""
    path = str(tmp_path / "runs.db")
    with closing(writer(path)), group(2) as (trainer, worker):
        assert "database is locked" in finished(calling(writer, path)).stderr
        _, received = beside(lambda: trainer.send_weights("policy", weights()), worker.receive_weights)
        assert same(received, weights())
        assert worker.receive_weights(0.6) is None
        assert "database is locked" in finished(calling(writer, path)).stderr
