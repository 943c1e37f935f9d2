"""A plugin of vLLM, SGLang and the embedded engine that writes down how long calls of theirs and of ours take.

`register` wraps them. Each outermost call of a thread becomes a line of JSON in the file that ``TORCHRL_EXT_TIMED``
names: the seconds of ``engine`` and of ``ours`` among the wrapped calls inside it, each without those inside itself.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import threading
import time
from collections import defaultdict

FILE = "TORCHRL_EXT_TIMED"
_now = threading.local()
_wrapped: set[tuple[type, str]] = set()


def register():
    """Wrap the calls of this process."""
    from torchrl_ext.base.messages import Message
    from torchrl_ext.data.landing.loader import TensorsLoader
    from torchrl_ext.engines.loader import EngineLoader
    from torchrl_ext.sync.engine_worker import EngineWorker
    from torchrl_ext.sync.receiver import WeightReceiver

    made = EngineLoader.__init__

    def init(loader, model):
        """Wrap also what belongs to the engine: the loader of its model, and its processing after a load."""
        made(loader, model)
        wrap(type(model.module), "load_weights", "engine")
        for name in ("open", "close"):
            wrap(type(model), name, "engine")

    EngineLoader.__init__ = init
    wrap(Message, "from_json", "ours")
    for owner, names in {EngineWorker: ("handle",), WeightReceiver: ("handle", "connect", "prefetch")}.items():
        for name in names:
            wrap(owner, name, "ours")
    called = ("_placed", "_in_place", "_passing", "check", "patchable", "part", "slices", "missing", "landings")
    called += ("digests", "digests", "stage", "confirm", "commit", "rehearse")  # by the engine's code, too
    for loader in (EngineLoader, TensorsLoader):
        for name in called:
            if name in vars(loader):
                wrap(loader, name, "ours")


def routes(engine):
    """Serve the embedded engine's ``--routes``, of which there are none here."""
    register()
    return []


def wrap(owner, name, label):
    """Time a method."""
    if (owner, name) in _wrapped:
        return
    _wrapped.add((owner, name))
    method = inspect.getattr_static(owner, name)
    bare = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method

    @functools.wraps(bare)
    def timed(*args, **settings):
        with _Timed(label):
            found = bare(*args, **settings)
        return _each(found, label) if inspect.isgenerator(found) else found

    setattr(owner, name, type(method)(timed) if bare is not method else timed)


def _each(items, label):
    while True:
        with _Timed(label):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


class _Timed:
    def __init__(self, label):
        self.label = label

    def __enter__(self):
        _now.stack = getattr(_now, "stack", [])
        if not _now.stack:
            _now.own = defaultdict(float)
        _now.stack.append(self)
        self.inside, self.began = 0.0, time.perf_counter()

    def __exit__(self, *_):
        took = time.perf_counter() - self.began
        _now.stack.pop()
        _now.own[self.label] += took - self.inside
        if _now.stack:
            _now.stack[-1].inside += took
        elif FILE in os.environ:
            with open(os.environ[FILE], "a") as file:
                file.write(json.dumps(_now.own) + "\n")
