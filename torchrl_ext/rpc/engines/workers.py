"""What a client says to an engine's workers in each step of an update, and how: to those that run our plugin.

`torchrl_ext.rpc.engines.stock` has the words for engines that run nothing of ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, final

from torchrl_ext import messages
from torchrl_ext.errors import EngineError, EngineRefusedError
from torchrl_ext.messages import Join, Message, stamped
from torchrl_ext.routes import OPEN_UPDATE, merged
from torchrl_ext.types import Info, Part

__all__ = ["PluggedSGLang", "PluggedVLLM", "Workers", "abandon"]

Tell = Callable[[Message], list[Info]]


class Workers(ABC):
    """The workers of one engine, in the steps of an update; the client pauses and resumes the engine around them.

    Every step raises an `EngineError` or a `DeadlineError` where it fails.

    Attributes:
        plugged: whether they run our plugin: they compare digests, rehearse, and answer questions.
    """

    plugged: ClassVar[bool]
    connection = ""
    """The id for which they joined last, which each step bears."""

    @property
    def sessions(self) -> bool:
        """Whether an update runs in a session of SGLang's own."""
        return True

    @abstractmethod
    def join(self, info: Info) -> None:
        """Have them join the transport of ``info``, with their ``rank_offset``."""

    def prefetch(self, version: int, part: Part | None = None) -> None:
        """Have them fetch and check ``version``, or the part of it that comes, while the engine serves.

        Raises:
            EngineRefusedError: a stock worker takes whole versions only, and prepares nothing ahead.
        """
        if part is not None:
            raise EngineRefusedError("engines without our plugin take whole versions only", state="nothing was changed")

    @abstractmethod
    def start(self, *, bracketed: bool = False) -> None:
        """Begin an update; the engine is paused.

        Args:
            bracketed: a session of SGLang's is open around it.
        """

    @abstractmethod
    def load(self, info: Info) -> None:
        """Have them take one handoff."""

    @abstractmethod
    def verify(self, digests: Mapping[str, str]) -> None:
        """Have them compare their weights with the trainer's digests."""

    @abstractmethod
    def finish(self, version: int) -> None:
        """End the update to ``version``."""

    def confirm(self) -> None:  # noqa: B027 - only those that run our plugin know who has joined
        """Raise EngineRefusedError where they have joined another sender since `join`; nothing is touched."""

    def state(self) -> Info:
        """Return what they say of themselves: ``paused``, ``asleep``, ``empty``, ``whole``, as far as they do."""
        return {}

    def emptied(self) -> None:  # noqa: B027 - as `state`
        """Take note that the engine gave its weights up."""

    def leave(self) -> None:  # noqa: B027 - those of our plugin see by themselves that a transport is gone
        """Have them leave the transport, where they can be told. Raises nothing."""


class _Plugged(Workers):
    plugged: ClassVar[bool] = True

    def __init__(self, tell: Tell, await_idle: Callable[[str], None]) -> None:
        self._tell, self._await_idle = tell, await_idle

    def _join(self, message: Join) -> Join:
        """Return the message by which they join; from then on each step bears its connection."""
        self.connection = message.connection
        return message

    def confirm(self) -> None:
        if self.connection:
            self._tell(messages.State(connection=self.connection))

    def prefetch(self, version: int, part: Part | None = None) -> None:
        self._tell(messages.Prefetch(connection=self.connection, version=version, part=part))
        self._await_idle(f"stage version {version}")

    def emptied(self) -> None:
        self._tell(messages.Reset(weights="gone"))


@final
class PluggedSGLang(_Plugged):
    """Those of an SGLang server with our plugin.

    Args:
        tell: sends every worker a message, and returns the answers.
        await_idle: waits until they have done what they went on with; takes what that is.
        ask: as ``tell``, with the deadline of a short call.
        replicas: asks how many data-parallel replicas there are.
    """

    def __init__(
        self, tell: Tell, await_idle: Callable[[str], None], ask: Tell, replicas: Callable[[], tuple[str, int]]
    ) -> None:
        super().__init__(tell, await_idle)
        self._ask, self._replicas = ask, replicas

    def join(self, info: Info) -> None:
        if info.get("transport") not in ("disk", "delta"):
            url, replicas = self._replicas()
            if replicas > 1:
                raise EngineRefusedError(
                    f"{url} has {replicas} data-parallel replicas, whose workers do not know their ranks in a group",
                    expected="--dp-size 1, or a transport through files",
                )
        self._tell(self._join(messages.Join.of(info)))
        self._await_idle("join the transport")

    def start(self, *, bracketed: bool = False) -> None:
        self._tell(messages.Start(connection=self.connection, bracketed=bracketed))

    def load(self, info: Info) -> None:
        self._tell(stamped(messages.Load.of(info), self.connection))

    def verify(self, digests: Mapping[str, str]) -> None:
        self._tell(messages.Verify(connection=self.connection, digests={**digests}))

    def finish(self, version: int) -> None:
        self._tell(messages.Finish(connection=self.connection, version=version))

    def state(self) -> Info:
        return merged(self._ask(messages.State()))


@final
class PluggedVLLM(_Plugged):
    """Those of a vLLM server with our backend, or of the embedded engine.

    Args:
        tell, await_idle: as for `PluggedSGLang`.
        post: calls a route, with a body and ``timeout_s``, and returns the answer.
        timeout_s: deadline of loading, in seconds.
        explained: adds to an error of joining what the engine was not started with.
    """

    def __init__(
        self,
        tell: Tell,
        await_idle: Callable[[str], None],
        post: Callable[..., Info],
        timeout_s: float,
        explained: Callable[[EngineRefusedError], EngineError],
    ) -> None:
        super().__init__(tell, await_idle)
        self._post, self._timeout_s, self._explained = post, timeout_s, explained

    def join(self, info: Info) -> None:
        message = self._join(messages.Join.of(info))
        try:
            self._tell(message)
        except EngineRefusedError as error:
            if OPEN_UPDATE not in error.what:
                explained = self._explained(error)
                if explained is error:  # which is no cause of itself
                    raise
                raise explained from error
            abandon(self._post)
            self._tell(message)
        self._await_idle("join the transport")

    def start(self, *, bracketed: bool = False) -> None:
        self._post("/start_weight_update")

    def load(self, info: Info) -> None:
        self._update(stamped(messages.Load.of(info), self.connection))

    def verify(self, digests: Mapping[str, str]) -> None:
        self._update(messages.Verify(connection=self.connection, digests={**digests}))

    def finish(self, version: int) -> None:
        self._update(messages.Seal(connection=self.connection))
        self._post("/finish_weight_update", {"weight_version": str(version)})

    def state(self) -> Info:
        return merged(self._tell(messages.State()))

    def _update(self, message: Any) -> None:
        self._post("/update_weights", {"update_info": message.to_json()}, timeout_s=self._timeout_s)


def abandon(post: Callable[..., Info]) -> None:
    """End an open update of vLLM's; where it failed, workers have none to end any more and refuse, which is ignored."""
    with suppress(EngineRefusedError):
        post("/finish_weight_update")
