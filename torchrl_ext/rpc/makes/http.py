"""What the ports of servers share: calls of routes, log-probabilities, and updates of servers without our plugin."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError, RouteAbsent
from torchrl_ext.messages import Inspect, Join, Message, Prefetch, State, Verify
from torchrl_ext.routes import merged
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.rpc.http import HTTPSession, Keys
from torchrl_ext.rpc.port import Port
from torchrl_ext.rpc.router import refuse_router
from torchrl_ext.rpc.server_info import ServerInfo
from torchrl_ext.types import EngineInfo, Info, ParamMeta, dtype_name

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HTTPPort", "StockPort", "bodies", "is_absent", "session"]

log = logging.getLogger("torchrl_ext")

_LEAVE_S = 30.0
_P = TypeVar("_P", bound="HTTPPort")


def is_absent(error: EngineRefusedError) -> bool:
    """Return whether a server refused because it lacks our plugin; SGLang's own route calls the action unsupported."""
    return isinstance(error, RouteAbsent) or "Unsupported action" in error.what


def session(url: str, api_key: Keys, timeout_s: float) -> HTTPSession:
    """Return a session of one server, which refuses to speak to a router."""
    return HTTPSession(url, api_key=api_key, timeout_s=timeout_s, check=refuse_router)


class HTTPPort(Port):
    """A server behind one address.

    Args:
        http: calls its routes.
        timeout_s: deadline of joining a transport, draining, and receiving weights, in seconds.
        pause_mode, keep_cache: as for the client of its make.

    Attributes:
        modes: the engine's pause modes.
        frozen: the one in which running requests keep their cache.

    Raises:
        ConfigError: a setting that cannot work.
    """

    modes: ClassVar[tuple[str, ...]]
    frozen: ClassVar[str]

    def __init__(
        self, http: HTTPSession, *, timeout_s: float = 600.0, pause_mode: str = "keep", keep_cache: bool = False
    ) -> None:
        if pause_mode not in self.modes:
            raise ConfigError(f"there is no pause mode {pause_mode!r}", expected=f"one of {', '.join(self.modes)}")
        if keep_cache and pause_mode != self.frozen:
            what = f"keep_cache means nothing with pause mode {pause_mode!r}"
            raise ConfigError(what, expected=f"pause_mode={self.frozen!r}")
        self.http, self.url, self.timeout_s = http, http.url, timeout_s
        self._pause_mode, self._keep_cache = pause_mode, keep_cache
        self._followed: tuple[str, ...] = ()
        self._facts = ServerInfo(info=EngineInfo(url=self.url, kind=self.kind))  # as of the last `suited`
        self._ours = True  # until it refuses a message of ours; another process of the server is asked anew

    @classmethod
    def over(cls, http: HTTPSession) -> Self:
        """Return a port that makes its calls by ``http``, within what is left of its deadline."""
        return cls(http, timeout_s=http.left_s)

    def _as(self, port: type[_P]) -> _P:
        """Return a port of another class for the same server, with the same settings."""
        found = port.__new__(port)
        vars(found).update(vars(self))
        return found

    def followed(self) -> tuple[str, ...]:
        """Return the names of the transports that all workers can follow, those of other packages among them.

        An answer is kept. Where they do not say, there are none, and a warning is logged.
        """
        if not self._followed:
            try:
                known = [answer.get("transports") for answer in Engine(self).inspect(Inspect())]
            except (EngineError, DeadlineError) as error:
                log.warning("%s does not say which transports it can follow: %s", self.url, error)
                return ()
            names = [set(map(str, one)) if isinstance(one, list) else set() for one in known]
            self._followed = tuple(sorted(set.intersection(*names)))
        return self._followed

    def _fitness(self, ask: Callable[[Message], list[Info]]) -> Info:
        """Return what workers say of themselves, asked by ``ask``; {} where they run nothing of ours."""
        try:
            return merged(ask(State())) if self._ours else {}
        except EngineRefusedError as error:
            if not self.lacks_plugin(error):
                raise
            self._ours = False
            return {}

    def lacks_plugin(self, error: EngineRefusedError) -> bool:
        return is_absent(error)

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `torchrl_ext.EngineClient.logprobs`. vLLM's ``--logprobs-mode`` must be one of log-probabilities, the
        default. SGLang reads no keys and values of a prefix. The embedded engine answers while it is paused, too,
        unless what it holds cannot be served. Of several data-parallel replicas one answers."""
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

    def _post(self, route: str, body: Any = None, **how: Any) -> Any:
        return self.http.post(route, body, **how)

    @abstractmethod
    def _scoring(self, prompt: list[int]) -> tuple[str, Info]:
        """Return the route and the body that ask for the log-probabilities of ``prompt``."""

    @abstractmethod
    def _scores(self, answer: Any, prompt: list[int]) -> list[Any]:
        """Return the log-probabilities in an answer, in nats, of the tokens after the first; raise anything where the
        answer lacks one."""

    def post(self, route: str, body: Any = None, *, query: Mapping[str, Any] | None = None) -> Info:
        """Call a route of the engine's own, and return ``{"status": HTTP status, "body": JSON, or text}``.

        Raises:
            EngineRefusedError: any status but 2xx.
            EngineUnreachableError, DeadlineError: the engine did not answer, or not in time.
        """
        answer = self.http.call("POST", route, body, query=query, timeout_s=self.timeout_s)
        if not answer.ok:
            what = f"{self.url}{route} answered {answer.status}: {answer.message()}"
            raise EngineRefusedError(what, status=answer.status)
        try:
            return {"status": answer.status, "body": answer.json()}
        except ValueError:
            return {"status": answer.status, "body": answer.text}


class StockPort(HTTPPort):
    """A server that runs nothing of ours, and has joined a transport: by whole files, or by its own broadcasts.

    Attributes:
        lacking, wanted, plugin: words of errors: what the server is, what it should be, and a hint.
        group: of its own broadcasts; None where it follows by files.
    """

    proves: bool = False
    lacking: ClassVar[str]
    wanted: ClassVar[str]
    plugin: ClassVar[str]
    group: Info | None = None

    def tell(self, message: Message) -> list[Info]:
        """Join a transport, and refuse what needs our plugin; a make translates `Start`, `Load` and `Finish`."""
        match message:
            case Join():
                self._join(message)
            case Prefetch() if message.part is not None:
                words = "engines without our plugin take whole versions only"
                raise EngineRefusedError(words, state="nothing was changed")
            case Verify():
                words = f"{self.url} runs without our plugin, and cannot prove what it holds"
                raise ConfigError(words, hint=self.plugin)
        return []

    def _join(self, message: Join) -> None:
        by, offer = message.transport, message.offer
        if by == "native":
            self._check(offer)
        elif by != "disk":
            words = f"{self.url} runs {self.lacking}, and cannot follow by {by!r}"
            raise EngineRefusedError(words, expected=self.wanted, hint=self.plugin)
        words = "%s runs without our plugin, and follows by %s: only its outputs show what it loaded (verify='outputs')"
        log.warning(words, self.url, by)
        if by == "native":
            self.group = offer["group"]
            self._leave()  # an earlier trainer's
            route, body = self._meeting(offer, message.rank_offset)
            self._post(route, body, timeout_s=self.timeout_s)

    @abstractmethod
    def _check(self, offer: Info) -> None:
        """Raise EngineRefusedError where the server cannot take the broadcasts of a transport with this offer."""

    @abstractmethod
    def _meeting(self, offer: Info, rank_offset: int) -> tuple[str, Info]:
        """Return the route and the body by which its workers join the group of the broadcasts."""

    @abstractmethod
    def _leaving(self) -> tuple[str, Info | None]:
        """Return the route and the body by which they leave it."""

    def close(self, connection: str) -> None:
        """Have the workers leave the group that they joined."""
        if self.group:
            self._leave()
            self.group = None

    def _leave(self) -> None:
        route, body = self._leaving()
        with suppress(EngineError, DeadlineError):  # there may be no group, no such route, or no server any more
            self.http.call("POST", route, body, timeout_s=_LEAVE_S)


def bodies(handoff: Info) -> Iterator[tuple[list[str], list[str], list[list[int]]]]:
    """Yield names, dtypes and shapes of each call of a `native` handoff; a tensor without elements is in none."""
    for first, stop in handoff["calls"]:
        metas = [ParamMeta.from_json(row) for row in handoff["params"][first:stop]]
        metas = [meta for meta in metas if meta.nbytes]
        if metas:
            yield (
                [meta.name for meta in metas],
                [dtype_name(meta.dtype) for meta in metas],
                [list(meta.shape) for meta in metas],
            )
