"""`RemoteSender` as an object of this process; `tests/sync/test_ray.py` has it in an actor."""

from __future__ import annotations

import pytest
from torch import nn

from torchrl_ext.errors import NotConnectedError
from torchrl_ext.sync.remote import RemoteSender


class Collector:
    version = 0

    def increment_version(self):
        self.version += 1


def test_what_is_applied_is_applied_to_the_model_whatever_was_registered_since():
    sender, collector = RemoteSender("memory", nn.Linear(3, 2), make_model=lambda: nn.Linear(3, 2)), Collector()
    sender.register_collector(collector)
    assert sender.apply(lambda model, name: getattr(model, name), "in_features") == 3
    assert sender.update_weights().verified
    assert collector.version == 1
    other = nn.Linear(3, 2)
    sender.register_model(other)
    assert sender.apply(lambda model: model) is other
    sender.shutdown()


def test_without_a_model_there_is_nothing_to_apply_anything_to():
    sender, collector = RemoteSender("memory"), Collector()
    sender.register_collector(collector)
    with pytest.raises(NotConnectedError, match=r"no model.*make_model="):
        sender.apply(lambda model: model)
