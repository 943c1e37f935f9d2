"""Hydra groups by transport name; importing this package adds those of `torchrl_ext.configs.hydra`.

Where hydra is not installed there are none; `torchrl_ext.compat.flags.options` does not need it.
"""

import importlib
import logging
from importlib.util import find_spec

from torchrl_ext.errors import ConfigError

if find_spec("hydra") is not None:
    try:
        importlib.import_module(f"{__name__}.hydra")
    except ConfigError as error:  # hydra is there, and not what TorchRL's groups need
        logging.getLogger("torchrl_ext").warning("there are no hydra groups: %s", error)
