"""Running servers of either make, looked at in the same words."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import torchrl_ext as tx
from tests.models import PROMPT, VOCAB, doubtful, greedy
from tests.processes import COMMAND, WAIT_S, family, finished, maps_of
from tests.routers import settings_for_router
from torchrl_ext.base.registry import engines
from torchrl_ext.cli.environments import settings_for
from torchrl_ext.cli.main import main
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.serving import routing
from torchrl_ext.control.serving.server import RouterProcess, start

_ENDS = ThreadPoolExecutor(4)
FORKING = str(Path(__file__).with_name("site"))
"""The folder by which servers fork their children, on their ``PYTHONPATH``."""
LONG = [(7 * i + 3) % (VOCAB - 3) + 3 for i in range(180)]
"""A prompt longer than a block of any cache of keys and values: what is shorter is not kept, or handed on."""


@contextmanager
def serving(served, checkpoint, **settings):
    """A server beside the block, which leaves its end to a thread: SGLang takes ten seconds, in which it sleeps.

    The interpreter waits for such threads before it ends itself. The server's children are forked; engines that tests
    start by the launchers themselves start as a user's do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FORKING, prepend=os.pathsep)
        server = start(spec_of(served.kind, checkpoint, **settings))
    found = served(server)
    found.checkpoint = checkpoint
    try:
        yield found
    finally:
        _ENDS.submit(server.stop)


@contextmanager
def sending(transport, root, *served, settings=None, proving=None, **of_engine):
    """A sender to some servers; ``settings`` are further ones of its transport, ``proving`` its own."""
    files = {"root": root}
    own = {"disk": files, "delta": files, "collective": {}, "ipc": {"bucket_bytes": 256 << 10}}[transport]
    if len(served) == 1:
        engine = tx.make_engine(served[0].kind, url=served[0].url, **of_engine)
    else:
        engine = tx.connect(*(one.url for one in served), **of_engine)
    sender = tx.WeightSender(tx.make_transport(transport, **own, **(settings or {})), engine, **(proving or {}))
    try:
        yield sender
    finally:
        sender.shutdown()


def spec_of(kind, checkpoint=".", **settings):
    """What a server is started with, in the environment that `torchrl-ext serve` makes for it."""
    return engines.part(kind, "server")(checkpoint, **settings_for(kind), **settings)


def with_routers():
    """Let routers of this process that name no interpreter run in the environments of the command line."""

    def started(*given, kind="vllm", **settings):
        return RouterProcess(*given, kind=kind, **{**settings_for_router(kind), **settings})

    routing.RouterProcess = started


class Served:
    """A running server and a few ways to look at it.

    Each make has ``generate(count, prompt, **sampling)``, which returns one choice, greedy by default, with
    ``token_ids``, ``finish_reason`` and ``weight_versions``; ``version()``, the label of its weights; ``paused()``,
    whether it generates nothing; and ``running()``, for how many requests it generates.
    """

    kind = ""

    def __init__(self, server):
        self.server, self.url = server, server.url
        self.http = HTTPSession(server.url, timeout_s=120)

    def mapping(self):
        """Its processes that map a buffer of a trainer."""
        return [pid for pid in family(self.server.pid) if "memfd:torchrl_ext" in maps_of(pid)]

    def tokens(self, count=32):
        return self.generate(count)["token_ids"]

    def says(self, model):
        """Whether it says what ``model`` would."""
        return self.tokens() == greedy(model)

    def assert_serves(self, model, report):
        """It serves the weights of ``model``, with which ``report`` came back."""
        choice, label = self.generate(), str(report.version)
        assert self.would_say(model, choice["token_ids"])
        assert choice["weight_versions"] == [{"version": label, "start": 0, "end": 32}]
        assert self.is_called(label)
        assert report.verified and [row.state for row in report.engines] == ["serving"]

    def is_called(self, label):
        """Whether its weights have this label."""
        return self.version() == label

    def would_say(self, model, tokens):
        """Whether ``model`` would say these tokens, or ones that it likes as much."""
        return not doubtful(model, tokens)


class ServedVLLM(Served):
    kind = "vllm"

    def generate(self, count=32, prompt=None, **sampling):
        """By ``/inference/v1/generate``."""
        body = {
            "token_ids": prompt or PROMPT,
            "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True, **sampling},
        }
        return self.http.post("/inference/v1/generate", body)["choices"][0]

    def version(self):
        return self.http.get("/weight_info")["weight_version"]

    def paused(self):
        return self.http.get("/is_paused")["is_paused"]

    def running(self):
        told = self.http.call("GET", "/metrics").text
        return sum(map(float, re.findall(r"^vllm:num_requests_running\S* (\S+)", told, re.MULTILINE)))


class ServedSGLang(Served):
    kind = "sglang"

    def generate(self, count=32, prompt=None, **sampling):
        """By ``/generate``, told in vLLM's words."""
        body = {
            "input_ids": prompt or PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling},
        }
        told = self.http.post("/generate", body)
        meta = told["meta_info"]
        return {
            "token_ids": told["output_ids"],
            "weight_versions": meta.get("weight_versions"),  # what is aborted in the queue says less
            "finish_reason": meta["finish_reason"]["type"],
            "retractions": meta.get("num_retractions"),
        }

    def version(self):
        return self.http.get("/model_info")["weight_version"]

    def paused(self):
        return self.http.call("GET", "/ready").status == 503

    def running(self):
        return sum(row["num_running_reqs"] for row in self.http.get("/v1/loads")["loads"])


def by_route(served, path, expected=200, **body):
    """Ask for a version as slime's trainers do; returns the engine's words."""
    answer = served.http.call("POST", "/update_weights_from_disk", {"model_path": str(path), **body})
    told = answer.json()
    assert answer.status == expected, told
    assert told["success"] == (expected == 200) and not told.get("num_paused_requests")
    return told["message"]


def command(capsys, *argv, status=0):
    """What a command prints in JSON."""
    assert main([*map(str, argv), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def demo(*arguments):
    """What the demonstration prints in JSON, run in a process of its own."""
    done = finished(COMMAND, "demo", "--json", *arguments, timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["verified"]
    return told


def until_met(attempt):
    """Call ``attempt`` until it is true: how far an engine is with a request when an update comes is luck."""
    until = time.monotonic() + WAIT_S
    while not attempt():
        assert time.monotonic() < until, "no request was met in the middle"


def at_work(served, pool, count, tokens=220):
    """``count`` requests that the server is at work on."""
    found = []

    def met():
        found[:] = [pool.submit(served.generate, tokens, temperature=1.0) for _ in range(count)]
        while not all(future.done() for future in found):
            if served.running() >= count:
                return True
        return False

    until_met(met)
    return found


def assert_spans(choice, count, versions):
    """The request came to its end, and each of its ``count`` tokens names one of ``versions``, none after a newer."""
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == count
    spans = choice["weight_versions"]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == count
    seen = [int(span["version"]) for span in spans]
    assert set(seen) <= set(versions) and seen == sorted(seen)
