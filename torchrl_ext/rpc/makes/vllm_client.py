"""`ClientPort`: vLLM servers behind a client of somebody else's, with the four methods of ``VLLMWeightSyncClient``.

`vllm.distributed.weight_transfer.base.VLLMWeightSyncClient` (0.31 to 0.33) is a protocol without a class: any object
has it that has these methods, over HTTP, Ray or calls in this process, to one server or to several at once.

=====================================================  ===============================================================
``start_weight_update()``                              `Start`
``update_weights(message)``                            `Load`, `Verify`, `Seal`
``finish_weight_update(weight_version=str)``           `Seal` before it, then `Finish`; without the argument where a
                                                       client takes none
``init_weight_transfer_engine(envelope)``              all others, whose answers come back in the words of the exception
                                                       that the client raises
=====================================================  ===============================================================

Whoever made the client pauses the servers before an update and resumes them after it; this port does neither. Workers
refuse to resume while they hold a part of a version.

A client of several servers raises the error of one of them, and an answer travels as an error. So every message that
may be answered says which engines were heard (`torchrl_ext.routes.envelope`), and is sent until none is left to answer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, final

from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError, RouteAbsent
from torchrl_ext.messages import Finish, Inspect, Load, Message, Seal, Start, Verify
from torchrl_ext.routes import ANSWERS, answers_in, envelope
from torchrl_ext.rpc.http import Answer
from torchrl_ext.rpc.makes.vllm import explained, of_another_backend
from torchrl_ext.rpc.port import EngineState, Port
from torchrl_ext.types import EngineInfo, Info

__all__ = ["ClientPort"]


@final
class ClientPort(Port):
    """The servers that one client speaks to, as one engine that stays paused.

    Args:
        client: has the four methods.
        world_size: 1 (the trainer) + the workers of all servers, for clients that give each server a ``rank_offset`` of
            its own; None asks the workers.
    """

    kind: ClassVar[str] = "vllm"

    def __init__(self, client: Any, *, world_size: int | None = None) -> None:
        self._client, self._size = client, world_size
        self.url = str(getattr(client, "base_url", "") or f"a {type(client).__name__}")

    def describe(self) -> EngineInfo:
        """See `Port.describe`; asks every worker.

        Raises:
            ConfigError: the workers that answer are not as many as ``world_size`` says.
        """
        found = self._workers()
        if self._size not in (None, 1 + len(found)):
            raise ConfigError(
                f"{self.url} reaches {len(found)} workers, and world_size is {self._size}",
                expected=f"world_size={1 + len(found)}: the trainer's rank 0 and every worker; or None",
            )
        version = max(answer.get("version", 0) for answer in found)
        return EngineInfo(url=self.url, kind=self.kind, world_size=len(found), weight_version=str(version or ""))

    def suited(self, info: Info) -> Port:
        """See `Port.suited`.

        Raises:
            ConfigError: several deployments would take the same ranks in one group.
        """
        if self._size is None and "root" not in info:  # workers that read files have no ranks
            found = self._workers()
            if len(found) > max(answer.get("workers", 1) for answer in found):
                raise ConfigError(
                    f"{self.url} reaches several deployments, whose workers would all join the {info['transport']} "
                    "transport as the same ranks",
                    expected="delta or disk; or a client that gives each server its own rank_offset, and world_size",
                    state="nothing was sent",
                )
        return self

    def state(self, *, fit: bool = False) -> EngineState:
        return EngineState(paused=True)  # the client's owner sees to it, and the protocol has no way to ask

    def hold(self, before: EngineState) -> None:
        """Do nothing: the client's owner pauses the servers before it has weights sent."""

    def release(self) -> None:
        """Do nothing: the client's owner resumes them."""

    def abandon(self) -> None:
        with suppress(EngineRefusedError):  # workers may have no open update any more
            self._call(self._client.finish_weight_update)

    def tell(self, message: Message) -> list[Info]:
        match message:
            case Start():
                self._call(self._client.start_weight_update)
            case Load() | Verify() | Seal():
                self._call(self._client.update_weights, message.to_json())
            case Finish():
                self.tell(Seal(connection=message.connection))
                finish = self._client.finish_weight_update
                labels = "weight_version" in inspect.signature(finish).parameters
                self._call(finish, **({"weight_version": str(message.version)} if labels else {}))
            case _:
                return self._ask(message)
        return []

    def _workers(self) -> list[Info]:
        found = [answer for answer in self._ask(Inspect()) if "torchrl_ext" in answer]
        if not found:
            raise EngineRefusedError(
                f"no worker behind {self.url} answered",
                expected="a client that raises what a server refuses, in the server's words",
                hint="have the client raise an error with the body of the server's answer",
            )
        return found

    def _ask(self, message: Message) -> list[Info]:
        """Send every worker a message, and return the answers of all, server by server."""
        found: list[Info] = []
        heard: list[str] = []
        while True:
            answers = self._call(self._client.init_weight_transfer_engine, envelope(message, heard, self._size))
            fresh = {answer["engine"] for answer in answers if "engine" in answer} - {*heard}
            if not fresh:
                return found
            found += [answer for answer in answers if answer.get("engine") in fresh]
            heard = [*heard, *sorted(fresh)]

    def _call(self, method: Callable[..., Any], *args: Any, **named: Any) -> list[Info]:
        """Call the client; return the answers that its error has in its words, if it has any.

        Raises:
            EngineRefusedError, EngineUnreachableError, DeadlineError: the call failed; in the worker's words.
        """
        try:
            method(*args, **named)
        except Exception as error:
            answer = _answer_of(error, self.url)
            answers = answers_in(_content(answer.text)) if ANSWERS in answer.text else []
            if not answers:
                with explained():
                    raise _restated(error, answer) from error
            return [one for number, one in enumerate(answers) if one not in answers[:number]]  # a traceback repeats it
        return []

    def lacks_plugin(self, error: EngineRefusedError) -> bool:
        return isinstance(error, RouteAbsent) or of_another_backend(error) is not None


def _answer_of(error: Exception, where: str) -> Answer:
    """Return the server's answer that made a client raise, as far as the client hands it on: whole, or in its words."""
    response = getattr(error, "response", None)
    status, text = getattr(response, "status_code", 500), getattr(response, "text", "") or str(error)
    start = text.find('{"')  # some clients put the body behind words of their own
    body = text[max(start, 0) :]
    return Answer(where=where, status=status, text=body if isinstance(_content(body), dict) else text)


def _content(text: str) -> Any:
    """Return the body of a server's error, in which words are escaped once more; a text that is none stays as it is."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return body if isinstance(body, dict) and body.keys() & {"error", "detail", "message"} else text


def _restated(error: Exception, answer: Answer) -> Exception:
    """Return the error of ours for an error of a client."""
    names = {base.__name__ for base in type(error).__mro__}
    words = answer.message() or type(error).__name__
    what = f"{answer.where}: {words}"
    if getattr(error, "response", None) is None:
        if any("Timeout" in name for name in names):
            return DeadlineError(what, state="the server may still be working on the call")
        if isinstance(error, OSError) or any("ActorDied" in name or "Connect" in name for name in names):
            return EngineUnreachableError(what, hint="check that the server runs, and the client's address")
    if answer.absent:
        return RouteAbsent(what, status=answer.status)
    refused = EngineRefusedError(what, status=answer.status, reason=words)
    return of_another_backend(refused) or refused
