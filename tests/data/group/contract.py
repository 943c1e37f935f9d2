"""What every carrier promises to a group; a carrier's own tests derive from `CarrierContract`."""

import itertools
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.data.group.members import SHORT_S, WAIT_S, beside
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import DeadlineError, TransportError, WeightSyncError
from torchrl_ext.data.group.carrier import Seat
from torchrl_ext.data.group.group import Group
from torchrl_ext.data.group.store import LOST, HostedStore, RemoteStore

MIB = 1 << 20
RANKS = 3
SIZES = st.sampled_from([1, 2, 33, 4097, MIB, 8 * MIB + 1])
MOVES = st.lists(st.tuples(st.permutations(range(RANKS)).map(lambda ranks: (ranks[0], ranks[1])), SIZES), max_size=8)


def filled(nbytes, seed, device="cpu"):
    bits = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=bits).to(device)


def arrived(flat, seed):
    return torch.equal(flat.cpu(), filled(flat.numel(), seed))


def on_all_ranks(run):
    assert beside(*(partial(run, rank) for rank in range(RANKS))) == [None] * RANKS


class CarrierContract:
    """Derive, and say which carrier.

    Attributes:
        backend: of its seats.
        device: of its tensors.
        any_order: whether ranks may begin the transfers that they share in different orders.
    """

    backend = "gloo"
    device = torch.device("cpu")
    any_order = False

    def carrier(self, seat):
        """Return the carrier of a seat, formed."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def class_patch(cls):
        with pytest.MonkeyPatch.context() as patch:
            yield patch

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def world(cls):
        """Install what the carrier needs."""
        return None

    def blank(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def filled(self, nbytes, seed=0):
        return filled(nbytes, seed, self.device)

    def carry(self, source, to, nbytes=8, seed=0):
        """Have one end of a group send bytes to another, and see that they arrive."""
        read, sent = self.blank(nbytes), self.filled(nbytes, seed)
        ends = (lambda: source.wait(source.send(sent, to.rank)), lambda: to.wait(to.receive(read, source.rank)))
        assert beside(*ends) == [None, None]
        assert arrived(read, seed)

    @contextmanager
    def seats(self, size=RANKS, timeout_s=WAIT_S):
        """Seats of a group, all of them in this process; its store is closed at the end."""
        trainer = HostedStore("127.0.0.1", 0, "s")
        stores = [trainer, *(RemoteStore("127.0.0.1", trainer.port, "s", Deadline(WAIT_S)) for _ in range(1, size))]
        peers = {rank: f"pid {1000 + rank}" for rank in range(size)}
        try:
            how = peers, self.device, self.backend
            yield [Seat(own, rank, *how, Deadline(timeout_s)) for rank, own in enumerate(stores)]
        finally:
            for own in reversed(stores):
                own.close()

    @contextmanager
    def groups(self, size=RANKS, timeout_s=WAIT_S):
        """The ends of a group."""
        with self.seats(size, timeout_s) as seats:
            ends = beside(*(partial(Group.form, seat, self.carrier) for seat in seats))
            assert all(isinstance(end, Group) for end in ends), ends
            try:
                yield ends
            finally:
                for end in ends:
                    end.sever()

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, world):
        """A group that no test breaks."""
        with cls().groups() as ends:
            yield ends

    # bytes

    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(MOVES, st.integers(0, 1 << 30))
    @example([((0, 1), 64 * MIB)], 0)
    @example([((2, 1), nbytes) for nbytes in (1, 9 * MIB, 3, 70_000, 2, 1, 33, MIB) * 3], 1)
    @example([(pair, 12 * MIB + 5) for pair in itertools.permutations(range(RANKS), 2)], 2)
    def test_bytes_arrive_in_order_and_are_counted_once(self, group, moves, seed):
        sent = [self.filled(nbytes, at) for at, (_, nbytes) in enumerate(moves)]
        read = [self.blank(nbytes) for _, nbytes in moves]
        before = [(Counter(end.sent), Counter(end.received)) for end in group]

        def run(rank):
            end, choice, works = group[rank], random.Random(seed + rank), []
            own = [at for at, (pair, _) in enumerate(moves) if rank in pair]
            if self.any_order:  # but for those of a pair
                own.sort(key=lambda at: (moves[at][0][0] == rank) == (seed + rank) % 2)
            for at in own:
                source, to = moves[at][0]
                works.append(end.send(sent[at], to) if source == rank else end.receive(read[at], source))
            for work in choice.sample(works, len(works)) + works[:1]:  # one that is done may be waited for again
                end.wait(work)
            for at in own:
                if moves[at][0][0] == rank:
                    sent[at].zero_()  # memory is free once the wait is over

        on_all_ranks(run)
        assert all(arrived(flat, at) for at, flat in enumerate(read))
        for rank, end in enumerate(group):
            outward, inward = Counter(), Counter()
            for (source, to), nbytes in moves:
                outward[to] += nbytes * (source == rank)
                inward[source] += nbytes * (to == rank)
            assert (end.sent - before[rank][0], end.received - before[rank][1]) == (+outward, +inward)

    def test_broadcasts_in_flight_reach_every_rank(self, group):
        flats = [[self.filled(MIB + at, at) if rank == 0 else self.blank(MIB + at) for at in range(6)]
                 for rank in range(RANKS)]  # fmt: skip

        def run(rank):
            for work in [group[rank].broadcast(flat) for flat in flats[rank]]:
                group[rank].wait(work)

        before = [(end.sent.total(), end.received.total()) for end in group]
        on_all_ranks(run)
        assert all(arrived(flat, at) for own in flats for at, flat in enumerate(own))
        assert [(end.sent.total(), end.received.total()) for end in group] == before  # they count between pairs

    def test_a_ring_of_blocks_does_not_wait_for_itself(self, group):
        read = [self.blank(MIB) for _ in range(RANKS)]

        def run(rank):
            end = group[rank]
            with end.together():
                works = [end.send(self.filled(MIB, rank), (rank + 1) % RANKS)]
                works.append(end.receive(read[rank], (rank - 1) % RANKS))
            for work in works:
                end.wait(work)

        on_all_ranks(run)
        assert all(arrived(flat, (rank - 1) % RANKS) for rank, flat in enumerate(read))

    def test_a_block_that_fails_begins_nothing(self, group):
        first, second, _ = group
        lost = self.filled(MIB, 1)
        with pytest.raises(ZeroDivisionError), first.together():
            first.send(lost, 1)
            raise ZeroDivisionError
        self.carry(first, second, MIB, seed=2)

    # failures

    def test_a_rank_that_is_absent_from_forming_is_missed_in_time(self):
        with self.seats(timeout_s=SHORT_S) as seats:
            failed = beside(*(partial(Group.form, seat, self.carrier) for seat in seats[:2]))
            assert all(isinstance(one, WeightSyncError) for one in failed), failed
            assert any(isinstance(one, DeadlineError) and "within 1 s" in str(one) for one in failed), failed

    @pytest.mark.parametrize("met", [False, True])
    def test_a_peer_that_does_not_come_is_named_at_the_deadline(self, met):
        """Also if its connection was used before."""
        with self.groups(timeout_s=SHORT_S) as (first, _, third):
            if met:
                self.carry(first, third)
            (late,) = beside(lambda: first.wait(first.send(self.filled(MIB), 2)))
            assert type(late) is DeadlineError and "rank 2 (pid 1002" in str(late), late
            first.sever()
            (late,) = beside(lambda: third.wait(third.receive(self.blank(MIB), 1)))
            assert isinstance(late, WeightSyncError) and "rank 1 (pid 1001" in str(late), late

    @pytest.mark.parametrize("call", ["send", "receive", "broadcast"])
    def test_an_abort_by_another_thread_ends_every_wait(self, call):
        with self.groups(size=2) as (first, second):
            waiting = threading.Barrier(3)

            def moves(end, name):
                waiting.wait(WAIT_S)
                flat = self.filled(40 * MIB)
                end.wait(end.broadcast(flat) if name == "broadcast" else getattr(end, name)(flat, 1 - end.rank))

            def abort():
                waiting.wait(WAIT_S)
                time.sleep(0.1)  # it may come before, or in the middle
                first.sever()

            other = "receive" if call == "broadcast" else call
            own, peers, _ = beside(lambda: moves(first, call), lambda: moves(second, other), abort)
            assert type(own) is TransportError and "aborted" in str(own)
            assert type(peers) is TransportError and "rank 0 (pid 1000" in str(peers), peers
            for late in (lambda: first.send(self.filled(8), 1), lambda: first.broadcast(self.filled(8))):
                with pytest.raises(TransportError, match="aborted"):
                    late()

    def test_a_peer_that_dies_in_the_middle_is_seen_and_the_next_forms(self):
        """Nobody leaves a word; the other end says so, lives, and moves bytes in the next group."""
        with self.groups(size=2) as (first, second):
            self.carry(first, second)
            work = first.receive(self.blank(64 * MIB), 1)
            second.carrier.abort()
            with pytest.raises(TransportError, match=r"a connection broke .* from rank 1 \(pid 1001\): ."):
                first.wait(work)
        with self.groups(size=2) as (first, second):
            self.carry(first, second, MIB, seed=3)

    def test_what_the_store_says_of_a_lost_peer_ends_waits(self):
        with self.groups(size=2) as (first, second):
            self.carry(first, second)
            second.store.will(LOST, "rank 1 (pid 1001) is gone")
            work = first.receive(self.blank(MIB), 1)
            second.store.close()
            with pytest.raises(TransportError, match=r"rank 1 \(pid 1001\) is gone"):
                first.wait(work)
