"""A trainer that knows only vLLM's API drives a real vLLM by our backend's name, in vLLM's own environment.

It runs the first block of docs/vllm_api.md.
"""

import json
import os
import subprocess
from contextlib import ExitStack, contextmanager

import pytest

from tests.models import tiny_model
from tests.processes import ROOT, WAIT_S
from tests.real_engines.conftest import small
from tests.real_engines.served import ServedVLLM
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.control.serving.processes import make_overlay, on_path
from torchrl_ext.testing import free_port

pytestmark = pytest.mark.engine


@contextmanager
def trainer(folder, url, transport, settings, seeds):
    """The ranks of a trainer; rank 0 is first."""
    told = {"world": 2, "port": free_port(), "url": url, "transport": transport, "settings": settings, "seeds": seeds}
    command = [str(settings_for("vllm").get("python", "python")), str(ROOT / "tests/real_engines/vllm_api_trainer.py")]
    path = on_path(make_overlay(folder / "overlay"), str(ROOT))
    how = {"env": {**os.environ, "PYTHONPATH": path, "VLLM_PLUGINS": "torchrl_ext"}, "cwd": ROOT, "text": True}
    how |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as ends:
        ranks = []
        for rank in range(2):
            child = ends.enter_context(subprocess.Popen([*command, json.dumps({"rank": rank, **told})], **how))
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
vllm, fresh_vllm = (small(ServedVLLM, "module", **OURS) for _ in range(2))


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
