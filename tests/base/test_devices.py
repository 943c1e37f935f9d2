"""A device that is not there is refused by name, wherever one can be asked for."""

import pytest
import torch

import torchrl_ext as tx
from tests.models import tiny_checkpoint
from torchrl_ext.base.errors import ConfigError
from torchrl_ext.engines.embedded.engine import EmbeddedEngine

ABSENT = f"cuda:{torch.cuda.device_count()}"


SEES = rf"{ABSENT}.*this process sees \d+ devices of type 'cuda'"


@pytest.mark.parametrize(("device", "words"), [(ABSENT, SEES), ("abacus", "'abacus' is not a device")])
def test_absent_or_invalid_device_is_refused_first(tmp_path, device, words):
    """A device that this process does not have is refused before anything is opened."""
    model = tiny_checkpoint(tmp_path / "model")
    for ask in (
        lambda: tx.VLLMCollectiveTransport("127.0.0.1", 29500, 0, 2, device=device),
        lambda: tx.make_transport("ipc", device=device),
        lambda: EmbeddedEngine(str(model), device=device),
    ):
        with pytest.raises(ConfigError, match=words):
            ask()
