"""A pytest plugin that puts our client in the place of SkyRL's, so that SkyRL's own tests run over it.

Run by `test_as_skyrls_client` in a process of its own; nothing of SkyRL is imported.
"""

import base64
import functools
import socket
import sys
import types

import aiohttp
import yarl

from torchrl_ext.compat.skyrl import PauseMode, RemoteInferenceClient
from torchrl_ext.errors import EngineError
from torchrl_ext.rpc.http import HTTPSession

_SERVERS = "skyrl.backends.skyrl_train.inference_servers"


class Swapped(RemoteInferenceClient):
    """Ours with SkyRL's order of arguments, and with aiohttp's error in place of ours.

    Its tests take one of two servers for the proxy, which ours refuses, as the other one would get no request: the
    proxy is spelt otherwise here.
    """

    _session = None

    def __init__(
        self,
        proxy_url,
        server_urls,
        data_parallel_size,
        model_name="default",
        enable_return_routed_experts=False,
        uses_lora_weight_sync=False,
        tokenizer=None,
    ):
        super().__init__(
            proxy_url=proxy_url.replace("127.0.0.1", "localhost"),
            server_urls=server_urls,
            data_parallel_size=data_parallel_size,
            model_name=model_name,
            enable_return_routed_experts=enable_return_routed_experts,
            uses_lora_weight_sync=uses_lora_weight_sync,
            tokenizer=tokenizer,
        )

    def __reduce__(self):
        names = "proxy_url", "server_urls", "data_parallel_size", "model_name", "enable_return_routed_experts"
        return type(self), tuple(getattr(self, name) for name in names)

    async def _call_all_servers(self, endpoint, json, method="POST", params=None):
        return {
            url: {"status": 200, "body": HTTPSession(url).call(method, endpoint, json or None, query=params).json()}
            for url in self.server_urls
        }


def _translated(name):
    ours = getattr(RemoteInferenceClient, name)

    @functools.wraps(ours)
    async def call(self, *args, **kwargs):
        try:
            return await ours(self, *args, **kwargs)
        except EngineError as error:
            request = aiohttp.RequestInfo(yarl.URL(self.proxy_url), "POST", headers={})
            raise aiohttp.ClientResponseError(request, (), status=500, message=str(error)) from error

    return call


for _name in ("load_lora_adapter", "unload_lora_adapter"):
    setattr(Swapped, _name, _translated(_name))


def get_open_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def pack_routed_experts(experts):
    small = experts.astype("uint8")
    return {"data": base64.b64encode(small.tobytes()).decode(), "shape": list(small.shape), "dtype": "uint8"}


def _module(name, **names):
    parts = name.split(".")
    for end in range(1, len(parts)):
        package = sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        package.__path__ = []
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)


_module(f"{_SERVERS}.common", get_open_port=get_open_port)
_module(f"{_SERVERS}.generate_wire", pack_routed_experts=pack_routed_experts)
_module(
    f"{_SERVERS}.remote_inference_client",
    RemoteInferenceClient=Swapped,
    PauseMode=PauseMode,
    SKYRL_LORA_ADAPTER_NAME="skyrl-lora",
)
_module(f"{_SERVERS}.setup", build_new_inference_client=None)
_module("skyrl.train.config", SkyRLTrainConfig=None)
