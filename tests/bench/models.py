"""vLLM servers that keep linear weights on a CPU as they are on a GPU."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def plain_linears():
    """vLLM servers that are started in the block keep linear weights unpacked (`plain/plain_linears.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("plain")), prepend=os.pathsep)
        patch.setenv("VLLM_PLUGINS", "plain_linears,torchrl_ext_cpu")
        yield
