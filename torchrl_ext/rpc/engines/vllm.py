"""The clients that drive vLLM servers and the embedded engine, over vLLM's weight-transfer routes.
The protocol, as far as routes and bodies go, is vLLM's (`vllm.entrypoints.rl.online.api_router`, 0.32); what travels
in the bodies are our messages (`torchrl_ext.messages`):

========================================  ====================================================================
``POST /init_weight_transfer_engine``     ``{"init_info": message}``: all that loads nothing. Answers come in the
                                          text of an error (`torchrl_ext.ANSWERS`); from the embedded
                                          engine in ``{"answer": {...}}``
``POST /pause?mode=abort|wait|keep``      with ``clear_cache=false``, which vLLM is about to give up: `commit` clears
``POST /start_weight_update``
``POST /update_weights``                  ``{"update_info": message}``: `Load`, `Verify`, or `Seal` after the last one
``POST /finish_weight_update``            ``{"weight_version": "7"}``; after a failed update, without a body, it
                                          ends the update that is still open
``POST /reset_prefix_cache``              preempts what runs: its keys and values come from the old weights, as do
                                          those that a KV connector keeps elsewhere
``POST /reset_encoder_cache``             of multimodal models: embeddings of images come from the old weights too
``POST /resume``
``POST /sleep``, ``/wake_up``             see `torchrl_ext.rpc.engines.sleep`
``POST /inference/v1/generate``           with ``prompt_logprobs``: log-probabilities of given tokens
========================================  ====================================================================

Everything that can fail happens up to ``seal``; ``finish_weight_update`` only gives the version its label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, final

from torchrl_ext.deadline import Deadline
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError
from torchrl_ext.messages import Message
from torchrl_ext.registry import Make
from torchrl_ext.routes import ADAPTERS_ROUTE, ANSWERS, BACKEND, answers_in, unescaped
from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.rpc.engines.adapters import AdapterClient
from torchrl_ext.rpc.engines.base import HTTPEngine, restated
from torchrl_ext.rpc.engines.sleep import SleepState, check_sleep, check_wake, sleep_state_of_vllm
from torchrl_ext.rpc.engines.stock import FLAGS, StockVLLM
from torchrl_ext.rpc.engines.workers import PluggedVLLM, Workers, abandon
from torchrl_ext.rpc.server_info import is_guest, kv_connectors, parse_server_info, sees, transfer_backend
from torchrl_ext.types import EngineInfo, Info, Part

__all__ = ["EmbeddedEngine", "VLLMEngine"]

PAUSE_MODES = ("abort", "wait", "keep")

_EVERYWHERE = {"reset_running_requests": "true", "reset_external": "true"}
_COPYING_S = 10.0

_PROBE = {"prompt_logprobs": 0, "skip_reading_prefix_cache": True, "max_tokens": 1, "temperature": 1.0}
"""Sampling settings that score a prompt: ``prompt_logprobs`` 0 asks for its own tokens alone, whatever their rank; the
one token that is sampled after them is not used."""

_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment: vLLM has these routes only then"
_ADAPTERS = (
    "install torchrl_ext in the engine's environment and name it in VLLM_PLUGINS, or let "
    "`torchrl-ext serve vllm --lora-rank N` start the server"
)
_LORA = "start the server with --enable-lora (`torchrl-ext serve vllm --lora-rank N`)"

_EXECUTORS = re.compile(
    r"Call to \w+ method failed: "
    r"(?:Worker failed with error '(?=.*please check the stack))?"
    r"(?P<words>.*?)"
    r"(?:', please check the stack trace above for the root cause)?\.?$",
    re.DOTALL,
)
"""Matches the text that vLLM's executors put around a worker's error message."""


class VLLMRoutes(HTTPEngine):
    """Drives an engine behind vLLM's routes through weight updates.

    Args:
        url: base address of the server itself, never of a router.
        pause_mode: what happens to running requests: ``"keep"`` freezes them and lets them go on with the new weights
            (their keys and values are computed anew), ``"wait"`` lets them end first, ``"abort"`` ends them.
        keep_cache: with ``"keep"``: leave keys and values of the old weights where they are: frozen requests go on with
            them, and later requests to vLLM with the same prefix and no ``cache_salt`` of their own begin with them.
            Each token still has the version of the weights that sampled it. Not for a server with a KV connector.
        timeout_s: deadline of each short call, in seconds.
        load_timeout_s: deadline of joining a transport, draining, and receiving weights, in seconds.
        api_key: sent as a bearer token; see `HTTPSession` for several.

    Raises:
        ConfigError: a setting that cannot work.
    """

    def __init__(
        self,
        url: str,
        *,
        pause_mode: str = "keep",
        keep_cache: bool = False,
        timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        api_key: str | tuple[str, ...] | None = None,
    ) -> None:
        if pause_mode not in PAUSE_MODES:
            raise ConfigError(f"there is no pause mode {pause_mode!r}", expected=f"one of {', '.join(PAUSE_MODES)}")
        if keep_cache and pause_mode != "keep":
            raise ConfigError(f"keep_cache means nothing with pause mode {pause_mode!r}", expected="pause_mode='keep'")
        super().__init__(url, timeout_s=timeout_s, load_timeout_s=load_timeout_s, api_key=api_key)
        self._pause_mode, self._keep_cache, self._sees = pause_mode, keep_cache, False
        how = self._post, self._load_timeout_s, self._explained
        self._plugged = PluggedVLLM(self.tell, self._await_idle, *how)
        self._workers: Workers = self._plugged

    @property
    def verifies(self) -> bool:
        return self._workers.plugged

    def _found(self, told: Any) -> Workers:
        """Return those that the engine has, by what it says of itself."""
        return self._plugged

    def info(self) -> EngineInfo:
        told = self._told()
        size = self.world_size
        return parse_server_info(
            self.url, told, world_size=size, weight_version=self._label_of(), followed=self.followed
        )

    def _label_of(self) -> str:
        """Return the label of the weights in service; "" where a release has no labels, so that it is not known."""
        try:
            return str(self._ask("/weight_info", "weight_version"))
        except EngineRefusedError as error:
            if error.status not in (404, 405):
                raise
            return ""

    def _told(self) -> Any:
        with self._needs_dev_mode():
            return self._http.get("/server_info", query={"config_format": "json"})

    @property
    def world_size(self) -> int:
        told = self._ask("/get_world_size", "world_size")
        if isinstance(told, bool) or not isinstance(told, int) or told < 1:
            raise EngineRefusedError(f"{self.url} says that its world size is {str(told)[:80]!r}", expected="a count")
        return told

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """See `EngineClient.connect`. An update that an earlier trainer left open is ended first.

        Raises:
            ConfigError: ``keep_cache``, and the server has a KV connector.
            EngineRefusedError: the engine lacks our backend, the parameters cannot land in its model, or the world
                size is not the transport's. It keeps serving what it served.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        with self._step("join the transport", state="the engine's weights and its pause are what they were"):
            told = self._told()
            if self._keep_cache:
                self._refuse_connector(kv_connectors(told))
            self._sees = sees(told)
            self._workers.leave()  # of another transport, or from before a failure
            self._workers, self._connection = self._found(told), str(info.get("connection", ""))
            if not self._workers.plugged and self.sleep_state().empty:
                self._workers.emptied()  # these are new here; those that run our plugin remember it themselves
            self._workers.join(info)

    def _refuse_connector(self, names: list[str]) -> None:
        if names:
            raise ConfigError(
                f"{self.url} has KV connector {', '.join(names)}, which would hand on keys and values of old weights",
                expected="keep_cache=False, or a server without a connector",
                state="the engine's weights and its pause are what they were",
            )

    def rehearse(self, how: str = "once") -> None:
        """See `EngineClient.rehearse`. Weights that sleep are woken for it; a server without our backend proves
        nothing."""
        if self._workers.plugged:
            self._wake_weights()
            super().rehearse(how)

    def prefetch(self, version: int, part: Part | None = None) -> None:
        """See `EngineClient.prefetch`. Workers stage while they generate."""
        self._wake_weights()  # staging checks changes against the weights
        with self._step(f"prefetch version {version}", state="the engine serves what it served"):
            self._workers.prefetch(version, part)

    def begin(self, version: int) -> None:
        """See `EngineClient.begin`. Where workers do not start, no weight was changed, and an engine that served before
        serves again."""
        before = self._before = self._halt(f"pause for version {version}")
        self._wake_weights(before)
        undo = self._undo_of(before)
        with self._step(f"start version {version}", undo=lambda: self._not_started(undo)):
            self._workers.confirm()
            self._workers.start()

    def _not_started(self, undo: Callable[[], str]) -> str:
        """End the update on workers that have started it, then undo; return the state that holds, in words."""
        try:
            abandon(self._post)
        except (EngineError, DeadlineError) as error:
            return self._paused(f"the weights it had, which could not be confirmed: {error.what}")
        return undo()

    def _load(self, info: Info) -> None:
        self._workers.load(info)

    def _finish(self, version: int) -> None:
        self._workers.finish(version)

    def _label(self, version: int) -> None:
        """Drop what was computed with the old weights; wait for a connector that still copies keys and values."""
        if self._keep_cache:
            return
        Deadline(min(self._http.timeout_s, _COPYING_S)).poll(
            lambda: self._post("/reset_prefix_cache", query=_EVERYWHERE).get("success", True),
            late=lambda: EngineRefusedError(f"{self.url} could not drop cached keys and values of the old weights"),
        )
        if self._sees:
            self._post("/reset_encoder_cache")

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        """See `EngineClient.sleep`. A vLLM server needs ``--enable-sleep-mode`` to give memory back."""
        wanted = check_sleep(level, tags)
        with self._step(f"sleep at level {level}"):
            if wanted == {"kv_cache"}:
                self.pause()
                self._post("/release_kv_cache_memory", timeout_s=self._load_timeout_s)
            else:
                query: dict[str, Any] = {"level": level, "mode": self._pause_mode}
                query |= {} if tags is None else {"tags": list(tags)}
                self._post("/sleep", query=query, timeout_s=self._load_timeout_s)
            if level == 2 and "weights" in wanted:
                self._tell_gone()
            self._state = "paused"

    def _tell_gone(self) -> None:
        """Tell the workers that their weights are gone. A server without our backend has none that remembers."""
        try:
            self._workers.emptied()
        except EngineRefusedError as error:
            if not self._lacks_plugin(error):
                raise

    def _lacks_plugin(self, error: EngineRefusedError) -> bool:
        return error.status in (404, 405) or _of_another_backend(error)

    def wake_up(self, tags: Collection[str] | None = None, *, paused: bool = False) -> None:
        """See `HTTPEngine.wake_up`. A server that cannot say what of it sleeps is told all the same."""
        check_wake(tags)
        with self._step("wake up"):
            known = self.sleep_state().known
        if known:
            super().wake_up(tags, paused=paused)
            return
        with self._step("wake up"):
            query = None if tags is None else {"tags": list(tags)}
            told = self._post("/wake_up", query=query, timeout_s=self._load_timeout_s)
            self._state = "paused"
            if paused:
                self._hold()
            elif tags is None or told.get("status") == "awake":
                self._resumed()  # by itself, with the wake of its last part

    def sleep_state(self) -> SleepState:
        return sleep_state_of_vllm(self._http)

    def _is_empty(self, state: SleepState, waking: Collection[str]) -> bool:
        """See `HTTPEngine._is_empty`. An engine that is awake has weights, and is not asked. Where its workers do not
        know, weights that were dropped, and wake together with the cache, got none in between."""
        unfilled = bool(state.empty) and "weights" in waking
        try:
            return bool(state.asleep) and bool(self._workers.state().get("empty", unfilled))
        except EngineRefusedError:
            return unfilled  # other backends know no such question

    def _wake(self, wanted: frozenset[str], state: SleepState) -> bool:
        awake = not state.asleep
        for tag in sorted(state.asleep & wanted, reverse=True):  # weights first: the wake of the last part resumes it
            told = self._post("/wake_up", query={"tags": tag}, timeout_s=self._load_timeout_s)
            awake = told.get("status") == "awake"
        return awake

    def _wake_weights(self, before: SleepState | None = None) -> None:
        """Wake the weights, and nothing else, before they are touched.

        Args:
            before: the engine's state before the pause. Where the cache is awake already, vLLM generates as soon as the
                weights are awake too, and is paused again.
        """
        with self._step("wake its weights", state=f"{self.url} sleeps"):
            state = self.sleep_state() if before is None else before
            if state.empty:
                self._workers.emptied()  # whoever put it to sleep may not have said so
            if "weights" in state.asleep and self._wake(frozenset({"weights"}), state):
                self.pause()

    def _hold(self) -> None:
        # `commit` drops the cache; until then it fits the weights, and it stays where the update fails
        query = {"mode": self._pause_mode, "clear_cache": "false"}
        self._post("/pause", query=query, timeout_s=self._load_timeout_s)

    def _release(self) -> None:
        self._post("/resume")

    def _ask(self, route: str, field: str) -> Any:
        with self._needs_dev_mode():
            told = self._http.get(route)
        if not isinstance(told, dict) or field not in told:
            raise EngineRefusedError(f"{self.url}{route} answered {told!r}", expected=f"an object with {field!r}")
        return told[field]

    def _post(self, route: str, body: Any = None, **how: Any) -> Info:
        with self._needs_dev_mode():
            try:
                answer = self._http.post(route, body, **how)
            except EngineRefusedError as error:
                raise restated(error, _own_words(error.what), reason=_own_words(error.reason)) from error
        found = answer if isinstance(answer, dict) else {}
        if body is None:
            self.told = found
        return found

    def tell(self, message: Message) -> list[Info]:
        body = {"init_info": message.to_json()}
        try:
            told: Any = self._post("/init_weight_transfer_engine", body, timeout_s=self._load_timeout_s)
        except EngineRefusedError as error:
            if ANSWERS not in error.what:
                raise
            told = error.what
        return answers_in(told)

    def close(self) -> None:
        """Have the workers leave the group that they joined, where they run nothing of ours; the engine serves on."""
        self._workers.leave()

    @contextmanager
    def _needs_dev_mode(self) -> Iterator[None]:
        try:
            yield
        except EngineRefusedError as error:
            if error.status not in (404, 405):
                raise
            raise restated(error, error.what, expected="vLLM's RL routes", hint=_DEV_MODE) from error

    def _explained(self, error: EngineRefusedError) -> EngineRefusedError:
        if not _of_another_backend(error):
            return error
        return restated(error, error.what, expected=f"weight-transfer backend {BACKEND!r}", hint=FLAGS)


def _own_words(text: str) -> str:
    """Return the words of a worker without those of vLLM's executors around them."""
    return unescaped(_EXECUTORS.sub(r"\g<words>", text))


def _of_another_backend(error: EngineRefusedError) -> bool:
    """Return whether a vLLM server refused a message because its weight-transfer backend is not ours."""
    return "not configured" in error.what or "Invalid init_info" in error.what


@final
class VLLMEngine(VLLMRoutes):
    """Drives a vLLM server; see `VLLMRoutes` for its settings.

    One that runs our weight-transfer backend follows by every transport; another one by full files, and by broadcasts
    where it was started with backend ``"nccl"``.
    """

    kind: ClassVar[str] = "vllm"

    def _found(self, told: Any) -> Workers:
        if is_guest(told):
            raise ConfigError(
                f"{self.url} maps weights that a daemon owns: an update would change them for every engine that does",
                expected="a server with weights of its own: another --load-format than ipc_cache",
                state="nothing was sent",
            )
        backend = transfer_backend(told)
        return self._plugged if backend == BACKEND else StockVLLM(self._post, backend, self.url, self._load_timeout_s)

    def _scoring(self, prompt: list[int]) -> tuple[str, Info]:
        return "/inference/v1/generate", {"token_ids": prompt, "sampling_params": _PROBE}

    def _scores(self, told: Any, prompt: list[int]) -> list[Any]:
        """See `HTTPEngine._scores`; the answer has, per token, ``{"17": {"logprob": -3.2, ...}}`` by token id, always
        with the prompt's own."""
        rows = zip(prompt, told["prompt_logprobs"], strict=True)
        return [row[str(token)]["logprob"] for token, row in rows if row is not None]  # null for the first token

    def adapter(self, name: str) -> EngineClient:
        """See `EngineClient.adapter`. The server needs ``--enable-lora``."""
        return AdapterClient(self, name, self._adapters, self._tell_adapters, plugin=_ADAPTERS, lora=_LORA)

    def _adapters(self) -> Info:
        return self._http.get(ADAPTERS_ROUTE)["adapters"]

    def _tell_adapters(self, message: Message) -> Info:
        try:
            return self._http.post(ADAPTERS_ROUTE, message.to_json(), timeout_s=self._load_timeout_s)
        except EngineRefusedError as error:
            raise restated(error, _own_words(error.what), reason=_own_words(error.reason)) from error


@final
class EmbeddedEngine(VLLMRoutes):
    """Drives an engine of `torchrl_ext.embedded` in another process; see `VLLMRoutes` for its settings."""

    kind: ClassVar[str] = "embedded"

    def _scoring(self, prompt: list[int]) -> tuple[str, Info]:
        return "/prompt_logprobs", {"prompts": [prompt]}

    def _scores(self, told: Any, prompt: list[int]) -> list[Any]:
        return told["logprobs"][0]


VLLM = Make(
    client=VLLMEngine,
    dialect="torchrl_ext.rollout.dialects:VLLMDialect",
    server="torchrl_ext.serving.engines.vllm:VLLMServer",
)
EMBEDDED = Make(
    client=EmbeddedEngine,
    dialect="torchrl_ext.rollout.dialects:VLLMDialect",
    server="torchrl_ext.serving.engines.embedded:EmbeddedServer",
)
