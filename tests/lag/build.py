"""Builds the lagging device, once for each release of torch and each edit, into the cache of this machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

__all__ = ["Unbuilt", "library"]

_SOURCE = Path(__file__).with_name("lag.cpp")
_BUILD_S = 600.0


class Unbuilt(Exception):
    """The device cannot be built on this machine; says why."""


def library() -> Path:
    """Return the path of the built library.

    Raises:
        Unbuilt: there is no C++ compiler, or it failed.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise Unbuilt("this machine has no C++ compiler (g++, clang++, or one that CXX names)")
    made_of = _SOURCE.read_bytes() + f"{torch.__version__} {compiler}".encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrl_ext" / "lag"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"lag-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one session come at once
        if not built.exists():
            _compile(compiler, built)
    return built


def _compile(compiler: str, built: Path) -> None:
    torch_home = Path(torch.__file__).parent
    unfinished = built.with_suffix(f".{os.getpid()}")
    flags = [
        "-shared",
        "-fPIC",
        "-O0",
        "-std=c++20",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    links = [f"-L{torch_home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_home / 'lib'}"]
    command = [compiler, *flags, str(_SOURCE), "-o", str(unfinished), *includes, *links]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    if done.returncode:
        raise Unbuilt(f"{compiler} cannot build the lagging device:\n{done.stderr[-2000:]}")
    unfinished.rename(built)
