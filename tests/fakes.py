"""`FakeEngine`: an HTTP server with the routes of one make of engine, for tests of clients that drive engines.

A real `WeightReceiver` lands updates in real tensors. Pauses, sleep, labels, caches and generation are imitated;
generation only checks whether the weights may be served. Routes and bodies follow vLLM 0.32 and SGLang 0.5.23; a
request that these engines would refuse is refused.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import torchrl_ext
from tests.control.sockets import serving
from torchrl_ext.base import messages
from torchrl_ext.base.errors import EngineRefusedError, WeightSyncError
from torchrl_ext.base.messages import Message, answered, partial_version, read
from torchrl_ext.base.routes import CALL, CHANNEL, Flush, version_label
from torchrl_ext.base.types import Info
from torchrl_ext.compat.vllm_words import BACKEND, one_by_one, spoken
from torchrl_ext.data.weights.checkpoint import CheckpointSource
from torchrl_ext.sync.inspection import followed, inspect
from torchrl_ext.sync.receiver import WeightReceiver

MAKES = ("vllm", "sglang", "embedded", "stock-vllm", "stock-sglang")
"""The makes that a `FakeEngine` imitates; stock makes run without our plugin."""

Reply = tuple[int, Any]

_LATE_S = 60.0
_TAGS = {"weights", "kv_cache"}
_MODES = {"vllm": ("abort", "wait", "keep"), "sglang": ("abort", "retract", "in_place")}
_LOOK = "GET /workers"  # by which clients recognise routers
_DONE = {"success": True, "status": "ok", "message": "done", "results": [None], "num_paused_requests": 0}
_ABSENT = (404, {"detail": "Not Found"})
_EXECUTORS = (
    "Call to collective_rpc method failed: Worker failed with error '{}', please check the stack trace above for the "
    "root cause"
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A received request: ``"POST /pause"``, its query, JSON body and headers, the kind of the message it carries."""

    route: str
    query: Info
    body: Any
    headers: Info
    kind: str = ""


def kind_of(body: Any) -> str:
    """Return the kind of the message that a body carries to the workers of any make; "" if it carries none."""
    try:
        if body.get("method") == CALL:
            return str(json.loads(body["args"][0])["kind"])
        return str(json.loads(body["action"].removeprefix(CHANNEL))["kind"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""


class Faults:
    """A queue of faults for an engine's requests."""

    def __init__(self):
        self._waiting, self._noting = [], threading.Lock()

    def inject(self, how="fail", route="", *, after=0, junk="junk", first=None):
        """Queue a fault of one request. Faults happen once, in the order queued.

        Args:
            how: ``"fail"`` answers with status 500 and ``"cut"`` breaks the connection; neither carries the request
                out. The others do: ``"lose"`` breaks the connection before the answer, ``"hang"`` does not answer,
                ``"junk"`` answers with ``junk``, ``"twice"`` carries it out twice, ``"pass"`` does nothing wrong.
            route: the request's route or kind, as in `Call`; "" for any.
            after: number of matching requests that pass before the fault.
            junk: the answer of ``"junk"``.
            first: called before the request is handled, for example to act as another client.
        """
        with self._noting:
            self._waiting.append(SimpleNamespace(how=how, route=route, after=after, junk=junk, first=first))

    def heal(self):
        """Drop the faults that have not happened yet."""
        with self._noting:
            self._waiting.clear()

    def carry_out(self, route, do, kind=""):
        """Carry a request out as often as its fault lets it; return the fault and the last answer."""
        fault, answer = self._next_fault({"", route, kind}), None
        if fault.first is not None:
            fault.first()
        for _ in range({"fail": 0, "cut": 0, "twice": 2}.get(fault.how, 1)):
            answer = do()
        return fault, answer

    def _next_fault(self, names):
        with self._noting:
            for fault in self._waiting:
                if fault.route in names:
                    fault.after -= 1
                    if fault.after < 0:
                        self._waiting.remove(fault)
                        return fault
        return SimpleNamespace(how="pass", junk=None, first=None)


class FakeEngine(Faults):
    """Serves the routes of one make of engine on a free port of 127.0.0.1, in threads, until closed.

    Args:
        make: one of `MAKES`.
        tensors: the initial weights by name, which updates overwrite in place; None for two small tensors.

    Attributes:
        url, kind, stock: the server's address, the make's name for clients, and whether it lacks our plugin.
        tensors, versions: the weights, and the number of the update that last changed each; 0 at first.
        calls: all requests in order, except those by which a client checks for a router.
        answers: replies by route, or by the kind of a message, that replace the engine's own. A reply is a body (JSON
            or bytes), ``(status, body)``, or a callable that takes one dict of the request's query and body and returns
            such a reply.
        label, paused, asleep: the version label, whether generation is paused, the tags whose memory was released.
        unrehearsed: whether the engine asks for a rehearsal.
        wrongs: what clients wrongly made the engine do, in words, such as serve part of an update or released weights.
    """

    def __init__(self, make: str, tensors: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.kind, self.stock = make.removeprefix("stock-"), make.startswith("stock-")
        self.tensors = {name: torch.zeros(4) for name in ("a", "b")} if tensors is None else tensors
        self.versions = dict.fromkeys(self.tensors, 0)
        self.calls: list[Call] = []
        self.answers: dict[str, Any] = {}
        self.label, self.paused, self.wrongs = "0" if make == "embedded" else "default", False, list[str]()
        self.unrehearsed = False
        self.asleep: set[str] = set()
        self._receiver = WeightReceiver(self.tensors)
        self._open = self._session = self._frozen = self._given_up = False
        self._alone = threading.RLock()
        self._routes = {"GET /health": (200, {}), **(self._sglang() if self.kind == "sglang" else self._vllm())}
        self._ends = ExitStack()
        self._server = self._ends.enter_context(serving(self._respond))
        self.url = self._server.url

    @property
    def counts(self) -> Counter[str]:
        """Number of requests by route, and of messages by kind."""
        return Counter(name for call in self.calls for name in (call.route, call.kind) if name)

    @property
    def serving(self) -> bool:
        """Whether the engine generates."""
        return not self.paused and not self.asleep

    @property
    def whole(self) -> bool:
        """Whether the weights are one whole version."""
        return self._receiver.whole and not self._given_up

    def close(self) -> None:
        """Stop the server, dropping requests that hang."""
        self._ends.close()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # requests

    def _respond(self, asked: Any) -> Reply:
        query = {name: one if len(one) > 1 else one[0] for name, one in asked.query.items()}
        headers = {name.lower(): value for name, value in asked.headers.items()}
        route, kind = f"{asked.method} {asked.path}", kind_of(asked.body)
        status, answer = self._answer(Call(route=route, query=query, body=asked.body, headers=headers, kind=kind))
        return status, answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    def _answer(self, call: Call) -> Reply:
        if call.route == _LOOK and call.route not in self.answers:
            return _ABSENT
        self.calls.append(call)
        fault, reply = self.carry_out(call.route, lambda: self._do(call), call.kind)
        if fault.how == "hang":
            self._server.stopped.wait(_LATE_S)
        if fault.how in ("cut", "hang", "lose"):
            raise ConnectionAbortedError
        return {"fail": (500, {"error": "it fails here"}), "junk": (200, fault.junk)}.get(fault.how, reply)

    def _do(self, call: Call) -> Reply:
        asked = {**(call.body if isinstance(call.body, dict) else {}), **call.query}
        name = call.kind if call.kind in self.answers else call.route
        replaced = name in self.answers
        route = self.answers[name] if replaced else self._routes.get(call.route, _ABSENT)
        with nullcontext() if replaced else self._alone:  # a replacement may wait for other requests
            try:
                found = route(asked) if callable(route) else route
            except (KeyError, AssertionError) as error:  # real engines check with pydantic
                return 422, {"detail": f"{call.route} does not accept {asked}: {error!r}"}
            except WeightSyncError as error:
                return self._refusal(f"{type(error).__name__}: {error}")
            finally:
                if self.serving and not self.whole:
                    part = "weights that it gave up" if self._given_up else "a part of an update"
                    self.wrongs.append(f"it serves {part}")
        return found if isinstance(found, tuple) else (200, _DONE if found is None else found)

    def _refusal(self, words: str) -> Reply:
        if self.kind == "sglang":
            return 400, {"success": False, "message": words}
        message = _EXECUTORS.format(words) if self.kind == "vllm" else words
        return 500, {"error": {"message": message, "type": "InternalServerError", "code": 500}}

    # common to all makes

    def _tell(self, message: Message) -> Info:
        """Carry out a message in the only worker."""
        match message:
            case messages.Inspect():
                version = self._receiver.version
                return {"worker": 0, "version": version, **inspect(message), "transports": followed()}
            case messages.Rehearse():
                return self._rehearse(message)
            case messages.Start() | messages.Load() | messages.Verify():
                self._receiver.refuse_replaced(message)
                self._refuse_busy()
            case messages.Commit() if not self.serving:
                raise EngineRefusedError("the engine is paused", state="unchanged")
        before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        try:
            answer = self._receiver.handle(message)
        finally:
            if isinstance(message, messages.Load):
                changed = (name for name, tensor in self.tensors.items() if not torch.equal(tensor, before[name]))
                self.versions |= dict.fromkeys(changed, message.version)
        match message:
            case messages.Finish():
                self.versions = dict.fromkeys(self.tensors, message.version)
                self._given_up = False
                return answer if self.kind == "embedded" else {**answer, "workers": 1}  # as an `EngineWorker`
            case messages.Commit() | messages.Undo():
                self.versions = dict.fromkeys(self.tensors, answer["version"])
                if self.kind != "sglang":  # whose main process is told by another route
                    self.label = version_label(answer["version"])
                return {**answer, "workers": 1} if self.kind == "vllm" else answer
            case messages.Reset(weights="reloaded"):
                self._given_up = False
        if isinstance(message, messages.State) and self.kind != "vllm":
            answer = {"paused": self.paused, **answer}
        return {"asleep": sorted(self.asleep), **answer} if isinstance(message, messages.State) else answer

    def _rehearse(self, message: messages.Rehearse) -> Info:
        self._receiver.refuse_replaced(message)
        needed = self.unrehearsed and message.how != "never"
        if needed and not message.ask:
            self._refuse_busy()
            self.unrehearsed = needed = False
        return {"needed": needed, "proof": "in place" if self.unrehearsed else "rehearsed", "restored": True}

    def _refuse_busy(self) -> None:
        if self.serving:
            raise EngineRefusedError("weights cannot change while the engine generates", state="unchanged")
        if "weights" in self.asleep:
            raise EngineRefusedError("the weights sleep", state="unchanged")

    def _reload(self, path: str, version: int) -> None:
        """Load a checkpoint without our plugin."""
        self._refuse_busy()
        self._receiver.apply_weights(CheckpointSource(path))
        self._open = self._given_up = False
        self.versions = dict.fromkeys(self.tensors, version)

    def _give_up(self, parts: set[str], *, keep: bool) -> None:
        self.asleep |= parts
        if "weights" in parts and not keep:
            self._given_up = True
            if not self.stock:
                self._receiver.invalidate(empty=True)
            self.versions = dict.fromkeys(self.tensors, -1)
            for tensor in self.tensors.values():
                tensor.fill_(float("nan"))

    def _hold(self, mode: str) -> None:
        assert mode in _MODES["sglang" if self.kind == "sglang" else "vllm"], mode
        self._frozen = mode == "in_place" and (self._frozen or not self.paused)
        self.paused = True

    def _score(self, prompt: list[int]) -> list[float]:
        if not self.serving:
            raise EngineRefusedError(f"{self.url} is paused", state="paused")
        bias = sum(float(tensor.float().sum()) for tensor in self.tensors.values())
        return [-1.0 - token % 7 - abs(bias) for token in prompt]

    # vLLM, and the embedded engine

    def _vllm(self) -> dict[str, Any]:
        config = {
            "model_config": {"model": "/models/policy", "dtype": "torch.float32"},
            "parallel_config": {f"{axis}_parallel_size": 1 for axis in ("tensor", "pipeline", "data")},
            "weight_transfer_config": {"backend": "nccl" if self.stock else BACKEND},
            "additional_config": {} if self.stock else {CALL: True},
        }
        embedded = {
            "GET /server_info": {
                "engine": "embedded",
                "version": torchrl_ext.__version__,
                "model": "/models/policy",
                "transports": followed(),
            },
            "POST /prompt_logprobs": lambda asked: {"logprobs": [self._score(one[1:]) for one in asked["prompts"]]},
        }
        return {
            "GET /server_info": {"vllm_config": config, "system_env": {"vllm_version": "0.32.0"}},
            "GET /get_world_size": {"world_size": 1},
            "GET /weight_info": lambda asked: {"weight_version": self.label},
            "GET /is_paused": lambda asked: {"is_paused": self.paused},
            "GET /is_sleeping": lambda asked: {"is_sleeping": not self.serving},
            "POST /pause": self._pause_vllm,
            "POST /resume": self._resume_vllm,
            "POST /sleep": self._sleep_vllm,
            "POST /wake_up": self._wake_vllm,
            "POST /release_kv_cache_memory": self._release_cache,
            "POST /init_weight_transfer_engine": self._initialise,
            "POST /shutdown_weight_transfer_engine": (200, None),
            "POST /start_weight_update": self._start_vllm,
            "POST /update_weights": self._update_vllm,
            "POST /finish_weight_update": self._finish_vllm,
            "POST /reset_prefix_cache": self._reset_cache,
            "POST /collective_rpc": self._call_workers,
            "POST /update_weight_version": lambda asked: setattr(self, "label", asked["new_version"]),
            "POST /inference/v1/generate": self._generate_vllm,
            **(embedded if self.kind == "embedded" else {}),
        }

    def _reset_cache(self, asked: Info) -> None:
        assert asked == {"reset_running_requests": "true", "reset_external": "true"}

    def _pause_vllm(self, asked: Info) -> None:
        assert asked.get("clear_cache", "false") == "false", "vLLM is about to give it up"
        self._hold(asked["mode"])

    def _resume_vllm(self, asked: Info) -> None:
        if not self.stock and (not self._receiver.whole or (self.kind == "embedded" and self.asleep)):
            raise partial_version(self.url)
        self._receiver.give_up()
        self.paused = False
        if self.asleep:
            self.wrongs.append("it was resumed in its sleep")

    def _sleep_vllm(self, asked: Info) -> None:
        self._hold(asked["mode"])
        level = int(asked["level"])
        if level:
            self._give_up(_TAGS, keep=level == 1)

    def _release_cache(self, asked: Info) -> None:
        assert self.paused
        self._give_up({"kv_cache"}, keep=True)

    def _wake_vllm(self, asked: Info) -> None:
        tags = asked.get("tags", sorted(_TAGS))
        woken = {tags} if isinstance(tags, str) else set(tags)
        assert woken <= _TAGS
        if not self.stock and self.asleep <= woken and not self._receiver.whole:
            raise partial_version(self.url)
        self.asleep -= woken
        if not self.asleep:
            self._receiver.give_up()
            self.paused = False

    def _initialise(self, asked: Info) -> Any:
        info = asked["init_info"]
        if self.stock:
            if "packed" not in info:
                raise EngineRefusedError(f"Invalid init_info for NCCLWeightTransferEngine: unexpected {sorted(info)}")
            assert info["world_size"] > info["rank_offset"] >= 1
            assert "nccl_unique_id_b64" in info or {"master_address", "master_port"} <= info.keys()
            return None
        answer = one_by_one(info, lambda: self.url, lambda told: self._tell(read(told)))
        return self._refusal(f"EngineError: {spoken(answer)}.") if answer else None

    def _start_vllm(self, asked: Info) -> None:
        if not self.stock:
            self._tell(messages.Start(connection=self._receiver.connection))
        elif self._open:
            raise EngineRefusedError("Weight update already active")
        self._open = True

    def _update_vllm(self, asked: Info) -> None:
        info = asked["update_info"]
        if not self._open:
            raise EngineRefusedError("no weight update is open")
        if self.stock:
            assert info.keys() == {"names", "dtype_names", "shapes"}
            return
        try:
            self._tell(read(info))
        except WeightSyncError:
            self._open = False  # vLLM's worker ends an update that fails
            raise

    def _finish_vllm(self, asked: Info) -> None:
        if not self._open:
            raise EngineRefusedError("no weight update is open")
        self._open = False
        self.label = asked.get("weight_version", self.label)

    def _call_workers(self, asked: Info) -> Any:
        if asked["method"] == CALL:
            assert not self.stock, "each worker raises, and vLLM mixes up their replies from then on"
            return {"results": [answered(self._tell, *asked["args"])]}
        assert asked["method"] == "reload_weights" and self.stock
        path = asked["kwargs"]["weights_path"]
        number = re.search(r"(\d+)\D*$", path)
        self._reload(path, int(number[1]) if number else 0)
        return None

    def _generate_vllm(self, asked: Info) -> Info:
        prompt = asked["token_ids"]
        scores = zip(prompt[1:], self._score(prompt[1:]), strict=True)
        rows = [None, *({str(token): {"logprob": value}} for token, value in scores)]
        more = {"prompt_logprobs": rows} if "prompt_logprobs" in asked["sampling_params"] else {}
        return {"choices": [{"token_ids": [1]}], **more}

    # SGLang

    def _sglang(self) -> dict[str, Any]:
        info: Info = {"model_path": "/models/policy", "disaggregation_mode": "null", "version": "0.5.23"}
        info |= {"tp_size": 1, "pp_size": 1, "dp_size": 1, "enable_weights_cpu_backup": True}
        group = ("init_weights_update_group", "destroy_weights_update_group", "update_weights_from_distributed")
        return {
            "GET /server_info": info,
            "GET /model_info": lambda asked: {"model_path": "/models/policy", "weight_version": self.label},
            "GET /ready": lambda asked: (503 if self.paused else 200, ""),
            "OPTIONS /begin_weight_update": (405, ""),
            "POST /weights_checker": self._check,
            "POST /pause_generation": self._pause_sglang,
            "POST /continue_generation": self._continue,
            "POST /flush_cache": lambda asked: (400 if self._frozen else 200, "Flush cache."),
            "POST /begin_weight_update": lambda asked: self._set_session(True),
            "POST /end_weight_update": lambda asked: self._set_session(False),
            "POST /update_weights_from_disk": self._from_disk,
            "POST /update_weight_version": lambda asked: setattr(self, "label", asked["new_version"]),
            "POST /release_memory_occupation": self._release_memory,
            "POST /resume_memory_occupation": self._resume_memory,
            "POST /generate": self._generate_sglang,
            **{f"POST /{route}": _DONE for route in group},
        }

    def _check(self, asked: Info) -> Any:
        action = asked["action"]
        if self.stock or not action.startswith(CHANNEL):
            return 400, {"success": False, "message": f"Unsupported action={action!r}"}

        def handle(message: Message) -> Info:
            return {"flushed": not self._frozen} if isinstance(message, Flush) else self._tell(message)

        return {"success": True, "message": json.dumps(answered(handle, action.removeprefix(CHANNEL)))}

    def _pause_sglang(self, asked: Info) -> Reply | None:
        if asked["mode"] == "abort" and self._frozen:
            return 504, {"message": "it waits for requests that are frozen"}
        self._hold(asked["mode"])
        return None

    def _continue(self, asked: Info) -> None:
        self.paused = self._frozen = self.paused and not self.stock and not self._receiver.whole
        if not self.paused:
            self._receiver.give_up()

    def _set_session(self, opened: bool) -> None:
        if self._session == opened:
            raise EngineRefusedError(
                "a weight-update session is already open; call end_weight_update() first"
                if opened
                else "no weight-update session is open"
            )
        self._session = opened

    def _from_disk(self, asked: Info) -> None:
        assert asked["load_format"] == "auto" and not asked["flush_cache"] and not asked["abort_all_requests"]
        self._reload(asked["model_path"], int(asked["weight_version"]))
        self.label = asked["weight_version"]

    def _release_memory(self, asked: Info) -> None:
        tags = set(asked["tags"]) or {"weights", "kv_cache", "cuda_graph"}  # an empty list stands for all
        if not self.paused or self._frozen or tags & self.asleep:
            self.wrongs.append(f"its scheduler ended: {sorted(tags)} were to sleep")
        self._give_up(tags, keep=not self._receiver.held.empty)

    def _resume_memory(self, asked: Info) -> None:
        tags = set(asked["tags"])
        if not tags <= self.asleep:
            self.wrongs.append(f"its scheduler ended: {sorted(tags - self.asleep)} were awake")
        self.asleep -= tags

    def _generate_sglang(self, asked: Info) -> Info:
        prompt = asked["input_ids"]
        rows = [[value, token, None] for token, value in zip(prompt, self._score(prompt), strict=True)]
        rows[0][0] = None
        return {"output_ids": [1], "meta_info": {"input_token_logprobs": rows}}
