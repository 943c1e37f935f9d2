"""``torchrl-ext doctor`` at engines that are well, and at each thing that can be wrong with one."""

import json
import re
import socket

import pytest
import torch

import torchrl_ext as tx
from tests.control.servers import CONFIG, running
from tests.control.test_discovery import scripted
from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint
from tests.processes import ROOT
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.cli.main import main
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.data.stores.opening import open_store
from torchrl_ext.data.weights.checkpoint import CheckpointSource

DOCTOR = [ROOT / "torchrl_ext" / "cli" / f"{name}.py" for name in ("commands/doctor", "examination")]
BARE = CONFIG | {"additional_config": {}}
GONE = (404, {"detail": "Not Found"})
SGLANG = {"model_path": "/m", "disaggregation_mode": "null", "version": "0.5.23"}
EMBEDDED = {"engine": "embedded", "version": "1", "model": "/m", "parallel_config": {}, "transports": ["disk"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "seed0")


@pytest.fixture(scope="module")
def engine(checkpoint):
    with EmbeddedServer(checkpoint, threads=1) as server:
        yield server


def examined(capsys, *argv, status=None):
    found = main(["doctor", *map(str, argv), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == ("failure" not in {row["level"] for row in document["findings"]}) == (not found)
    assert status in (None, found), document
    return document


def finding(document, check, level=None, where=None):
    rows = [row for row in document["findings"] if row["check"] == check]
    rows = [row for row in rows if where in (None, row["where"]) and level in (None, row["level"])]
    assert len(rows) == 1, (check, document["findings"])
    return rows[0]


def test_a_healthy_engine_with_a_shared_root_has_nothing_wrong(engine, checkpoint, tmp_path, capsys):
    root = tmp_path / "root"
    document = examined(capsys, engine.url, "--root", root, "--transport", "delta", "--model", checkpoint, status=0)
    assert {row["level"] for row in document["findings"]} == {"ok"}
    wanted = {"reachable", "routes", "plugin", "versions", "shared root", "model"}
    assert wanted <= {row["check"] for row in document["findings"]}
    assert f"reads {root}" in finding(document, "shared root", where=engine.url)["found"]
    assert document["engines"][0]["url"] == engine.url
    assert not root.exists()  # as it was before


def test_a_root_keeps_its_files_and_a_connected_trainer_goes_on(engine, checkpoint, tmp_path, capsys):
    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "a"), tx.connect(engine.url))
    source = CheckpointSource(checkpoint)
    before = sender.update_weights(source).version
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("mine")
    examined(capsys, engine.url, "--root", tmp_path / "b", status=0)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["mine"]
    assert sender.update_weights(source).version == before + 1
    sender.shutdown()


def test_doctor_warns_of_an_engine_that_is_paused(engine, tmp_path, capsys):
    session = HTTPSession(engine.url)
    session.post("/pause", query={"mode": "keep"})
    flags = ["--update-weight-transport", "disk", "--update-weight-disk-dir", tmp_path]
    document = examined(capsys, *flags, "--rollout-external-engine-addrs", engine.url, status=0)
    session.post("/resume")
    finding(document, "paused", "warning", engine.url)
    assert "transport 'disk'" in finding(document, "options")["found"]
    finding(document, "shared root", "ok", engine.url)
    assert "::1:8000" in finding(examined(capsys, "::1:8000", status=1), "reachable")["found"]


def answering(**answer):
    """Workers that answer a question so."""
    told = {"torchrl_ext": "0.1.0", "host": "elsewhere", "pid": 1, **answer}
    return {"post_collective_rpc": (200, {"results": [told]})}


def of_vllm(**config):
    return {"get_server_info": (200, {"vllm_config": {**CONFIG, **config}})}


UNSEEN = {"seen": False, "why": "no such file"}
CLOSED = {**UNSEEN, "remedy": "name it in TORCHRL_EXT_ROOTS where the engine is started"}


@pytest.mark.parametrize(
    ("answers", "check", "level", "word"),
    [
        ({"get_server_info": GONE}, "routes", "failure", "VLLM_SERVER_DEV_MODE=1"),
        ({"get_server_info": (401, {"error": "no"})}, "routes", "failure", "api_key"),
        (of_vllm(additional_config={}, load_config={"load_format": "dummy"}), "plugin", "failure", "VLLM_PLUGINS"),
        ({"get_server_info": (200, EMBEDDED)}, "plugin", "failure", "transport 'delta'"),
        (answering(torchrl_ext="0.0.1"), "versions", "warning", "0.0.1"),
        (answering(root=UNSEEN), "shared root", "failure", "mount"),
        (answering(root=CLOSED), "shared root", "failure", "'remedy': 'name it in TORCHRL_EXT_ROOTS"),
        ({"post_collective_rpc": (400, {"error": "no transport"})}, "shared root", "warning", "no plugin"),
        ({"post_collective_rpc": (400, {"error": "no transport"})}, "plugin", "warning", "torchrl_ext"),
    ],
)
def test_what_is_wrong_with_a_server_is_named_with_the_remedy(answers, check, level, word, tmp_path, capsys):
    with running(**answers) as server:
        document = examined(capsys, server.url, "--root", tmp_path, "--transport", "delta")
    assert word in str(finding(document, check, level, server.url))


def test_a_router_is_recognised_and_named_as_none_to_talk_to(capsys):
    listing, info = {"workers": [{"url": "http://a:1"}]}, {"engine": "embedded", "parallel_config": {}}
    with scripted({"/workers": (200, listing), "/server_info": (200, info)}) as server:
        row = finding(examined(capsys, f"127.0.0.1:{server.port}", status=1), "router")
    assert row["level"] == "failure" and "http://a:1" in row["remedy"]


@pytest.mark.parametrize(
    ("info", "follows", "missing"),
    [
        ({"vllm_config": BARE}, "disk", "/collective_rpc"),
        (SGLANG, "disk, native", "/init_weights_update_group"),
    ],
    ids=["vllm", "sglang"],
)
def test_doctor_shows_transports_of_an_engine_without_the_plugin(info, follows, missing, capsys):
    with running(get_server_info=(200, info)) as server:
        server.answers["POST /weights_checker"] = (400, {"success": False, "message": "Unsupported action"})
        found = examined(capsys, server.url, "--transport", follows.rpartition(", ")[2], status=1)
        job = finding(examined(capsys, server.url, "--update-weight-mode", "full", status=1), "options")["found"]
    assert ("transport 'native'" if "native" in follows else "no broadcast of its own") in job
    plugin = finding(found, "plugin", "warning")
    assert plugin["found"].startswith(f"runs without our plugin: follows by {follows}, and only its outputs show")
    assert "a part of a version" in plugin["expected"]
    assert missing in finding(found, "routes", "failure")["found"]  # this server answers no OPTIONS
    assert "/weights_checker" not in finding(found, "routes", "failure")["found"]


def test_doctor_finds_a_checkpoint_of_another_model_or_dtype(checkpoint, tmp_path, capsys):
    other = tiny_checkpoint(tmp_path / "other", hidden_size=64)
    with running(get_server_info=(200, EMBEDDED | {"model": str(other), "dtype": "bfloat16"})) as server:
        document = examined(capsys, server.url, "--model", checkpoint, status=1)
        row = finding(document, "model", "failure")
        assert "hidden_size 64" in row["found"] and "hidden_size 128" in row["expected"]
        row = finding(document, "dtype", "failure")
        assert "bfloat16" in row["found"] and "float32" in row["expected"]
        assert "dtype=torch.bfloat16" in row["remedy"] and "--dtype bfloat16" in row["remedy"]
    half = tiny_checkpoint(tmp_path / "half", dtype=torch.bfloat16)
    with running(**of_vllm(model_config={"model": str(half), "dtype": "torch.float32"})) as server:
        finding(examined(capsys, server.url, "--model", half), "dtype", "warning")  # it rounds nothing
        finding(examined(capsys, server.url, "--model", tmp_path, status=1), "model", "failure", "trainer")


def test_doctor_fails_in_time_for_a_silent_or_absent_server(capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        document = examined(capsys, f"127.0.0.1:{silent.getsockname()[1]}", "--timeout-s", "0.5", status=1)
        assert re.search(r"within 0\.\d+ s", finding(document, "reachable")["found"])  # what was left of it by then
        free = silent.getsockname()[1]
    assert finding(examined(capsys, f"127.0.0.1:{free}", status=1), "reachable")["level"] == "failure"


def test_options_that_cannot_work_together_are_a_failure(capsys):
    """As the guides' checklist says; `tests.compat.test_flags` has the others."""
    flags = ("--vllm-config", "x.yaml", "--rollout-external-engine-addrs", "a:1", "--timeout-s", "0.5")
    assert "exclude each other" in finding(examined(capsys, *flags, status=1), "options", "failure")["found"]


def test_a_person_gets_lines_that_are_never_cut(engine, tmp_path, capsys):
    root = tmp_path / ("a" * 40) / ("b" * 40)
    root.mkdir(parents=True)
    assert main(["doctor", engine.url, "127.0.0.1:9", "--root", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"ok       {engine.url}  shared root: ") and str(root) in line for line in lines)
    assert any(line.startswith("failure  127.0.0.1:9  ") for line in lines)
    assert "an update would fail" in lines[-1]
    assert main(["doctor", engine.url]) == 0 and "no problem found" in capsys.readouterr().out
    (tmp_path / "file").write_text("in the way")
    finding(examined(capsys, engine.url, "--root", tmp_path / "file", status=1), "shared root", "failure", "trainer")
    assert main(["doctor"]) == 2 and "nothing to examine" in capsys.readouterr().err
    assert main(["doctor", engine.url, "--pigeon"]) == 2 and "--pigeon" in capsys.readouterr().err


def test_operations_page_names_every_doctor_check():
    checks, _, rest = (ROOT / "docs" / "operations.md").read_text().partition("## Deployment checklist")
    lines = rest.partition("\n## ")[0]
    table = [line.split("|")[1] for line in checks.splitlines() if line.startswith("| `")]
    named = {name for cell in table for name in re.findall("`([^`]+)`", cell)}
    made = set(
        re.findall(r'(?:ok|warning|failure|failed|level)\(\s*"([a-z ]+)"', "".join(path.read_text() for path in DOCTOR))
    )
    assert named == made
    rows = [line.split("|")[2] for line in lines.splitlines() if line.startswith("| ") and "`" in line.split("|")[2]]
    assert len(rows) == 7  # the lines of the guides' checklist
    assert all(set(re.findall("`([^`]+)`", row)) <= named for row in rows)


def test_a_key_that_would_travel_in_the_clear_is_worth_a_word(caplog):
    for address in ("engine.example:8000", "127.0.0.1:8000", "https://engine.example"):
        HTTPSession(address, api_key="sesame")
    (record,) = caplog.records
    assert "engine.example unencrypted" in record.message and "sesame" not in record.message


def test_a_root_with_a_password_in_its_url_is_refused():
    with pytest.raises(ConfigError, match="s3://bucket/x contains a user or a password") as refused:
        open_store("s3://key:secret@bucket/x")
    assert "secret" not in str(refused.value)
