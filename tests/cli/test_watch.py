"""``torchrl-ext watch``: what it says of engines and roots while a trainer changes them."""

import json

import pytest
import torch

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint, tiny_model
from tests.processes import COMMAND
from tests.terminals import on_terminal
from torchrl_ext.cli.commands.watch import looks
from torchrl_ext.cli.main import main
from torchrl_ext.control.serving.processes import free_port


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with EmbeddedServer(tiny_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", threads=1) as server:
        yield server


def test_watch_follows_a_trainer_and_an_engine_that_sleeps(engine, tmp_path):
    """Watch shows a trainer's versions and the states of engines: asleep, paused or unreachable."""
    absent = f"127.0.0.1:{free_port()}"
    seen = looks([engine.url, absent, str(tmp_path)], 0.05)
    (first, gone), (root,) = next(seen)
    assert (first.state, first.version, first.lag) == ("serving", "default", None)
    assert gone.state == "unreachable" and absent in gone.error

    model = tiny_model(1)
    sender = tx.WeightSender(tx.make_transport("delta", root=tmp_path), tx.connect(engine.url))
    sender.update_weights(model)
    with torch.no_grad():
        next(model.parameters())[0, :8] += 1
    assert sender.update_weights(model).verified
    (first, gone), (root,) = next(seen)
    assert (first.state, first.version, first.lag) == ("serving", "2", 0)
    newest, oldest = root["versions"][-1], root["versions"][0]
    assert root["latest"] == 2 and oldest["keyframe_bytes"] > newest["bytes"] > 0
    assert 0 < newest["density"] < 1e-3

    other = tx.make_transport("disk", root=tmp_path / "other")
    other.send_weights("policy", {"w": torch.ones(3)})
    other.shutdown()
    ((one,), _) = next(looks([engine.url, str(tmp_path / "other")], 0.05))
    assert one.lag == -1

    client = tx.make_engine("embedded", url=engine.url)
    client.sleep(1)
    assert next(seen)[0][0].state == "asleep"
    client.wake_up()
    client.pause()
    next(seen)
    (first, gone), _ = next(seen)
    assert first.state == "paused" and first.pause_s > 0
    client.resume()
    (first, gone), _ = next(seen)
    assert first.state == "serving" and first.pause_s > 0
    sender.shutdown()
    client.close()
    seen.close()


def test_it_prints_one_document_or_tables(engine, tmp_path, capsys):
    transport = tx.make_transport("disk", root=tmp_path)
    for _ in range(3):
        transport.send_weights("policy", {"w": torch.ones(3)})
    transport.shutdown()
    assert main(["watch", engine.url, str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["roots"][0]["latest"] == 3 and told["engines"][0]["state"] == "serving"
    assert (
        main(["watch", engine.url, str(tmp_path), str(tmp_path / "empty"), "--looks", "2", "--interval-s", "0.05"]) == 0
    )
    shown = capsys.readouterr().out
    assert shown.count("serving") == 2 and "keyframe" in shown  # each look reaches a pipe
    assert f"{tmp_path / 'empty'}  there is nothing here yet\n" in shown and f"{engine.url}  " in shown


def test_a_terminal_of_80_columns_shows_whole_addresses(engine, tmp_path):
    watched = (engine.url, f"127.0.0.1:{free_port()}", str(tmp_path), "--looks", "1")
    shown, _ = on_terminal(COMMAND, "watch", *watched, stream="stdout", COLUMNS="80")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80 and any(line.startswith(f"{engine.url}  serving") for line in lines)
    assert f"http://{watched[1]}: [Errno 111] Connect call failed" in " ".join(shown.split())  # wrapped, and not cut
    assert str(tmp_path) in shown.replace("\r\n", "")


def test_a_directory_without_a_slash_is_a_root(tmp_path, monkeypatch):
    (tmp_path / "feat").mkdir()
    monkeypatch.chdir(tmp_path)
    engines, roots = next(looks(["feat", "127.0.0.1:1"], 0.05))
    assert [root["root"] for root in roots] == ["feat"] and [one.engine for one in engines] == ["127.0.0.1:1"]


def test_numbers_that_make_no_sense_are_refused(capsys):
    for wrong in (["--interval-s", "0"], ["--interval-s", "nan"], ["--looks", "0"], ["--versions", "0"]):
        assert main(["watch", "127.0.0.1:1", *wrong]) == 2 and wrong[0] in capsys.readouterr().err
