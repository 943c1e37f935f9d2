"""What the plugins do when an engine has them register."""

from __future__ import annotations

import ast
import json
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import finished, python
from torchrl_ext.engines.vllm import register as vllm_register

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
plugin = importlib.import_module(f"torchrl_ext.engines.{plugin}.register")
plugin.register()
plugin.register()
print("registered")
"""

WORKERS = "vllm/v1/worker/worker_base.py"
FACTORY = "vllm/distributed/weight_transfer/factory.py"
CORE = "vllm/v1/engine/core.py"
ARGS = "vllm/engine/arg_utils.py"
CLIENT = "vllm/v1/engine/core_client.py"
LAYERS = """
from types import SimpleNamespace
def get_layerwise_info(layer):
    return SimpleNamespace(can_load=lambda: False)
"""
EXECUTOR = "vllm/v1/executor/multiproc_executor.py"
WHOLE = {
    "vllm/__init__.py": "__version__ = '1000.0'",
    FACTORY: "class WeightTransferEngineFactory:\n register_engine = print\n"
    "class WeightTransferTrainerFactory:\n register_engine, _registry = print, {}",
    WORKERS: "class WorkerBase: pass",
    ARGS: "from types import SimpleNamespace\nclass EngineArgs:\n def create_engine_config(self, *_):\n"
    "  return SimpleNamespace(additional_config={'a': 1})",
    CLIENT: "class AsyncMPClient:\n"
    " async def collective_rpc_async(self, method, timeout=None, args=(), kwargs=None): return [0, 1]\n"
    " async def call_utility_all_async(self, name, method, timeout, args, kwargs): return [[0, 1], [2, 3]]",
    CORE: "class EngineCore:\n def resume_scheduler(self): print('resumed')\n"
    " collective_rpc = _attach_weight_version = preprocess_add_request = add_request = print",
    EXECUTOR: "class MultiprocExecutor:\n def collective_rpc(self): return self.response_mqs",
}


@pytest.fixture
def ran(tmp_path):
    """What an interpreter with the files of an engine says, on either stream, after the plugin was registered."""

    def run(files, code="", plugin="vllm"):
        done = finished(REGISTER + code, tmp_path / "site", plugin, json.dumps(files))
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("registered\n")[2], done.stderr

    return run


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
SCHEDULER = "sglang/srt/managers/scheduler.py"
BARE = {"sglang/__init__.py": "__version__ = '0.6.0'"}
HALF = {**BARE, HOOKS: REGISTRY, MANAGER: "class SchedulerWeightUpdaterManager:\n def check_weights(self): 1"}


@pytest.mark.parametrize(
    ("needs", "files", "words"),
    [
        ("vLLM 0.32.0", {FACTORY: "registry = {}"}, "WeightTransferEngineFactory"),
        ("vLLM 0.32.0", {FACTORY: "class WeightTransferEngineFactory:\n def register_engine(name): 1"}, "TypeError"),
        ("vLLM 0.32.0", {WORKERS: "class Worker: pass"}, "WorkerBase"),
        (
            "vLLM 0.32.0",
            {CORE: "class EngineCore:\n resume_scheduler = collective_rpc = print"},
            "_attach_weight_version",
        ),
        ("vLLM 0.32.0", {EXECUTOR: "class MultiprocExecutor:\n def collective_rpc(self): 1"}, "read its response_mqs"),
        ("SGLang 0.5.23", BARE, ""),
        ("SGLang 0.5.23", {**BARE, HOOKS: "x = 1"}, ""),
        ("SGLang 0.5.23", HALF, ""),
    ],
    ids=["factory", "arguments", "workers", "labels", "replies", "no hooks", "registry", "own loads elsewhere"],
)
def test_an_engine_of_another_release_starts_and_says_so_once(ran, needs, files, words):
    plugin = needs.partition(" ")[0].lower()
    _, said = ran({**(WHOLE if plugin == "vllm" else {}), **files}, plugin=plugin)
    assert said.count(f"torchrl_ext needs {needs}, and this release cannot follow a trainer") == 1
    assert said.count("WARNING") == 1 and words in said


GROUPS = "".join(
    f"def {name}():\n from types import SimpleNamespace\n return SimpleNamespace(world_size=1, cpu_group=None)\n"
    for name in ("get_tp_group", "get_pp_group", "get_pcp_group")
)
CONFIG = "from contextlib import nullcontext as set_current_vllm_config"
MADE = """
import torch
from types import SimpleNamespace as Some
from vllm.v1.worker.worker_base import WorkerBase
plugin.register()
plugin.register()
text = Some(get_text_config=lambda: Some(tie_word_embeddings=False))
worker = WorkerBase()
worker.vllm_config = Some(
    model_config=Some(model="/m", dtype=torch.float32, hf_config=text, revision=None),
    parallel_config=Some(
        rank=0, world_size=1, data_parallel_index=0, world_size_across_dp=1, enable_eplb=False,
        pipeline_parallel_size=1, enable_expert_parallel=False,
    ),
    load_config=Some(load_format="auto"), quant_config=None,
)
worker.model_runner = Some(get_model=lambda: model, reset_lora_state=lambda: None)
model = torch.nn.Linear(2, 2)
"""
CALLS = """
from torchrl_ext.base.messages import Inspect, Join, Reset, Start, State
def says(message):
    return worker.torchrl_ext(json.dumps(message.to_json()))
def state():
    told = says(State())
    return told["asleep"], told.get("empty", False), told["whole"]
"""
DAEMON = f"""{MADE.replace('"auto"', '"ipc_cache"')}{CALLS}
print(says(Join(transport="disk", params=(), rank_offset=0, offer={{}}))["error"])
print(says(Inspect())["workers"], state())
"""


THERE = {name.removesuffix(".py").replace("/", ".") for name in WHOLE}


def stand_in(**workers):
    """A vLLM that has the names that the plugin imports; ``workers`` are methods of its workers."""
    texts = {}
    for path in {*Path(vllm_register.__file__).parent.glob("*.py")} - {Path(vllm_register.__file__)}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("vllm.") and node.module not in THERE:
                names = {alias.name for alias in node.names}
                texts.setdefault(node.module, {}).update(dict.fromkeys(names, "class {}: ..."))
    files = {
        f"{module.replace('.', '/')}/__init__.py": "\n".join(text.format(name) for name, text in names.items())
        for module, names in texts.items()
    }
    groups, layers = "vllm/distributed/parallel_state", "vllm/model_executor/model_loader/reload/layerwise"
    methods = {name: f" def {name}(self, *args, **how): {does}" for name, does in workers.items()}
    return {
        **files,
        **WHOLE,
        f"{groups}/__init__.py": GROUPS,
        f"{layers}/__init__.py": files[f"{layers}/__init__.py"] + LAYERS,
        "vllm/config/__init__.py": CONFIG,
        WORKERS: "\n".join(["class WorkerBase:\n _weight_update_active = False", *methods.values()]),
    }


def test_vllm_that_maps_a_daemons_weights_refuses_trainers(ran):
    said, _ = ran(stand_in(), DAEMON)
    assert "this engine maps weights that a daemon owns" in said and "still serves its previous weights" in said
    assert said.endswith("1 ([], False, True)\n")


def test_an_engine_configuration_names_the_plugin(ran):
    """A client asks workers only where it is there: without their method vLLM would mix up their replies."""
    code = "from vllm.engine.arg_utils import EngineArgs\nprint(EngineArgs().create_engine_config().additional_config)"
    assert ran(stand_in(), code)[0] == "{'a': 1, 'torchrl_ext': True}\n"


NOTICED = f"""{MADE}{CALLS}
def notices(does, *args, **how):
    try:
        does(*args, **how)
    except ZeroDivisionError:
        pass
    print(*state(), worker.torchrl_ext_beside.ours.end.receiver.held)
"""


@pytest.mark.parametrize("first", ["", "print(*state())"], ids=["before our first message", "after it"])
@pytest.mark.parametrize(
    ("does", "named"),
    [("1", "reload_weights"), ("1 / 0", "reload_weights"), ("1", "update_weights"), ("1", "finish_weight_update")],
)
def test_what_vllm_loads_by_itself_is_noticed(ran, first, does, named):
    said, log = ran(stand_in(**{named: does}), f"{NOTICED}\n{first}\nnotices(worker.{named}, '/other')")
    assert said.endswith("[] False True parts of several versions, or weights of another origin\n"), log


SLEPT = f"""{NOTICED}
stopping = worker.torchrl_ext_beside.ours.end
stopping.stop = lambda: print("let go")
worker.sleep(level=1)
notices(worker.wake_up, ["kv_cache"])
notices(worker.wake_up, tags=["weights"])
notices(worker.discard, ("kv_cache",))
notices(worker.wake_up)
notices(worker.sleep, level=2)
notices(worker.wake_up, None)
"""
LOST = "True True no weights"


def test_vllms_worker_lets_go_of_weights_before_it_sleeps(ran):
    """Our worker hears of a sleep before the memory goes, which tags sleep, and that weights were lost."""
    sleeps = {"sleep": "print('sleeps')", "wake_up": "print('wakes')", "discard": "print('discards')"}
    said, log = ran(stand_in(**sleeps), SLEPT)
    assert said.splitlines() == [
        *("let go", "sleeps", "wakes", "['weights'] False True version 0"),
        *("wakes", "[] False True version 0", "discards", "['kv_cache'] False True version 0"),
        *("wakes", "[] False True version 0", "let go", "sleeps", f"['kv_cache', 'weights'] {LOST}"),
        *("wakes", f"[] {LOST}"),
    ], log


RESUMED = f"""{MADE}{CALLS}
from vllm.v1.engine.core import EngineCore
from torchrl_ext.base.errors import EngineError
core = EngineCore()
core.model_executor = Some(collective_rpc=lambda name: [getattr(worker, name)()])
core.resume_scheduler()
for torn in (False, True):
    worker.torchrl_ext_beside.ours.end.receiver.invalidate(torn=torn)
    try:
        core.resume_scheduler()
    except EngineError:
        print("refused")
"""


def test_vllm_with_a_partial_version_refuses_to_resume(ran):
    said, log = ran(stand_in(), RESUMED)
    assert said == "resumed\nresumed\nrefused\n", log


def test_an_update_of_vllms_own_that_is_open_keeps_ours_away(ran):
    code = f"{MADE}{CALLS}\nworker._weight_update_active = True\nprint(says(Start())['error'])\nprint(*state())"
    said, log = ran(stand_in(), code)
    assert "by vLLM's own weight transfer is open" in said and said.endswith("[] False True\n"), log


OBSTACLES = f"""{MADE}
config = worker.vllm_config
parallel, described = config.parallel_config, config.model_config
vars(parallel).update(distributed_executor_backend="mp", data_parallel_size=1, enable_fault_tolerance=False)
vars(described).update(is_moe=True, multimodal_config=None)
vars(config).update(kv_transfer_config=None, lora_config=None)
ours = worker.torchrl_ext_beside.ours
def says(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    print(ours._obstacle())
    setattr(owner, name, before)
says(parallel, "distributed_executor_backend", "ray")
says(parallel, "distributed_executor_backend", "external_launcher")
says(parallel, "data_parallel_size", 2)
says(parallel, "enable_fault_tolerance", True)
says(described, "multimodal_config", 1)
says(config, "kv_transfer_config", 1)
says(config, "lora_config", 1)
says(ours, "asleep", frozenset(["kv_cache"]))
says(worker, "_weight_update_active", True)
"""


def test_what_a_vllm_has_to_be_paused_for(ran):
    said, log = ran(stand_in(), OBSTACLES)
    assert said.splitlines() == [
        "",
        "steps and calls may reach the workers of executor external_launcher in another order",
        "replicas share experts, and each takes a version at a step of its own",
        "vLLM's fault tolerance may drop dispatched batches",
        "embeddings of images are kept",
        "a KV connector keeps keys and values elsewhere",
        "adapters are placed over the weights",
        "kv_cache asleep",
        "an update by vLLM's own weight transfer is open",
    ], log


REPLICAS = """
import asyncio
from vllm.v1.engine.core_client import AsyncMPClient
for method in ("torchrl_ext", "other"):
    print(asyncio.run(AsyncMPClient().collective_rpc_async(method, args=("{}",))))
"""


def test_every_replica_is_heard(ran):
    """vLLM's client returns what the workers of the first replica say."""
    said, log = ran(stand_in(), REPLICAS)
    assert said == "[0, 1, 2, 3]\n[0, 1]\n", log


class Queue(deque):
    """A worker's replies; the first ``late`` reads come too early for any."""

    late = 0

    def dequeue(self, timeout=None):
        if self.late:
            self.late -= 1
            raise TimeoutError
        return self.popleft()


class Executor:
    """Two workers. A reply is what was called, the number of the call, and by whom; to what is unknown, an error."""

    def __init__(self):
        self.queues = self.response_mqs = [Queue(), Queue()]
        self.futures, self.calls = [], 0

    def collective_rpc(self, method, timeout=None, non_block=False, unique_reply_rank=None):
        self.calls += 1
        for rank, queue in enumerate(self.queues):
            if unique_reply_rank in (None, rank):
                queue.append((method != "unknown", (method, self.calls, rank)))
        queues = self.response_mqs
        if unique_reply_rank is not None:
            queues = (queues[unique_reply_rank],)
        future = SimpleNamespace(queues=queues, timeout=timeout, found=[])
        self.futures.append(future)
        return future if non_block else self.result(future)

    def result(self, wanted):
        while self.futures:
            future = self.futures.pop(0)
            try:
                for queue in future.queues:
                    good, reply = queue.dequeue(timeout=future.timeout)
                    if not good:
                        raise RuntimeError(reply)
                    future.found.append(reply)
            except (RuntimeError, TimeoutError):
                if future is wanted:
                    raise
        return wanted.found


@pytest.fixture
def executor(monkeypatch):
    module = SimpleNamespace(MultiprocExecutor=type("MultiprocExecutor", (Executor,), dict(vars(Executor))))
    monkeypatch.setitem(sys.modules, "vllm.v1.executor.multiproc_executor", module)
    vllm_register._keep_in_step()
    return module.MultiprocExecutor()


@pytest.mark.parametrize("late", [0, 1])
def test_a_call_that_fails_leaves_no_reply_to_the_next(executor, late):
    def both(method):
        assert executor.collective_rpc(method) == [(method, executor.calls, rank) for rank in range(2)]

    both("state")
    for _ in range(2):
        executor.queues[0].late = late
        with pytest.raises(TimeoutError if late else RuntimeError):
            executor.collective_rpc("unknown", timeout=1)
        steps = [executor.collective_rpc("step", non_block=True, unique_reply_rank=0) for _ in range(2)]
        executor.collective_rpc("unknown", non_block=True)
        both("state")
        assert [step.found for step in steps] == [[("step", executor.calls - 3 + place, 0)] for place in range(2)]
        assert executor.collective_rpc("step", unique_reply_rank=1) == [("step", executor.calls, 1)]
        both("state")
    assert not any(executor.queues)


def test_sglangs_own_ways_to_load_are_seen_by_whatever_name(tmp_path):
    updater = "class WeightUpdater:\n" + "".join(
        f" def {name}(self): 1\n"
        for name in ("update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_somewhere")
    )
    code = REGISTER.replace(
        'plugin.register()\nplugin.register()\nprint("registered")',
        "plugin._wrap(plugin._worker_hooks())\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "print(*sorted(name.rpartition('.')[2] for name, hooks in HookRegistry._hooks.items() if len(hooks) == 1))",
    )
    files = {
        **HALF,
        UPDATER: updater,
        MANAGER: f"{HALF[MANAGER]}\n def update_weights_from_disk(self): 1\n def release_memory_occupation(self): 1",
        SCHEDULER: "class Scheduler:\n def continue_generation(self): 1",
    }
    told = python(code, tmp_path / "site", "sglang", json.dumps(files))
    assert {"load_weights_from_distributed", "update_weights_from_somewhere", "check_weights"} <= set(told.split())
