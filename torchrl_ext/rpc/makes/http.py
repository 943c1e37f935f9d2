"""What the ports of servers share: calls of routes, log-probabilities, and updates of servers without our plugin."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.messages import Prefetch
from torchrl_ext.rpc.engine import Engine
from torchrl_ext.rpc.http import HTTPSession, Keys
from torchrl_ext.rpc.port import Port
from torchrl_ext.rpc.router import refuse_router
from torchrl_ext.types import Info, ParamMeta, dtype_name

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ABSENT", "HTTPPort", "bodies", "is_absent", "refuse_part", "session", "unproved", "warn_of_outputs"]

log = logging.getLogger("torchrl_ext")

ABSENT = (404, 405, 501)
"""HTTP statuses of a server that has no such route."""


def is_absent(error: EngineRefusedError) -> bool:
    """Return whether a server refused because it lacks our plugin; SGLang's own route calls the action unsupported."""
    return error.status in ABSENT or "Unsupported action" in error.what


def session(url: str, api_key: Keys, timeout_s: float) -> HTTPSession:
    """Return a session of one server, which refuses to speak to a router."""
    return HTTPSession(url, api_key=api_key, timeout_s=timeout_s, check=refuse_router)


class HTTPPort(Port):
    """A server behind one address.

    Args:
        http: calls its routes.
        timeout_s: deadline of joining a transport, draining, and receiving weights, in seconds.
    """

    def __init__(self, http: HTTPSession, *, timeout_s: float) -> None:
        self.http, self.url, self.timeout_s = http, http.url, timeout_s
        self._followed: tuple[str, ...] = ()

    @classmethod
    def over(cls, http: HTTPSession) -> Self:
        """Return a port that makes its calls by ``http``, within what is left of its deadline."""
        return cls(http, timeout_s=http.left_s)

    def followed(self) -> tuple[str, ...]:
        """Return the transports that its workers follow; an answer is kept."""
        self._followed = self._followed or Engine(self).followed()
        return self._followed

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
            raise EngineRefusedError(
                f"{self.url}{route} answered {answer.status}: {answer.message()}", status=answer.status
            )
        try:
            return {"status": answer.status, "body": answer.json()}
        except ValueError:
            return {"status": answer.status, "body": answer.text}


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


def unproved(url: str, hint: str) -> ConfigError:
    """Return the error for digests that a server without our plugin is to compare."""
    return ConfigError(f"{url} runs without our plugin, and cannot prove what it holds", hint=hint)


def refuse_part(message: Prefetch) -> None:
    """Refuse to prepare a part of a version on a server without our plugin, which prepares nothing ahead."""
    if message.part is not None:
        raise EngineRefusedError("engines without our plugin take whole versions only", state="nothing was changed")


def warn_of_outputs(url: str, transport: str) -> None:
    """Log that only a server's outputs show what it loaded."""
    words = "%s runs without our plugin, and follows by %s: only its outputs show what it loaded (verify='outputs')"
    log.warning(words, url, transport)
