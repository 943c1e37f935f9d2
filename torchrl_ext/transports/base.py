"""The contract of the data layer. A transport moves bytes; it knows no engine, no HTTP, no pause and no cache.

To add one, write the abstract methods of `Transport`, register the class by name, and run
`tests/transports/contract.py` over it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from torchrl_ext.errors import ConcurrentUpdateError, ManifestError
from torchrl_ext.landing.loader import TensorsLoader, as_loader
from torchrl_ext.types import Handoff, Info, ParamMeta
from torchrl_ext.weights.source import WeightSource, as_source, inner_model, is_mapping

__all__ = ["Changes", "TransferStats", "Transport"]


@dataclass
class TransferStats:
    """What the last update of a transport took.

    Attributes:
        bytes: bytes that were moved or published, once, whatever the fan-out; None where they equal the model's.
        density: changed elements / all elements.
        spans: seconds by phase (``encode``, ``publish``, ``transfer``).
    """

    bytes: int | None = None
    density: float = 1.0
    spans: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What leads from the version that a worker holds to another one, folded: no element twice.

    Attributes:
        held: run id and number of the version that it starts from.
        reached: run id and number of the version that it leads to.
        params: every parameter of the model, in order.
        patches: makes one pass over the changed ones (`torchrl_ext.codecs.patch.Patch`); it asks for each name first
            whether it is wanted, and decodes only what is.
        digests: position digest of every tensor at the end, 32 hex digits, by name.
        whole: the tensors of some names at the end, from the host copies that `Transport.retain` asked for.
    """

    held: tuple[str, int]
    reached: tuple[str, int]
    params: tuple[ParamMeta, ...]
    patches: Callable[[Callable[[str], bool]], Iterator[Any]]
    digests: Mapping[str, str]
    whole: Callable[[Iterable[str]], Iterator[tuple[str, Tensor]]]


class Transport(ABC):
    """Both ends of one way to move weights.

    Trainer end: `open`, `prepare`, `acknowledge`. Worker end: `join`, `receive`. Alone, without an engine and a
    control layer: `send_weights` and `receive_weights` (TorchRL's `TransportBackend`), for which a transport adds
    `announce` and `poll`.

    Args:
        timeout_s: deadline of every wait, in seconds.

    Attributes:
        received_version: the version that `receive_weights` returned last; 0 before the first.
        stats: what the last update took.
    """

    name: ClassVar[str]
    proves: ClassVar[bool] = False
    """Workers hold every tensor against digests that travel with the weights; a sender needs no proof of its own."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self._busy = threading.Lock()
        self._last_version = 0
        self.received_version = 0
        self.stats = TransferStats()

    @classmethod
    def from_info(cls, info: Info) -> Transport:
        """The worker end for a trainer's `open` info, ready to `join`."""
        return cls()

    def init_all_workers_group(self, model_metadata: Mapping[str, tuple[Any, Any]]) -> None:
        """Connect standalone ends (seed 002's name); only a collective has a group to form.

        Args:
            model_metadata: ``{name: (dtype, shape)}``.
        """
        del model_metadata

    # trainer end

    @abstractmethod
    def open(self, workers: int, params: tuple[ParamMeta, ...]) -> Handoff:
        """Make ready for ``workers`` engine workers and these parameters.

        Returns:
            A handoff whose ``info`` goes to every engine's `join`, while ``transfer`` runs here.
        """

    @abstractmethod
    def prepare(self, source: WeightSource, version: int) -> Iterable[Handoff]:
        """Everything that can be done before engines pause; then one handoff per piece, made when asked for.

        A handoff's ``info`` has at least ``version`` and ``params``.
        """

    def send_ahead(self) -> None:  # noqa: B027 - most transports have nothing to move before the pause
        """Move what can be moved of the version that was prepared last while engines still generate.

        Runs beside the engines' prefetch, which takes it in.
        """

    def acknowledge(self, version: int) -> None:  # noqa: B027 - a transport that keeps nothing has nothing to drop
        """Every engine serves ``version`` or a later one, and reads nothing older: what is older may go."""

    def latest_version(self) -> int:
        """The newest version that this transport knows to exist, or tried to send; 0 before the first."""
        return self._last_version

    # worker end

    @abstractmethod
    def join(self, info: Info) -> None:
        """Connect to the trainer that made ``info``."""

    @abstractmethod
    def receive(self, info: Info, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the pairs of one handoff, full tensors in checkpoint coordinates, in the order of ``info["params"]``.

        Args:
            info: a handoff's.
            into: tensors that may be filled directly; what is yielded then is that very tensor. Anything else that
                is yielded is memory that nobody writes again.
        """

    def decline(self, info: Info, error: BaseException) -> None:  # noqa: B027 - only a collective must stay in step
        """Worker end: a handoff that `poll` gave cannot land here, for the reason in ``error``; do not wait for it."""

    def retain(self, names: Callable[[str], bool]) -> None:  # noqa: B027 - transports of full versions keep nothing
        """Worker end: keep host copies of the tensors that ``names`` accepts; the loader needs them whole."""

    def changes(self, version: int, held: Callable[[], Mapping[str, str]]) -> Changes | None:
        """Worker end: fetch and check what leads to ``version`` while the engine serves; None where it comes in full.

        Args:
            version: where to.
            held: position digests of what the model holds now, should it be needed.
        """
        return None

    def landed(self, changes: Changes) -> None:  # noqa: B027 - without changes there is nothing to follow
        """Worker end: what `changes` gave is in the model."""

    def prefetch(self, version: int) -> None:  # noqa: B027 - nothing to fetch ahead is a fine default
        """Fetch, check and stage ``version`` while the engine still serves."""

    # both ends

    def abort(self) -> None:  # noqa: B027 - a transport without blocking waits has nothing to abort
        """Unblock whoever waits inside this transport, from another thread."""

    @abstractmethod
    def check_connection(self) -> bool:
        """Whether this end is connected."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything. May be called twice."""

    # alone, without a control layer

    @abstractmethod
    def announce(self, info: Info) -> None:
        """Tell the workers of this transport that a handoff comes, when no control layer does."""

    @abstractmethod
    def poll(self, timeout_s: float) -> Info | None:
        """Worker end: the next announced ``info``, or None after ``timeout_s`` seconds."""

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """One send at a time.

        Raises:
            ConcurrentUpdateError: another one is running.
        """
        if not self._busy.acquire(blocking=False):
            raise ConcurrentUpdateError(
                f"{what} was called while another send runs on this {self.name} transport",
                state="the running send goes on",
                hint="send from one thread, or give each trainer a transport of its own",
            )
        try:
            yield
        finally:
            self._busy.release()

    def send_weights(self, model_id: Any, weights: Any = None) -> None:
        """Send one version of ``weights`` (trainer end); also callable as ``send_weights(weights)``.

        Args:
            model_id: name of the model, a label only.
            weights: module, (nested) TensorDict, mapping of tensors, checkpoint directory or WeightSource.

        Raises:
            ConcurrentUpdateError: another send runs.
            TransportError, DeadlineError: the bytes could not be moved.
        """
        if weights is None:
            model_id, weights = "policy", model_id
        with self.exclusive("send_weights"):
            source = as_source(weights)
            version = self._last_version = self.latest_version() + 1  # taken: some may get it even if others do not
            for handoff in self.prepare(source, version):
                self.announce({**handoff.info, "model_id": model_id})
                handoff.transfer()
                handoff.release()

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any | None:
        """Receive the newest version (worker end).

        Args:
            timeout: seconds to wait for one; None waits as long as this transport waits for anything, `timeout_s`.
            weights: TensorDict or mapping to fill in place.
            model: module (or TensorDict) to apply the weights to.
            strategy: TorchRL `WeightStrategy` through which they are applied to ``model``.

        Returns:
            TensorDict with flat keys (``weights`` itself is only filled), or None when nothing new came.

        Raises:
            ManifestError: ``weights`` or ``model`` has other parameters; nothing was changed.
            IntegrityError, TransportError: what arrived is damaged or incomplete.
        """
        info = self.poll(self.timeout_s if timeout is None else timeout)
        if info is None:
            return None
        try:
            params = tuple(ParamMeta.from_json(row) for row in info["params"])
            target = None if weights is None else TensorsLoader(_mapping(weights))
            if target is not None:
                target.check(params)
            loader = None if model is None or strategy is not None else as_loader(model)
            if loader is not None:
                loader.check(params)
        except Exception as error:
            self.decline(info, error)
            raise
        into = {} if target is None else target.targets()
        received = dict(self.receive(info, into))
        if target is not None:
            target.load(received.items())
            into = target.targets()
            received = {name: into[name] for name in received}
        if loader is not None:
            loader.start()
            loader.load(received.items())
            loader.finish()
        from tensordict import TensorDict  # only the standalone road needs it; engines have no tensordict

        result = TensorDict(received, batch_size=[])
        if model is not None and strategy is not None:
            model = inner_model(model)
            strategy.apply_weights(model, result if _is_flat(model) else result.unflatten_keys("."))
        self.received_version = info["version"]
        return result


def _is_flat(model: Any) -> bool:
    """Whether a strategy finds names joined by ``.`` in ``model``; TorchRL's views a module as a nested TensorDict."""
    from tensordict import TensorDictBase

    return isinstance(model, TensorDictBase) and any("." in key for key in model.keys())  # noqa: SIM118 - a TensorDict iterates over its batch


def _mapping(weights: Any) -> Any:
    if not is_mapping(weights):
        raise ManifestError(f"weights= is a {type(weights).__name__}", expected="a TensorDict or a mapping of tensors")
    return weights


def deadline(timeout_s: float) -> float:
    """The monotonic moment at which a wait of ``timeout_s`` seconds ends."""
    return time.monotonic() + timeout_s
