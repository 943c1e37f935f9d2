"""Releases of vLLM and SGLang that our plugins were not tested with, as a plugin meets them when it registers."""

from __future__ import annotations

import json

import pytest

from tests.processes import finished, python

REGISTER = """
import importlib, json, logging, pathlib, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
folder, plugin, files = sys.argv[1:]
for name, text in json.loads(files).items():
    path = pathlib.Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.relative_to(folder).parents:
        pathlib.Path(folder, parent, "__init__.py").touch()
    path.write_text(text)
sys.path.insert(0, folder)
plugin = importlib.import_module(f"torchrl_ext.plugins.{plugin}.register")
plugin.register()
plugin.register()
print("registered")
"""

WORKERS = "vllm/v1/worker/worker_base.py"
FACTORY = "vllm/distributed/weight_transfer/factory.py"
REGISTERING = """
class WeightTransferEngineFactory:
    known = {}
    @classmethod
    def register_engine(cls, name, *where):
        if name in cls.known:
            raise ValueError(name)
        cls.known[name] = where
"""


def registered(tmp_path, plugin, files):
    done = finished(REGISTER, tmp_path / "site", plugin, json.dumps(files))
    assert done.returncode == 0 and done.stdout.split()[-1] == "registered", done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"vllm/__init__.py": "__version__ = '0.9.0'"}, "No module named 'vllm.distributed'"),
        ({"vllm/__init__.py": "__version__ = '0.9.0'", FACTORY: "registry = {}"}, "WeightTransferEngineFactory"),
        (
            {
                "vllm/__init__.py": "__version__ = '0.9.0'",
                FACTORY: "class WeightTransferEngineFactory:\n def register_engine(name): 1",
            },
            "TypeError",
        ),
    ],
    ids=["no backends", "another factory", "other arguments"],
)
def test_a_vllm_that_takes_no_backend_starts_and_says_so_once(tmp_path, files, words):
    said = registered(tmp_path, "vllm", files)
    assert said.count("found vLLM 0.9.0, tested with 0.32.0") == 1 and said.count("WARNING") == 1
    assert words in said and "follows no trainer" in said


WHOLE = {"vllm/__init__.py": "__version__ = '0.33.0'", FACTORY: REGISTERING, WORKERS: "class WorkerBase: pass"}


def test_a_vllm_that_has_everything_is_found_without_a_warning(tmp_path):
    said = registered(tmp_path, "vllm", WHOLE)
    assert said.count("found vLLM 0.33.0, tested with 0.32.0") == 1 and "WARNING" not in said


def test_a_vllm_with_other_workers_says_that_only_an_engine_made_with_our_backend_follows(tmp_path):
    said = registered(tmp_path, "vllm", WHOLE | {WORKERS: "class Worker: pass"})
    assert said.count("WARNING") == 1 and "made without our backend" in said and "follows no trainer" not in said


def test_linears_that_cannot_be_kept_plain_stop_no_vllm(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_EXT_PLAIN_LINEARS", "1")
    said = registered(tmp_path, "vllm", WHOLE | {"vllm/_custom_ops.py": "x = 1"})
    assert said.count("WARNING") == 1 and "TORCHRL_EXT_PLAIN_LINEARS" in said


REGISTRY = """
import collections, enum
class HookType(enum.Enum):
    AROUND = "around"
class HookRegistry:
    _hooks = collections.defaultdict(list)
    @classmethod
    def register(cls, target, hook, kind):
        cls._hooks[target].append((kind, hook, None))
"""
HOOKS = "sglang/srt/plugins/hook_registry.py"
UPDATER = "sglang/srt/model_executor/model_runner_components/weight_updater.py"
MANAGER = "sglang/srt/managers/scheduler_components/weight_updater.py"
BARE = {"sglang/__init__.py": "__version__ = '0.6.0'"}
HALF = {**BARE, HOOKS: REGISTRY, MANAGER: "class SchedulerWeightUpdaterManager:\n def check_weights(self): 1"}


@pytest.mark.parametrize("files", [BARE, {**BARE, HOOKS: "x = 1"}], ids=["no hooks", "another registry"])
def test_a_sglang_without_hooks_starts_and_says_so_once(tmp_path, files):
    said = registered(tmp_path, "sglang", files)
    assert said.count("found SGLang 0.6.0, tested with 0.5.23") == 1 and said.count("WARNING") == 1


def test_a_sglang_whose_own_loads_cannot_be_seen_says_what_follows(tmp_path):
    said = registered(tmp_path, "sglang", HALF)
    assert "weight_updater.WeightUpdater" in said and "every version has to be a full one" in said


def test_ways_to_load_that_other_releases_have_are_seen_by_whatever_name(tmp_path):
    updater = "class WeightUpdater:\n" + "".join(
        f" def {name}(self): 1\n"
        for name in ("update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_somewhere")
    )
    code = REGISTER.replace(
        'print("registered")',
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "print(*sorted(name.rpartition('.')[2] for name, hooks in HookRegistry._hooks.items() if len(hooks) == 1))",
    )
    told = python(code, tmp_path / "site", "sglang", json.dumps({**HALF, UPDATER: updater}))
    assert {"load_weights_from_distributed", "update_weights_from_somewhere", "check_weights"} <= set(told.split())
