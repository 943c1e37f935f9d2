"""A real HTTP server with the routes for LoRA adapters that our plugin adds to vLLM, and what they remember."""

import json
from contextlib import contextmanager
from pathlib import Path

from tests.rpc.servers import GOOD, bare, running
from torchrl_ext.routes import ADAPTERS_ROUTE


class Adapters:
    """What the server holds; a test may set ``refusal`` (words for what is staged) and ``in_use``."""

    def __init__(self):
        self.staged, self.served, self.refusal, self.in_use, self.files = {}, {}, None, [], {}

    def told(self, body):
        return 200, {"adapters": {name: {"version": version} for name, version in self.served.items()}}

    def answer(self, body):
        return getattr(self, body["kind"].removesuffix("_adapter"))(body)

    def check(self, body):
        return 200, {}

    def stage(self, body):
        if self.refusal is not None:
            return 400, {"error": self.refusal}
        self.files[body["version"]] = sorted(path.name for path in Path(body["path"]).iterdir())
        self.staged[body["name"]] = body["version"]
        return 200, {}

    def serve(self, body):
        assert self.staged.pop(body["name"]) == body["version"]
        self.served[body["name"]] = body["version"]
        return 200, {"in_use": self.in_use}

    def unload(self, body):
        if self.served.pop(body["name"], None) is None:
            return 404, {"error": f"no adapter '{body['name']}' is loaded; there are: none"}
        return 200, {}


@contextmanager
def serving_adapters():
    """The server, with what it holds as ``adapters``."""
    adapters = Adapters()
    routes = {f"GET {ADAPTERS_ROUTE}": adapters.told}
    routes |= {f"POST {ADAPTERS_ROUTE}": adapters.answer}
    with running({**GOOD, **routes}) as server:
        server.adapters = adapters
        yield server


def actions(server):
    """The questions about adapters that an SGLang server was sent."""
    found = [json.loads(body["action"].partition(":")[2]) for _, _, body in server.calls if body and "action" in body]
    return [bare(message) for message in found]
