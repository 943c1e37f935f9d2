"""Message classes for the steps of an update, the questions around it, and LoRA adapters by name and version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torchrl_ext.messages.base import (
    Count,
    Digests,
    Fate,
    Flag,
    How,
    ListOrNone,
    Message,
    Object,
    ObjectOrNone,
    Params,
    PartOrNone,
    Text,
    TextOrNone,
    WorldSize,
    check_offered,
    refused,
)  # fmt: skip
from torchrl_ext.types import Info


@dataclass(frozen=True, kw_only=True)
class Connected:
    """The part of a message that names the connection of the sender that speaks.

    Attributes:
        connection: the id that its `Join` brought; empty for a caller that made none, and whose steps are not told
            from those of the sender that joined last.
    """

    connection: Text = ""


def stamped(message: Message, connection: str) -> Message:
    """Return the message with the id of a sender's connection, where it is to bear one and has none."""
    bears = isinstance(message, Connected) and not message.connection
    return replace(message, **{"connection": connection}) if bears else message


@dataclass(frozen=True, kw_only=True)
class Inspect(Message):
    """A question about an engine's surroundings (`torchrl_ext.sync.inspection`); no part of any update.

    Attributes:
        root: what `SharedRoot.invite` gave, to be looked for.
        clear: the same, with the probe that an earlier answer named, to be removed.
        dial: host and port of the asker, to be reached.
        token: what the asker's listener sends.
    """

    kind: ClassVar[str] = "inspect"
    root: ObjectOrNone = None
    clear: ObjectOrNone = None
    dial: ListOrNone = None
    token: TextOrNone = None


@dataclass(frozen=True, kw_only=True)
class Join(Connected, Message):
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
        offer: what the transport's trainer end tells its worker ends.
    """

    kind: ClassVar[str] = "join"
    sender: Text = ""
    transport: Text
    params: Params
    rank_offset: Count = 1
    world_size: WorldSize = None
    compares: Flag = True
    unproved: Flag = False
    offer: Object

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Join:
        """Make the message from what `Transport.open` gives, once ``params`` were added to it.

        Raises:
            ConfigError: a field breaks its rule; it is named.
        """
        own = {one.name for one in fields(cls)}
        told = {name: value for name, value in info.items() if name in own}
        return cls.from_json({**told, "offer": {name: value for name, value in info.items() if name not in own}})

    def info(self) -> Info:
        """Return the info that `Transport.from_info` and `Transport.join` take."""
        return {
            **self.offer,
            "transport": self.transport,
            "params": [meta.to_json() for meta in self.params],
            "rank_offset": self.rank_offset,
            **({} if self.world_size is None else {"world_size": self.world_size}),
        }

    def check(self) -> None:
        check_offered("the transport's offer", self.offer)


@dataclass(frozen=True, kw_only=True)
class Rehearse(Connected, Message):
    """Tells workers to show that an update leads to the same state as a cold start (`torchrl_ext.proof.rehearsal`).

    Attributes:
        how: ``"once"`` per start of the engine, ``"never"`` or ``"always"``.
        ask: nothing is done, and the engine need not be paused.

    The answer has ``needed`` (to an ``ask``: it would be done), ``proof`` and what was shown.
    """

    kind: ClassVar[str] = "rehearse"
    how: How = "once"
    ask: Flag = False


@dataclass(frozen=True, kw_only=True)
class Prefetch(Connected, Message):
    """Tells workers to stage a version while the engine serves; `Poll` says when that is over.

    Attributes:
        version: that version.
        part: where it brings some tensors alone: which, and the version that has all others; None for all tensors.
        files: the names of its files that were announced now, where those of one version are announced one by one; None
            for all of it.
        label: what the weights in service are called, which names the version that such files build on.
    """

    kind: ClassVar[str] = "prefetch"
    version: Count
    part: PartOrNone = None
    files: ListOrNone = None
    label: TextOrNone = None

    def check(self) -> None:
        if self.files is None:
            return
        if not self.files or not all(isinstance(name, str) for name in self.files):
            raise refused("a 'prefetch' message", "files", self.files, "names of files, at least one, or null")
        if self.part is not None:
            raise refused("a 'prefetch' message", "files", self.files, "null beside a part: each says what comes")


@dataclass(frozen=True, kw_only=True)
class Land(Message):
    """Says, inside an SGLang server, what its workers need to know of a call that has them land a version directory.

    Attributes:
        files: the names of files that the call has; None for all of the version.
        paused: whether the server is paused.
        label: what the weights in service are called.
    """

    kind: ClassVar[str] = "land"
    files: ListOrNone = None
    paused: Flag = False
    label: TextOrNone = None


@dataclass(frozen=True, kw_only=True)
class Pull(Message):
    """Tells workers to bring a checkpoint on their host to a published version, while the engine serves; see `Poll`.

    Nothing of it is loaded (`torchrl_ext.versions.local_checkpoint`).

    Attributes:
        source: where the versions lie.
        directory: the checkpoint, on the host of each worker.
        version: its number; 0 is the checkpoint that the engine was started with.
    """

    kind: ClassVar[str] = "pull"
    source: Text
    directory: Text
    version: Count

    @classmethod
    def asked(cls, told: Any) -> Pull:
        """Make the message from the body of ``POST /pull_weights``, as slime's trainers send it.

        Raises:
            ConfigError: a field is missing, or of another type; it is named.
        """
        body = told if isinstance(told, Mapping) else {}
        fields = {"source": "source_dir", "directory": "local_checkpoint_dir", "version": "target_version"}
        return cls.from_json({own: body[theirs] for own, theirs in fields.items() if theirs in body})


@dataclass(frozen=True, kw_only=True)
class Poll(Connected, Message):
    """Asks whether what `Join` or `Prefetch` began is over; ``working: true`` while a worker works.

    Attributes:
        pull: it is asked of what `Pull` began, which goes on beside those.
    """

    kind: ClassVar[str] = "poll"
    pull: Flag = False


@dataclass(frozen=True, kw_only=True)
class Start(Connected, Message):
    """Tells workers that the engine is paused, and to make ready to load.

    Attributes:
        bracketed: SGLang's own bracket around a load is open (``/begin_weight_update``).
    """

    kind: ClassVar[str] = "start"
    bracketed: Flag = False


@dataclass(frozen=True, kw_only=True)
class Load(Connected, Message):
    """Tells workers to receive one handoff.

    Attributes:
        version: the one that the handoff belongs to.
        handoff: what the transport's trainer end tells its worker ends; the number ``onto`` where the handoff brings a
            part of a model that otherwise stays at this version, as `Prefetch` said.
    """

    kind: ClassVar[str] = "load"
    version: Count
    handoff: Object

    def info(self) -> Info:
        """Return the info that `Transport.receive` takes."""
        return {**self.handoff, "version": self.version}

    def check(self) -> None:
        check_offered("the handoff", self.handoff)


@dataclass(frozen=True, kw_only=True)
class Verify(Connected, Message):
    """Tells workers that every handoff came, to end the load, and to compare the model with digests by name."""

    kind: ClassVar[str] = "verify"
    digests: Digests


def loading(info: Mapping[str, Any]) -> Load | Verify:
    """Return the message for a handoff's info, or for ``{"verify": digests}``.

    Fields are checked against their rules where the message is read from JSON.
    """
    if "verify" in info:
        return Verify(digests=info["verify"])
    handoff = {**info}
    return Load(version=handoff.pop("version"), handoff=handoff)


@dataclass(frozen=True, kw_only=True)
class Seal(Connected, Message):
    """Tells workers that every handoff came, and to end the load, so that `Finish` has nothing left that could fail."""

    kind: ClassVar[str] = "seal"


@dataclass(frozen=True, kw_only=True)
class Finish(Connected, Message):
    """Tells workers that the loaded version is now the one in service; a load that was not sealed is ended first."""

    kind: ClassVar[str] = "finish"
    version: Count


@dataclass(frozen=True, kw_only=True)
class Reset(Message):
    """Tells workers that the engine's weights are not those of an update: the next version does not build on them.

    Attributes:
        weights: ``"gone"``: their memory is about to be given up, and only a whole update brings them back;
            ``"reloaded"``: the engine loaded others by itself.
    """

    kind: ClassVar[str] = "reset"
    weights: Fate


@dataclass(frozen=True, kw_only=True)
class State(Connected, Message):
    """Asks how the engine is; with a connection, only whether another one has replaced it, which is refused then.

    The answer has ``whole``, false where a part of an update landed and the rest did not, with the ``landing`` version;
    and ``empty: true`` where the weights were given up, and no update came since. What else an engine's plugin knows of
    its pause and its sleep comes with it.
    """

    kind: ClassVar[str] = "state"


@dataclass(frozen=True, kw_only=True)
class Flush(Message):
    """Tells the engine to drop cached keys and values; the answer has ``flushed``, false while requests use them."""

    kind: ClassVar[str] = "flush"


@dataclass(frozen=True, kw_only=True)
class Keep(Message):
    """Tells a worker that waits for its first weights that none will come, and to keep what it has."""

    kind: ClassVar[str] = "keep"


@dataclass(frozen=True, kw_only=True)
class Leave(Connected, Message):
    """Tells workers to leave the transport."""

    kind: ClassVar[str] = "leave"


@dataclass(frozen=True, kw_only=True)
class CheckAdapter(Message):
    """Asks whether a LoRA adapter with these parameters could be loaded.

    Attributes:
        params: the adapter's tensors.
        root: where its versions will lie, as `SharedRoot.invite` gives it; None where that was looked at already.
    """

    kind: ClassVar[str] = "check_adapter"
    params: Params
    root: ObjectOrNone = None

    @classmethod
    def of(cls, info: Info) -> CheckAdapter:
        """Make the message from what `Transport.open` gives, once ``params`` were added to it.

        Raises:
            ConfigError: ``params`` are missing, or do not describe parameters.
        """
        return cls.from_json({"params": info.get("params"), "root": {k: v for k, v in info.items() if k != "params"}})


@dataclass(frozen=True, kw_only=True)
class ListAdapters(Message):
    """Asks which version each adapter's name stands for; the answer has ``adapters``: ``{name: {"version"}}``."""

    kind: ClassVar[str] = "list_adapters"


@dataclass(frozen=True, kw_only=True)
class StageAdapter(Message):
    """Tells the engine to load a version of a LoRA adapter, with which no request is served yet.

    Attributes:
        name: what requests call the adapter.
        version: of the adapter.
        path: the directory of its files.
    """

    kind: ClassVar[str] = "stage_adapter"
    name: Text
    version: Count
    path: Text


@dataclass(frozen=True, kw_only=True)
class ServeAdapter(Message):
    """Tells the engine that an adapter's name stands for a staged version from now on.

    The answer may have ``in_use``: the versions that requests are still at work with.
    """

    kind: ClassVar[str] = "serve_adapter"
    name: Text
    version: Count


@dataclass(frozen=True, kw_only=True)
class UnloadAdapter(Message):
    """Tells the engine to refuse requests by an adapter's name from now on."""

    kind: ClassVar[str] = "unload_adapter"
    name: Text


@dataclass(frozen=True, kw_only=True)
class CheckLoaded(Message):
    """Asks workers whether each tensor of the adapter that was loaded under ``label`` has a layer that applies it."""

    kind: ClassVar[str] = "check_loaded"
    label: Text
