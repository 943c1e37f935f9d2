"""`torchrl-ext serve`: a real engine in the foreground, and options that an engine does not have."""

import json
import signal
import subprocess

import httpx
import pytest

from tests.models import tiny_checkpoint
from tests.processes import COMMAND, WAIT_S, running_python
from torchrl_ext.cli.main import main


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_it_says_where_the_engine_is_and_ends_it_with_itself(tmp_path, number):
    checkpoint = tiny_checkpoint(tmp_path / "model")
    command = ["serve", "embedded", "--model", str(checkpoint), "--dtype", "float32", "--json"]
    with running_python(COMMAND, *command, stderr=subprocess.DEVNULL) as child:
        told = json.loads(child.stdout.readline())
        assert told["engine"] == "embedded" and httpx.get(f"{told['url']}/health").status_code == 200
        child.send_signal(number)
        assert child.wait(WAIT_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{told['url']}/health")


@pytest.mark.parametrize("option", [["--tp", "2"], ["--lora-rank", "8"], ["--plain-linears"], ["--host", "0.0.0.0"]])
def test_an_option_that_the_engine_does_not_have_is_refused_before_anything_starts(tmp_path, capsys, option):
    assert main(["serve", "embedded", "--model", str(tmp_path), *option]) != 0
    assert f"embedded cannot be started with {option[0]}" in capsys.readouterr().err


def test_a_release_that_nobody_has_a_recipe_for_is_refused_with_those_that_there_are(tmp_path, capsys):
    assert main(["serve", "sglang", "--model", str(tmp_path), "--release", "0.1"]) != 0
    said = capsys.readouterr().err
    assert "no recipe for sglang 0.1" in said and "0.5.19" in said


def test_help_says_which_routes_and_keys_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "the OpenAI routes (/v1/completions, /v1/chat/completions) are vLLM's and SGLang's alone" in told
    assert "VLLM_API_KEY" in told and "TORCHRL_EXT_API_KEY" in told
