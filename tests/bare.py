"""Import every module whose extra is installed: run in an installation, or here with the packages of extras blocked."""

import importlib
import importlib.util
import sys
from pathlib import Path

import torchrl_ext

NEEDS = {
    "torchrl_ext.cli": "typer",
    "torchrl_ext.rl.hydra": "hydra",
    "torchrl_ext.engines.embedded": "starlette",
    "torchrl_ext.engines.sglang": "sglang",
    "torchrl_ext.compat.vllm_backend": "vllm",
    "torchrl_ext.engines.vllm": "vllm",
    "torchrl_ext.testing.engine": "pytest",
    "torchrl_ext.testing.transports": "pytest",
}
"""Modules, and packages with all of theirs, by the package of an extra or of an engine that they need."""


def modules():
    """Yield the names of the modules that can be imported here."""
    root = Path(torchrl_ext.__file__).parent
    lacking = [name for name, package in NEEDS.items() if importlib.util.find_spec(package) is None]
    for path in sorted(root.rglob("*.py")):
        name = ".".join(("torchrl_ext", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        if not any(f"{name}.".startswith(f"{other}.") for other in lacking) and path.name != "__main__.py":
            yield name


if __name__ == "__main__":
    sys.modules.update(dict.fromkeys(sys.argv[1:]))  # packages that are blocked
    names = list(modules())
    for name in names:
        importlib.import_module(name)
    print(f"{len(names)} modules of {torchrl_ext.__file__}")
