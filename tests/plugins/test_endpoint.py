"""The routes in vLLM's server, over a stand-in of its engine whose one worker is a real end of ours."""

import asyncio
import importlib
import json
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from tests.compat.test_slime_chains import renumber
from tests.hostile import HOSTILE
from tests.processes import WAIT_S
from tests.transports.chains import checkpoint, folder, published, same, weights
from torchrl_ext.landing.loader import TensorsLoader
from torchrl_ext.messages import Finish, Reset, Start, read
from torchrl_ext.routes import ANSWERS
from torchrl_ext.sync.worker_end import WorkerEnd

PLUGIN = ("torchrl_ext.plugins.vllm.adapters", "torchrl_ext.plugins.vllm.endpoint")
ABSENT = (
    "fastapi",
    "fastapi.responses",
    "fastapi.routing",
    "vllm.distributed.weight_transfer.base",
    "vllm.lora.peft_helper",
    "vllm.lora.request",
)


class StandIn(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture(scope="module")
def endpoint():
    with pytest.MonkeyPatch.context() as patch:
        for name in ABSENT:
            patch.setitem(sys.modules, name, StandIn(name))
        sys.modules["fastapi.responses"].JSONResponse = lambda content, status_code=200: (status_code, content)
        for name in PLUGIN:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(PLUGIN[1])
        for name in PLUGIN:
            sys.modules.pop(name, None)


class Engine:
    """Of vLLM's `AsyncLLM`, what the routes call."""

    def __init__(self, held, backend="torchrl_ext"):
        transfer = None if backend is None else SimpleNamespace(backend=backend)
        model = SimpleNamespace(multimodal_config=None)
        self.vllm_config = SimpleNamespace(weight_transfer_config=transfer, model_config=model)
        self.end = WorkerEnd(TensorsLoader(held), rank=0, workers=1, agree=lambda words: [words])
        self.paused, self.label, self.fails, self.methods = False, "0", "", []
        self.hangs, self.hanging, self.let_go = "", threading.Event(), asyncio.Event()

    async def is_paused(self):
        return self.paused

    async def pause_generation(self, mode, clear_cache):
        self.paused = True

    async def resume_generation(self):
        self.paused = False

    async def get_weight_version(self):
        return self.label

    async def update_weight_version(self, label):
        self.label = label

    async def reset_prefix_cache(self, *_, **__):
        return True

    async def collective_rpc(self, method, kwargs=None):
        self.methods.append(method)
        if method == self.hangs:
            self.hanging.set()
            await self.let_go.wait()
        if method == self.fails:
            self.fails = ""
            raise RuntimeError("out of memory")
        if method in ("pull_weights", "reload_weights"):
            return
        own = {"connection": self.end.receiver.connection}  # as the plugin takes it for routes without a body
        message = {"start_weight_update": Start(**own), "finish_weight_update": Finish(version=1, **own)}.get(method)
        answer = self.end.handle(read(next(iter(kwargs.values()))) if message is None else message)
        if answer:
            raise RuntimeError(ANSWERS + json.dumps(answer))


class Server:
    """The routes over an engine, in an event loop of its own."""

    def __init__(self, endpoint, engine, base):
        self._engine, self._routes = engine, endpoint.UpdateFromDisk()
        self._args = SimpleNamespace(model=str(base), api_key=None)

    async def __aenter__(self):
        await self._routes.init_state(self._engine, SimpleNamespace(), self._args)
        return self

    async def __aexit__(self, *_):
        self._engine.end.close()

    async def update(self, path, **body):
        return await self._asked(self._routes.update, {"model_path": str(path), **body})

    async def pull(self):
        told = {"local_checkpoint_dir": "/local", "source_dir": "/root", "target_version": 1}
        return await self._asked(self._routes.pull, told)

    async def _asked(self, route, body):
        status, told = await self._ask(route, body)
        assert told["success"] == (status == 200)
        return status, told["message"]

    async def _ask(self, route, body):
        async def parsed():
            return body

        return await route(SimpleNamespace(json=parsed))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Versions of slime's first format, of two files each; returns root, base, and what the versions are."""
    path = tmp_path_factory.mktemp("made")
    _, _, history = published(path / "ours", 3, encoding="deltas", keyframe_every=0)
    for version in (1, 2):
        renumber(folder(path / "ours", version + 1), folder(path / "root", version), version)
    checkpoint(path / "base", history[1])
    return path / "root", path / "base", {version - 1: own for version, own in history.items()}


def names(root, version):
    return sorted(file.name for file in folder(root, version).iterdir())


def run(test):
    asyncio.run(asyncio.wait_for(test, WAIT_S))


def test_an_engine_that_a_failed_load_left_paused_serves_no_part_of_the_next_version(endpoint, made):
    root, base, history = made
    held = {name: tensor.clone() for name, tensor in history[0].items()}
    engine = Engine(held)

    async def test():
        async with Server(endpoint, engine, base) as server:
            engine.fails = "update_weights"
            status, words = await server.update(folder(root, 1), load_format="delta", files=names(root, 1))
            assert status == 400 and "out of memory" in words and "is paused" in words and engine.paused
            for name in names(root, 1):
                status, words = await server.update(folder(root, 1), load_format="delta", files=[name])
                assert status == 400 and "all of its files in one call" in words and engine.paused
            whole = {"load_format": "delta", "files": names(root, 1), "weight_version": "1"}
            assert (await server.update(folder(root, 1), **whole))[0] == 200
            assert not engine.paused and engine.label == "1" and same(held, history[1])
            engine.paused = True  # its caller's pause
            for name in names(root, 2):
                status, words = await server.update(folder(root, 2), load_format="delta", files=[name])
                assert status == 200 and engine.paused, words
            assert same(held, history[2])

    run(test())


@pytest.mark.parametrize("by", ["a caller that resumes", "another trainer"])
def test_a_failure_is_forgotten_once_somebody_else_had_the_engine_serve(endpoint, made, by):
    root, base, history = made
    engine = Engine({name: tensor.clone() for name, tensor in history[0].items()})

    async def test():
        async with Server(endpoint, engine, base) as server:
            engine.fails = "update_weights"
            assert (await server.update(folder(root, 1), load_format="delta"))[0] == 400 and engine.paused
            if by == "another trainer":
                engine.label = "17"
            else:
                engine.paused = False
                assert (await server.update(root / "nothing", load_format="delta"))[0] == 400
            engine.paused = True
            assert (await server.update(folder(root, 1), load_format="delta"))[0] == 200
            assert engine.paused

    run(test())


def test_an_update_that_was_not_begun_leaves_the_engine_serving(endpoint, made):
    root, base, history = made
    engine = Engine({name: tensor.clone() for name, tensor in history[0].items()})

    async def test():
        async with Server(endpoint, engine, base) as server:
            engine.fails = "start_weight_update"
            status, words = await server.update(folder(root, 1), load_format="delta")
            assert status == 400 and "the engine serves what it served" in words and not engine.paused

    run(test())


def test_every_call_has_a_deadline_and_a_pull_waits_for_no_load(endpoint, made, monkeypatch):
    _, base, _ = made
    engine = Engine(weights(), backend=None)
    monkeypatch.setattr("torchrl_ext.sync.published._BUSY_S", 0.01)

    async def test():
        engine.hangs = "reload_weights"
        monkeypatch.setattr(endpoint, "_FILES_S", WAIT_S)
        async with Server(endpoint, engine, base) as server:
            load = asyncio.create_task(server.update(base))
            await asyncio.to_thread(engine.hanging.wait, WAIT_S)
            assert await server.pull() == (200, "Success.")
            assert "another load has been under way" in (await server.update(base))[1]
            engine.let_go.set()
            assert (await load)[0] == 200 and not engine.paused
        for hangs, ask in (("reload_weights", "update"), ("pull_weights", "pull")):
            monkeypatch.setattr(endpoint, "_FILES_S", 0.05)
            engine.hangs = hangs
            engine.let_go.clear()
            async with Server(endpoint, engine, base) as server:
                status, words = await (server.update(base) if ask == "update" else server.pull())
                assert status == 400 and "did not answer within" in words

    run(test())


def test_workers_are_told_of_a_checkpoint_that_was_loaded_past_them(endpoint, made):
    _, base, _ = made
    engine, told = Engine(weights()), []
    engine.end.handle = lambda message: told.append(message) or {}

    async def test():
        async with Server(endpoint, engine, base) as server:
            assert (await server.update(base, weight_version="3"))[0] == 200
        assert told == [Reset(weights="reloaded")] and engine.label == "3" and not engine.paused

    run(test())


def test_any_body_gets_an_answer(endpoint, made):
    _, base, _ = made
    engine = Engine(weights())
    bodies = [*HOSTILE, *({"model_path": value, "load_format": "delta"} for value in HOSTILE)]

    async def test():
        async with Server(endpoint, engine, base) as server:
            routes = server._routes
            for route in (routes.update, routes.pull, routes._adapters.answer):
                for body in bodies:
                    status, _ = await server._ask(route, body)
                    assert status == 400

    run(test())
