"""Every Python that `setup.py` promises imports every module, whatever the Python is that these tests run in."""

from __future__ import annotations

import ast
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

OLDEST = (3, 10)
PROMISED = ["3.10", "3.11", "3.12", "3.13"]
NEWER = {
    "asyncio": {"Barrier", "Runner", "TaskGroup", "timeout", "timeout_at"},
    "builtins": {"BaseExceptionGroup", "ExceptionGroup", "PythonFinalizationError"},
    "collections.abc": {"Buffer"},
    "contextlib": {"chdir"},
    "copy": {"replace"},
    "datetime": {"UTC"},
    "enum": {"EnumType", "FlagBoundary", "ReprEnum", "StrEnum", "global_enum", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "inspect": {"getmembers_static", "ismethodwrapper", "markcoroutinefunction"},
    "itertools": {"batched"},
    "logging": {"getHandlerByName", "getHandlerNames", "getLevelNamesMapping"},
    "math": {"cbrt", "exp2", "fma", "sumprod"},
    "operator": {"call", "is_none", "is_not_none"},
    "os": {"process_cpu_count", "unshare"},
    "queue": {"ShutDown"},
    "random": {"binomialvariate"},
    "sys": {"exception", "monitoring"},
    "threading": {"setprofile_all_threads", "settrace_all_threads"},
    "types": {"CapsuleType", "get_original_bases"},
    "typing": {
        "LiteralString", "Never", "NotRequired", "ReadOnly", "Required", "Self", "TypeAliasType", "TypeIs",
        "TypeVarTuple", "Unpack", "assert_never", "assert_type", "dataclass_transform", "get_overloads",
        "get_protocol_members", "is_protocol", "override", "reveal_type",
    },
    "warnings": {"deprecated"},
}  # fmt: skip
"""Names that modules of the standard library got after the oldest Python; and those of objects and of arguments:"""
NEWER_MODULES = {"compression", "concurrent.interpreters", "pathlib.types", "tomllib", "wsgiref.types"}
NEWER_ATTRIBUTES = {"add_note", "cancelling", "co_qualname", "full_match", "is_junction", "uncancel"}
NEWER_ARGUMENTS = {"delete_on_close", "onexc", "process_group", "walk_up"}

IMPORTS_ALL = '''
import abc, importlib, json, sys, types
from importlib.machinery import ModuleSpec

def of_third_party(name):
    if name.startswith("__"):
        raise AttributeError(name)
    takes = {"__init__": lambda self, *given, **settings: None, "__init_subclass__": lambda cls=None, **settings: None}
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


def newer_names(tree):
    """What a module uses of the standard library that the oldest Python does not have, with the line of each use."""
    bound, nodes = {}, list(ast.walk(tree))
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    bound[alias.asname or alias.name] = alias.name
                    if alias.name in NEWER_MODULES:
                        yield node.lineno, alias.name
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    bound[alias.asname or alias.name] = f"{module}.{alias.name}"
                    if {module, f"{module}.{alias.name}"} & NEWER_MODULES or alias.name in NEWER.get(module, ()):
                        yield node.lineno, f"{module}.{alias.name}"
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if name in NEWER_ATTRIBUTES:
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in NEWER.get(bound.get(module), ()):
                yield node.lineno, f"{module}.{name}"
            case ast.Name(id=name) if name in NEWER["builtins"] and name not in bound:
                yield node.lineno, name
            case ast.keyword(arg=name) if name in NEWER_ARGUMENTS:
                yield node.lineno, f"{name}="


def test_the_oldest_python_that_is_promised_is_the_first_of_those_tried():
    assert f'python_requires=">={PROMISED[0]}"' in (ROOT / "setup.py").read_text()
    assert re.search(r'^target-version = "py310"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


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


@pytest.mark.parametrize(
    "code",
    [
        "from typing import Self",
        "from contextlib import suppress, chdir",
        "import contextlib as c\nc.chdir('.')",
        "import typing\nx: typing.Never",
        "import tomllib",
        "raise ExceptionGroup('', [])",
        "frame.f_code.co_qualname",
        "shutil.rmtree(path, onexc=print)",
    ],
)
def test_a_name_that_the_oldest_python_lacks_is_found(code):
    assert list(newer_names(ast.parse(code)))


def test_no_module_uses_what_the_oldest_python_lacks():
    found = []
    for path in modules():
        tree = ast.parse(path.read_text(), str(path), feature_version=OLDEST)
        found += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in newer_names(tree)]
    assert not found
