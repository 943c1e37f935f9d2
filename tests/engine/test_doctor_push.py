"""`torchrl-ext doctor` and `push` at a real vLLM server, with our plugin, without it, and behind a real router."""

import json

import pytest

import torchrl_ext as tx
from tests.models import greedy, tiny_checkpoint, tiny_model
from torchrl_ext.cli.environments import settings_for_router
from torchrl_ext.cli.main import main
from torchrl_ext.serving.router import RouterProcess

pytestmark = pytest.mark.engine


def asked(capsys, *argv, status=0):
    assert main([*map(str, argv), "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.fixture(params=["vllm", "sglang"])
def served(request):
    return request.getfixturevalue(request.param)


def test_a_healthy_server_has_nothing_wrong_and_goes_on_generating(served, checkpoint, tmp_path, capsys):
    before = served.tokens()
    told = asked(capsys, "doctor", served.url, "--root", tmp_path, "--transport", "delta", "--model", checkpoint)
    rows = {(row["check"], row["where"]): row for row in told["findings"]}
    assert {row["level"] for row in rows.values()} == {"ok"}, told
    assert "seen from both sides" in rows["shared root", served.url]["found"]
    assert "torchrl_ext" in rows["versions", served.url]["found"]
    assert list(tmp_path.iterdir()) == []
    told = asked(capsys, "doctor", served.url, "--transport", "collective", "--rehearse")
    rows = {row["check"]: row for row in told["findings"]}
    assert rows["group"]["level"] == rows["rehearsal"]["level"] == "ok"
    assert "in place" in rows["rehearsal"]["found"] and "refused" not in rows["rehearsal"]["found"]
    assert served.tokens() == before and not served.paused()


def test_a_real_router_is_recognised(vllm, capsys):
    with RouterProcess([vllm.url], **settings_for_router("vllm")) as router:
        told = asked(capsys, "doctor", router.url, status=1)
    (row,) = [row for row in told["findings"] if row["check"] == "router"]
    assert row["level"] == "failure" and vllm.url in row["remedy"]


@pytest.mark.parametrize("transport", ["disk", "delta", "collective"])
def test_a_checkpoint_is_pushed(transport, served, checkpoint, tmp_path, capsys):
    other = tiny_checkpoint(tmp_path / "other", seed=3)
    asked(capsys, "push", checkpoint, "--engines", served.url)
    assert served.tokens() == greedy(tiny_model(0))
    extra = ["--base", checkpoint] if transport == "delta" else []
    told = asked(capsys, "push", other, "--engines", served.url, "--transport", transport, *extra)
    assert told["pushed"] and told["report"]["verified"]
    assert served.tokens() == greedy(tiny_model(3))
    assert served.version() == str(told["report"]["version"])


def test_a_checkpoint_of_another_model_is_refused_while_the_server_generates(vllm, tmp_path, capsys):
    before, version = vllm.tokens(), vllm.version()
    strange = tiny_checkpoint(tmp_path / "strange", hidden_size=64)
    told = asked(capsys, "push", strange, "--engines", vllm.url, status=3)
    assert told["report"]["engines"][0]["state"] == "serving"
    assert not vllm.paused() and vllm.version() == version and vllm.tokens() == before


@pytest.mark.exhaustive
def test_each_of_two_workers_answers_for_itself(tensor_parallel_vllm, tmp_path, capsys):
    told = asked(capsys, "doctor", tensor_parallel_vllm.url, "--root", tmp_path, "--transport", "collective")
    seen = [row["found"] for row in told["findings"] if row["check"] == "shared root" and "sides" in row["found"]]
    assert sorted(seen) == ["seen from both sides (worker 0)", "seen from both sides (worker 1)"]
    assert len([row for row in told["findings"] if row["check"] == "group"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_engines_of_both_makes_load_the_newest_version_that_another_process_published(
    transport, vllm, sglang, checkpoint, tmp_path, capsys
):
    trainer = tx.make_transport(transport, root=tmp_path, **({"encoding": "xor"} if transport == "delta" else {}))
    for seed in (5, 6):
        trainer.send_weights("policy", tiny_model(seed))
    trainer.shutdown()
    urls = [vllm.url, sglang.url]
    told = asked(capsys, "push", "--published", tmp_path, "--engines", *urls, "--base", checkpoint)
    assert told["pushed"] and told["report"]["version"] == 2
    for engine in (vllm, sglang):
        assert engine.tokens() == greedy(tiny_model(6)) and engine.version() == "2" and not engine.paused()


def test_a_stock_server_loads_full_versions_that_another_process_published(stock_sglang, tmp_path, capsys):
    trainer = tx.make_transport("disk", root=tmp_path)
    trainer.send_weights("policy", tiny_model(7))
    trainer.shutdown()
    told = asked(capsys, "push", "--published", tmp_path, "--engines", stock_sglang.url)
    assert told["pushed"] and not told["report"]["verified"] and stock_sglang.tokens() == greedy(tiny_model(7))
