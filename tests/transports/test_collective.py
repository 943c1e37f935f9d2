"""`VLLMCollectiveTransport` beyond the contract: forming groups, and what they agree on."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from tests.transports.members import BUCKET, SHORT_S, beside, enter, group, member, same, weights
from torchrl_ext.errors import ConfigError, DeadlineError, ManifestError, TransportError
from torchrl_ext.serving.processes import free_port
from torchrl_ext.transports.collective.transport import VLLMCollectiveTransport


def test_the_signature_is_that_of_torchrl():
    transport = VLLMCollectiveTransport("127.0.0.1", 29500, 1, 3, "cpu", "engine")
    assert (transport.rank, transport.world_size, transport.vllm_engine) == (1, 3, "engine")
    assert (transport.device, transport.backend) == (torch.device("cpu"), "gloo")


@pytest.mark.parametrize("bucket_bytes", [0, BUCKET, 1 << 20])
def test_every_one_of_three_workers_receives_every_bit_and_what_it_keeps_is_never_written_again(bucket_bytes):
    kept, before = [], dict(os.environ)
    with group(4, bucket_bytes=bucket_bytes) as (trainer, *workers):
        for seed in range(4):
            receives = [worker.receive_weights for worker in workers]
            _, *received = beside(lambda s=seed: trainer.send_weights("policy", weights(s)), *receives)
            kept.append(received)
        assert dict(os.environ) == before and not torch.distributed.is_initialized()
    assert all(same(one, weights(seed)) for seed, received in enumerate(kept) for one in received)


def test_a_rank_that_never_arrives_is_named_on_both_sides():
    port = free_port()
    trainer, worker = member(port, 0, 3, timeout_s=SHORT_S), member(port, 1, 3, timeout_s=3 * SHORT_S)
    for error in enter(trainer, worker):
        assert isinstance(error, DeadlineError)
        assert "rank 2 of world size 3 did not arrive" in str(error)
    assert not trainer.check_connection() and not worker.check_connection()
    trainer.shutdown()


def test_a_worker_without_a_trainer_says_where_it_looked():
    port = free_port()
    with pytest.raises(DeadlineError, match=rf"no trainer \(rank 0\) listened at 127.0.0.1:{port}"):
        member(port, 1, 2, timeout_s=SHORT_S).init_all_workers_group({})


def test_a_trainer_alone_must_know_how_many_workers_there_are():
    with pytest.raises(ConfigError, match="world_size"):
        VLLMCollectiveTransport(device="cpu").init_all_workers_group({})


def test_a_taken_port_is_an_error_that_says_so():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        transport = member(taken.getsockname()[1], 0, 2)
        with pytest.raises(TransportError, match="pick another master_port"):
            transport.init_all_workers_group({})


def test_the_port_is_free_again_after_the_end_and_a_worker_may_leave_the_world_size_to_the_trainer():
    port = free_port()
    for size in (2, None, 2):
        members = [member(port, 0, 2), member(port, 1, size)]
        assert enter(*members) == [None, None]
        for one in members:
            one.shutdown()


# roles


def test_only_rank_0_sends_and_only_others_receive():
    with group(2) as (trainer, worker):
        with pytest.raises(RuntimeError, match="send_weights was called on rank 1"):
            worker.send_weights("policy", weights())
        with pytest.raises(TransportError, match="rank 0, the trainer"):
            trainer.receive_weights(0.01)


def test_what_was_not_agreed_on_is_not_sent():
    port = free_port()
    members = [member(port, rank, 2) for rank in range(2)]
    enter(*members, metadata={"p00": (torch.float32, (5000,))})
    with pytest.raises(ManifestError, match="'p01'"):
        members[0].send_weights("policy", weights(count=2))
    for one in members:
        one.shutdown()
