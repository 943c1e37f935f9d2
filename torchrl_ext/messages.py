"""Messages from a trainer's control layer to the workers of an engine: one frozen struct per step.

A message is one JSON object: ``{"format": 3, "release": "0.1.0", "kind": "prefetch", "version": 7}``. The format counts
the changes of this protocol, and the release is the one of the sender, for error messages; the other fields are those
of the message. An engine's client (`torchrl_ext.rpc`) and plugin choose the route that brings it. Workers handle it in
`torchrl_ext.sync.worker_end.WorkerEnd.handle`, or, where weights land in this process, in
`torchrl_ext.sync.receiver.WeightReceiver.handle`. An answer is a JSON object too, and empty where there is nothing to
say.

Whoever reaches an engine's port can send a message, so every field is checked as it is decoded. The trainer end of a
transport writes to its worker ends inside (`Join.offer`, `Load.handoff`): a `Wire` of that transport's own.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

import torchrl_ext
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError
from torchrl_ext.types import Count, Info, Params, Part, Text, Wire

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "FORMAT", "NOBODY", "REPLACED", "CheckAdapter", "Connected", "Digests", "Finish", "Inspect", "Join", "Leave",
    "Load", "Message", "Poll", "Prefetch", "Pull", "Rehearse", "RehearsePolicy", "Reset", "Seal", "ServeAdapter",
    "StageAdapter", "Start", "State", "UnloadAdapter", "Verify", "WeightsLost", "WorldSize", "partial_version",
    "read", "replaced", "replaced_by", "stamped",
]  # fmt: skip

FORMAT = 3
"""The number of this protocol; `docs/formats.md` says what changed with each."""

REPLACED = "torchrl_ext: this sender has to join again"
"""What a worker's refusal begins with where it has joined another sender since, or none."""

NOBODY = "no sender has joined"
"""What such a refusal says, of an engine that no sender has joined since it was started."""

WorldSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Digests = dict[str, str]
Files = Annotated[list[str], msgspec.Meta(min_length=1)]
RehearsePolicy = Annotated[str, msgspec.Meta(pattern=r"^(once|never|always)\Z")]
WeightsLost = Annotated[str, msgspec.Meta(pattern=r"^(gone|reloaded)\Z")]


def _kind_of(name: str) -> str:
    """Return the kind of a message in JSON by the name of its class: ``"check_adapter"`` for ``"CheckAdapter"``."""
    return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()


class Message(Wire, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=_kind_of):
    """A message to the workers of an engine: one step of an update, or a question."""

    @property
    def kind(self) -> str:
        """The name of the message in JSON."""
        return str(self.__struct_config__.tag)

    def to_json(self) -> Info:
        """Return the message as a JSON object."""
        return {"format": FORMAT, "release": torchrl_ext.__version__, **super().to_json()}

    @classmethod
    def from_json(cls, info: Any, what: str = "") -> Self:
        """Decode a message of this class, from its JSON object or the fields in it.

        Raises:
            ConfigError: a field is missing, unknown, of another type or out of bounds; it is named.
        """
        if isinstance(info, Mapping):
            info = {name: value for name, value in info.items() if name not in ("format", "release")}
        return super().from_json(info, what or f"a {cls.__struct_config__.tag!r} message")


class Connected(Message, frozen=True, kw_only=True):
    """The part of a message that names the connection of its sender.

    Attributes:
        connection: the id that its `Join` brought; empty for a caller that made none, whose steps count as steps of the
            sender that joined last.
    """

    connection: Text = ""


def stamped(message: Message, connection: str) -> Message:
    """Return the message with the id of a sender's connection, where it is to bear one and has none."""
    bears = isinstance(message, Connected) and not message.connection
    return msgspec.structs.replace(message, connection=connection) if bears else message


def read(info: Any) -> Message:
    """Return the message that a JSON object stands for.

    Raises:
        ConfigError: it is no message, or one of another release, or has an invalid field, which is named.
    """
    if not isinstance(info, Mapping):
        raise ConfigError(f"a message is {reprlib.repr(info)}", expected="an object", state="unchanged")
    if type(info.get("format")) is not int or info["format"] != FORMAT:
        release = info.get("release")
        sender = f"of release {reprlib.repr(release)}, format {reprlib.repr(info.get('format'))} of torchrl_ext"
        unnumbered = "without a number, as earlier releases of torchrl_ext and programs of others send them,"
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


class Inspect(Message, frozen=True, kw_only=True):
    """A question about an engine's surroundings (`torchrl_ext.sync.inspection`); no part of any update.

    Attributes:
        root: what `SharedRoot.invite` gave, to be looked for.
        clear: the same, with the probe that an earlier answer named, to be removed.
        dial: host and port of the asker, to be reached.
        token: what the asker's listener sends.
    """

    root: Info | None = None
    clear: Info | None = None
    dial: list[Any] | None = None
    token: Text | None = None


class Join(Connected, frozen=True, kw_only=True):
    """Tells workers to check the parameters, then to join a trainer's transport; `Poll` says when that is over.

    From then on workers refuse every step of an update that bears another `Connected.connection`.

    Attributes:
        sender: names the trainer's process, for the sender that this one replaces.
        transport: the registered name.
        params: every parameter of the update, in order.
        rank_offset: the rank of the engine's first worker, where the trainer is 0.
        world_size: the trainer and all workers of all engines; None where the transport counts none.
        compares: whether digests will be asked for (`Verify`).
        unproved: whether the trainer gave up any proof, so that nothing was rehearsed.
        offer: the `Wire` of the transport's trainer end to its worker ends.
    """

    sender: Text = ""
    transport: Text
    params: Params
    rank_offset: Count = 1
    world_size: WorldSize | None = None
    compares: bool = True
    unproved: bool = False
    offer: Info

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Join:
        """Make the message from what `Transport.open` gives, once ``params`` were added to it.

        Raises:
            ConfigError: a field is malformed; it is named.
        """
        own = {name: value for name, value in info.items() if name in cls.__struct_fields__}
        return cls.from_json({**own, "offer": {name: value for name, value in info.items() if name not in own}})


class Rehearse(Connected, frozen=True, kw_only=True):
    """Tells workers to show that an update leads to the same state as a cold start (`torchrl_ext.proof.rehearsal`).

    Attributes:
        how: ``"once"`` per start of the engine, ``"never"`` or ``"always"``.
        ask: nothing is done, and the engine need not be paused.

    The answer has ``needed`` (to an ``ask``: it would be done), ``proof`` and what was shown.
    """

    how: RehearsePolicy = "once"
    ask: bool = False


class Prefetch(Connected, frozen=True, kw_only=True):
    """Tells workers to stage a version while the engine serves; `Poll` says when that is over.

    Attributes:
        version: that version.
        part: of a partial update: which tensors it brings, and the version that has the others; None for all tensors.
        files: the names of its files that were announced now, where those of one version are announced one by one; None
            for all of it.
        label: what the weights in service are called, which names the version that such files build on.
    """

    version: Count
    part: Part | None = None
    files: Files | None = None
    label: Text | None = None

    def __post_init__(self) -> None:
        if self.files is not None and self.part is not None:
            raise ValueError("Expected `files` or `part`, got both")


class Pull(Message, frozen=True, kw_only=True):
    """Tells workers to bring a checkpoint on their host to a published version, while the engine serves; see `Poll`.

    Nothing of it is loaded (`torchrl_ext.versions.local_checkpoint`).

    Attributes:
        source: where the versions lie.
        directory: the checkpoint, on the host of each worker.
        version: its number; 0 is the checkpoint that the engine was started with.
    """

    source: Text
    directory: Text
    version: Count

    @classmethod
    def of(cls, body: Any) -> Pull:
        """Make the message from the body of ``POST /pull_weights``, as slime's trainers send it.

        Raises:
            ConfigError: a field is missing, or of another type; it is named.
        """
        names = {"source": "source_dir", "directory": "local_checkpoint_dir", "version": "target_version"}
        body = body if isinstance(body, Mapping) else {}
        return cls.from_json({own: body[theirs] for own, theirs in names.items() if theirs in body})


class Poll(Connected, frozen=True, kw_only=True):
    """Asks whether what `Join` or `Prefetch` began is over; ``working: true`` while a worker works.

    Attributes:
        pull: the question is about what `Pull` began, which goes on beside those.
    """

    pull: bool = False


class Start(Connected, frozen=True, kw_only=True):
    """Tells workers that the engine is paused, and to make ready to load.

    Attributes:
        bracketed: SGLang's own bracket around a load is open (``/begin_weight_update``).
    """

    bracketed: bool = False


class Load(Connected, frozen=True, kw_only=True):
    """Tells workers to receive one handoff.

    Attributes:
        version: the one that the handoff belongs to.
        handoff: the `Wire` of the transport's trainer end to its worker ends; the number ``onto`` where the handoff
            brings a part of a model that otherwise stays at this version, as `Prefetch` said.
    """

    version: Count
    handoff: Info

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Load:
        """Make the message from the info of a handoff; its version is checked, and other fields by the transport.

        Raises:
            ConfigError: it has no version.
        """
        handoff = {name: value for name, value in info.items() if name != "version"}
        return cls.from_json({"version": info.get("version"), "handoff": handoff})


class Verify(Connected, frozen=True, kw_only=True):
    """Tells workers that every handoff came, to end the load, and to compare the model with digests by name."""

    digests: Digests


class Seal(Connected, frozen=True, kw_only=True):
    """Tells workers that every handoff came, and to end the load, so that `Finish` has nothing left that could fail."""


class Finish(Connected, frozen=True, kw_only=True):
    """Tells workers that the loaded version is now the one in service; a load that was not sealed is ended first."""

    version: Count


class Reset(Message, frozen=True, kw_only=True):
    """Tells workers that the engine's weights are not those of an update: the next version does not build on them.

    Attributes:
        weights: ``"gone"``: their memory is about to be given up, and only a whole update brings them back;
            ``"reloaded"``: the engine loaded others by itself.
    """

    weights: WeightsLost


class State(Connected, frozen=True, kw_only=True):
    """Asks how the engine is; with a connection, only whether another one has replaced it, which is refused then.

    The answer has ``whole``, false where a part of an update landed and the rest did not, with the ``landing`` version;
    and ``empty: true`` where the weights were given up, and no update came since. What else an engine's plugin knows of
    its pause and its sleep comes with it.
    """


class Leave(Connected, frozen=True, kw_only=True):
    """Tells workers to leave the transport."""


class CheckAdapter(Message, frozen=True, kw_only=True):
    """Asks whether a LoRA adapter with these parameters could be loaded.

    Attributes:
        params: the adapter's tensors.
        root: where its versions will lie, as `SharedRoot.invite` gives it; None where that was looked at already.
    """

    params: Params
    root: Info | None = None

    @classmethod
    def of(cls, info: Info) -> CheckAdapter:
        """Make the message from what `Transport.open` gives, once ``params`` were added to it.

        Raises:
            ConfigError: ``params`` are missing, or do not describe parameters.
        """
        return cls.from_json({"params": info.get("params"), "root": {k: v for k, v in info.items() if k != "params"}})


class StageAdapter(Message, frozen=True, kw_only=True):
    """Tells the engine to load a version of a LoRA adapter, with which no request is served yet.

    Attributes:
        name: what requests call the adapter.
        version: of the adapter.
        path: the directory of its files.
    """

    name: Text
    version: Count
    path: Text


class ServeAdapter(Message, frozen=True, kw_only=True):
    """Tells the engine that an adapter's name stands for a staged version from now on.

    The answer may have ``in_use``: the versions that requests are still at work with.
    """

    name: Text
    version: Count


class UnloadAdapter(Message, frozen=True, kw_only=True):
    """Tells the engine to refuse requests by an adapter's name from now on."""

    name: Text


def replaced_by(ask: Callable[[Message], Any], connection: str) -> str:
    """Ask workers who has replaced the sender that joined as ``connection``; "" where nobody has, or none answers."""
    try:
        ask(State(connection=connection))
    except (EngineError, DeadlineError) as error:
        _, _, rest = error.what.partition(f"{REPLACED}: ")
        return rest.partition(". Expected:")[0].partition("; ")[0]
    return ""


def replaced(since: str) -> EngineRefusedError:
    """Return the error for a step of a sender that has to join again; ``since`` says who joined, if anyone."""
    return EngineRefusedError(
        f"{REPLACED}: {since} this engine since",
        expected="steps of the sender that joined last",
        state="nothing was touched",
        hint="one sender at a time: the next update of this one joins again, and replaces the other",
    )


def partial_version(engine: str) -> EngineRefusedError:
    """Return the error for an engine that is to generate, and holds a part of a version."""
    return EngineRefusedError(
        f"{engine} holds a part of a version, which must not be served",
        expected="a version that arrived whole",
        state="paused",
        hint="send the weights again: the next update that arrives whole resumes the engine",
    )
