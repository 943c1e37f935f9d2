"""The parts of vLLM's and SGLang's servers that our plugins call, each over one worker that is a real end of ours."""

import asyncio
import json
import sys
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from torchrl_ext.base.messages import answered
from torchrl_ext.base.routes import CALL, CHANNEL, Flush
from torchrl_ext.data.landing.loader import TensorsLoader
from torchrl_ext.data.weights.digests import position_digest
from torchrl_ext.engines.sglang import routes as sglang_routes
from torchrl_ext.engines.vllm import endpoint
from torchrl_ext.sync.engine_worker import EngineWorker

REQUESTS = (
    "PauseGenerationReqInput", "ContinueGenerationReqInput", "UpdateWeightVersionReqInput", "CheckWeightsReqInput",
    "CheckWeightsReqOutput",
)  # fmt: skip


class Engine:
    """What both have.

    Attributes:
        held: the weights in service.
        hangs: the call that does not return until `let_go` is set; `hanging` is set once it is there.
        fails: the call that fails once.
    """

    def __init__(self, held, model):
        self.held, self.model = held, str(model)
        self.end = EngineWorker(TensorsLoader(held), rank=0, workers=1, agree=lambda words: [words])
        self.paused, self.label, self.loaded, self.dropped = False, "0", [], 0
        self.hangs = self.fails = ""
        self.hanging, self.let_go = threading.Event(), threading.Event()

    def digests(self):
        return {name: position_digest(tensor).hex() for name, tensor in self.held.items()}

    async def reached(self, call):
        if call == self.hangs:
            self.hanging.set()
            while not self.let_go.is_set():
                await asyncio.sleep(0.01)
        if call == self.fails:
            self.fails = ""
            raise RuntimeError("out of memory")


class VLLM(Engine):
    """vLLM's `AsyncLLM`."""

    def __init__(self, held, model):
        super().__init__(held, model)
        self.vllm_config = SimpleNamespace(
            additional_config={CALL: True},
            model_config=SimpleNamespace(multimodal_config=None, model="net"),
            kv_transfer_config=None,
            parallel_config=SimpleNamespace(data_parallel_size=1),
        )

    async def is_paused(self):
        return self.paused

    async def is_sleeping(self):
        return False

    async def pause_generation(self, mode, clear_cache):
        self.paused = True

    async def resume_generation(self):
        self.paused = False

    async def update_weight_version(self, label):
        self.label = label

    async def reset_prefix_cache(self, *_, **__):
        self.dropped += 1
        return True

    async def collective_rpc(self, method, args=(), kwargs=None):
        assert method == CALL
        await self.reached(json.loads(args[0])["kind"])
        return [{**answered(self.end.handle, args[0])}]

    def app(self, key=None):
        """The server's application."""
        plugin = endpoint.UpdateFromDisk()

        @asynccontextmanager
        async def lifespan(app):
            args = SimpleNamespace(model=self.model, api_key=[key] if key else None)
            await plugin.init_state(self, SimpleNamespace(), args)
            yield

        app = Starlette(lifespan=lifespan)
        plugin.attach_router(app)
        return app


class SGLang(Engine):
    """SGLang's `TokenizerManager`, and its one scheduler."""

    def __init__(self, held, model):
        super().__init__(held, model)
        self.server_args = SimpleNamespace(model_path=self.model, disaggregation_mode="null")

    @property
    def is_pause(self):
        return self.paused

    def abort_request(self, *, abort_all):
        pass

    async def pause_generation(self, request):
        self.paused = True

    async def continue_generation(self, request):
        self.paused = False

    async def update_weight_version(self, request):
        self.label = request.new_version

    async def check_weights(self, request, *_):
        def handle(message):
            self.dropped += isinstance(message, Flush)
            return {"flushed": True} if isinstance(message, Flush) else self.end.handle(message)

        text = request.action.removeprefix(CHANNEL)
        await self.reached(json.loads(text)["kind"])
        return True, json.dumps(answered(handle, text)), None, None

    def app(self):
        """The server's application."""

        async def theirs(manager, told, request):
            self.loaded.append(told.model_path)
            return True, "loaded by SGLang", 0

        async def update(request):
            fields = {"abort_all_requests": False, "load_format": None, "weight_version": None}
            fields |= await request.json()
            success, message, paused = await sglang_routes.update(theirs, self, SimpleNamespace(**fields), request)
            content = {"success": success, "message": message, "num_paused_requests": paused}
            return JSONResponse(content, status_code=200 if success else 400)

        return Starlette(routes=[Route("/update_weights_from_disk", update, methods=["POST"])])


def add_sglang(patch):
    """Put modules of SGLang where the plugin imports them; the patch ends that."""
    modules = {
        "sglang.srt.managers.io_struct": SimpleNamespace(**dict.fromkeys(REQUESTS, SimpleNamespace)),
        "sglang.srt.distributed.parallel_state": SimpleNamespace(
            get_tp_group=lambda: SimpleNamespace(cpu_group=None, world_size=1),
            get_pp_group=lambda: SimpleNamespace(world_size=1),
        ),
    }
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr("torchrl_ext.engines.plugin.agree", lambda words, *_: [words])
