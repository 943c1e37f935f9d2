"""`ClientPort`: vLLM servers behind somebody else's client, with the methods of vLLM's ``VLLMWeightSyncClient``.

=====================================================  ===============================================================
``start_weight_update()``                              `Start`
``update_weights(message)``                            `Load`, `Verify`, `Seal`
``finish_weight_update(weight_version=str)``           after a `Seal` and a `Finish`; a client may take no version
``init_weight_transfer_engine(envelope)``              all others; answers are in the words of the client's exception
=====================================================  ===============================================================

Whoever made the client pauses the servers before an update and resumes them after it. A client of several servers
raises the error of one of them, so a message is sent in a `torchrl_ext.routes.envelope` until no engine answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, final

from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, EngineUnreachableError, RouteAbsent
from torchrl_ext.messages import Finish, Inspect, Load, Message, Seal, Start, Verify
from torchrl_ext.routes import ANSWERS, answers_in, each_answer
from torchrl_ext.rpc.http import Answer
from torchrl_ext.rpc.makes.vllm import explained, is_of_another_backend
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
        """See `Port.describe`; ConfigError if other workers answer than ``world_size`` says."""
        found = self._workers()
        if self._size not in (None, 1 + len(found)):
            raise ConfigError(
                f"{self.url} reaches {len(found)} workers, and world_size is {self._size}",
                expected=f"world_size={1 + len(found)}: the trainer's rank 0 and every worker; or None",
            )
        version = max(answer.get("version", 0) for answer in found)
        return EngineInfo(url=self.url, kind=self.kind, world_size=len(found), weight_version=str(version or ""))

    def suited(self, info: Info) -> Port:
        """See `Port.suited`; ConfigError if several deployments would take the same ranks in one group."""
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
        """Do nothing, as `release`: the client's owner pauses and resumes the servers."""

    def release(self) -> None:
        """See `hold`."""

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
                answers = self._ask(message)
                finish = self._client.finish_weight_update
                labels = "weight_version" in inspect.signature(finish).parameters
                self._call(finish, **({"weight_version": str(message.version)} if labels else {}))
                return answers
            case _:
                return self._ask(message)
        return []

    def lacks_plugin(self, error: EngineRefusedError) -> bool:
        return is_of_another_backend(error)

    def _workers(self) -> list[Info]:
        found = [answer for answer in self._ask(Inspect()) if "torchrl_ext" in answer]
        if not found:
            expected = "a client that raises errors in the server's words"
            raise EngineRefusedError(f"no worker behind {self.url} answered", expected=expected)
        return found

    def _ask(self, message: Message) -> list[Info]:
        return each_answer(partial(self._call, self._client.init_weight_transfer_engine), message, self._size)

    def _call(self, method: Callable[..., Any], *args: Any, **named: Any) -> list[Info]:
        """Call the client; return the answers in its error's words, or raise an error of ours in the worker's words."""
        try:
            method(*args, **named)
        except Exception as error:
            answer, content = _answer_of(error, self.url)
            answers = answers_in(content) if ANSWERS in answer.text else []
            if not answers:
                with explained():
                    raise _restated(error, answer) from error
            return [one for number, one in enumerate(answers) if one not in answers[:number]]  # a traceback repeats it
        return []


def _answer_of(error: Exception, where: str) -> tuple[Answer, Any]:
    """Return the server's answer that made a client raise, as far as the client hands it on, and what is in it."""
    response = getattr(error, "response", None)
    text = getattr(response, "text", "") or str(error)
    answer = Answer(where=where, status=getattr(response, "status_code", 500), text=text)
    body = replace(answer, text=text[max(text.find('{"'), 0) :])  # some clients put it behind words of their own
    with suppress(ValueError):
        content = body.json()
        if isinstance(content, dict) and content.keys() & {"error", "detail", "message"}:
            return body, content
    return answer, text


def _restated(error: Exception, answer: Answer) -> Exception:
    names, what = " ".join(base.__name__ for base in type(error).__mro__), f"{answer.where}: {answer.message()}"
    if getattr(error, "response", None) is None:
        if "Timeout" in names:
            return DeadlineError(what, state="the server may still be working on the call")
        if isinstance(error, OSError) or "Connect" in names or "ActorDied" in names:
            return EngineUnreachableError(what, hint="check that the server runs, and the client's address")
    kind = RouteAbsent if answer.absent else EngineRefusedError
    return kind(what, status=answer.status, reason=answer.message())
