"""`VLLMCollectiveTransport` beyond the contract: forming groups, and members that refuse, stop, freeze or die."""

import os
import select
import signal
import sys
from functools import partial

import pytest
import torch

from tests.data.group.members import (
    BUCKET,
    SHORT_S,
    WAIT_S,
    Interrupted,
    beside,
    broken,
    enter,
    group,
    member,
    same,
    stop,
    weights,
)  # fmt: skip
from tests.processes import calling, running_python
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError, ManifestError, TransportError
from torchrl_ext.control.serving.processes import free_port
from torchrl_ext.data.transports.base import Worker
from torchrl_ext.data.transports.collective import VLLMCollectiveTransport
from torchrl_ext.testing import any_bits


def sent(members, source, *receives):
    """Send a version from the first member to the others; what each returned or raised."""
    trainer, *workers = members
    takes = receives or [worker.receive_weights for worker in workers]
    return beside(lambda: trainer.send_weights("policy", source), *takes)


@pytest.mark.parametrize("bucket_bytes", [0, BUCKET])
def test_three_workers_receive_every_bit_and_keep_each_version(bucket_bytes):
    """And hear of a source that breaks, after which they connect again."""
    kept, before = [], dict(os.environ)
    with group(4, bucket_bytes=bucket_bytes) as members:
        for seed in range(3):
            _, *received = sent(members, weights(seed))
            kept.append(received)
        assert dict(os.environ) == before and not torch.distributed.is_initialized()
        failed, *lost = sent(members, Interrupted(weights(), 12, broken))
        assert isinstance(failed, ValueError)
        for error in lost:
            assert isinstance(error, TransportError) and "the source broke" in str(error) and "rank 0" in str(error)
        assert not any(one.check_connection() for one in members)
        assert enter(*members) == [None] * 4
        kept.append(sent(members, weights(3))[1:])
    assert all(same(one, weights(seed)) for seed, received in enumerate(kept) for one in received)


def test_a_rank_that_never_arrives_is_named_on_both_sides():
    port = free_port()
    trainer, worker = member(port, 0, 3, timeout_s=SHORT_S), member(port, 1, 3, timeout_s=3 * SHORT_S)
    for error in enter(trainer, worker):
        assert isinstance(error, DeadlineError)
        assert "rank 2 of world size 3 did not arrive" in str(error)
    assert not trainer.check_connection() and not worker.check_connection()
    trainer.shutdown()


# roles


def test_only_rank_0_sends_and_only_others_receive():
    with group(2) as (trainer, worker):
        with pytest.raises(RuntimeError, match="send_weights was called on rank 1"):
            worker.send_weights("policy", weights())
        with pytest.raises(TransportError, match="rank 0, the trainer"):
            trainer.receive_weights(0.01)


# members that fail: the others learn it, and the next try works


def take_until(worker, stop_at):
    """Receive one version as a loader does that stops at a parameter, by its number."""
    within = Deadline(WAIT_S)
    end = worker.attend(within)
    pairs = end.receive(end.next(within), {}, within)
    for number, _ in enumerate(pairs if stop_at >= 0 else ()):
        if number == stop_at:
            break


def test_worker_that_takes_no_version_gives_the_reason():
    first, second = weights(0), weights(1)
    given = {**{name: torch.zeros(5000) for name in first}, "p07": torch.zeros(4)}
    with group(3) as members:
        refuse = partial(members[2].receive_weights, weights=given)
        *told, declined = sent(members, first, members[1].receive_weights, refuse)
        assert isinstance(declined, ManifestError) and not given["p00"].any()
        for error in told:
            assert isinstance(error, TransportError) and "rank 2" in str(error) and "'p07'" in str(error)
        assert not any(one.check_connection() for one in members)
        assert enter(*members) == [None] * 3
        assert all(same(one, second) for one in sent(members, second)[1:])
        assert (members[1].received_version, members[0].latest_version()) == (2, 2)


def test_a_loader_may_stop_at_any_parameter():
    sizes = [1, 7, 50, 300, 300, 700, 3000, 700, 300, 20]  # most share buckets, one is too large
    own = {f"p{index}": any_bits(torch.float32, size, seed=index) for index, size in enumerate(sizes)}
    with group(2) as members:
        for stop_at in range(-1, len(sizes)):
            told, _ = sent(members, own, partial(take_until, members[1], stop_at))
            words = "it loaded nothing" if stop_at < 0 else f"stopped loading after 'p{stop_at}'"
            assert isinstance(told, TransportError) and "rank 1 (pid" in str(told) and words in str(told)
            assert enter(*members) == [None, None]
            assert same(sent(members, own)[1], own)


def test_numbers_of_workers_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="number of workers is not known"):
        VLLMCollectiveTransport(device="cpu").init_all_workers_group({})
    info = member(0, 0, None).open(1, (), Deadline(WAIT_S)).info
    with pytest.raises(ConfigError, match="rank 2 does not exist in world_size 2"):
        VLLMCollectiveTransport.join(info, Worker(rank=2), Deadline(WAIT_S))
    with pytest.raises(ConfigError, match=r"world_size 2, but the engines have 3 workers"):
        member(0, 0, 2).open(3, (), Deadline(WAIT_S))


# processes that end, die or freeze


def entered(port, rank, size):
    """A member of a process of its own, which says how far it is."""
    end = member(port, rank, size)
    print("started", flush=True)
    end.init_all_workers_group({})
    print("connected", flush=True)
    return end


def receives(port, rank, size, stop_at):
    """A worker that stops at a parameter until a line comes, takes the rest, and leaves."""
    end, within = entered(port, rank, size), Deadline(WAIT_S)
    worker = end.attend(within)
    for number, _ in enumerate(worker.receive(worker.next(within), {}, within)):
        if number == stop_at:
            stop()
    print("took", flush=True)
    end.shutdown()
    print("left", flush=True)


def sends(port):
    """A trainer that stops in the middle of its version until a line comes."""
    end = entered(port, 0, 2)
    sys.stdin.readline()
    end.send_weights("policy", Interrupted(weights(count=40), 30, stop))


def says(child, *lines):
    assert [child.stdout.readline() for _ in lines] == [f"{line}\n" for line in lines]


def go_on(child):
    child.stdin.write("\n")
    child.stdin.flush()


FROZEN_S = 3
EITHER = (TransportError, DeadlineError)
LARGE = {f"p{i}": torch.ones(1 << 20) for i in range(40)}


@pytest.mark.parametrize(
    ("who", "moment", "how", "kind"),
    [
        ("worker", "half", signal.SIGKILL, TransportError),
        ("worker", "half", signal.SIGSTOP, DeadlineError),
        ("trainer", "idle", signal.SIGKILL, EITHER),
        ("trainer", "half", signal.SIGKILL, EITHER),
        ("trainer", "half", signal.SIGSTOP, EITHER),
        pytest.param("trainer", "idle", signal.SIGSTOP, EITHER, marks=pytest.mark.exhaustive),
    ],
)
def test_process_that_dies_or_freezes_is_named_at_the_other_end(who, moment, how, kind):
    port, rank = free_port(), ["trainer", "worker"].index(who)
    with running_python(calling(receives, port, 1, None, 3) if rank else calling(sends, port)) as child:
        end = member(port, 1 - rank, 2, timeout_s=WAIT_S if how is signal.SIGKILL else FROZEN_S)
        says(child, "started")
        end.init_all_workers_group({})
        says(child, "connected")

        def strike():
            if moment == "half":
                if rank == 0:
                    go_on(child)
                says(child, "now")
            os.kill(child.pid, how)

        lost, _ = beside(lambda: end.send_weights("policy", LARGE) if rank else end.receive_weights(WAIT_S), strike)
        assert isinstance(lost, kind) and f"rank {rank} (pid {child.pid}" in str(lost)
        assert ("no answer came from" in str(lost)) == bool(rank) and not end.check_connection()
        end.shutdown()


@pytest.mark.parametrize("slow_one_dies", [False, True])
def test_fast_worker_stays_in_the_group_until_slow_worker_ends(slow_one_dies):
    port, last = free_port(), 20
    programs = calling(receives, port, 1, 3, last), calling(receives, port, 2, 3, -1)
    with running_python(programs[0]) as slow, running_python(programs[1]) as fast:
        trainer = member(port, 0, 3)
        trainer.init_all_workers_group({})

        def watch():
            says(slow, "started", "connected", "now")
            says(fast, "started", "connected", "took")
            assert not select.select([fast.stdout], [], [], 1)[0]  # it stays for the slow one
            if slow_one_dies:
                slow.kill()
                says(fast, "left")
                trainer.abort()
            else:
                go_on(slow)
                says(slow, "took", "left")
                says(fast, "left")

        met, watched = sent([trainer], weights(count=1 + last), watch)
        assert watched is None
        assert isinstance(met, TransportError) if slow_one_dies else met is None
        trainer.shutdown()
