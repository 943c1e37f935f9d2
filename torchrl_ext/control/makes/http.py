"""Base classes of HTTP servers' ports: route calls, log-probabilities, updates without our plugin."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from torchrl_ext.base.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, RouteAbsent
from torchrl_ext.base.messages import Finish, Inspect, Join, Leave, Load, Message, Prefetch, Start, Verify
from torchrl_ext.base.types import Info, dtype_name
from torchrl_ext.control.http import HTTPSession
from torchrl_ext.control.makes.server_info import ServerInfo
from torchrl_ext.control.port import EngineState, Port, restated

__all__ = ["HTTPPort", "Settings", "StockPort", "bodies"]

log = logging.getLogger("torchrl_ext")

_LEAVE_S = 30.0
_UNSUPPORTED = "Unsupported action"  # how SGLang's own route refuses our messages


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a client drives a server; see the client functions, such as `torchrl_ext.control.makes.vllm.vllm_engine`.

    Attributes:
        live: whether the server may take versions while it serves.
    """

    live: bool = True
    pause_mode: str = "keep"
    keep_cache: bool = False
    load_timeout_s: float = 600.0
    flush_timeout_s: float = 60.0

    def check(self, modes: tuple[str, ...], frozen: str) -> None:
        """Raise ConfigError unless there is such a pause mode, in which requests keep their cache if they have to.

        Args:
            modes: the pause modes.
            frozen: the one in which running requests keep their cache.
        """
        if self.pause_mode not in modes:
            raise ConfigError(f"there is no pause mode {self.pause_mode!r}", expected=f"one of {', '.join(modes)}")
        if self.keep_cache and self.pause_mode != frozen:
            what = f"keep_cache means nothing with pause mode {self.pause_mode!r}"
            raise ConfigError(
                what, expected=f"pause_mode={frozen!r}", hint="leave keep_cache out, or pause in that mode"
            )


class HTTPPort(Port):
    """A server at one address.

    Args:
        http: the session for the server's routes.
        facts: how the server describes itself.
        settings: as for the client function, such as `torchrl_ext.control.makes.vllm.vllm_engine`.

    Attributes:
        fields: what the true answer of a route has, by route; routes that answer nothing are left out.
        lora_routes: what stands before ``/load_lora_adapter`` and ``/unload_lora_adapter``.
        lora_needs: what the server needs to serve adapters, for errors.
    """

    fields: ClassVar[Mapping[str, tuple[str, ...]]]
    lora_routes: ClassVar[str]
    lora_needs: ClassVar[str]

    def __init__(self, http: HTTPSession, facts: ServerInfo, settings: Settings) -> None:
        self.http, self.url, self.timeout_s = http, http.url, settings.load_timeout_s
        self._facts, self._settings, self.live = facts, settings, settings.live and self.plugin
        self._followed: tuple[str, ...] = ()

    def has_plugin(self) -> bool:
        """Ask whether the workers run our plugin, and note which transports they can follow."""
        try:
            answers = self.call(Inspect())
        except EngineRefusedError as error:
            if isinstance(error, RouteAbsent) or _UNSUPPORTED in error.what:
                return False
            raise
        known = [answer.get("transports") for answer in answers if "torchrl_ext" in answer]
        names = [set(map(str, one)) if isinstance(one, list) else set() for one in known]
        self._followed = tuple(sorted(set.intersection(*names))) if names else ()
        return bool(names)

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `torchrl_ext.EngineClient.logprobs`. One of several data-parallel replicas answers.

        vLLM's ``--logprobs-mode`` must be one that gives log-probabilities, as the default does. SGLang does not reuse
        cached prefixes. A paused embedded engine answers too, unless its weights cannot be served.
        """
        return [self._logprobs(list(prompt)) for prompt in prompts]

    def _logprobs(self, prompt: list[int]) -> list[float]:
        route, body = self._scoring(prompt)
        answer = self.http.post(route, body, timeout_s=self.timeout_s)
        try:
            found = self._scores(answer, prompt)
            if len(found) != len(prompt) - 1:
                raise ValueError(f"there are {len(found)}")
            return [math.nan if value is None else float(value) for value in found]  # JSON has no NaN
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineRefusedError(
                f"{self.url}{route} answered without the log-probabilities of the prompt: {type(error).__name__}: "
                f"{error}",
                expected="one for each token after the first",
            ) from error

    def adapters(self) -> dict[str, str]:
        """Return the directories of the LoRA adapters that the server serves, by name."""
        answer = self.http.get("/v1/models")
        try:
            return {str(row["id"]): str(row["root"]) for row in answer["data"] if row.get("parent")}
        except (AttributeError, KeyError, TypeError) as error:
            raise EngineRefusedError(
                f"{self.url}/v1/models answered {answer!r:.200}", expected="a list of models"
            ) from error

    def load_adapter(self, name: str, path: str) -> None:
        before = self.adapters().get(name)
        try:
            self._replace_adapter(name, path, before)
            if self.adapters().get(name) != path:
                raise EngineRefusedError(f"{self.url} does not list adapter {name!r} after loading it")
        except (EngineRefusedError, DeadlineError) as error:
            raise restated(error, error.what, self._serving_now(name), hint=self.lora_needs) from error

    def unload_adapter(self, name: str) -> None:
        self._adapter("unload_lora_adapter", {"lora_name": name})

    @abstractmethod
    def _replace_adapter(self, name: str, path: str, before: str | None) -> None:
        """Load an adapter; ``before`` is the directory of the one that the name stands for, if it has one."""

    def _adapter(self, call: str, body: Info) -> None:
        """Call a route for adapters, whose answer may be text."""
        self.http.call("POST", f"{self.lora_routes}/{call}", body, timeout_s=self.timeout_s).checked()

    def _serving_now(self, name: str) -> str:
        try:
            found = self.adapters().get(name)
        except (EngineError, DeadlineError):
            return f"{self.url} does not say what it serves as {name!r}"
        return f"{self.url} serves {name!r} from {found}" if found else f"{self.url} serves no adapter {name!r}"

    def _post(self, route: str, body: Any = None, **how: Any) -> Any:
        return self.http.post(route, body, fields=self.fields.get(route, ()), **how)

    @abstractmethod
    def _refuse(self, message: Join) -> None:
        """Refuse a sender that this server would follow wrongly."""

    @abstractmethod
    def drop_cached(self) -> None:
        """Drop what older weights cached, unless the settings keep it."""

    @abstractmethod
    def _scoring(self, prompt: list[int]) -> tuple[str, Info]:
        """Return route and body of a request for the log-probabilities of ``prompt``."""

    @abstractmethod
    def _scores(self, answer: Any, prompt: list[int]) -> list[Any]:
        """Return the log-probabilities, in nats, of the tokens after the first; an incomplete answer may raise."""


class StockPort(HTTPPort):
    """A server without our plugin that has joined a transport: full files, or the server's own broadcasts.

    Attributes:
        lacking, wanted, hint: error texts: what the server is, what it should be, and a hint.
        group: settings of the broadcast group; None if the server loads files.
    """

    plugin: bool = False
    lacking: ClassVar[str]
    wanted: ClassVar[str]
    hint: ClassVar[str]
    group: Info | None = None

    def state(self) -> EngineState:
        return EngineState()

    def sleep(self, level: int, tags: frozenset[str]) -> None:
        raise EngineRefusedError(f"{self.url} runs {self.lacking}, and does not say what sleeps", hint=self.hint)

    def call(self, message: Message) -> list[Info]:
        match message:
            case Join():
                self._refuse(message)
                self._join(message)
            case Start():
                self.drop_cached()
                self._begin()
            case Load():
                self._load(message)
            case Finish():
                self._finish(str(message.version))
            case Leave() if self.group:
                self._leave()
                self.group = None
            case Inspect():
                raise EngineRefusedError(f"{self.url} runs {self.lacking}", expected=self.wanted, hint=self.hint)
            case Prefetch() if message.part is not None:
                words = f"{self.url} runs without our plugin, and takes whole versions only"
                raise EngineRefusedError(words, state="nothing was changed", hint=f"leave only= out, or {self.hint}")
            case Verify():
                words = f"{self.url} runs without our plugin, and cannot prove which weights it holds"
                raise ConfigError(words, hint=self.hint)
        return []

    def _join(self, message: Join) -> None:
        by, offer = message.transport, message.offer
        if by == "native":
            self._check(offer)
        elif by not in self._facts.info.transports:
            words = f"{self.url} runs {self.lacking}, and cannot follow by {by!r}"
            raise EngineRefusedError(words, expected=self.wanted, hint=self.hint)
        words = "%s runs without our plugin and follows by %s: only outputs show what it loaded (verify='outputs')"
        log.warning(words, self.url, by)
        if by == "native":
            self.group = offer["group"]
            self._leave()  # an earlier trainer's group
            route, body = self._meeting(offer, message.rank_offset)
            self._post(route, body, timeout_s=self.timeout_s)

    @abstractmethod
    def _check(self, offer: Info) -> None:
        """Raise `EngineRefusedError` if the server cannot receive the broadcasts of this offer."""

    @abstractmethod
    def _begin(self) -> None:
        """Prepare the server for an update, also after one that failed."""

    @abstractmethod
    def _load(self, message: Load) -> None:
        """Have the workers receive one handoff."""

    @abstractmethod
    def _finish(self, label: str) -> None:
        """End the update, and label the weights."""

    @abstractmethod
    def _meeting(self, offer: Info, rank_offset: int) -> tuple[str, Info]:
        """Return route and body with which the workers join the broadcast group."""

    @abstractmethod
    def _leaving(self) -> tuple[str, Info | None]:
        """Return route and body with which the workers leave the broadcast group."""

    def _leave(self) -> None:
        route, body = self._leaving()
        with suppress(EngineError, DeadlineError):  # the group, the route or the server may not exist
            self.http.call("POST", route, body, timeout_s=_LEAVE_S)


def bodies(message: Load) -> Iterator[tuple[list[str], list[str], list[list[int]]]]:
    """Yield names, dtypes and shapes for each call of a `native` handoff; empty tensors are left out."""
    for first, stop in message.handoff["calls"]:
        metas = [meta for meta in (message.params or ())[first:stop] if meta.nbytes]
        if metas:
            yield (
                [meta.name for meta in metas],
                [dtype_name(meta.dtype) for meta in metas],
                [list(meta.shape) for meta in metas],
            )
