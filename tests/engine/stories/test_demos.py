"""What each system promises, acted out by ``torchrl-ext demo --seed NAME`` on real engines."""

import json

import pytest

from tests.processes import COMMAND, finished

pytestmark = pytest.mark.engine


def acted(name, *args):
    done = finished(COMMAND, "demo", "--seed", name, "--json", *map(str, args), timeout_s=400)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["verified"] and told["demo"] == name and all(check["held"] for check in told["checks"])
    return told


def test_vimes_guide_to_external_engines_on_two_vllms(vllm, second_vllm, checkpoint):
    told = acted("vime", "--engines", vllm.url, second_vllm.url, "--model", checkpoint)
    assert told["engine"] == "vllm" and {*told["transport"].split(", ")} == {"collective", "disk", "delta"}
    assert {row["engine"] for report in told["syncs"] for row in report["engines"]} == {vllm.url, second_vllm.url}


def test_slimes_guide_to_external_engines_on_sglang(sglang, checkpoint):
    told = acted("slime", "--engines", sglang.url, "--model", checkpoint)
    assert told["engine"] == "sglang" and {*told["transport"].split(", ")} == {"collective", "disk", "delta"}


def test_torchrls_surface_on_a_vllm(vllm, checkpoint):
    assert acted("torchrl", "--engines", vllm.url, "--model", checkpoint)["engine"] == "vllm"


def test_skyrls_architecture_on_two_vllms(vllm, second_vllm, checkpoint):
    assert acted("skyrl", "--engines", vllm.url, second_vllm.url, "--model", checkpoint)["engine"] == "vllm"


def test_online_switching_of_vllms_own_object():
    assert acted("switching")["engine"] == "vllm"
