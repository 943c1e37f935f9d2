"""Engines that load what another process has published, and what of it they are told."""

from __future__ import annotations

import pytest
import torch
from starlette.applications import Starlette
from starlette.testclient import TestClient

import torchrl_ext as tx
from tests.compat.test_slime_chains import write_slime
from tests.models import PROMPT, greedy, tiny_checkpoint, tiny_model
from tests.transports.chains import folder
from torchrl_ext.compat.slime.embedded import routes
from torchrl_ext.embedded.engine import Engine
from torchrl_ext.embedded.protocol import GenerateRequest
from torchrl_ext.errors import ConfigError, StoreError, UpdateError
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.sync.published import PublishedFollower
from torchrl_ext.transports.published import PublishedRoot


def tensors(seed, **changes):
    return {name: tensor.detach().clone() for name, tensor in tiny_model(seed, **changes).state_dict().items()}


def by_disk(root, seeds, base):
    transport = tx.make_transport("disk", root=root)
    for seed in seeds:
        transport.send_weights("policy", tiny_model(seed))


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


def by_slime_in_full(root, seeds, base):
    for version, seed in enumerate(seeds, start=1):
        tiny_model(seed).save_pretrained(folder(root, version))


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


@pytest.mark.parametrize("publish", [by_disk, by_deltas, by_slime, by_slime_in_full])
def test_the_newest_version_of_a_root_is_put_in_service_whoever_published_it(engine, base, tmp_path, publish):
    root, client = PublishedRoot(tmp_path / "root", base), tx.make_engine("inprocess", engine=engine)
    handed = PublishedFollower(root, client)
    for versions, seeds in ((2, [5, 6]), *([(3, [7])] if publish is by_deltas else [])):
        publish(tmp_path / "root", seeds, base)
        told = root.newest()
        assert told["version"] == versions and ("path" in told) == (publish is by_disk or versions == 3)
        handed.take(told)
        assert says(engine) == greedy(tiny_model(seeds[-1]), PROMPT, 8)
        (row,) = client.rows()
        assert (row.state, row.version) == ("serving", versions)
    root.close()
    assert not [path for path in (tmp_path / "root").iterdir() if path.name.startswith(".probe")]


def test_damaged_files_are_not_served_and_the_next_good_version_is(engine, base, tmp_path):
    by_disk(tmp_path, [5], base)
    file = next(folder(tmp_path, 1).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    root, client = PublishedRoot(tmp_path, base), tx.make_engine("inprocess", engine=engine)
    handed = PublishedFollower(root, client)
    with pytest.raises(UpdateError, match="is damaged"):
        handed.take(root.newest())
    assert client.rows()[0].state == "paused"
    tx.make_transport("disk", root=tmp_path).send_weights("policy", tiny_model(6))
    handed.take(root.newest())
    root.close()
    assert client.rows()[0].state == "serving" and says(engine) == greedy(tiny_model(6), PROMPT, 8)


class Packed(TensorsLoader):
    """Cannot read one of its tensors back."""

    def digests(self):
        return {**super().digests(), "b": ""}


def test_what_an_engine_cannot_read_back_counts_by_what_it_was_handed(tmp_path):
    tx.make_transport("disk", root=tmp_path).send_weights("policy", {"a": torch.ones(4), "b": torch.ones(4)})
    held = {"a": torch.zeros(4), "b": torch.zeros(4)}
    root, client = PublishedRoot(tmp_path), tx.make_engine("inprocess", engine=tx.WeightReceiver(Packed(held)))
    PublishedFollower(root, client).take(root.newest())
    root.close()
    assert client.rows()[0].state == "serving" and all(bool((tensor == 1).all()) for tensor in held.values())


@pytest.mark.parametrize("publish", [by_deltas, by_slime])
def test_a_call_of_another_trainer_lands_versions_that_are_decoded_with_all_old_bytes(engine, base, tmp_path, publish):
    publish(tmp_path / "root", [5, 6], base)
    told = {"model_path": str(tmp_path / "root"), "load_format": "delta", "weight_version": "two"}
    client = TestClient(Starlette(routes=routes(engine)))
    assert client.post("/update_weights_from_disk", json=told).json()["success"]
    assert engine.scheduler.version == "two" and says(engine) == greedy(tiny_model(6), PROMPT, 8)


def test_a_root_of_another_model_is_refused_before_the_pause(engine, base, tmp_path):
    tx.make_transport("disk", root=tmp_path).send_weights("policy", {"other.weight": torch.ones(3)})
    root, client = PublishedRoot(tmp_path, base), tx.make_engine("inprocess", engine=engine)
    with pytest.raises(UpdateError, match=r"other\.weight"):
        PublishedFollower(root, client).take(root.newest())
    root.close()
    assert client.rows()[0].pause_s == 0 and says(engine) == greedy(tiny_model(0), PROMPT, 8)


def test_what_is_not_there_or_leads_back_to_nothing_known_is_named(base, tmp_path):
    assert PublishedRoot(tmp_path, base).newest() is None
    with pytest.raises(StoreError, match="holds no version"):
        PublishedRoot.of_path(str(tmp_path), base)
    by_slime(tmp_path, [5], base)
    with pytest.raises(StoreError, match="holds no version 9"):
        PublishedRoot(tmp_path, base).contents(9)
    with pytest.raises(ConfigError, match="--base"):
        PublishedRoot(tmp_path).newest()
