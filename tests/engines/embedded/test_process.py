"""The embedded engine as a child process: it starts, or says why it cannot, and ends."""

import httpx
import psutil
import pytest
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.models import PROMPT
from tests.processes import WAIT_S
from torchrl_ext.base.errors import EngineError
from torchrl_ext.base.types import API_KEY_VARIABLE
from torchrl_ext.control.requests.client import InferenceClient
from torchrl_ext.control.serving.embedded import EmbeddedServer
from torchrl_ext.engines.embedded.__main__ import main, patient


def test_server_computes_in_the_given_dtype_and_ends(checkpoint):
    with EmbeddedServer(checkpoint, dtype="bfloat16", threads=1) as server:
        process = psutil.Process(server.pid)
        assert server.alive() and httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/server_info").json()["dtype"] == "bfloat16"
        (found,) = InferenceClient(server.url).generate([PROMPT], max_tokens=4, temperature=0.0)
        assert len(found.token_ids) == 4
    process.wait(timeout=WAIT_S)
    assert not server.alive()
    server.stop()


def test_a_directory_without_a_model_is_named_by_the_error(tmp_path):
    with pytest.raises(EngineError, match=f"{tmp_path} holds no model"):
        EmbeddedServer(tmp_path)


@pytest.fixture
def run(monkeypatch):
    """Runs the command with an engine's options and others; returns its exit status and what it would serve."""
    served = []
    monkeypatch.setattr("uvicorn.run", lambda app, **settings: served.append((app, settings)))
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)

    def run(model, *options):
        served.clear()
        return main(["--model", str(model), "--port", "7", *options]), served

    return run


def routes(engine):
    return [Route("/more", lambda request: Response())]


def test_more_routes_are_served_where_the_command_names_them(run, checkpoint, caplog):
    for options, there in (((), False), (("--routes", "tests.engines.embedded.test_process:routes"), True)):
        status, ((app, settings),) = run(checkpoint, *options, "--host", "0.0.0.0")
        assert (status, settings["host"], settings["port"]) == (0, "0.0.0.0", 7)
        assert settings["http"].__module__ == patient.__module__  # test_listening.py tells what it does
        with TestClient(app) as client:
            assert client.get("/health").status_code == 200
            assert (client.get("/more").status_code == 200) == there
    assert f"set {API_KEY_VARIABLE}" in caplog.text  # strangers reach such an address


@pytest.mark.parametrize("routes", ["nowhere.at.all:routes", "torchrl_ext:nothing", "no module"])
def test_missing_routes_are_named_and_no_server_starts(run, checkpoint, capsys, routes):
    status, served = run(checkpoint, "--routes", routes)
    assert (status, served) == (1, []) and capsys.readouterr().err.strip()
