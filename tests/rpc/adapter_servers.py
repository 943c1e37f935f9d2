"""Fake engines with what our plugin knows of LoRA adapters, and what they remember."""

import json
from contextlib import contextmanager
from pathlib import Path

from tests.fakes import FakeEngine
from tests.rpc.servers import bare
from torchrl_ext.routes import ADAPTERS_ROUTE


class Adapters:
    """What the server holds; a test may set ``refusal`` (words for what is staged) and ``in_use``."""

    def __init__(self):
        self.staged, self.served, self.refusal, self.in_use, self.files = {}, {}, None, [], {}

    def list(self, body):
        return 200, {"adapters": {name: {"version": version} for name, version in self.served.items()}}

    def answer(self, body):
        return getattr(self, body["kind"].removesuffix("_adapter").removesuffix("_adapters"))(body)

    def answer_sglang(self, body):
        status, found = self.answer(json.loads(body["action"].partition(":")[2]))
        words = found["error"] if status != 200 else json.dumps({**self.list(body)[1], **found})
        return status, {"success": status == 200, "message": words}

    def check(self, body):
        return 200, {}

    def stage(self, body):
        if self.refusal is not None:
            return 400, {"error": self.refusal}
        self.files[body["version"]] = sorted(path.name for path in Path(body["path"]).glob("*"))
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
def serving_adapters(make="vllm"):
    """A fake engine, with what it holds as ``adapters``."""
    with FakeEngine(make) as fake:
        fake.adapters = adapters = Adapters()
        fake.answers = {f"GET {ADAPTERS_ROUTE}": adapters.list, f"POST {ADAPTERS_ROUTE}": adapters.answer}
        if make == "sglang":
            fake.answers = {"POST /weights_checker": adapters.answer_sglang}
        yield fake


def told_of(fake):
    """The messages about adapters that an engine got."""
    found = [call.body for call in fake.calls if call.body]
    return [bare(json.loads(body["action"].partition(":")[2]) if "action" in body else body) for body in found]
