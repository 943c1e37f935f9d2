"""Messages from a trainer's control layer to an engine's workers: one frozen struct per step of an update.

A message is one JSON object: ``{"format": 8, "release": "0.1.0", "kind": "prefetch", "version": 7}``. ``format`` is the
protocol version, ``release`` is the sender's release (for error messages), and the other fields belong to the message.
The engine's client (`torchrl_ext.control`) and plugin choose the route. Workers handle messages in
`torchrl_ext.sync.engine_worker.EngineWorker.handle`, or, for weights in this process, in
`torchrl_ext.sync.receiver.WeightReceiver.handle`. The answer is also a JSON object, and may be empty.

Anyone who can reach an engine's port can send a message, so decoding checks every field. `Join.offer` and
`Load.handoff` carry the transport's own `Wire` from its trainer end to its worker ends.
"""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

import torchrl_ext
from torchrl_ext.base.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineRefusedError,
    error_from,
    error_info,
)
from torchrl_ext.base.types import Count, Info, Params, Part, Seconds, Text, Wire

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "FORMAT", "NOBODY", "WHOLE", "Commit", "Connected", "Digests", "Finish", "Inspect", "Join", "Keep", "Leave", "Load",
    "Message", "Poll", "Prefetch", "Rehearse", "RehearsePolicy", "Reset", "Start", "State", "Undo", "Verify",
    "WeightsLost", "WorldSize", "answered", "answers_of", "partial_version", "read", "replaced", "replaced_by",
    "stamped",
]  # fmt: skip

log = logging.getLogger("torchrl_ext")

FORMAT = 8
"""Protocol version; `docs/formats.md` lists the changes."""

NOBODY = "no sender has joined"
"""Reason in such a refusal when no sender has joined since the engine was started."""

WHOLE = "the version is sent whole"
"""Obstacle to a `Commit` that the trainer itself puts there."""

WorldSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Digests = dict[str, str]
RehearsePolicy = Annotated[str, msgspec.Meta(pattern=r"^(once|never)\Z")]
WeightsLost = Annotated[str, msgspec.Meta(pattern=r"^(gone|reloaded)\Z")]


def _kind_of(name: str) -> str:
    """Return a message class's ``kind`` in JSON: ``"weights_lost"`` for ``"WeightsLost"``."""
    return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()


class Message(Wire, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=_kind_of):
    """A message to an engine's workers: one step of an update, or a query."""

    @property
    def kind(self) -> str:
        """The message's ``kind`` in JSON."""
        return str(self.__struct_config__.tag)

    def to_json(self) -> Info:
        return {"format": FORMAT, "release": torchrl_ext.__version__, **super().to_json()}

    @classmethod
    def from_json(cls, info: Any, what: str = "") -> Self:
        """Decode a message of this class; ``format`` and ``release`` may be missing, and are not checked.

        Raises:
            ConfigError: a field is missing, unknown, of the wrong type or out of bounds; the message names it.
        """
        if isinstance(info, Mapping):
            info = {name: value for name, value in info.items() if name not in ("format", "release")}
        return super().from_json(info, what or f"a {cls.__struct_config__.tag!r} message")


class Connected(Message, frozen=True, kw_only=True):
    """Base class of messages that carry their sender's connection id.

    Attributes:
        connection: the id from the sender's `Join`. If it is empty, workers treat the message as one from the sender
            that joined last.
    """

    connection: Text = ""


def stamped(message: Message, connection: str) -> Message:
    """Return the message with this connection id, if it is `Connected` and has no id yet."""
    bears = isinstance(message, Connected) and not message.connection
    return msgspec.structs.replace(message, connection=connection) if bears else message


def read(info: Any) -> Message:
    """Decode a message of any class.

    Raises:
        ConfigError: ``info`` is not a message, has another protocol version, or has an invalid field, which the error
            names.
    """
    if not isinstance(info, Mapping):
        raise ConfigError(f"a message is {reprlib.repr(info)}", expected="an object", state="unchanged")
    if type(info.get("format")) is not int or info["format"] != FORMAT:
        release = info.get("release")
        sender = f"of release {reprlib.repr(release)}, format {reprlib.repr(info.get('format'))} of torchrl_ext"
        unnumbered = "without a number"
        raise ConfigError(
            f"a message {sender if release else unnumbered} came to release {torchrl_ext.__version__}, format {FORMAT}",
            state="unchanged",
            hint="use one release of torchrl_ext on both ends",
        )
    classes = (*Message.__subclasses__(), *Connected.__subclasses__())
    kinds = {_kind_of(one.__name__): one for one in classes if one is not Connected}
    kind = info.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(
            f"there is no message of kind {reprlib.repr(kind)}",
            expected=f"one of {', '.join(kinds)}",
            state="unchanged",
        )
    return kinds[kind].from_json(info)


def answered(handle: Callable[[Message], Info], text: str) -> Info:
    """Return a worker's answer to a message as JSON; of a step that failed ``{"error": ...}`` (`error_info`).

    It never raises: engines end their workers, or mix up their replies, after an exception.
    """
    try:
        return handle(read(msgspec.json.decode(text.encode("utf-8", "replace"))))
    except Exception as error:
        log.debug("a message was refused", exc_info=True)
        if isinstance(error, (msgspec.DecodeError, RecursionError)):
            error = ConfigError(f"a message is not JSON: {error}", state="unchanged")
        return {"error": error_info(error)}


def answers_of(rows: Any, where: str) -> list[Info]:
    """Return the answers of an engine's workers; of workers that share a process group, one may speak for all.

    Args:
        rows: what each answered (`answered`).
        where: the engine, for errors.

    Raises:
        EngineRefusedError, DeadlineError: a worker answered with an error, or something else than a worker answered.
    """
    rows = rows if isinstance(rows, list) else [rows]
    for row in rows:
        if not isinstance(row, dict):
            raise EngineRefusedError(
                f"{where} answered {reprlib.repr(row)} in place of a worker",
                expected="the answer of torchrl_ext's plugin in each worker",
                hint="check that nothing between trainer and engine answers in the engine's place",
            )
        if "error" in row:
            raise error_from(row["error"])
    return [*rows]


class Inspect(Message, frozen=True, kw_only=True):
    """Queries an engine worker's environment (`torchrl_ext.sync.inspection`), independently of any update.

    Attributes:
        root: an invitation from `SharedRoot.invite` to look for.
    """

    root: Info | None = None


class Join(Connected, frozen=True, kw_only=True):
    """Tells workers to check the parameters and to join a trainer's transport; `Poll` reports when they have joined.

    From then on workers refuse every step of an update that has another `Connected.connection`.

    Attributes:
        sender: a description of the trainer's process, for errors that the replaced sender gets.
        transport: the registered name of the transport.
        params: all parameters of the update, in order.
        rank_offset: rank of the engine's first worker; the trainer is rank 0.
        world_size: 1 (the trainer) + the workers of all engines; None if the transport does not need it.
        compares: whether the trainer wants to know that the model holds what it sent: by the digests of a `Verify`, or
            by those that travel with the weights.
        unproved: whether the trainer skips the rehearsal, and so accepts updates without proof.
        timeout_s: deadline of every wait for the trainer, in seconds.
        offer: the `Wire` from the transport's trainer end to its worker ends.
    """

    sender: Text = ""
    transport: Text
    params: Params
    rank_offset: Count = 1
    world_size: WorldSize | None = None
    compares: bool = True
    unproved: bool = False
    timeout_s: Seconds = 60.0
    offer: Info


class Rehearse(Connected, frozen=True, kw_only=True):
    """Tells workers to check that an update leads to the same state as a cold start (`torchrl_ext.engines.rehearsal`).

    The answer has ``needed`` (for an ``ask``: whether a rehearsal would run), ``proof``, ``shared`` (the parameters of
    the join that land in one memory, `torchrl_ext.data.weights.shared`) and the rehearsal's findings.

    Attributes:
        how: ``"once"`` per start of the engine, or ``"never"``.
        ask: only ask whether a rehearsal is needed; the engine need not be paused.
    """

    how: RehearsePolicy = "once"
    ask: bool = False


class Prefetch(Connected, frozen=True, kw_only=True):
    """Tells workers to stage a version while the engine serves; `Poll` reports when they have staged it.

    Attributes:
        version: the version to stage.
        part: for a partial update, the tensors that it sends and the version that it builds on; None for all tensors.
    """

    version: Count
    part: Part | None = None


class Poll(Connected, frozen=True, kw_only=True):
    """Asks whether a `Join` or `Prefetch` has ended; the answer has ``working: true`` until every worker is done.

    After a `Prefetch` the last answer has ``obstacle``: why the version needs a pause; "" if a `Commit` is allowed.
    """


class Commit(Connected, frozen=True, kw_only=True):
    """Tells workers to write the staged version between two steps of the engine, which serves all the time.

    Workers do not wait for each other: each handles the message at the same point of its own queue of steps. It may be
    sent again: workers that hold the version answer as before. The answer is that of `Finish`, without ``workers``.

    Attributes:
        version: the version, which `Prefetch` named, and to which the last `Poll` found no obstacle.
        keep_cache: let requests from here on share keys and values with those before; otherwise they share none.
    """

    version: Count
    keep_cache: bool = False


class Undo(Connected, frozen=True, kw_only=True):
    """Tells workers to hold again what they held before ``version`` was committed, bit by bit; allowed until `Keep`.

    It may be sent again. A version that a worker only staged is dropped. The answer has ``version``, which the worker
    holds now.

    Attributes:
        version: the version that is taken back.
    """

    version: Count


class Keep(Connected, frozen=True, kw_only=True):
    """Tells workers that the version in service stays, so that they give up the way back and its memory."""


class Start(Connected, frozen=True, kw_only=True):
    """Tells workers that the engine is paused; it changes no weight, and nobody has to cancel it.

    Attributes:
        bracketed: whether SGLang's own ``/begin_weight_update`` was called before.
    """

    bracketed: bool = False


class Load(Connected, frozen=True, kw_only=True):
    """Tells workers to receive one handoff.

    Attributes:
        version: the version that it brings.
        params: its parameters, in order; None for those of the join, or of the part that `Prefetch` announced.
        onto: of a partial update, the version that it builds on.
        handoff: the `Wire` from the transport's trainer end to its worker ends.
    """

    version: Count
    params: Params | None = None
    onto: Count | None = None
    handoff: Info


class Verify(Connected, frozen=True, kw_only=True):
    """Tells workers to end the load, because every handoff was sent, and to compare the model with these digests."""

    digests: Digests


class Finish(Connected, frozen=True, kw_only=True):
    """Tells workers that every handoff was sent: they end the load, and once all have, note that the version serves.

    Workers refuse it unless that many loads of this version, and of no other, have landed since the `Start`. The answer
    has ``version`` and ``digest``, which say what they hold (`torchrl_ext.sync.receiver.WeightReceiver.finish`), and
    ``workers``, the number of those that agree on it.

    Attributes:
        version: the version.
        loads: how many loads it had.
    """

    version: Count
    loads: Count = 1


class Reset(Message, frozen=True, kw_only=True):
    """Tells workers that the engine no longer has the last update's weights, so the next version cannot build on them.

    Attributes:
        weights: ``"gone"``: the engine is about to release their memory, and only a full update restores them;
            ``"reloaded"``: the engine loaded other weights itself.
    """

    weights: WeightsLost


class State(Connected, frozen=True, kw_only=True):
    """Asks for the engine's state; with a connection id, only checks that no other sender has replaced this one.

    Workers refuse the message if one has. Otherwise the answer to a message without an id has ``whole``, which is false
    after an update that landed only in part (``landing`` is its version), and ``empty: true`` if the weights' memory
    was released and no update has arrived since. The engine's plugin adds ``asleep``, the tags that sleep, and
    ``paused`` where workers know that.
    """


class Leave(Connected, frozen=True, kw_only=True):
    """Tells workers to leave the transport."""


def replaced_by(ask: Callable[[Message], Sequence[Info]], connection: str) -> str:
    """Ask workers which sender replaced the one that joined as ``connection``; "" if none did or no worker answers."""
    with suppress(EngineError, DeadlineError):
        for answer in ask(State()):
            if answer.get("connection", connection) != connection:
                return f"{answer.get('sender') or 'another sender'} has joined" if answer["connection"] else NOBODY
    return ""


def replaced(since: str) -> EngineRefusedError:
    """Return the error for a step of a sender that has to join again; ``since`` says which sender joined, if any."""
    return EngineRefusedError(
        f"this sender must join again: {since} this engine since",
        expected="steps of the sender that joined last",
        state="nothing was changed",
        hint="use one sender at a time; this sender's next update joins again and replaces the other",
        code="replaced",
    )


def partial_version(engine: str) -> EngineRefusedError:
    """Return the error for resuming an engine that holds only part of a version."""
    return EngineRefusedError(
        f"{engine} holds a part of a version, which it must not serve",
        expected="a complete version",
        state="paused",
        hint="send the weights again: the next complete update resumes the engine",
    )
