"""The client's half of an engine: `MAKE` lets trainers, `push` and `watch` drive a dovecote at an address."""

from torchrl_ext.base.messages import State, answers_of
from torchrl_ext.base.registry import Make
from torchrl_ext.base.types import EngineInfo
from torchrl_ext.control.engine import Engine
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.port import EngineState, Port


class DovePort(Port):
    kind = "dove"
    live = True  # a dovecote handles a message between two requests, and keeps no keys and values

    def __init__(self, http, load_timeout_s):
        self.url, self.http, self.timeout_s = http.url, http, load_timeout_s

    def describe(self):
        found = self.http.get("/info")
        known = {"model": found["model"], "transports": tuple(found["transports"])}
        return EngineInfo(url=self.url, kind=self.kind, weight_version=str(found["version"]), **known)

    def paused(self):
        return not self.http.get("/info")["running"]

    def state(self):
        return EngineState.of(self.call(State()))

    def call(self, message):  # one answer per worker; raises what a worker raised
        return answers_of([self.http.post("/message", message.to_json(), timeout_s=self.timeout_s)], self.url)

    def pause(self):
        self.http.post("/pause")

    def resume(self):
        self.http.post("/resume")

    def logprobs(self, prompts):  # for `verify="outputs"` and the kit that judges engines
        return self.http.post("/logprobs", [list(prompt) for prompt in prompts])


def connect(url, *, timeout_s=30.0, api_key=None, load_timeout_s=600.0):
    return Engine.of(DovePort(HTTPSession(url, timeout_s=timeout_s, api_key=api_key), load_timeout_s))


def describe(http):  # what answers at this address; None if it is no dovecote
    found = http.call("GET", "/info")
    return DovePort(http, http.timeout_s).describe() if found.ok and "running" in found.json() else None


MAKE = Make(client=connect, describe=describe)
