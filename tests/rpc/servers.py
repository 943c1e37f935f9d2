"""A real HTTP server with vLLM's weight-transfer routes in a few lines, to see what a client asks for."""

import json
from contextlib import contextmanager

from tests.rpc.sockets import serving
from torchrl_ext.routes import ANSWERS

CONFIG = {
    "model_config": {"model": "/models/policy", "dtype": "torch.float32"},
    "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 3},
    "weight_transfer_config": {"backend": "torchrl_ext"},
    "kv_transfer_config": {"kv_role": "kv_producer"},
}
KNOWN = ["collective", "delta", "disk", "ipc", "courier"]
"""Transports that the server's environment has."""


def initialised(body):
    """What the workers answer to a message that loads nothing."""
    if (body or {}).get("init_info", {}).get("kind") == "inspect":
        told = [{"worker": rank, "torchrl_ext": "0", "host": "here", "transports": KNOWN} for rank in range(2)]
        return failed("; ".join(f"worker {one['worker']}: {ANSWERS}{json.dumps(one)}" for one in told))
    return 200, {"message": "done"}


GOOD = {
    "GET /server_info": (200, {"vllm_config": CONFIG, "system_env": {"vllm_version": "0.32.0"}}),
    "GET /get_world_size": (200, {"world_size": 6}),
    "GET /weight_info": (200, {"weight_version": "7"}),
    "POST /reset_prefix_cache": (200, {"success": True}),
    "POST /init_weight_transfer_engine": initialised,
    **{
        f"POST /{route}": (200, {"message": "done"})
        for route in (
            "pause",
            "resume",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        )
    },
}

SGLANG = {  # with our plugin
    "GET /server_info": (200, {"model_path": "/models/start", "disaggregation_mode": "null", "version": "0.5.23"}),
    "GET /model_info": (200, {"model_path": "/models/start", "weight_version": "8"}),
    "POST /weights_checker": (
        200,
        {"message": json.dumps({"torchrl_ext": "0", "host": "here", "transports": KNOWN, "paused": False})},
    ),
    "POST /pause_generation": (200, {}),
    "POST /continue_generation": (200, {}),
}


def failed(words):
    """A worker's failure as vLLM's server words it."""
    message = (
        f"Call to collective_rpc method failed: Worker failed with error '{words}', "
        "please check the stack trace above for the root cause"
    )
    return 500, {"error": {"message": message, "type": "InternalServerError", "code": 500}}


def bare(message):
    """A message without what says whose it is, and without fields that are as they are by default."""
    plain = {"rank_offset": 1, "world_size": None, "compares": True, "unproved": False, "params": [], "offer": {}}
    plain |= {"connection": "", "sender": ""}
    own = {name: value for name, value in message.items() if name not in ("format", "release")}
    return {name: value for name, value in own.items() if plain.get(name, message) != value}


class Resting:
    """Pause and sleep as vLLM 0.32 has them; `answers` are for `running`.

    Attributes:
        paused: whether it generates nothing.
        asleep: what gave its memory up.
        hollow: whether its workers were told that their weights are gone, and got none since.
        harmed: whether it generated, or was written to, while what that takes slept.
    """

    def __init__(self):
        self.paused, self.asleep, self.state, self.hollow, self.harmed = False, set(), "awake", False, False

    @property
    def answers(self):
        routes = {
            "GET /is_paused": lambda _: (200, {"is_paused": self.paused}),
            "GET /is_sleeping": lambda _: (200, {"is_sleeping": self.paused or bool(self.asleep)}),
            "GET /metrics": lambda _: (200, self.gauge().encode()),
            "POST /pause": lambda _: self.pause(True),
            "POST /resume": lambda _: self.pause(False),
            "POST /sleep": self.sleep,
            "POST /release_kv_cache_memory": lambda _: self.release(),
            "POST /wake_up": self.wake,
            "POST /init_weight_transfer_engine": self.tell,
            "POST /start_weight_update": lambda _: self.start(),
            "POST /finish_weight_update": self.finish,
        }
        return {**GOOD, **routes}

    def gauge(self):
        labels = 'engine="0",model_name="policy",sleep_state'
        states = ("awake", "weights_offloaded", "discard_all")
        rows = (f'vllm:engine_sleep_state{{{labels}="{name}"}} {float(name == self.state)}\n' for name in states)
        return "# TYPE vllm:engine_sleep_state gauge\n" + "".join(rows)

    def pause(self, paused):
        self.paused, self.harmed = paused, self.harmed or (not paused and bool(self.asleep))
        return 200, {"status": "paused" if paused else "resumed"}

    def sleep(self, asked):
        self.paused, level = True, int(asked["level"])
        self.asleep |= {"weights", "kv_cache"} if level else set()
        self.state = {0: "neither", 1: "weights_offloaded", 2: "discard_all"}[level]
        return 200, {"status": "sleeping"}

    def release(self):
        self.asleep, self.state = self.asleep | {"kv_cache"}, "neither"
        return 200, {"status": "kv_cache_released"}

    def wake(self, asked):
        tags = {asked["tags"]} if asked and "tags" in asked else {"weights", "kv_cache"}
        self.asleep -= tags if tags <= self.asleep or len(tags) > 1 else set()
        if not self.asleep:
            self.paused, self.state = False, "awake"
        return 200, {"status": "sleeping" if self.asleep else "awake"}

    def tell(self, asked):
        kind = asked["init_info"]["kind"]
        self.hollow = self.hollow or kind == "reset"
        if kind == "state" and self.hollow:
            return failed(f'EngineError: {ANSWERS}{{"empty": true}}.')
        return initialised(asked)

    def start(self):
        self.harmed = self.harmed or "weights" in self.asleep
        return 200, {}

    def finish(self, asked):
        self.hollow = False
        return 200, {"message": "done"}


def rehearsing(*, needed=True, refused=False, restored=True):
    """Answers of ``/init_weight_transfer_engine`` whose two workers rehearse, as vLLM's server words them."""

    def answer(body):
        question = (body or {}).get("init_info", {})
        if question.get("kind") != "rehearse":
            return initialised(body)
        if refused and not question.get("ask"):
            return failed("layer.0 (Experts): not as after a cold start")
        proof = "sent" if question.get("ask") and needed else "rehearsed"
        layers = [{"verdict": "in place", "kernel": "RMSNorm", "layers": 1, "first": f"norm.{n}"} for n in range(99)]
        told = {"needed": needed and bool(question.get("ask")), "proof": proof, "restored": restored, "layers": layers}
        workers = [
            json.dumps({"worker": 0, **told}),
            json.dumps({"worker": 1, **told, "proof": min(proof, "in place")}),
        ]
        return failed("; ".join(f"worker {rank}: EngineError: {ANSWERS}{said}" for rank, said in enumerate(workers)))

    return answer


class Running:
    """The server's address, its answers by "METHOD /route", the calls that it got, and the headers of each."""

    def __init__(self, server, answers):
        self.url, self.answers, self.calls, self.headers = server.url, answers, [], []

    def routes(self):
        return [call for call, _, _ in self.calls]

    def answer(self, asked):
        call, body = f"{asked.method} {asked.path}", asked.body
        query = {name: one if len(one) > 1 else one[0] for name, one in asked.query.items()}
        if asked.path not in ("/workers", "/list_workers"):  # how clients see that this is no router
            self.calls.append((call, query, body))
            self.headers.append({name.lower(): value for name, value in asked.headers.items()})
        answer = self.answers.get(call, (404, {"detail": "Not Found"}))
        if isinstance(answer, list):  # one after the other, the last one for ever
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return answer({**(body or {}), **query} or body) if callable(answer) else answer


@contextmanager
def running(good=None, /, **changes):
    """``changes`` as ``get_server_info=(404, {...})`` or ``post_pause=...``; ``good`` in place of vLLM's answers.

    An answer may be a function of the body, with what the query says among it.
    """
    answers = dict(GOOD if good is None else good)
    for name, answer in changes.items():
        method, _, route = name.partition("_")
        answers[f"{method.upper()} /{route}"] = answer
    with serving(lambda asked: found.answer(asked)) as server:
        found = Running(server, answers)
        yield found
