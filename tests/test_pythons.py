"""Every Python that `setup.py` promises imports every module, whatever the Python is that these tests run in."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, WAIT_S
from tests.test_floors import imports, modules

PROMISED = ["3.10", "3.11", "3.12", "3.13"]
IMPORTS_ALL = '''
import abc, importlib, json, sys, types
from importlib.machinery import ModuleSpec

def of_third_party(name):
    if name.startswith("__"):
        raise AttributeError(name)
    takes = {"__init__": lambda self, *given, **settings: None, "__init_subclass__": lambda cls=None, **settings: None}
    takes |= dict.fromkeys(("callback", "command"), lambda *given, **settings: lambda function: function)  # typer's
    return AnyClass(name, (), takes) if name[0].isupper() else Stub(name)

class AnyClass(abc.ABCMeta):
    __getattr__ = lambda cls, name: of_third_party(name)
    __getitem__ = lambda cls, key: cls

class Stub(types.ModuleType):
    """Passes for a module of a third party, and for its functions, decorators and constants."""

    __path__ = []
    __version__ = "0"
    __getattr__ = lambda self, name: of_third_party(name)
    __or__ = __ror__ = __sub__ = __lshift__ = __invert__ = __getitem__ = lambda self, *other: self
    __setitem__ = lambda self, key, value: None

    def __call__(self, *given, **settings):
        return given[0] if len(given) == 1 and callable(given[0]) and not settings else self

class ThirdParties:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.split(".")[0] in third else None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass

root, third, modules = json.load(sys.stdin)
sys.meta_path.insert(0, ThirdParties())
sys.path.insert(0, root)
failed = []
for name in modules:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
sys.exit("\\n".join(failed) or 0)
'''


def interpreter(version):
    """The path of a Python of this version on this machine, or None."""
    own = sys.executable if sys.version_info[:2] == tuple(map(int, version.split("."))) else None
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [own, *sorted(installed.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]
    for path in filter(None, candidates):
        if subprocess.run([path, "-I", "-c", ""], capture_output=True, timeout=WAIT_S).returncode == 0:
            return path  # a shim of pyenv for a version that is not chosen fails
    return None


def test_oldest_promised_python_agrees_with_the_settings():
    """The oldest Python tried here is the one that setup.py, the linter and mypy are set to."""
    assert f'python_requires=">={PROMISED[0]}"' in (ROOT / "setup.py").read_text()
    settings = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^target-version = "py310"$', settings, re.MULTILINE)
    assert re.search(r'^python_version = "3.10"', settings, re.MULTILINE)  # mypy knows what newer ones brought


EXTRAS = [
    "typer",
    "rich",
    "transformers",
    "tokenizers",
    "starlette",
    "uvicorn",
    "fastapi",
    "yaml",
    "peft",
    "hydra",
    "ray",
    "matplotlib",
    "pytest",
    "hypothesis",
]
"""Packages that an engine's environment may lack, and those that only extras bring."""


def test_bare_installation_imports_modules_that_need_no_extra():
    done = subprocess.run(
        [sys.executable, "-m", "tests.bare", *EXTRAS], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import sys; from torchrl_ext.cli.main import main; sys.exit(main(['discover', 'localhost:1']))", "cli"),
        ("from torchrl_ext.testing.tiny import make_tiny_lm; make_tiny_lm('model')", "embedded"),
        ("from torchrl_ext.control.serving.embedded import EmbeddedServer; EmbeddedServer('.')", "embedded"),
        ("from torchrl_ext.control.serving.topology import read_plans; read_plans('engines.yaml')", "cli"),
        ("import torchrl_ext.rl.hydra", "hydra"),
        ("from torchrl_ext.base.reports import SyncReport; SyncReport(version=1, transport='disk').plot()", "plot"),
    ],
)
def test_an_extra_that_is_missing_is_named_in_one_line(code, extra):
    blocked = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS})); {code}"
    done = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode and f"pip install 'torchrl_ext[{extra}]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("version", PROMISED)
def test_a_python_imports_every_module(version):
    path = interpreter(version)
    if path is None:
        pytest.skip(f"there is no Python {version} on this machine")
    third = {dotted.split(".")[0] for one in modules() for dotted in imports(one, anywhere=True)}
    third -= {"torchrl_ext", *sys.stdlib_module_names}
    names = [".".join(one.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for one in modules()]
    names = [name for name in names if not name.endswith("__main__")]
    done = subprocess.run(
        [path, "-I", "-S", "-c", IMPORTS_ALL],
        input=json.dumps([str(ROOT), sorted(third), names]),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
