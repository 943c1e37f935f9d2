"""The demo as a person or a script meets it: real processes, real signals."""

import json
import signal
import subprocess
import tempfile
import threading
from contextlib import contextmanager

import httpx
import psutil
import pytest

import torchrl_ext as tx
from tests.engines.embedded import EmbeddedServer
from tests.processes import COMMAND, WAIT_S, finished, running_python
from torchrl_ext.cli.main import main
from torchrl_ext.testing.tiny import make_tiny_lm


def demonstrated(*args):
    """The document of a demo that ends well, and what it says to a person."""
    done = finished(COMMAND, "demo", "--json", *args, timeout_s=2 * WAIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedServer(make_tiny_lm(tmp_path_factory.mktemp("model")), dtype="float32", threads=1) as running:
        yield running


def test_the_demo_learns_and_proves_that_the_engine_followed():
    document, words = demonstrated("--steps", "4")
    assert document["verified"] and document["weights_equal"] and document["greedy_equal"] and document["on_policy"]
    assert (document["transport"], document["engine"]) == ("collective", "embedded")
    assert [report["version"] for report in document["syncs"]] == list(range(1, 6))
    assert all(report["verified"] and report["engines"][0]["state"] == "serving" for report in document["syncs"])
    assert document["rewards"][-1] > 2 * document["rewards"][0]
    assert "bit-equal" in words and "step 1" in words


def test_the_demo_follows_by_disk_with_engines_that_run_already(server):
    document, _ = demonstrated("--transport", "disk", "--engines", server.url, "--steps", "1")
    assert document["verified"] and document["transport"] == "disk" and document["engines"] == [server.url]
    assert httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "2", "paused": False}


def test_the_demo_by_delta_serves_what_it_trains_in_float32_as_bfloat16():
    document, words = demonstrated("--transport", "delta", "--steps", "1")
    assert document["verified"] and document["weights_equal"] and document["outputs_close"]
    assert "greedy_equal" not in document and "rounded to bfloat16: yes" in words
    first, second = document["syncs"]
    assert second["bytes"] < first["model_bytes"] == second["model_bytes"]
    (line,) = (line for line in words.splitlines() if line.startswith("step 1"))
    assert f"{second['bytes']:,} of {second['model_bytes']:,} bytes  no pause  proof: in place" in line


@pytest.mark.parametrize(
    ("args", "words", "status"),
    [
        ("--transport pigeon", ", ".join(sorted(tx.transports())), 2),
        ("--transport memory", "no other process", 2),
        ("--transport native", "vLLM or SGLang with --engines", 2),
        ("--engine steam", "embedded, sglang, vllm", 2),
        ("--seed vime", "--seed", 2),
        ("--steps 0", "--steps", 2),
        ("--transport collective --root updates", "uses no directory", 2),
        ("--tp 2", "never share a model", 2),
        ("--engines 127.0.0.1:9", "http://127.0.0.1:9", 3),
    ],
)
def test_what_cannot_work_is_one_line_and_one_document(args, words, status, capsys):
    assert main(["demo", *args.split(), "--json"]) == status
    out, err = capsys.readouterr()
    assert words in json.loads(out)["error"] and words in err and len(err.strip().splitlines()) <= 2


@contextmanager
def demo_until(words, *args):
    """A demo that would run for long, from its line with these words on; it is killed where a test goes wrong."""
    with tempfile.TemporaryFile("w+") as out:
        command = ["demo", "--json", "--steps", "5000", *args]
        with running_python(COMMAND, *command, stdout=out, stderr=subprocess.PIPE) as process:
            watchdog = threading.Timer(WAIT_S, process.kill)
            watchdog.start()
            try:
                assert any(words in line for line in process.stderr), f"it ended before it said {words!r}"
                yield process, out
            finally:
                watchdog.cancel()


def interrupted(process, out, number=signal.SIGINT):
    """The document that it prints at its end."""
    process.send_signal(number)
    process.stderr.read()
    process.wait(WAIT_S)
    out.seek(0)
    return json.load(out)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting the embedded engine", signal.SIGTERM),
        pytest.param("step 1", signal.SIGINT, marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupt_leaves_no_process_behind(moment, number):
    with demo_until(moment) as (process, out):
        children = psutil.Process(process.pid).children(recursive=True)
        assert interrupted(process, out, number)["error"] == "interrupted"
        assert process.returncode == 130
        assert psutil.wait_procs(children, timeout=WAIT_S)[1] == []


@pytest.mark.parametrize("moment", ["loading the trainer", pytest.param("step 3", marks=pytest.mark.exhaustive)])
def test_interrupted_demo_leaves_running_engines_unpaused(server, moment):
    with demo_until(moment, "--engines", server.url) as (process, out):
        interrupted(process, out)
    assert server.alive()
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": False}
