"""Who may import whom: nine rooms on six floors, no circle between two files, a home for each third party."""

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
BELOW_SYNC = {"base", "data", "control"}
ROOMS = {  # room: its floor, the rooms that it may import, the third parties that only rooms naming them may import
    "base": (1, set(), {"matplotlib"}),
    "data": (2, {"base"}, {"nccl"}),
    "control": (2, {"base"}, {"aiohttp"}),
    "sync": (3, BELOW_SYNC, {"ray"}),
    "engines": (4, BELOW_SYNC | {"sync"}, {"vllm", "sglang"}),
    "rl": (4, BELOW_SYNC | {"sync"}, set()),
    "compat": (5, BELOW_SYNC | {"sync", "engines", "rl"}, {"vllm"}),
    "testing": (5, BELOW_SYNC | {"sync", "engines", "rl"}, {"pytest"}),
    "cli": (6, BELOW_SYNC | {"sync", "engines", "rl", "compat", "testing"}, set()),
}
NOBODYS = {"httpx", "requests"}
ENTRIES = 9
"""The most files and folders of a folder that a reader takes in at once, without ``__init__.py``."""
TRAINER_ONLY = {
    "torchrl", "tensordict", "transformers", "ray", "aiohttp", "httpx", "requests", "peft", "datasets", "rich",
    "matplotlib",
}  # fmt: skip
ENGINE_MODULES = (
    "engines.vllm.register", "engines.sglang.register", "sync.receiver", "engines.update_from_disk",
    "data.weights.checkpoint", "data.transports.memory", "data.transports.disk", "data.transports.collective",
    "data.transports.delta", "data.transports.ipc", "data.group.ranks", "data.sharded.transport",
)  # fmt: skip


def modules():
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def home(path):
    """The package (or top-level module) of ours that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path, *, anywhere, checkers=False):
    """Dotted names that a file imports; at module level only, or anywhere; with those for type checkers, or without."""
    pending, found = list(tree_of(path).body), set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not checkers:
            pending += node.orelse
        elif anywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return found


def ours(path):
    """Files of ours that a file imports, wherever it does so: in a function, or for type checkers only."""
    found = set()
    for name in imports(path, anywhere=True, checkers=True):
        parts = name.split(".")[1:] if name.startswith("torchrl_ext.") else []
        while parts:
            for file in (PACKAGE.joinpath(*parts).with_suffix(".py"), PACKAGE.joinpath(*parts, "__init__.py")):
                if file.exists():
                    found.add(file)
                    parts = []
                    break
            parts = parts[:-1]
    return found - {path}


def drawn():
    """A table of the rooms from the highest floor down."""
    lines = ["| floor | room | what belongs there | may import |", "|--:|---|---|---|"]
    for name, (floor, below, _) in reversed(ROOMS.items()):
        said = ast.get_docstring(tree_of(PACKAGE / name / "__init__.py")).splitlines()[0].replace("``", "`")
        lines.append(f"| {floor} | `{name}` | {said} | {', '.join(f'`{one}`' for one in ROOMS if one in below)} |")
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- map: begin -->\n\n", "\n<!-- map: end -->"


def test_page_shows_the_rooms():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert drawn() == page.split(BEGIN)[1].split(END)[0], "python -m tests.test_floors --write"


def test_every_file_is_in_a_room():
    assert {home(path) for path in modules()} - {"__init__"} == set(ROOMS)


def test_rooms_import_lower_floors_only():
    """A table that lets two rooms of one floor see each other, or an arrow point up, would not be one of floors."""
    for name, (floor, below, _) in ROOMS.items():
        assert all(ROOMS[other][0] < floor for other in below), name
    strays = [
        f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
        for path in modules()
        if home(path) != "__init__"
        for other in ours(path)
        if home(other) not in {"__init__", home(path), *ROOMS[home(path)][1]}
    ]
    assert not strays


def test_no_files_import_each_other():
    """Also not by way of others, inside a function, or for the sake of an annotation."""
    left = {path: ours(path) for path in modules()}
    while ends := [path for path, others in left.items() if not others & left.keys()]:
        for path in ends:
            del left[path]
    assert not {str(path.relative_to(ROOT)): [str(one.relative_to(ROOT)) for one in others & left.keys()]
                for path, others in left.items()}  # fmt: skip


def test_folders_are_few_and_shallow():
    for folder in {path.parent for path in modules()} - {PACKAGE}:
        entries = {path.name for path in folder.iterdir()} - {"__init__.py", "__pycache__"}
        assert len(entries) <= ENTRIES and len(folder.relative_to(PACKAGE).parts) <= 2, (folder, len(entries))


def test_each_third_party_has_its_homes():
    homes = {
        name: {room for room in ROOMS if name in ROOMS[room][2]} for _, _, names in ROOMS.values() for name in names
    }
    homes |= {name: set() for name in NOBODYS}
    strays = {
        (str(path.relative_to(ROOT)), name)
        for path in modules()
        for name in {dotted.split(".")[0] for dotted in imports(path, anywhere=True)} & set(homes)
        if home(path) not in homes[name]
    }
    assert not strays


def test_importing_what_engines_need_brings_no_trainer_package():
    python(
        "import importlib, json, sys\n"
        "for module in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(module)\n"
        "    brought = set(sys.argv[2:]) & set(sys.modules)\n"
        "    assert not brought, (module, brought)",
        json.dumps(["torchrl_ext", *(f"torchrl_ext.{name}" for name in ENGINE_MODULES)]),
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


def test_a_device_is_any_vendors_but_for_nccl():
    """`torch.cuda` is one vendor's; the others' devices would go past what is asked of it."""
    asking = set()
    for path in modules():
        for node in ast.walk(tree_of(path)):
            names = {alias.name for alias in node.names} if isinstance(node, (ast.Import, ast.ImportFrom)) else set()
            asks = isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda")
            if asks or names & {"torch.cuda"} or ("cuda" in names and getattr(node, "module", "") == "torch"):
                asking.add(str(path.relative_to(PACKAGE)))
    assert asking <= {"base/devices.py", "data/group/nccl.py"}


def test_the_top_level_of_the_repository_holds_nothing_else():
    expected = {
        "torchrl_ext", "tests", "tutorials", "docs", "setup.py", "README.md", "pyproject.toml", "LICENSE",
        "changes",
    }  # fmt: skip
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    top = {Path(name).parts[0] for name in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= expected


def test_files_by_which_tests_are_shared_between_processes_exist():
    named = {*beside.LONGEST}.union(*beside.GROUPS.values()) - beside.GROUPS.keys()
    assert not [name for name in named if not (ROOT / "tests" / name).exists()]


if __name__ == "__main__":
    if "--write" in sys.argv:
        target = ROOT / "docs" / "architecture.md"
        before, _, rest = target.read_text().partition(BEGIN)
        target.write_text(f"{before}{BEGIN}{drawn()}{END}{rest.partition(END)[2]}")
    print(drawn(), end="")
