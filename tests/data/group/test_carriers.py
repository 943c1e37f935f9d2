"""What a group promises: bytes from rank to rank in the order of each pair, and an end to every wait."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.group.members import SHORT_S, WAIT_S, beside, stop
from tests.processes import calling, finished, running_python
from torchrl_ext.base.errors import DeadlineError, NotConnectedError, TransportError
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.group.meeting import STANDALONE_GROUP, Membership

MIB = 1 << 20
CPU = torch.device("cpu")
RANKS = 3


def membership(port, timeout_s=WAIT_S):
    return Membership("127.0.0.1", port, "", device=CPU, backend="gloo", timeout_s=timeout_s)


@contextmanager
def carriers(size=RANKS, timeout_s=WAIT_S):
    """The ends of a group, all of them in this process."""
    port = free_port()
    members = [membership(port, timeout_s) for _ in range(size)]
    host = [lambda: members[0].host(STANDALONE_GROUP, size, ())]
    enter = [lambda rank=rank: members[rank].enter(STANDALONE_GROUP, rank, size, ()) for rank in range(1, size)]
    try:
        assert beside(*host, *enter) == [None] * size
        yield [member.carrier() for member in members]
    finally:
        for member in members:
            member.close()


@pytest.fixture(scope="module")
def group():
    """A group that no test breaks."""
    with carriers() as ends:
        yield ends


def filled(nbytes, seed):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def blank(nbytes, seed=0):
    return torch.zeros(nbytes, dtype=torch.uint8)


SIZES = st.sampled_from([1, 2, 33, 4097, MIB, 8 * MIB + 1])
MOVES = st.lists(st.tuples(st.permutations(range(RANKS)).map(lambda ranks: (ranks[0], ranks[1])), SIZES), max_size=8)


@settings(max_examples=20, deadline=None)
@given(MOVES, st.integers(0, 1 << 30))
@example([((0, 1), 64 * MIB)], 0)
@example([((2, 1), nbytes) for nbytes in (1, 9 * MIB, 3, 70_000, 2, 1, 33, MIB) * 3], 1)
@example([(pair, 12 * MIB + 5) for pair in itertools.permutations(range(RANKS), 2)], 2)
def test_bytes_arrive_in_order_and_are_counted_once(group, moves, seed):
    """Every byte arrives once and is counted once, in whatever order ranks begin and wait."""
    sent, read = ([make(nbytes, at) for at, (_, nbytes) in enumerate(moves)] for make in (filled, blank))
    before = [(Counter(end.sent), Counter(end.received)) for end in group]

    def run(rank):
        end, choice, works = group[rank], random.Random(seed + rank), []
        own = [at for at, (pair, _) in enumerate(moves) if rank in pair]
        for at in sorted(own, key=lambda at: (moves[at][0][0] == rank) == (seed + rank) % 2):  # of a pair in one order
            source, to = moves[at][0]
            works.append(end.send(sent[at], to) if source == rank else end.receive(read[at], source))
        for work in choice.sample(works, len(works)) + works[:1]:  # one that is done may be waited for again
            end.wait(work)
        for at in own:
            if moves[at][0][0] == rank:
                sent[at].zero_()  # memory is free once the wait is over

    assert beside(*(lambda rank=rank: run(rank) for rank in range(RANKS))) == [None] * RANKS
    assert all(
        torch.equal(flat, filled(nbytes, at)) for at, (flat, (_, nbytes)) in enumerate(zip(read, moves, strict=True))
    )
    for rank, end in enumerate(group):
        outward, inward = Counter(), Counter()
        for (source, to), nbytes in moves:
            outward[to] += nbytes * (source == rank)
            inward[source] += nbytes * (to == rank)
        assert (end.sent - before[rank][0], end.received - before[rank][1]) == (+outward, +inward)


# failures


def test_a_peer_that_does_not_come_is_named_at_the_deadline():
    with carriers(timeout_s=SHORT_S) as (first, _, third):
        work, back = first.send(filled(MIB, 0), 2), third.receive(blank(MIB), 1)
        late = beside(lambda: first.wait(work), lambda: third.wait(back))
        assert [type(one) for one in late] == [DeadlineError, DeadlineError]
        assert "to rank 2 (pid" in str(late[0]) and "from rank 1 (pid" in str(late[1])
        for end in (first, third):
            end.sever()


def test_an_abort_ends_waits_of_other_threads_and_those_of_peers():
    with carriers() as (first, second, third):
        works = [(first, first.receive(blank(MIB), 1)), (first, first.send(filled(40 * MIB, 0), 2))]
        works += [(second, second.receive(blank(MIB), 0)), (third, third.send(filled(40 * MIB, 0), 1))]
        waiting = threading.Barrier(len(works) + 1)

        def wait(end, work):
            waiting.wait(WAIT_S)
            end.wait(work)

        def abort():
            waiting.wait(WAIT_S)
            first.sever()

        began = time.monotonic()
        *ended, _ = beside(*(lambda one=one: wait(*one) for one in works), abort)
        assert time.monotonic() - began < WAIT_S / 2
        assert [type(one) for one in ended] == [TransportError] * 4
        assert [("aborted" in str(one)) for one in ended[:2]] == [True, True]
        assert "from rank 0 (pid" in str(ended[2])
        assert "rank 0 (pid" in str(ended[3])  # which has no part in this transfer
        first.sever()
        for call in (
            lambda: first.send(blank(8), 1),
            lambda: first.receive(blank(8), 1),
            lambda: first.wait(works[0][1]),
        ):
            with pytest.raises(TransportError, match="aborted"):
                call()


def peer(port, role):
    """Rank 1, which stops in the middle of a transfer, and says so."""
    member = membership(port)
    member.enter(STANDALONE_GROUP, 1, 2, ())
    group = member.carrier()
    group.wait(group.receive(blank(MIB), 0))
    work = (group.receive if role == "receiver" else group.send)(blank(256 * MIB), 0)
    stop()
    group.wait(work)


@pytest.mark.parametrize("role", ["receiver", "sender"])
def test_killed_peer_is_named_long_before_deadline(role):
    """A peer killed in a transfer is named by rank and process id long before the deadline."""
    port = free_port()
    member = membership(port)
    with running_python(calling(peer, port, role)) as child:
        member.host(STANDALONE_GROUP, 2, ())
        group = member.carrier()
        group.wait(group.send(filled(MIB, 0), 1))
        assert child.stdout.readline() == "now\n"
        flats = [blank(256 * MIB), blank(MIB)]
        works = [(group.send if role == "receiver" else group.receive)(flat, 1) for flat in flats]
        began = time.monotonic()
        child.send_signal(signal.SIGKILL)
        with pytest.raises(TransportError, match=rf"rank 1 \(pid {child.pid}") as caught:
            for work in works:
                group.wait(work)
        assert not isinstance(caught.value, NotConnectedError)
        assert time.monotonic() - began < WAIT_S / 2
        member.close()


def leaves(how):
    with carriers(size=2) as (first, _):
        works = [first.send(blank(64 * MIB), 1), first.receive(blank(8), 1)]  # noqa: F841 - kept, and never waited for
        print("left", flush=True)
        if how == "exit":
            sys.exit(3)


@pytest.mark.parametrize(("how", "status"), [("exit", 3), ("close", 0)])
def test_a_process_that_leaves_transfers_half_way_ends_in_peace(how, status):
    done = finished(calling(leaves, how))
    assert (done.stdout, done.returncode) == ("left\n", status), done.stderr[-2000:]
