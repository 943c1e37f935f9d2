"""An embedded engine of its own for each file; a file with a `checkpoint` of its own has it served."""

import httpx
import pytest

from tests.engines.embedded import EmbeddedServer
from tests.models import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def server(checkpoint):
    with EmbeddedServer(checkpoint, dtype="float32", threads=1) as running:
        yield running


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
