"""Running servers of either make, looked at in the same words."""

import os
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.models import PROMPT, doubtful, greedy
from tests.processes import WAIT_S
from torchrl_ext.cli.environments import settings_for, settings_for_router
from torchrl_ext.errors import DeadlineError
from torchrl_ext.registry import engines
from torchrl_ext.rpc.discovery import discover
from torchrl_ext.rpc.http import HTTPSession
from torchrl_ext.serving import routing
from torchrl_ext.serving.router import RouterProcess
from torchrl_ext.serving.server import start

_ENDS = ThreadPoolExecutor(4)


@contextmanager
def forked_children():
    """Servers that are started in the block fork their children, as the file in `site` does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("site")), prepend=os.pathsep)
        yield


@contextmanager
def serving(served, checkpoint, **settings):
    """A server beside the block, which leaves its end to a thread: SGLang takes ten seconds, in which it sleeps.

    The interpreter waits for such threads before it ends itself. The server's children are forked; engines that tests
    start by the launchers themselves start as a user's do.
    """
    with forked_children():
        server = served.start(checkpoint, **settings)
    try:
        yield served(server)
    finally:
        _ENDS.submit(server.stop)


OLDER = {"vllm": "0.31.0", "sglang": "0.5.19"}
"""The other release of each engine that the suites run on."""


def spec_of(kind, checkpoint=".", *, release=None, **settings):
    """What a server is started with, in the environment that `torchrl-ext serve` makes for it."""
    return engines.part(kind, "server")(checkpoint, **settings_for(kind, release), **settings)


def with_routers():
    """Let routers of this process that name no interpreter run in the environments of the command line."""

    def started(*given, kind="vllm", make=None, **settings):
        return RouterProcess(*given, kind=kind, make=make, **{**settings_for_router(make or kind), **settings})

    routing.RouterProcess = started


class Served(ABC):
    """A running server and a few ways to look at it.

    Attributes:
        tells: whether it has to say which version sampled each token, and what its weights are called; of a release
            that nobody has asked yet, either is right, as long as what is said is true.
    """

    kind = ""
    tells = True

    def __init__(self, server):
        self.server, self.url = server, server.url
        self.http = HTTPSession(server.url, timeout_s=120)

    @classmethod
    def start(cls, checkpoint, *, release=None, **settings):
        """Start one, in the environment that `torchrl-ext serve` makes for it."""
        return start(spec_of(cls.kind, checkpoint, release=release, **settings))

    @abstractmethod
    def generate(self, count=32, prompt=None, **sampling):
        """One choice, greedy by default: ``token_ids``, ``finish_reason`` and ``weight_versions``."""

    @abstractmethod
    def version(self):
        """The label of the weights that it serves."""

    @abstractmethod
    def paused(self):
        """Whether it generates nothing."""

    def tokens(self, count=32):
        return self.generate(count)["token_ids"]

    def says(self, model):
        """Whether it says what ``model`` would."""
        return self.tokens() == greedy(model)

    def assert_serves(self, model, report):
        """It serves the weights of ``model``, with which ``report`` came back."""
        choice, label = self.generate(), str(report.version)
        assert self.would_say(model, choice["token_ids"])
        spans = choice.get("weight_versions")
        assert spans == [{"version": label, "start": 0, "end": 32}] or (spans is None and not self.tells)
        assert self.is_called(label)
        assert report.verified and [row.state for row in report.engines] == ["serving"]

    def is_called(self, label):
        """Whether its weights have this label, as far as it has to say so."""
        told = self.version()
        return told == label or (not told and not self.tells)

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


class ServedOlderVLLM(ServedVLLM):
    """As its base, of the other release."""

    tells = False

    def version(self):
        return discover(self.url)[0].weight_version


class ServedSGLang(Served):
    kind = "sglang"

    def generate(self, count=32, prompt=None, timeout_s=120, **sampling):
        """By ``/generate``, told in vLLM's words."""
        body = {
            "input_ids": prompt or PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling},
        }
        told = self.http.post("/generate", body, timeout_s=timeout_s)
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
        """It has no route that says so; a request that gets no token tells."""
        try:
            self.generate(1, timeout_s=2)
        except DeadlineError:
            return True
        return False


class ServedOlderSGLang(ServedSGLang):
    """As its base, of the other release."""


def until_met(attempt):
    """Call ``attempt`` until it is true: how far an engine is with a request when an update comes is luck."""
    until = time.monotonic() + WAIT_S
    while not attempt():
        assert time.monotonic() < until, "no request was met in the middle"


def assert_spans(choice, count, versions, tells=True):
    """The request came to its end, and each of its ``count`` tokens names one of ``versions``, none after a newer.

    With ``tells`` false it may also say of none (`Served.tells`).
    """
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == count
    spans = choice.get("weight_versions")
    if spans is None and not tells:
        return
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == count
    seen = [int(span["version"]) for span in spans]
    assert set(seen) <= set(versions) and seen == sorted(seen)
