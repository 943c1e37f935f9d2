"""How our package and its plugins reach an engine's environment: a folder on its ``PYTHONPATH``."""

from __future__ import annotations

import os
from pathlib import Path

import torchrl_ext

__all__ = ["make_overlay", "on_path"]

_PLUGINS = {
    "vllm.general_plugins": "vllm.register:register",
    "vllm.endpoint_plugins": "vllm.endpoint:UpdateFromDisk",
    "sglang.srt.plugins": "sglang.register:register",
}
_PACKAGE = Path(torchrl_ext.__file__).resolve().parent


def make_overlay(folder: Path) -> None:
    """Fill ``folder`` so that it makes our package and its entry points known to whoever has it on ``PYTHONPATH``.

    The layout is that of an installed distribution (https://packaging.python.org, "Recording installed projects").
    """
    (folder / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    name = "torchrl_ext_overlay"  # not the package's own: of two distributions with one name Python sees only the first
    info = folder / f"{name}-{torchrl_ext.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {torchrl_ext.__version__}\n")
    groups = (f"[{group}]\ntorchrl_ext = torchrl_ext.plugins.{target}\n" for group, target in _PLUGINS.items())
    (info / "entry_points.txt").write_text("".join(groups))


def on_path(overlay: Path) -> str:
    """The ``PYTHONPATH`` of this process with ``overlay`` in front."""
    return os.pathsep.join([str(overlay), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
