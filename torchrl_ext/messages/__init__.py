"""Messages from a trainer's control layer to the workers of an engine: one frozen class per step.

A message is one JSON object: ``{"format": 3, "release": "0.1.0", "kind": "prefetch", "version": 7}``. The format counts
the changes of this protocol, and the release is the one of the sender, for error messages; the other fields are those
of the message. An engine's client (`torchrl_ext.rpc`) and plugin choose the route that brings it. Workers handle it in
`torchrl_ext.sync.worker_end.WorkerEnd.handle`, or, where weights land in this process, in
`torchrl_ext.sync.receiver.WeightReceiver.handle`. An answer is a JSON object too, and empty where there is nothing to
say.

Whoever reaches an engine's port can send one, so every field is checked as it is read. What a transport's trainer end
tells its worker ends travels inside (`Join.offer`, `Load.handoff`). The transport alone knows what that means; here the
fields that several transports have are checked against their types and bounds.
"""

from __future__ import annotations

from torchrl_ext.messages.base import FORMAT, Message, read
from torchrl_ext.messages.routes import (
    ADAPTERS_ROUTE,
    ANSWERS,
    BACKEND,
    CHANNEL,
    OPEN_UPDATE,
    REPLACED,
    TAKE_OVER,
    answers_in,
    bears_key,
    escaped,
    merged,
    partial_version,
    refusal,
    replaced_by,
    unescaped,
)
from torchrl_ext.messages.steps import (
    CheckAdapter,
    CheckLoaded,
    Connected,
    Finish,
    Flush,
    Inspect,
    Join,
    Keep,
    Land,
    Leave,
    ListAdapters,
    Load,
    Poll,
    Prefetch,
    Pull,
    Rehearse,
    Reset,
    Seal,
    ServeAdapter,
    StageAdapter,
    Start,
    State,
    UnloadAdapter,
    Verify,
    loading,
    stamped,
)
from torchrl_ext.messages.wire import Wire

__all__ = [
    "ADAPTERS_ROUTE", "ANSWERS", "BACKEND", "CHANNEL", "FORMAT", "OPEN_UPDATE", "REPLACED", "TAKE_OVER", "CheckAdapter",
    "CheckLoaded", "Connected", "Finish", "Flush", "Inspect", "Join", "Keep", "Land", "Leave", "ListAdapters", "Load",
    "Message", "Poll", "Prefetch", "Pull", "Rehearse", "Reset", "Seal", "ServeAdapter", "StageAdapter", "Start",
    "State", "UnloadAdapter", "Verify", "Wire", "answers_in", "bears_key", "escaped", "loading", "merged", "partial_version",
    "read", "refusal", "replaced_by", "stamped", "unescaped",
]  # fmt: skip
