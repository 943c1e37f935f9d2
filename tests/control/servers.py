"""A `FakeEngine` of vLLM's with six GPUs, whose workers answer, and take every step of an update for granted."""

import json
from contextlib import contextmanager

from tests.fakes import FakeEngine
from torchrl_ext.base.routes import ANSWERS

CONFIG = {
    "model_config": {"model": "/models/policy", "dtype": "torch.float32"},
    "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 3},
    "weight_transfer_config": {"backend": "torchrl_ext"},
    "kv_transfer_config": {"kv_role": "kv_producer"},
}
KNOWN = ["collective", "delta", "disk", "ipc", "courier"]
"""Transports that the server's environment has."""


def initialised(asked):
    """What the workers answer to a message that loads nothing."""
    body = asked.get("init_info", {})
    message, heard = body.get("message", body), body.get("heard", ())
    if message.get("kind") == "finish" and len(heard) < CONFIG["parallel_config"]["data_parallel_size"]:
        told = {"version": message["version"], "digest": "", "workers": 2, "engine": f"replica {len(heard)}"}
        return failed(f"{ANSWERS}{json.dumps(told)}")
    if message.get("kind") == "inspect":
        told = [{"worker": rank, "torchrl_ext": "0", "host": "here", "transports": KNOWN} for rank in range(2)]
        return failed("; ".join(f"worker {one['worker']}: {ANSWERS}{json.dumps(one)}" for one in told))
    return 200, {"message": "done"}


STEPS = ("start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache")
GOOD = {
    "GET /server_info": (200, {"vllm_config": CONFIG, "system_env": {"vllm_version": "0.32.0"}}),
    "GET /get_world_size": (200, {"world_size": 6}),
    "GET /weight_info": (200, {"weight_version": "7"}),
    "GET /is_sleeping": (200, {"is_sleeping": False}),  # as without our endpoint plugin: workers say what is whole
    "POST /init_weight_transfer_engine": initialised,
    **{f"POST /{route}": (200, {"message": "done", "success": True}) for route in STEPS},
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


def rehearsing(*, needed=True, refused=False, restored=True):
    """Answers of ``/init_weight_transfer_engine`` whose two workers rehearse, as vLLM's server words them."""

    def answer(asked):
        question = asked.get("init_info", {})
        if question.get("kind") != "rehearse":
            return initialised(asked)
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
