"""Configuration by name.

Importing this package adds the groups of `torchrl_ext.configs.hydra` where hydra is installed; all else works without.
"""

import importlib
import logging
from importlib.util import find_spec

from torchrl_ext.errors import ConfigError

if find_spec("hydra") is not None:
    try:
        importlib.import_module(f"{__name__}.hydra")
    except ConfigError as error:  # an import of the options themselves does not fail for it
        logging.getLogger("torchrl_ext").warning("there are no hydra groups: %s", error)
