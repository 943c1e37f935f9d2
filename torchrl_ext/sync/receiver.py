"""`WeightReceiver`: the engine end. Joins the transport that the trainer names, and lands what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from types import NoneType
from typing import Any

import torch

from torchrl_ext.errors import ConfigError, IntegrityError, NotConnectedError
from torchrl_ext.landing.changes import Changes
from torchrl_ext.landing.loader import WeightLoader, as_loader
from torchrl_ext.registry import transports
from torchrl_ext.stores.opening import admit
from torchrl_ext.transports.base import Transport
from torchrl_ext.types import Info, ParamMeta

__all__ = ["WeightReceiver"]

_LONGEST_S = 86_400.0


class WeightReceiver:
    """Lands weights in one model. Inside an engine the control layer drives it; alone, `poll_and_apply` does.

    Args:
        target: module, TensorDict, mapping or `WeightLoader` that takes the weights.
        transport: the worker end to use alone; an engine gets its transport from `connect`.
        rank: this worker's rank within its engine, 0 .. world size of the engine - 1.
    """

    def __init__(self, target: Any = None, transport: Transport | None = None, *, rank: int = 0) -> None:
        self._loader: WeightLoader | None = None if target is None else as_loader(target)
        self._target = target
        self._transport = transport
        self._rank = rank
        self._sealed = False
        self._intact = True  # the model holds one version, and not parts of several
        self._staged: Changes | None = None
        self.version = 0

    @property
    def target(self) -> Any:
        """What takes the weights, as it was given."""
        return self._target

    # driven by an engine

    def connect(self, info: Info) -> None:
        """Join the transport that ``info["transport"]`` names.

        Raises:
            ManifestError: the trainer's parameters cannot land here; nothing was joined.
            ConfigError: no transport has this name, or the message names what this engine may not open.
        """
        loader = self._require_loader()
        _admit(info)
        loader.check(tuple(ParamMeta.from_json(row) for row in info["params"]))
        loader.refuse_unsound(unproved=bool(info.get("unproved")))
        loader.vouch(bool(info.get("compares", True)))
        if self._transport is not None:
            self._transport.shutdown()
        self._transport = transports.load(info["transport"]).from_info(info)
        self._transport.join({**info, "rank": info.get("rank_offset", 1) + self._rank})
        self._transport.incremental.retain(lambda name: not loader.patchable(name))
        self._staged = None

    def rehearse(self, question: Info) -> Info:
        """Show whether the road of an update leads to where a cold start does (`torchrl_ext.proof.rehearsal`).

        Args:
            question: ``how``: ``"once"`` per start of the engine, ``"never"`` or ``"always"``; with ``ask`` nothing is
                done, and the engine need not be paused.

        Returns:
            ``needed`` (to an ``ask``: it would be done), ``proof`` (`WeightLoader.proof`) and what it showed.

        Raises:
            EngineRefusedError, IntegrityError: the road does not lead there.
        """
        loader, how = self._require_loader(), question.get("how", "once")
        needed = how != "never" and loader.unrehearsed(again=how == "always")
        if needed and not question.get("ask"):
            loader.rehearse()
            needed = False
        return {"needed": needed, "proof": loader.proof(), **loader.rehearsal()}

    def prefetch(self, version: int) -> None:
        """Do for ``version`` whatever can be done while the engine serves: fetch, check, decode, translate.

        Raises:
            WeightSyncError: the version cannot be had; the engine goes on with what it serves.
        """
        transport, loader, self._staged = self._require_transport(), self._require_loader(), None
        changes = transport.incremental.prefetch(version, loader.position_digests if self._intact else None)
        if changes is not None:
            try:
                loader.stage(changes)
            except IntegrityError:
                self._intact = False  # whatever the model holds, the next version does not build on it
                raise
            self._staged = changes

    def confirm(self) -> None:
        """Where an engine's workers compare notes on what they staged; called in the thread that generates.

        Raises:
            IntegrityError: together they would not hold what the trainer has.
        """
        if self._staged is not None:
            try:
                self._require_loader().confirm()
            except IntegrityError:
                self._staged, self._intact = None, False
                raise

    def start(self) -> None:
        """The engine is idle: make ready to load."""
        self._require_transport()
        self._sealed = False
        if self._staged is None:
            self._intact = False
            self._require_loader().start()

    def load(self, info: Info) -> None:
        """Receive one handoff; or compare digests when ``info`` has ``verify``; or, with ``seal``, end the load.

        Sealing ahead of `finish` leaves nothing for the latter that could fail, which matters where an engine gives a
        version its number in the very call that finishes it. Digests are compared after the load has ended: until then
        some layers may hold what they held.
        """
        loader = self._require_loader()
        _check_fields(info)
        if "verify" in info:
            loader.finish()
            self._sealed = True
            self._verify(info["verify"])
        if info.keys() - {"verify", "seal"}:
            self._receive(info)
        if "seal" in info:
            loader.finish()
            self._sealed = True

    def _receive(self, info: Info) -> None:
        loader = self._require_loader()
        transport, staged, self._staged = self._require_transport(), self._staged, None
        if staged is not None and staged.reached[1] == info["version"]:
            self._intact = False
            loader.commit()
            transport.incremental.landed(staged)
            return
        if self._intact:  # what was staged is another version
            self._intact = False
            loader.start()
        with closing(_passed_on(transport.receive(info, loader.targets()))) as pairs:
            loader.load(pairs)

    def finish(self, version: int) -> None:
        """Everything arrived."""
        if not self._sealed:
            self._require_loader().finish()
        self._sealed = False
        self._intact = True
        self.version = version

    def doubt(self) -> None:
        """The model was loaded by somebody else: the next version does not build on what it holds."""
        self._staged, self._intact = None, False

    def abort(self) -> None:
        """Unblock a wait in another thread."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Leave the transport. May be called twice."""
        if self._transport is not None:
            self._transport.shutdown()
            self._transport = None

    # alone: TorchRL's surface

    def register_model(self, model: Any) -> None:
        """Set where weights land."""
        self._target, self._loader = model, as_loader(model)

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[torch.dtype, Any]], **_: Any) -> None:
        """Connect the worker end (collective); other transports need no group."""
        self._require_transport().init_all_workers_group(model_metadata)

    def poll_and_apply(self, timeout: float | None = 0.0) -> bool:
        """Apply the newest version if one came within ``timeout`` seconds; returns whether one did."""
        received = self._require_transport().receive_weights(timeout, model=self._loader)
        if received is not None:
            self.version = self._require_transport().received_version
        return received is not None

    def apply_weights(self, weights: Any) -> None:
        """Land ``weights`` (TensorDict or mapping) directly."""
        from torchrl_ext.weights.source import as_source

        source, loader = as_source(weights), self._require_loader()
        loader.check(source.params())
        loader.start()
        loader.load(source)
        loader.finish()

    def _verify(self, expected: Mapping[str, str]) -> None:
        """Compare with what the loader vouches for (see `WeightLoader.digests`)."""
        found = self._require_loader().digests()
        for name, digest in expected.items():
            if found.get(name) != digest:
                raise IntegrityError(
                    f"parameter {name!r} of the model is not what the trainer sent",
                    expected=f"digest {digest}, found {found.get(name)}",
                    state="the engine holds a damaged update and stays paused",
                    hint="send the version again",
                )

    def _require_loader(self) -> WeightLoader:
        if self._loader is None:
            raise NotConnectedError("this receiver has no model", hint="call register_model(model)")
        return self._loader

    def _require_transport(self) -> Transport:
        if self._transport is None:
            raise NotConnectedError("this receiver joined no transport", hint="connect first")
        return self._transport


def _passed_on(pairs: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same pairs. Closed, it closes those of a transport at once; an error's traceback would keep them half-way."""
    yield from pairs


def _admit(info: Info) -> None:
    """Refuse a message that asks for what a trainer has no business with, before anything is opened for it.

    Raises:
        ConfigError: it does, or is not one that a trainer of ours writes.
    """
    _check_fields(info)
    if not isinstance(info.get("params"), list):
        raise ConfigError("the message lists no parameters", expected='{"params": [[name, dtype, [sizes]], ...], ...}')
    for name in ("root", "base", "local_dir"):
        if info.get(name) is not None:
            admit(info[name], made=name == "local_dir")


def _check_fields(info: Info) -> None:
    for name in info.keys() & _FIELDS.keys():
        kinds, valid, expected = _FIELDS[name]
        value = info[name]
        known = kinds if isinstance(kinds, tuple) else (kinds,)
        if type(value) not in known or not valid(value):
            raise ConfigError(f"{name} of the message is {value!r:.80}", expected=expected, state="unchanged")
    if isinstance(info.get("wire"), dict):
        _check_fields(info["wire"])


_MOST = 2**62
_TEXT = (str, lambda value: len(value) <= 4096, "text")
_PLACE = ((str, NoneType), lambda value: value is None or len(value) <= 4096, "a place, or null")
_COUNT = (int, lambda value: 0 <= value < _MOST, "a whole number from 0")
_FIELDS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    **dict.fromkeys(("transport", "root", "probe", "run_id", "host", "master_address", "backend"), _TEXT),
    **dict.fromkeys(("base", "local_dir"), _PLACE),
    **dict.fromkeys(("version", "rank_offset", "bucket_bytes"), _COUNT),
    "world_size": (int, lambda value: 1 <= value <= 1 << 20, "1 or more"),
    "master_port": (int, lambda value: 1 <= value <= 65535, "1 to 65535"),
    "timeout_s": ((int, float), lambda value: 0 < value <= _LONGEST_S, f"seconds, above 0, at most {_LONGEST_S:g}"),
    "needs_base": (bool, lambda value: True, "true or false"),
    "wire": (dict, lambda value: True, "an object"),
    "verify": ((dict, bool), lambda value: True, "an object of digests, or (to connect) whether there will be any"),
    "params": (list, lambda value: True, "a list"),
}
"""Of the fields that messages share: their types, the rule that values obey, and the rule in words."""
