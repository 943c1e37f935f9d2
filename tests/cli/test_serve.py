"""`torchrl-ext serve`: a real engine in the foreground, and options that an engine does not have."""

import json
import signal
import subprocess

import httpx
import pytest

from tests.models import tiny_checkpoint
from tests.processes import COMMAND, WAIT_S, running_python
from torchrl_ext.cli.main import main


def test_it_says_where_the_engine_is_and_ends_it_with_itself(tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "model")
    command = ["serve", "embedded", "--model", str(checkpoint), "--dtype", "float32", "--json"]
    with running_python(COMMAND, *command, stderr=subprocess.DEVNULL) as child:
        document = json.loads(child.stdout.readline())
        assert document["engine"] == "embedded" and httpx.get(f"{document['url']}/health").status_code == 200
        child.send_signal(signal.SIGINT)
        assert child.wait(WAIT_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{document['url']}/health")


@pytest.mark.parametrize("option", [["--tp", "2"], ["--host", "0.0.0.0"]])
def test_serve_refuses_option_that_embedded_engine_lacks(tmp_path, capsys, option):
    assert main(["serve", "embedded", "--model", str(tmp_path), *option]) == 2
    assert f"embedded cannot be started with {option[0]}" in capsys.readouterr().err
