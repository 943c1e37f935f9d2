"""A gateway that answers requests of an update with 200 in the engine's place: never a success, or a proof."""

import pytest
import torch

import torchrl_ext as tx
from tests.control.engines import running, weights
from torchrl_ext.base.errors import WeightSyncError

EVERYTHING = {"success": True, "status": "ok", "message": "{}", "results": [None], "num_paused_requests": 0}
NO_SUCCESS = {
    "nothing": b"", "null": None, "no fields": {}, "a list": [], "text": "OK", "another body": {"ok": True},
    "no success": {"success": False, "message": "no shard 2"}, "an error": {"error": "no shard 2"},
    "a detail": {"detail": "no shard 2"},
}  # fmt: skip


def holds(fake, value):
    return all(torch.equal(fake.tensors[name], tensor) for name, tensor in weights(value).items())


def sender(transport, fake, root):
    return tx.WeightSender(tx.make_transport(transport, root=str(root)), tx.connect(fake.url))


def steps_of(fake):
    """The steps of the updates so far, by route or the kind of a message; questions by GET change nothing."""
    return list(dict.fromkeys(call.kind or call.route for call in fake.calls if call.route.startswith("POST ")))


@pytest.mark.parametrize("transport", ["delta", "disk"])
@pytest.mark.parametrize("make", ["vllm", "sglang", "embedded"])
def test_no_answer_in_an_engines_place_is_a_proof(make, transport, tmp_path):
    with running(make) as fake, sender(transport, fake, tmp_path) as own:
        own.update_weights(weights(1))
        fake.calls.clear()
        own.update_weights(weights(2))
        steps = steps_of(fake)
        assert len(steps) > (4 if transport == "delta" else 6)
        for value, step in enumerate(steps, start=3):
            own.update_weights(weights(-value))  # after a failure it comes whole
            swallowed = []

            def gateway(asked, step=step, swallowed=swallowed):
                del fake.answers[step]
                swallowed.append(step)
                return EVERYTHING

            fake.answers[step] = gateway
            try:
                verified = own.update_weights(weights(value)).verified
            except WeightSyncError:
                verified = False
            assert swallowed and (holds(fake, value) or not verified), step
            fake.answers.clear()
        assert own.update_weights(weights(100)).verified and holds(fake, 100) and fake.serving


@pytest.mark.parametrize("make", ["vllm", "sglang", "embedded"])
def test_digests_that_nobody_compared_are_no_proof(make, tmp_path):
    with running(make) as fake, sender("disk", fake, tmp_path) as own:
        own.update_weights(weights(1))

        def gateway(asked):
            fake.tensors["a"][0] += 1  # memory that went bad
            return {**EVERYTHING, "results": [{}]}

        fake.answers["verify"] = gateway
        with pytest.raises(WeightSyncError, match="does not confirm version 2"):
            own.update_weights(weights(2))
        assert not fake.serving
        fake.answers.clear()
        assert own.update_weights(weights(3)).verified and holds(fake, 3)


@pytest.mark.parametrize("reply", NO_SUCCESS.values(), ids=NO_SUCCESS)
@pytest.mark.parametrize(
    ("make", "route"),
    [
        ("stock-sglang", "POST /update_weights_from_disk"),
        ("stock-vllm", "POST /collective_rpc"),
        ("vllm", "load"),
        ("embedded", "load"),
        ("sglang", "load"),
    ],
)
def test_a_load_that_reports_no_success_is_none(make, route, reply, tmp_path):
    with running(make) as fake, sender("disk", fake, tmp_path) as own:
        own.update_weights(weights(1))
        label, fake.answers[route] = fake.label, (200, reply)
        with pytest.raises(WeightSyncError) as refused:
            own.update_weights(weights(2))
        assert "no shard 2" in str(refused.value) or "no shard 2" not in str(reply)
        assert (fake.label, holds(fake, 1)) == (label, True)
        fake.answers.clear()
        own.update_weights(weights(3))
        assert holds(fake, 3) and fake.label == str(own.version)
