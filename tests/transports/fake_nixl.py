"""NIXL's Python interface as `torchrl_ext.transports.sharded.nixl` uses it, among the agents of one process.

A read copies bytes between registered memory; whatever was not registered cannot be read.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict

_AGENTS = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


class nixl_agent_config:
    def __init__(self, backends, enable_prog_thread):
        assert backends == ["UCX"] and not enable_prog_thread


class nixl_agent:
    def __init__(self, name, config):
        self._name, self._notices, self._registered = name, defaultdict(list), []
        _AGENTS[name] = self

    def register_memory(self, rows, kind):
        self._registered += rows
        return rows

    def deregister_memory(self, rows):
        for row in rows:
            self._registered.remove(row)

    def get_agent_metadata(self):
        return self._name.encode()

    def add_remote_agent(self, metadata):
        return _AGENTS[metadata.decode()]._name

    def get_xfer_descs(self, rows, kind):
        return rows

    def initialize_xfer(self, operation, own, other, name):
        assert operation == "READ" and len(own) == len(other)
        for agent, rows in ((self, own), (_AGENTS[name], other)):
            for at, size, _ in rows:
                assert any(first <= at and at + size <= first + most for first, most, *_ in agent._registered)
        return own, other, name

    def transfer(self, handle, notice):
        own, other, name = handle
        for (target, size, _), (source, same, _) in zip(own, other, strict=True):
            assert size == same
            ctypes.memmove(target, source, size)
        self.send_notif(name, notice)
        return "DONE"

    def check_xfer_state(self, handle):
        return "DONE"

    def release_xfer_handle(self, handle):
        pass

    def send_notif(self, name, notice):
        if (agent := _AGENTS.get(name)) is None:
            raise ConnectionError(f"{name} is gone")
        with _LOCK:
            agent._notices[self._name].append(notice)

    def get_new_notifs(self):
        with _LOCK:
            found, self._notices = self._notices, defaultdict(list)
        return found
