"""Load our plugin into an engine from a folder on its ``PYTHONPATH``; the engine's environment is not changed."""

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


def make_overlay(folder: Path) -> Path:
    """Fill ``folder`` so that an interpreter with it on ``PYTHONPATH`` finds our package and its entry points.

    The layout follows https://packaging.python.org, "Recording installed projects".
    """
    folder.mkdir(exist_ok=True)
    (folder / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
    name = "torchrl_ext_overlay"  # not the package's own: Python sees only the first of two distributions with one name
    info = folder / f"{name}-{torchrl_ext.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {torchrl_ext.__version__}\n")
    groups = (f"[{group}]\ntorchrl_ext = torchrl_ext.engines.{target}\n" for group, target in _PLUGINS.items())
    (info / "entry_points.txt").write_text("".join(groups))
    return folder


def on_path(overlay: Path, path: str | None = None) -> str:
    """Return ``path`` (None uses this process's ``PYTHONPATH``) with ``overlay`` in front."""
    path = os.environ.get("PYTHONPATH") if path is None else path
    return os.pathsep.join([str(overlay), *filter(None, (path or "").split(os.pathsep))])
