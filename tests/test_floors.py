"""Imports point strictly down the floors, packages of one floor do not see each other, third parties have one home."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import beside
from tests.processes import ROOT, python

PACKAGE = ROOT / "torchrl_ext"
READS = ("msgspec.convert", "msgspec.json.decode", "msgspec.msgpack.decode")
FLOORS = [
    {"errors"},
    {"reports"},
    {"types", "registry", "files", "deadline", "devices"},
    {"kernels", "messages"},
    {"routes", "weights"},
    {"stores"},
    {"codecs"},
    {"landing"},
    {"versions"},
    {"rpc", "transports"},
    {"proof", "rollout"},
    {"serving", "sync"},
    {"collectors"},
    {"configs", "embedded", "planning", "plugins"},
    {"compat"},
    {"testing"},
    {"bench"},
    {"cli"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
HOMES = {
    "aiohttp": {"rpc"},
    "httpx": set(),
    "requests": set(),
    "ray": {"serving", "sync"},
    "matplotlib": {"reports"},
    "vllm": {"plugins"},
    "sglang": {"plugins"},
    "pytest": {"testing"},
}
IN_ENGINES = {
    "types", "errors", "reports", "messages", "routes", "registry", "files", "deadline", "devices",
    "kernels", "weights", "codecs", "landing", "stores", "versions", "transports", "proof", "sync", "plugins",
}  # fmt: skip
TRAINER_ONLY = {
    "torchrl", "tensordict", "transformers", "ray", "aiohttp", "httpx", "requests", "peft", "datasets", "rich",
    "matplotlib",
}  # fmt: skip
ENGINE_MODULES = [
    "torchrl_ext",
    "torchrl_ext.engines.vllm.register",
    "torchrl_ext.engines.sglang.register",
    "torchrl_ext.sync.receiver",
    "torchrl_ext.engines.update_from_disk",
    "torchrl_ext.data.weights.checkpoint",
    "torchrl_ext.data.transports.memory",
    "torchrl_ext.data.transports.disk",
    "torchrl_ext.data.transports.collective.transport",
    "torchrl_ext.data.transports.delta.transport",
    "torchrl_ext.data.transports.ipc.transport",
    "torchrl_ext.data.transports.ranks",
    "torchrl_ext.data.transports.sharded.transport",
]
NOT_IN_ENGINES = {f"torchrl_ext/sync/{name}.py" for name in ("engines/ray", "sender")}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def home(path):
    """The package (or top-level module) of ours that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path, *, anywhere):
    """Dotted names that a file imports; at module level only, or anywhere. Imports for type checkers do not count."""
    pending, found = list(tree_of(path).body), set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        elif anywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return found


def ours(names):
    return {name.split(".")[1] for name in names if name.startswith("torchrl_ext.")}


def drawn():
    """A table of the rooms from the highest floor down: what each is for, and what it uses."""
    rooms = {name: [path for path in modules() if home(path) == name] for name in FLOOR}
    uses = {
        name: set().union(*(ours(imports(path, anywhere=True)) for path in paths)) & set(FLOOR) - {name}
        for name, paths in rooms.items()
        if paths
    }
    brought = {name: set() for name in FLOOR}
    for name in sorted(uses, key=FLOOR.get):
        brought[name] = set().union(*({other} | brought[other] for other in uses[name]))
    lines = ["| room | what it is for | uses |", "|---|---|---|"]
    for floor in reversed(FLOORS):
        for name in sorted(floor & set(uses)):
            below = uses[name] - set().union(*(brought[other] for other in uses[name]))
            path = PACKAGE / name / "__init__.py"
            said = ast.get_docstring(tree_of(path if path.exists() else PACKAGE / f"{name}.py"))
            lines.append(f"| `{name}` | {said.splitlines()[0]} | {', '.join(sorted(below))} |")
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- map: begin -->\n\n", "\n<!-- map: end -->"


def test_the_map_for_contributors_is_that_of_the_imports():
    page = (ROOT / "docs" / "contributing.md").read_text()
    assert drawn() == page.split(BEGIN)[1].split(END)[0], "python -m tests.test_floors --write"


def test_every_package_has_a_floor():
    assert {home(path) for path in modules()} - {"__init__"} <= set(FLOOR)


def test_imports_point_strictly_down():
    upwards = [
        f"{path.relative_to(ROOT)} (floor {FLOOR[home(path)]}) imports {other} (floor {FLOOR[other]})"
        for path in modules()
        if home(path) != "__init__"
        for other in ours(imports(path, anywhere=True)) & set(FLOOR) - {home(path)}
        if FLOOR[other] >= FLOOR[home(path)]
    ]
    assert not upwards


def test_each_third_party_has_one_home():
    strays = {
        (str(path.relative_to(ROOT)), name)
        for path in modules()
        for name in {dotted.split(".")[0] for dotted in imports(path, anywhere=True)} & set(HOMES)
        if home(path) not in HOMES[name]
    }
    assert not strays


def test_what_engines_import_needs_nothing_of_the_trainers():
    strays = {
        (str(path.relative_to(ROOT)), name)
        for path in modules()
        for name in {dotted.split(".")[0] for dotted in imports(path, anywhere=False)} & TRAINER_ONLY
        if home(path) in IN_ENGINES and str(path.relative_to(ROOT)) not in NOT_IN_ENGINES
    }
    assert not strays


def test_importing_what_engines_need_brings_no_trainer_package():
    python(
        "import importlib, json, sys\n"
        "for module in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(module)\n"
        "    brought = set(sys.argv[2:]) & set(sys.modules)\n"
        "    assert not brought, (module, brought)",
        json.dumps(ENGINE_MODULES),
        *sorted(TRAINER_ONLY - {"datasets"}),
        fresh=True,
    )


def test_nothing_writes_to_the_environment_of_the_process():
    writers = []
    for path in modules():
        for node in ast.walk(tree_of(path)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "os.putenv", "os.unsetenv", "os.environ.update", "os.environ.setdefault", "os.environ.pop",
            ):  # fmt: skip
                targets = [node.func]
            writers += [f"{path}:{node.lineno}" for target in targets if ast.unparse(target).startswith("os.")
                        and "env" in ast.unparse(target)]  # fmt: skip
    assert not writers


def test_nobody_asks_with_hasattr_and_nothing_of_ours_is_pickled():
    for path in modules():
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        assert "hasattr" not in names, path
        assert not {name for name in names if name.startswith(("pickle.", "cloudpickle."))}, path
        # what pickles by another name
        assert not names & {"torch.save", "torch.load"}, path
        assert not {name for name in names if name.endswith(("_object", "_object_list"))}, path
        assert not [call for call in calls for one in call.keywords if one.arg == "weights_only"], path


def test_the_top_level_of_the_repository_holds_nothing_else():
    expected = {
        "torchrl_ext", "tests", "tutorials", "docs", "setup.py", "README.md", "pyproject.toml", "LICENSE",
    }  # fmt: skip
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    top = {Path(name).parts[0] for name in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= expected


def test_structs_are_read_by_types_that_are_described_first():
    """Two threads that have msgspec read a struct for the first time end the process (`types.described`)."""
    kinds = []
    for path in modules():
        for call in ast.walk(tree_of(path)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in READS:
                kind = [word.value for word in call.keywords if word.arg == "type"] or call.args[1:]
                kinds += [ast.unparse(one) for one in kind[:1]]
    assert len(kinds) > 9 and not [kind for kind in kinds if not kind.startswith("described(") and kind != "bytes"]


if __name__ == "__main__":
    if "--write" in sys.argv:
        target = ROOT / "docs" / "contributing.md"
        before, _, rest = target.read_text().partition(BEGIN)
        target.write_text(f"{before}{BEGIN}{drawn()}{END}{rest.partition(END)[2]}")
    print(drawn(), end="")


def test_files_by_which_tests_are_shared_between_processes_exist():
    named = {*beside.LONGEST, *beside.SHORT, *beside.RAY} - {"short deadlines", "Ray"}
    assert not [name for name in named if not (ROOT / "tests" / name).exists()]
