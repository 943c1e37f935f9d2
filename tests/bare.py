"""Import every module that needs no extra: run in an installation without extras, or with their packages blocked."""

import importlib
import sys
from pathlib import Path

import torchrl_ext

EXTRAS = {
    "torchrl_ext.cli": "cli",
    "torchrl_ext.rl.hydra": "hydra",
    "torchrl_ext.engines.embedded": "embedded",
    "torchrl_ext.engines.sglang": "sglang",
    "torchrl_ext.engines.vllm": "vllm",
    "torchrl_ext.testing.engine": "testing",
    "torchrl_ext.testing.stateful": "testing",
    "torchrl_ext.testing.transports": "testing",
}
"""Modules, and packages with all of theirs, by the extra or the package that they need."""


def modules():
    """Yield the names of the modules that need no extra."""
    root = Path(torchrl_ext.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = ".".join(("torchrl_ext", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        if not any(f"{name}.".startswith(f"{other}.") for other in EXTRAS) and path.name != "__main__.py":
            yield name


if __name__ == "__main__":
    sys.modules.update(dict.fromkeys(sys.argv[1:]))  # packages that are blocked
    names = list(modules())
    for name in names:
        importlib.import_module(name)
    print(f"{len(names)} modules of {torchrl_ext.__file__}")
