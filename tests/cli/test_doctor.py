"""``torchrl-ext doctor`` at engines that are well, and at each thing that can be wrong with one."""

from __future__ import annotations

import email.utils
import json
import re
import socket
import time

import pytest

from tests.embedded import EmbeddedServer
from tests.models import tiny_checkpoint
from tests.processes import ROOT
from tests.rpc.servers import CONFIG, rehearsing, running
from tests.rpc.test_discovery import scripted
from torchrl_ext.cli.doctor.findings import Examination, Notes
from torchrl_ext.cli.main import main
from torchrl_ext.errors import ConfigError
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.stores import open_store
from torchrl_ext.types import API_KEY_VARIABLE
from torchrl_ext.weights.checkpoint import CheckpointSource

DOCTOR = ROOT / "torchrl_ext" / "cli" / "doctor"
BARE = CONFIG | {"weight_transfer_config": None}
GONE = (404, {"detail": "Not Found"})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "seed0")


@pytest.fixture(scope="module")
def engine(checkpoint):
    with EmbeddedServer(checkpoint, threads=1) as server:
        yield server


def examined(capsys, *argv, status=None):
    found = main(["doctor", *map(str, argv), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert found == (0 if told["ok"] else 1)
    if status is not None:
        assert found == status, told
    return told


def finding(told, check, where=None, level=None):
    rows = [row for row in told["findings"] if row["check"] == check]
    rows = [row for row in rows if where in (None, row["where"]) and level in (None, row["level"])]
    assert len(rows) == 1, (check, rows)
    return rows[0]


def levels(told):
    return {(row["check"], row["level"]) for row in told["findings"]}


def test_a_healthy_engine_with_a_shared_root_has_nothing_wrong(engine, checkpoint, tmp_path, capsys):
    root = tmp_path / "root"
    told = examined(capsys, engine.url, "--root", root, "--transport", "delta", "--model", checkpoint, status=0)
    assert {level for _, level in levels(told)} == {"ok"}
    checks = {check for check, _ in levels(told)}
    wanted = {"address", "router", "reachable", "clock", "routes", "plugin", "world size", "versions", "shared root"}
    assert wanted | {"disk space", "model"} <= checks
    assert "seen from both sides" in finding(told, "shared root", engine.url)["found"]
    assert told["engines"][0]["url"] == engine.url
    assert not root.exists()  # as it was before


def test_an_engine_that_computes_with_what_is_read_back_has_nothing_to_rehearse(engine, capsys):
    found = finding(examined(capsys, engine.url, "--rehearse", status=0), "rehearsal")
    assert found["level"] == "ok" and "proof 'in place'" in found["found"]


def test_an_engine_that_refuses_its_rehearsal_would_fail_an_update(capsys):
    with running(post_init_weight_transfer_engine=rehearsing(refused=True)) as server:
        found = finding(examined(capsys, server.url, "--rehearse", status=1), "rehearsal")
    assert found["level"] == "failure" and "layer.0 (Experts)" in found["found"]


def test_nothing_is_left_in_a_root_that_was_there(engine, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    examined(capsys, engine.url, "--root", tmp_path, status=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_trainer_that_is_connected_is_not_disturbed(engine, checkpoint, tmp_path, capsys):
    import torchrl_ext as tx

    sender = tx.WeightSender(tx.make_transport("disk", root=tmp_path / "a"), tx.connect(engine.url))
    source = CheckpointSource(checkpoint)
    before = sender.update_weights(source).version
    examined(capsys, engine.url, "--root", tmp_path / "b", status=0)
    assert sender.update_weights(source).version == before + 1
    sender.shutdown()


def test_a_group_can_be_formed_where_workers_reach_the_trainer(engine, capsys):
    told = examined(capsys, engine.url, "--transport", "collective", status=0)
    assert "can reach" in finding(told, "group")["found"]


def test_two_addresses_of_one_engine_are_found_out(engine, capsys):
    port = engine.url.rpartition(":")[2]
    told = examined(capsys, engine.url, f"localhost:{port}", status=1)
    assert "lead to one engine" in finding(told, "addresses", "fleet")["found"]


def test_a_paused_engine_is_a_warning(engine, capsys):
    session = HTTPSession(engine.url)
    session.post("/pause", query={"mode": "keep"})
    try:
        told = examined(capsys, engine.url, status=0)
    finally:
        session.post("/resume")
    assert finding(told, "paused")["level"] == "warning"


def test_a_root_that_only_the_trainer_sees_is_a_failure(checkpoint, tmp_path, capsys):
    """An engine of another mount namespace, as far as it can be had without privileges: it looks somewhere else."""
    answer = {"torchrl_ext": "0.1.0", "host": "elsewhere", "pid": 1, "root": {"seen": False, "why": "no such file"}}
    with running(post_init_weight_transfer_engine=(200, {"answer": answer})) as server:
        told = examined(capsys, server.url, "--root", tmp_path, status=1)
    row = finding(told, "shared root", server.url)
    assert row["level"] == "failure" and "elsewhere" in row["found"] and "mount" in row["remedy"]


def test_a_root_that_shows_nothing_of_what_the_engine_writes_is_a_warning(tmp_path, capsys):
    root = {"seen": True, "why": "", "probe": ".probe.tmp-0123", "free_bytes": 1}
    answer = {"torchrl_ext": "0.1.0", "host": "elsewhere", "pid": 1, "root": root}
    with running(post_init_weight_transfer_engine=(200, {"answer": answer})) as server:
        told = examined(capsys, server.url, "--root", tmp_path)
    assert "does not show up" in finding(told, "shared root", server.url, "warning")["found"]


def test_a_root_that_cannot_be_written_is_a_failure(tmp_path, capsys, engine):
    (tmp_path / "file").write_text("in the way")
    told = examined(capsys, engine.url, "--root", tmp_path / "file", status=1)
    assert finding(told, "shared root", "trainer")["level"] == "failure"


ROUTERS = [{"/list_workers": {"urls": ["http://a:1"]}}, {"/workers": {"workers": [{"url": "http://a:1"}]}}]


@pytest.mark.parametrize("listing", ROUTERS)
def test_a_router_is_recognised_and_named_as_none_to_talk_to(listing, capsys):
    (route, body), info = next(iter(listing.items())), {"engine": "embedded", "parallel_config": {}}
    with scripted({route: (200, body), "/server_info": (200, info)}) as server:
        row = finding(examined(capsys, f"127.0.0.1:{server.port}", status=1), "router")
    assert row["level"] == "failure" and "http://a:1" in row["remedy"]


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"get_server_info": GONE}, "routes", "VLLM_SERVER_DEV_MODE=1"),
        (
            {"get_server_info": (200, {"vllm_config": BARE | {"load_config": {"load_format": "dummy"}}})},
            "plugin",
            "--weight-transfer-config",
        ),
        (
            {"get_server_info": (200, {"vllm_config": CONFIG | {"load_config": {"load_format": "ipc_cache"}}})},
            "plugin",
            "another --load-format",
        ),
        ({"get_server_info": (401, {"error": "no"})}, "routes", "api_key"),
    ],
)  # fmt: skip
def test_what_a_vllm_server_lacks_is_named_with_the_remedy(changes, check, words, capsys):
    with running(**changes) as server:
        row = finding(examined(capsys, server.url, status=1), check, level="failure")
    assert words in row["remedy"]


SGLANG = {"model_path": "/m", "disaggregation_mode": "null", "version": "0.5.23"}


@pytest.mark.parametrize(
    ("info", "follows", "more", "missing"),
    [
        ({"vllm_config": BARE}, "disk", '{"backend": "nccl"}', "/collective_rpc"),
        (
            {"vllm_config": CONFIG | {"weight_transfer_config": {"backend": "nccl"}}},
            "disk, native",
            "",
            "/start_weight",
        ),
        (SGLANG, "disk, native", "", "/init_weights_update_group"),
        (SGLANG | {"pp_size": 2}, "disk", "one pipeline stage", "/update_weights_from_disk"),
    ],
    ids=["vllm", "vllm-nccl", "sglang", "sglang-pp2"],
)
def test_an_engine_without_our_plugin_is_told_how_it_follows_what_it_lacks_and_what_its_proof_is(
    info, follows, more, missing, capsys
):
    with running(get_server_info=(200, info)) as server:
        server.answers["POST /weights_checker"] = (400, {"success": False, "message": "Unsupported action"})
        found = examined(capsys, server.url, "--transport", follows.rpartition(", ")[2], status=1)
    plugin = finding(found, "plugin", level="warning")
    assert plugin["found"] == f"runs without our plugin: follows by {follows}" and more in plugin["remedy"]
    assert "verify='outputs'" in finding(found, "proof", level="warning")["remedy"]
    assert "lets it serve what landed" in finding(found, "a part of a version", level="warning")["found"]
    assert missing in finding(found, "routes", level="failure")["found"]  # this server answers no OPTIONS
    assert ("no secret" in str(found)) == ("native" in follows)
    assert "/weights_checker" not in finding(found, "routes", level="failure")["found"]
    assert ("0.5.20 or older" in str(found)) == ("model_path" in info)


@pytest.mark.parametrize(
    ("transfer", "level"),
    [
        (None, None),
        ({"kv_role": "kv_both", "kv_connector": "OffloadingConnector"}, "ok"),
        ({"kv_role": "kv_both", "kv_connector": "LMCacheConnectorV1"}, "warning"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {"connectors": [{"kv_connector": "HF3FSKVConnector"}]},
            },
            "warning",
        ),
    ],
)
def test_stores_of_keys_that_outlive_an_update_are_named(transfer, level, capsys):
    with running(get_server_info=(200, {"vllm_config": CONFIG | {"kv_transfer_config": transfer}})) as server:
        told = examined(capsys, server.url)
    assert [row["level"] for row in told["findings"] if row["check"] == "kept keys"] == [level] * (level is not None)


def test_missing_routes_are_named(capsys):
    info = {"vllm_config": CONFIG}
    with scripted({"/server_info": (200, info), "/get_world_size": (200, {"world_size": 6})}) as server:
        row = finding(examined(capsys, f"127.0.0.1:{server.port}", status=1), "routes")
    assert "/update_weights" in row["found"] and "/resume" in row["found"]


def test_a_transport_that_the_engine_cannot_follow_is_a_failure(capsys):
    info = {"engine": "embedded", "version": "1", "model": "/m", "parallel_config": {}, "transports": ["disk"]}
    with running(get_server_info=(200, info)) as server:
        row = finding(examined(capsys, server.url, "--transport", "collective", status=1), "plugin", level="failure")
    assert row["expected"] == "transport 'collective'"


def test_another_version_of_the_package_is_a_warning(capsys):
    answer = {"torchrl_ext": "0.0.1", "host": "h", "pid": 1}
    with running(post_init_weight_transfer_engine=(200, {"answer": answer})) as server:
        row = finding(examined(capsys, server.url), "versions")
    assert row["level"] == "warning" and "0.0.1" in row["found"]


def test_an_engine_with_a_plugin_that_answers_nothing_is_a_warning(tmp_path, capsys):
    with running(post_init_weight_transfer_engine=(400, {"error": "the call names no transport"})) as server:
        told = examined(capsys, server.url, "--root", tmp_path)
    assert finding(told, "plugin", level="warning")["expected"].startswith("torchrl_ext")
    assert finding(told, "shared root", server.url)["level"] == "warning"


@pytest.mark.parametrize(("ahead_s", "level"), [(60, "warning"), (-3600, "failure"), (0, "ok")])
def test_clocks_are_compared(ahead_s, level, capsys):
    info = {"engine": "embedded", "parallel_config": {}, "transports": ["disk"]}
    date = email.utils.formatdate(time.time() + ahead_s, usegmt=True)
    with scripted({"/server_info": (200, info, {"date": date})}) as server:
        server.RequestHandlerClass.send_response = _without_date
        try:
            row = finding(examined(capsys, f"127.0.0.1:{server.port}"), "clock")
        finally:
            del server.RequestHandlerClass.send_response
    assert row["level"] == level


def _without_date(handler, code, message=None):
    handler.send_response_only(code, message)


def test_a_world_size_that_the_parallel_sizes_do_not_give_is_a_warning(capsys):
    with running(get_get_world_size=(200, {"world_size": 5})) as server:
        row = finding(examined(capsys, server.url), "world size", server.url)
    assert row["level"] == "warning" and "world size 5" in row["found"]


def test_an_engine_of_another_model_or_dtype_is_found(checkpoint, tmp_path, capsys):
    other = tiny_checkpoint(tmp_path / "other", hidden_size=64)
    info = {"engine": "embedded", "version": "1", "model": str(other), "dtype": "bfloat16", "parallel_config": {}}
    with running(get_server_info=(200, info | {"transports": ["disk"]})) as server:
        told = examined(capsys, server.url, "--model", checkpoint, status=1)
    row = finding(told, "model", server.url)
    assert row["level"] == "failure" and "hidden_size 64" in row["found"] and "hidden_size 128" in row["expected"]
    assert "bfloat16" in finding(told, "dtype", server.url, "warning")["found"]


def test_an_engine_that_computes_in_another_dtype_than_its_checkpoint_is_found_without_a_model(checkpoint, capsys):
    info = {"engine": "embedded", "version": "1", "model": str(checkpoint), "dtype": "bfloat16", "parallel_config": {}}
    with running(get_server_info=(200, info | {"transports": ["disk"]})) as server:
        row = finding(examined(capsys, server.url), "dtype", server.url, "warning")
    assert "bfloat16" in row["found"] and "float32" in row["expected"]
    assert "dtype=torch.bfloat16" in row["remedy"] and "--dtype bfloat16" in row["remedy"]


def test_a_full_disk_is_found_before_it_is_full(checkpoint, engine, tmp_path, capsys):
    """The root's filesystem is a small one where this machine lets us have it; else the model is said to be large."""
    from torchrl_ext.cli.doctor.shared import SharedChecks

    notes = Notes("trainer")
    shared = SharedChecks(str(tmp_path), "disk", 10**15, notes)
    with shared.asking([]):
        pass
    (row,) = [row for row in notes.rows if row.check == "disk space"]
    assert row.level == "failure" and "three full versions" in row.expected


@pytest.mark.parametrize("address", ["::1:8000", "ftp://host:1", "host:99999"])
def test_addresses_that_cannot_be_are_explained(address, capsys):
    row = finding(examined(capsys, address, status=1), "address")
    assert "[::1]:8000" in row["remedy"]


def test_nobody_there_and_silence_are_failures_within_the_deadline(capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told = examined(capsys, f"127.0.0.1:{silent.getsockname()[1]}", "--timeout-s", "0.5", status=1)
        assert re.search(r"within 0\.\d+ s", finding(told, "reachable")["found"])  # what was left of it by then
        free = silent.getsockname()[1]
    assert finding(examined(capsys, f"127.0.0.1:{free}", status=1), "reachable")["level"] == "failure"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--vllm-config", "x.yaml", "--rollout-external-engine-addrs", "a:1"], "exclude each other"),
        (["--update-weight-mode", "delta", "--colocate"], "colocated"),
        (["--update-weight-transport", "disk"], "no directory"),
    ],
)
def test_options_that_cannot_work_together_are_a_failure(flags, words, capsys):
    row = finding(examined(capsys, *flags, "--timeout-s", "0.5", status=1), "options")
    assert row["level"] == "failure" and words in row["found"]


@pytest.mark.parametrize("name", ["--update-weight-disk-dir", "--update-weight-delta-dir"])
def test_options_of_the_job_name_transport_root_and_engines(name, engine, tmp_path, capsys):
    flags = ["--update-weight-transport", "disk", name, tmp_path]
    told = examined(capsys, *flags, "--rollout-external-engine-addrs", engine.url, status=0)
    assert "transport 'disk'" in finding(told, "options")["found"]
    assert finding(told, "shared root", engine.url)["level"] == "ok"


def test_options_of_the_job_take_the_wire_of_engines_without_our_plugin(capsys):
    full = ("--update-weight-mode", "full")
    with running(get_server_info=(200, SGLANG)) as server:
        server.answers["POST /weights_checker"] = (400, {"success": False, "message": "Unsupported action"})
        told = examined(capsys, server.url, *full, status=1)  # this server answers no OPTIONS
        assert "transport 'native'" in finding(told, "options")["found"]
        assert finding(told, "plugin")["level"] == "warning"
        with running(get_server_info=(200, {"vllm_config": BARE})) as other:
            told = examined(capsys, server.url, other.url, *full, status=1)
        assert "none of its own" in finding(told, "options", level="failure")["found"]


def test_a_person_gets_whole_lines_and_a_verdict(engine, tmp_path, capsys):
    root = tmp_path / ("a" * 40) / ("b" * 40)
    root.mkdir(parents=True)
    assert main(["doctor", engine.url, "--root", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"ok       {engine.url}  shared root: ") for line in lines)
    assert "nothing stands in the way" in lines[-1]
    assert main(["doctor", engine.url, "127.0.0.1:9", "--root", str(root), "--problems"]) == 1
    out = capsys.readouterr().out
    assert "failure  127.0.0.1:9  " in out and "         remedy: " in out and "\nok " not in f"\n{out}"
    assert main(["doctor", "ftp://host:1"]) == 1
    assert "an update would fail" in capsys.readouterr().out
    assert main(["doctor"]) == 1
    assert "nothing to look at" in capsys.readouterr().err


def test_the_page_about_external_engines_names_the_checks_that_there_are():
    page = (ROOT / "docs" / "external_engines.md").read_text()
    checks, _, lines = page.partition("## Deployment checklist")
    table = [line.split("|")[1] for line in checks.splitlines() if line.startswith("| `")]
    named = {name for cell in table for name in re.findall("`([^`]+)`", cell)}
    source = "".join(path.read_text() for path in DOCTOR.glob("*.py"))
    made = set(re.findall(r'note(?:s\.\w+)?\(\s*"([a-z ]+)"', source))
    assert named == made | {"model", "dtype", "clock"}
    rows = [line.split("|")[2] for line in lines.splitlines() if line.startswith("| ") and "`" in line.split("|")[2]]
    assert len(rows) == 7  # the lines of the guides' checklist
    assert all(set(re.findall("`([^`]+)`", row)) <= named for row in rows)


def test_a_key_of_the_environment_opens_every_route_and_none_is_open_without(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv(API_KEY_VARIABLE, "sesame")
    with EmbeddedServer(checkpoint, threads=1) as server:
        told = examined(capsys, server.url, status=0)
        monkeypatch.delenv(API_KEY_VARIABLE)
        assert "401" in json.dumps(examined(capsys, server.url, status=1))
    assert finding(told, "key")["found"] == "every route of a weight update wants the key"


def test_routes_that_answer_without_the_key_are_named(engine, capsys):
    found = finding(examined(capsys, engine.url, "--api-key", "sesame", status=0), "key", level="warning")
    assert "/init_weight_transfer_engine, /pause" in found["found"] and "firewall" in found["remedy"]


def test_a_key_is_not_printed_with_what_is_asked():
    assert "sesame" not in repr(Examination(api_key="sesame", question={}))


def test_a_key_that_would_travel_in_the_clear_is_worth_a_word(caplog):
    for address in ("engine.example:8000", "http://engine.example:8000", "127.0.0.1:8000", "https://engine.example"):
        HTTPSession(address, api_key="sesame")
    (record,) = caplog.records
    assert "engine.example in the clear" in record.message and "sesame" not in record.message


def test_a_root_with_a_password_in_its_url_is_refused():
    with pytest.raises(ConfigError, match="s3://bucket/x was given with a user or a password") as refused:
        open_store("s3://key:secret@bucket/x")
    assert "secret" not in str(refused.value)
