"""Engines that load what another process has published, and what of it they are told."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

import torchrl_ext as tx
from tests.compat.test_slime_chains import write_slime
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.transports.chains import folder
from torchrl_ext.compat.slime.embedded import routes
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.embedded.protocol import GenerateRequest
from torchrl_ext.errors import StoreError
from torchrl_ext.transports.published import PublishedRoot


def tensors(seed, **changes):
    return {name: tensor.detach().clone() for name, tensor in tiny_model(seed, **changes).state_dict().items()}


def by_deltas(root, seeds, base):
    transport = tx.make_transport("delta", root=root, encoding="xor")
    for seed in seeds:
        transport.send_weights("policy", tiny_model(seed))
    transport.shutdown()


def by_slime(root, seeds, base):
    held = tensors(0)
    for version, seed in enumerate(seeds, start=1):
        write_slime(folder(root, version), version, held, tensors(seed), "xor", "xxh3-128")
        held = tensors(seed)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("base") / "model", seed=0))


@pytest.fixture
def engine(base):
    made = Engine(base, dtype="float32")
    yield made
    made.close()


def says(engine, count=8):
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True}}
    (output,) = engine.scheduler.submit(GenerateRequest.from_json(body, "request")).future.result(60)
    return output.token_ids


@pytest.mark.parametrize("publish", [by_deltas, by_slime])
def test_a_call_of_another_trainer_lands_versions_that_are_decoded_with_all_old_bytes(engine, base, tmp_path, publish):
    publish(tmp_path / "root", [5, 6], base)
    told = {"model_path": str(tmp_path / "root"), "load_format": "delta", "weight_version": "two"}
    client = TestClient(Starlette(routes=routes(engine)))
    assert client.post("/update_weights_from_disk", json=told).json()["success"]
    assert engine.scheduler.version == "two" and says(engine) == greedy(tiny_model(6), PROMPT, 8)


def test_what_is_not_there_or_leads_back_to_nothing_known_is_named(base, tmp_path):
    with pytest.raises(StoreError, match="holds no version"):
        PublishedRoot.of_path(str(tmp_path), base)
    by_slime(tmp_path, [5], base)
    with pytest.raises(StoreError, match="holds no version 9"):
        PublishedRoot(tmp_path, base).contents(9)
