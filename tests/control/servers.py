"""A `FakeEngine` of vLLM's with six GPUs, whose workers answer, and take every step of an update for granted."""

import json
from contextlib import contextmanager

from tests.fakes import FakeEngine
from torchrl_ext.base.routes import CALL

CONFIG = {
    "model_config": {"model": "/models/policy", "dtype": "torch.float32"},
    "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 3},
    "additional_config": {CALL: True},
    "kv_transfer_config": {"kv_role": "kv_producer"},
}
KNOWN = ["collective", "delta", "disk", "ipc", "courier"]
"""Transports that the server's environment has."""


def asked_of(body):
    """The message in a body of ``/collective_rpc``; None in any other."""
    return json.loads(body["args"][0]) if body and body.get("method") == CALL else None


def answered(asked):
    """What the six workers answer to a message."""
    message = asked_of(asked)
    match message["kind"]:
        case "finish":
            told = {"version": message["version"], "digest": "", "workers": 2}
        case "inspect":
            told = {"torchrl_ext": "0", "host": "here", "transports": KNOWN}
        case "state":
            told = {"whole": True, "asleep": [], "connection": message["connection"]}
        case _:
            told = {}
    return 200, {"results": [{"worker": rank, **told} if told else {} for rank in range(6)]}


def failed(words, **parts):
    """What they answer where a step failed on all of them."""
    return 200, {"results": [{"error": {"kind": "EngineRefusedError", "what": words, **parts}}] * 6}


STEPS = (
    *("update_weight_version", "reset_prefix_cache"),
    *("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"),  # of vLLM's own
)
GOOD = {
    "GET /server_info": (200, {"vllm_config": CONFIG, "system_env": {"vllm_version": "0.32.0"}}),
    "GET /get_world_size": (200, {"world_size": 6}),
    "GET /weight_info": (200, {"weight_version": "7"}),
    "POST /collective_rpc": answered,
    **{f"POST /{route}": (200, {"message": "done", "success": True}) for route in STEPS},
}


def bare(message):
    """A message without what says whose it is, and without fields that are as they are by default."""
    plain = {"rank_offset": 1, "world_size": None, "compares": True, "unproved": False, "params": [], "offer": {}}
    plain |= {"connection": "", "sender": ""}
    own = {name: value for name, value in message.items() if name not in ("format", "release")}
    return {name: value for name, value in own.items() if plain.get(name, message) != value}


def rehearsing(*, needed=True, refused=False, restored=True):
    """Answers of workers that rehearse."""

    def answer(asked):
        question = asked_of(asked)
        if question["kind"] != "rehearse":
            return answered(asked)
        if refused and not question.get("ask"):
            return failed("layer.0 (Experts): not as after a cold start")
        proof = "sent" if question.get("ask") and needed else "rehearsed"
        layers = [{"verdict": "in place", "kernel": "RMSNorm", "layers": 1, "first": f"norm.{n}"} for n in range(99)]
        told = {"needed": needed and bool(question.get("ask")), "proof": proof, "restored": restored, "layers": layers}
        return 200, {"results": [{"worker": 0, **told}, {"worker": 1, **told, "proof": min(proof, "in place")}]}

    return answer


def in_turn(*replies):
    """Give these replies one after the other, the last one for ever."""
    left = list(replies)
    return lambda asked: left.pop(0) if len(left) > 1 else left[0]


@contextmanager
def running(good=GOOD, /, **changes):
    """A fake vLLM that answers as ``good`` says, and as ``changes`` do: ``get_server_info=...``, ``post_pause=...``."""
    with FakeEngine("vllm") as fake:
        fake.answers = dict(good)
        for name, answer in changes.items():
            method, _, route = name.partition("_")
            fake.answers[f"{method.upper()} /{route}"] = answer
        yield fake
