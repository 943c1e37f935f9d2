"""What the launchers of engines have in common: what they check before a start, and how our plugin comes along."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchrl_ext.errors import ConfigError
from torchrl_ext.launch.overlay import make_overlay
from torchrl_ext.launch.processes import ServerProcess, free_port, reachable

__all__ = ["as_flags", "checkpoint_folder", "on_cpu", "start_with_plugin", "usable_port"]


def checkpoint_folder(model_dir: str | Path) -> Path:
    """Absolute path of a checkpoint.

    Raises:
        ConfigError: it is no directory.
    """
    if not Path(model_dir).is_dir():
        raise ConfigError(f"{model_dir} is no directory", expected="a Hugging Face checkpoint directory")
    return Path(model_dir).absolute()


def usable_port(port: int, host: str = "127.0.0.1") -> int:
    """``port``, or a free one where it is 0.

    Raises:
        ConfigError: somebody listens on it, who would answer the health check in the engine's place.
    """
    if not port:
        return free_port()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used: {error}", hint="pick another one, or 0 for any") from None
    return port


def on_cpu(python: Path) -> bool:
    """Whether an engine of that interpreter computes on the CPU: environments that we make are for CPUs."""
    return python != Path(sys.executable) or not torch.cuda.is_available()


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """``--name=value`` of each argument that has a value."""
    return [f"--{name}={value}" for name, value in arguments.items() if value is not None]


def start_with_plugin(
    command: Sequence[str],
    *,
    name: str,
    host: str,
    port: int,
    environ: Callable[[Path], Mapping[str, str]],
    plugin: bool = True,
    **settings: Any,
) -> tuple[ServerProcess, Path]:
    """Start a server that finds our plugin in a folder of its own.

    Args:
        command: the server and its arguments.
        name: what it is called in messages.
        host: address that it listens on.
        port: as `host`.
        environ: its variables, given the folder.
        plugin: False leaves the folder empty.
        **settings: of `ServerProcess`.

    Returns:
        The server, and the folder: to be removed when the server has ended.

    Raises:
        EngineError, DeadlineError: as for `ServerProcess`.
    """
    overlay = Path(tempfile.mkdtemp(prefix="torchrl-ext-overlay-"))
    try:
        if plugin:
            make_overlay(overlay)
        url = f"http://{reachable(host)}:{port}"
        return ServerProcess(command, name=name, url=url, environ=environ(overlay), **settings), overlay
    except BaseException:
        shutil.rmtree(overlay, ignore_errors=True)
        raise
