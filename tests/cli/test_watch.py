"""``torchrl-ext watch``: what it says of engines and roots while a trainer changes them."""

import json

import pytest
import torch

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint, tiny_model
from torchrl_ext.cli.commands.watch import look
from torchrl_ext.cli.main import main
from torchrl_ext.control.serving.processes import free_port


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with EmbeddedServer(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", threads=1) as server:
        yield server


def test_a_word_without_a_port_is_a_root_that_may_not_be_there_yet(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = look([engine.url, "updates"])
    assert found["roots"] == [{"root": "updates", "error": "there is nothing here yet"}] and len(found["engines"]) == 1


def said(found):
    return [(one["state"], one["version"], one["lag"]) for one in found["engines"]]


def test_watch_follows_a_trainer_and_an_engine_that_sleeps(engine, tmp_path):
    absent, root = f"127.0.0.1:{free_port()}", str(tmp_path / "root")
    targets = [engine.url, absent, root]
    found = look(targets)
    assert said(found) == [("serving", "default", None), ("unreachable", "", None)]
    assert absent in found["engines"][1]["error"] and found["roots"][0]["error"] == "there is nothing here yet"

    model = tiny_model(1)
    sender = tx.WeightSender(tx.make_transport("delta", root=root), tx.connect(engine.url))
    sender.update_weights(model)
    with torch.no_grad():
        next(model.parameters())[0, :8] += 1
    assert sender.update_weights(model).verified
    found = look(targets)
    assert said(found)[0] == ("serving", "2", 0) and found["roots"][0]["latest"] == 2
    oldest, newest = found["roots"][0]["versions"]
    assert oldest["keyframe_bytes"] > newest["bytes"] > 0 and 0 < newest["density"] < 1e-3

    other = tx.make_transport("disk", root=tmp_path / "other")
    other.send_weights("policy", {"w": torch.ones(3)})
    other.shutdown()
    assert said(look([engine.url, str(tmp_path / "other")])) == [("serving", "2", -1)]

    client = tx.make_engine("embedded", url=engine.url)
    client.sleep(1)
    assert said(look(targets))[0][0] == "asleep"
    client.wake_up()
    client.pause()
    assert said(look(targets))[0][0] == "paused"
    client.resume()
    assert said(look(targets))[0][0] == "serving"
    sender.shutdown()
    client.close()


def test_watch_prints_one_document_or_lines_for_each_look(engine, tmp_path, monkeypatch, capsys):
    transport = tx.make_transport("disk", root=tmp_path / "feat")
    transport.send_weights("policy", {"w": torch.ones(3)})
    transport.shutdown()
    monkeypatch.chdir(tmp_path)  # a directory without a slash is a root
    assert main(["watch", engine.url, "feat", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["roots"][0]["latest"] == 1 and document["engines"][0]["state"] == "serving"
    assert main(["watch", engine.url, "feat", str(tmp_path / "empty"), "--looks", "2", "--interval-s", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("serving") == 2 and "keyframe" in shown and f"{engine.url}  " in shown
    assert f"{tmp_path / 'empty'}  there is nothing here yet\n" in shown
    for wrong in (["--interval-s", "0"], ["--interval-s", "nan"], ["--looks", "0"]):
        assert main(["watch", "127.0.0.1:1", *wrong]) == 2 and wrong[0] in capsys.readouterr().err
