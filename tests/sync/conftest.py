"""An embedded engine of its own for each file that sends to one; the next update is right whatever was before."""

from tests.engines.conftest import checkpoint, server  # noqa: F401 - fixtures
