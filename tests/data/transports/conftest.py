"""Fixtures of the tests of transports."""

import pytest


@pytest.fixture
def root(tmp_path):
    """A directory that trainer and workers share; it does not exist yet."""
    return tmp_path / "root"
