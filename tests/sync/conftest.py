"""An embedded engine of its own for each file that sends to one."""

import pytest

from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(checkpoint):
    """Whatever other tests did to it, the next update has to be right."""
    with EmbeddedServer(checkpoint, dtype="float32") as running:
        yield running
