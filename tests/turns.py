"""Senders that share one engine, and trainers that are killed in an update: what the engine computes with after each.

`Turns` makes senders by every route; `die` is a trainer that kills itself at a chosen point of its second update.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

import httpx
import torch

import torchrl_ext as tx
from tests.models import PROMPT, tiny_model
from tests.processes import finished
from torchrl_ext.base.errors import WeightSyncError
from torchrl_ext.cli.main import main
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.data.weights.derived import as_source
from torchrl_ext.data.weights.source import WeightSource
from torchrl_ext.sync.outputs import score

PROMPTS = [PROMPT, PROMPT[::-1]]
CLOSE = 1e-4  # nats, in float32; steps of one model, and two models, are further than 1e-2 apart

TRANSPORTS = {
    "delta": ("delta", {"root": True}),
    "delta by broadcast": ("delta", {"carrier": "collective"}),
    "delta on a base": ("delta", {"root": True, "base": True}),
    "disk": ("disk", {"root": True}),
    "collective": ("collective", {"bucket_bytes": 1 << 16}),
    "sharded": ("sharded", {"bucket_bytes": 1 << 16}),
    "ipc": ("ipc", {}),
}
ROUTES = ("delta on a base", *(name for name in TRANSPORTS if name != "delta on a base"), "push")


def made(route, folder, base=None):
    """The transport of a route, with a root of its own where it needs one."""
    name, settings = TRANSPORTS[route]
    own = {"root": folder, "base": base}
    return tx.make_transport(name, **{key: own.get(key, value) for key, value in settings.items()})


def gap(model, found):
    """How far log-probabilities of `PROMPTS` are from the model's, in nats."""
    rows = zip(score(model, PROMPTS), found, strict=True)
    return max(abs(ours - theirs) for own, other in rows for ours, theirs in zip(own, other, strict=True))


class Policy:
    """A model of its own whose training steps are the same for the same seed, and how it is sent, if it is."""

    def __init__(self, seed, send=None):
        self.model, self._send = tiny_model(seed), send
        self._steps = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def train(self):
        for parameter in self.model.parameters():
            some = torch.rand(parameter.shape, generator=self._steps) < 0.02
            parameter[some] += 0.2 * torch.randn(int(some.sum()), generator=self._steps)
        return self

    def update(self):
        self._send(self.train().model)


class Turns:
    """Senders by any route to one engine; ``logprobs`` asks the engine itself."""

    def __init__(self, folder, url, ends, logprobs, base=None):
        self._folder, self.url, self._ends, self.logprobs, self._base = folder, url, ends, logprobs, base
        self._count = 0

    def folder(self):
        """A new folder."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        return folder

    def sender(self, route):
        folder = self.folder()
        send = self._push(folder) if route == "push" else self._sent(route, folder)
        return Policy(50 + self._count, send)

    def join(self, model):
        """Be a sender that joins, and sends nothing."""
        sender = tx.WeightSender(made("disk", self.folder()), tx.connect(self.url))
        sender.register_model(model)
        try:
            sender.init_all_workers_group()
        finally:
            sender.shutdown()

    def _sent(self, route, folder):
        sender = tx.WeightSender(made(route, folder, self._base), tx.connect(self.url))
        self._ends.callback(sender.shutdown)

        def send(model):
            report = sender.update_weights(model)
            assert report.verified or route == "sharded"  # slices can be rehearsed only before anything was loaded

        return send

    def _push(self, folder):
        """Each push is a connection of its own."""

        def send(model):
            model.save_pretrained(folder)
            assert main(["push", str(folder), "--engines", self.url, "--transport", "disk", "--json"]) == 0

        return send

    def check(self, sender):
        """The engine computes with what this sender sent last."""
        off = gap(sender.model, self.logprobs(PROMPTS))
        assert off < CLOSE, f"the engine is {off:.3g} nats away from what it was sent last"


def each_after_each(count):
    """Yield indices below ``count`` so that every one follows every other, and itself, once (de Bruijn, order 2)."""
    for first in range(count):
        yield first
        for second in range(first + 1, count):
            yield first
            yield second
    yield 0


class Meanwhile(WeightSource):
    """Another source; something is done when the given number of its tensors was read."""

    def __init__(self, source, count, what):
        self._source, self._count, self._what = source, count, what

    def params(self):
        return self._source.params()

    def __iter__(self):
        for place, pair in enumerate(self._source):
            if place == self._count:
                self._what()
            yield pair


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def die(url, route, folder, seed, point):
    """Be a trainer that updates once, and dies in its second update.

    Args:
        point: ``tensor:N``: when N tensors were read; ``call:N``: before the N-th call of the engine's routes;
            ``sent:N``: when the N-th was sent, whether or not it was answered.
    """
    where, count = point.split(":")
    policy, count = Policy(int(seed)).train(), int(count)
    sender = tx.WeightSender(made(route, folder), tx.connect(url))
    sender.update_weights(policy.model)
    policy.train()
    if where == "tensor":
        sender.update_weights(Meanwhile(as_source(policy.model), count, _die))
    call, made_calls = HTTPSession.call, []

    def dying(self, *args, **settings):
        made_calls.append(args)
        if len(made_calls) == count and where == "call":
            _die()
        if len(made_calls) == count and where == "sent":
            settings["timeout_s"] = 0.05
            try:
                return call(self, *args, **settings)
            finally:
                _die()
        return call(self, *args, **settings)

    HTTPSession.call = dying
    sender.update_weights(policy.model)
    print("survived", len(made_calls), file=sys.stderr)


def killed(turns, route, point):
    """Let a trainer die in its second update, and return its policy in both steps; it may end before it could."""
    folder, seed = turns.folder(), 900
    done = finished(
        "import sys; from tests.turns import die; die(*sys.argv[1:])", turns.url, route, folder, seed, point
    )
    assert done.returncode in (-signal.SIGKILL, 0), done.stderr[-4000:]
    return Policy(seed).train(), Policy(seed).train().train()


def may_serve(turns, route, point, resume):
    """Kill a trainer at a point, resume the engine by every road, and see that it serves one version, or refuses.

    Args:
        turns: on an engine that serves.
        route, point: as for `die`.
        resume: the engine's own route, which anybody may call.

    Returns:
        The roads after which it refused to compute.
    """
    before, after = killed(turns, route, point)
    roads = {
        "resume": lambda: tx.connect(turns.url).resume(),
        "wake": lambda: tx.connect(turns.url).wake_up(),
        "another sender that joins, and rehearses": lambda: turns.join(before.model),
        "its own route": lambda: httpx.post(resume, json={}, timeout=60),
    }
    refused = []
    for name, road in roads.items():
        with suppress(WeightSyncError):
            road()
        found = turns.logprobs(PROMPTS)
        refused += [name] if found is None else []
        gaps = [] if found is None else [gap(policy.model, found) for policy in (before, after)]
        assert found is None or min(gaps) < CLOSE, f"after {name} the engine serves a mixture: {gaps} nats"
    other = turns.sender("disk" if route != "disk" else "collective")
    other.update()
    turns.check(other)
    return refused


if __name__ == "__main__":
    die(*sys.argv[1:])
