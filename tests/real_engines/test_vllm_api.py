"""Trainers that know only vLLM's API drive a real vLLM by our backend's name, in vLLM's own environment.

They run the blocks of docs/migrate.md.
"""

import json
import os
import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from transformers import AutoModelForCausalLM

from tests.models import tiny_model
from tests.processes import ROOT, WAIT_S
from tests.real_engines.conftest import small
from tests.real_engines.served import ServedVLLM
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.control.serving.processes import make_overlay, on_path
from torchrl_ext.testing import free_port

pytestmark = pytest.mark.engine


def peer(program, folder, *told, site=()):
    """A program of ``tests`` in vLLM's environment."""
    overlay = folder / "overlay"
    path = os.pathsep.join([on_path(overlay if overlay.exists() else make_overlay(overlay), str(ROOT)), *site])
    environ = {**os.environ, "PYTHONPATH": path, "VLLM_PLUGINS": "torchrl_ext", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [str(settings_for("vllm").get("python", "python")), str(ROOT / "tests" / program), *told]
    return subprocess.Popen(command, env=environ, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextmanager
def trainer(folder, url, transport, settings, seeds):
    """The ranks of a trainer; rank 0 is first."""
    told = {"world": 2, "port": free_port(), "url": url, "transport": transport, "settings": settings, "seeds": seeds}
    with ExitStack() as ends:
        ranks = []
        for rank in range(2):
            child = ends.enter_context(
                peer("real_engines/vllm_api_trainer.py", folder, json.dumps({"rank": rank, **told}))
            )
            ends.callback(child.kill)
            ranks.append(child)
        yield ranks


def reports(rank):
    """Each report of an update, while the trainer waits."""
    for line in rank.stdout:
        if line.startswith("{"):
            yield json.loads(line)
            rank.stdin.write("\n")
            rank.stdin.flush()


OURS = {"extra_args": ["--weight-transfer-config", json.dumps({"backend": "torchrl_ext"})]}
vllm, fresh_vllm, second_vllm = (small(ServedVLLM, "module", **OURS) for _ in range(3))


@pytest.mark.parametrize("transport", ["delta", "sharded"])
def test_vllms_own_source_client_and_factory_on_two_fsdp_ranks(transport, request, tmp_path):
    """Each on a server of its own: one that follows by other means cannot rehearse another way to load any more."""
    vllm = request.getfixturevalue("vllm" if transport == "delta" else "fresh_vllm")
    settings, seeds = {"root": str(tmp_path / "root")} if transport == "delta" else {"timeout_s": 120}, (5, 6, 7)
    before = vllm.version()
    with trainer(tmp_path, vllm.url, transport, settings, seeds) as ranks:
        found = []
        for seed, report in zip(seeds, reports(ranks[0]), strict=True):
            found.append(report)
            assert report["verified"] and report["proof"] == "rehearsed", report
            assert vllm.would_say(tiny_model(seed), vllm.tokens()) and not vllm.would_say(tiny_model(0), vllm.tokens())
            assert vllm.is_called(str(report["version"])) and not vllm.paused()
        assert [rank.wait(WAIT_S) for rank in ranks] == [0, 0]
    versions = [report["version"] for report in found]
    assert versions == [*range(versions[0], versions[0] + 3)] and str(versions[0]) != before
    if transport == "sharded":
        assert all(min(report["rank_bytes"]) > 0 and not report["whole"] for report in found)


TRL = os.environ.get("TORCHRL_EXT_TRL")


@pytest.mark.skipif(TRL is None, reason="TORCHRL_EXT_TRL names no folder with TRL 1.16 (pip install --target)")
def test_trls_trainer_sends_by_our_backend(vllm, checkpoint, tmp_path):
    told = (vllm.url, str(checkpoint), str(tmp_path / "root"), str(tmp_path / "trained"))
    with peer("peers/trl_trainer.py", tmp_path, *told, site=(TRL,)) as trl:
        try:
            found = [json.loads(line) for line in trl.stdout if line.startswith('{"proof"')]
            assert trl.wait(WAIT_S) == 0
        finally:
            trl.kill()
    assert len(found) == 3 and all(one["proof"] == "rehearsed" for one in found)  # a cold one, then one per step
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    tokens = vllm.tokens()
    assert vllm.would_say(trained.eval(), tokens) and not vllm.would_say(tiny_model(0), tokens)


SKYRL = os.environ.get("TORCHRL_EXT_SKYRL")
SYNC = "skyrl/backends/skyrl_train/weight_sync"


@pytest.mark.skipif(SKYRL is None, reason="TORCHRL_EXT_SKYRL names no repository")
def test_skyrls_client_and_source_send_to_two_servers(vllm, second_vllm, tmp_path):
    archive = ["git", "-C", str(SKYRL), "archive", "HEAD", f"{SYNC}/control_plane.py", f"{SYNC}/sources.py"]
    packed = subprocess.run(archive, capture_output=True, timeout=WAIT_S)
    assert not packed.returncode, f"the repository does not send through vLLM's trainer API: {packed.stderr.decode()}"
    subprocess.run(["tar", "-x", "-C", tmp_path], input=packed.stdout, check=True)
    told = (str(tmp_path / SYNC), str(tmp_path / "root"), [vllm.url, second_vllm.url], [11, 12])
    with peer("peers/skyrl_trainer.py", tmp_path, *map(json.dumps, told)) as skyrl:
        try:
            for seed, report in zip((11, 12), reports(skyrl), strict=True):
                assert report["proof"] == "rehearsed"
                for served in (vllm, second_vllm):
                    assert served.would_say(tiny_model(seed), served.tokens())
                    assert served.is_called(str(report["version"]))
            assert skyrl.wait(WAIT_S) == 0
        finally:
            skyrl.kill()
