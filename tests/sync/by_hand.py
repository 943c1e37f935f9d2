"""The steps of an update, taken one by one: what a trainer's transport hands to a worker."""

from __future__ import annotations

from tests.processes import WAIT_S
from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.messages import Join, Load
from torchrl_ext.base.routes import called
from torchrl_ext.data.transports.base import Update
from torchrl_ext.data.update_source import UpdateSource
from torchrl_ext.data.weights.derived import as_source


def invitation(transport, model, workers=1):
    """The `Join` by which ``workers`` join ``transport``, for the tensors of ``model``."""
    params = as_source(model).params()
    offer = transport.open(workers, params, Deadline(WAIT_S)).info
    return Join(transport=transport.name, params=params, world_size=1 + workers, offer=offer)


def prepared(transport, weights, version):
    """The `Load` of ``weights`` as a version, which is prepared by then."""
    source = as_source(weights)
    handoff = transport.prepare(Update(source=source, version=version), Deadline(WAIT_S))
    onto = None if source.part is None else source.part.base
    return Load(version=version, params=source.params(), onto=onto, handoff=handoff.info)


def limited(source, part):
    """A source of the tensors of ``part`` alone."""
    found = UpdateSource(source)
    found.only = part.names
    found.limit(part.base)
    return found


def told(http, message):
    """What the one worker of an engine answers to a message."""
    answer = http.post("/collective_rpc", json=called(message))
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["results"]
    return found
