"""`EngineClient` and `Update`: how a sender controls engines. No tensor passes through them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from torchrl_ext.base.errors import EngineRefusedError
from torchrl_ext.base.messages import WHOLE
from torchrl_ext.base.reports import EngineRow
from torchrl_ext.base.types import EngineInfo, Info, Part
from torchrl_ext.control.port import no_logprobs

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EngineClient", "Manner", "NullEngine", "Update", "nothing"]

log = logging.getLogger("torchrl_ext")


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How an update is taken.

    Attributes:
        commit: ``"live"`` writes changes between two steps of an engine, which serves all the time, and refuses them
            where that is not possible; a version that is sent whole pauses the engine. ``"paused"`` always pauses;
            ``"auto"`` does so where it has to.
        policy: ``"best_effort"`` leaves the version in the engines that took it where others failed; ``"all"`` takes it
            back.
        canary: asked with the first engine's client after its live commit, before the other engines commit. If it
            raises, the version is taken back, and no other engine takes it.
    """

    commit: str = "auto"
    policy: str = "best_effort"
    canary: Callable[[EngineClient], None] | None = None


class Update(ABC):
    """One version on its way into an engine, or into each engine of a fleet; thrown away afterwards.

    Call `stage`, `begin`, `load` (once per handoff), `verify`, `commit` and `keep`, in this order; before `keep`,
    `undo` leads back. If a call fails, the engine stays in its current state (from `begin` on paused, unless it takes
    the version while it serves), and the error names that state. Nothing but these calls changes the object, so other
    threads may ask the engine's client anything meanwhile.

    Args:
        version: the next version.

    Attributes:
        version: the version.
        obstacle: why the engine has to be paused for the version; "" if it takes it while it serves. `stage` sets it.
    """

    obstacle: str = WHOLE

    def __init__(self, version: int) -> None:
        self.version = version

    @abstractmethod
    def stage(self, part: Part | None = None) -> None:
        """Make the engine prepare for the version as far as it can while it serves.

        Args:
            part: which tensors the version contains, and which version has the others; None for a full version.

        Raises:
            EngineRefusedError, StaleBaseError: the engine lacks the part's base, or takes no parts; it still serves
                its earlier weights.
        """

    @abstractmethod
    def begin(self) -> None:
        """Pause the engine, if there is an `obstacle`, and prepare it to load.

        On failure no weight has changed, and an engine that served serves.
        """

    @abstractmethod
    def load(self, info: Info, on_failure: Callable[[], None] = nothing) -> None:
        """Make every worker receive one handoff; return once they all have.

        Args:
            info: the fields of a `torchrl_ext.base.messages.Load`, whose ``handoff`` is of `Transport.prepare`.
            on_failure: as for `EngineClient.join`.
        """

    @abstractmethod
    def verify(self, digests: Mapping[str, str], digest: str = "") -> None:
        """Make every worker compare its weights with the trainer's digests; do nothing if there are none.

        Args:
            digests: of tensors, by name; empty if they travel with the weights.
            digest: over all of them (`torchrl_ext.data.weights.digests.digest_of`), which workers have to name in
                `commit`; "" if it is not known.

        Raises:
            EngineRefusedError, IntegrityError: a worker's weights differ; names the tensor.
        """

    @abstractmethod
    def commit(self) -> tuple[EngineRow, ...]:
        """Finish the version, resume the engine if it is paused, and return its row.

        Raises:
            EngineRefusedError: a worker with our plugin does not hold what was sent. The engine stays paused, or serves
                its previous version again if it was not.
        """

    def undo(self) -> None:
        """Make the engine serve, exactly, what it served before the version.

        Raises:
            EngineRefusedError: there is no way back: the version was sent whole, say. The engine is paused then.
        """
        raise EngineRefusedError(f"there is no way back from version {self.version}")

    def keep(self) -> None:  # noqa: B027 - most keep nothing
        """Give up the way back and its memory; never raises."""

    @abstractmethod
    def rows(self) -> tuple[EngineRow, ...]:
        """Return what the update has come to so far, one row per engine."""

    @final
    @contextmanager
    def begun(self) -> Iterator[None]:
        """`begin`, and run the body; if it raises, the engine stays paused and may be half updated."""
        try:
            self.begin()
            yield
        except Exception:
            raise  # it says what each engine serves
        except BaseException:
            if left := ", ".join(row.engine for row in self.rows()):
                words = "the update to version %d was interrupted; %s may stay paused until resume() or the next update"
                log.error(words, self.version, left)
            raise


class EngineClient(ABC):
    """Controls one engine, or a fleet: pauses and resumes it, takes it through an update, asks how it is.

    Any thread may ask anything at any time, since what an update knows lives in its `Update`.

    Every call raises EngineUnreachableError, EngineRefusedError or DeadlineError if the engine gives no answer, or an
    unusable one, or is late. A fleet's EngineError has a row per engine that failed.

    Example:
        >>> engine = tx.connect(address)
        >>> [(one.kind, one.info().world_size) for one in engine.each()]
        [('embedded', 1)]
        >>> engine.pause()  # whether it generated before
        True
        >>> engine.resume()
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def url(self) -> str:
        """The engine's address, or another readable name."""

    @abstractmethod
    def info(self) -> EngineInfo:
        """Ask the engine for its kind, model, version and sizes."""

    def members(self) -> tuple[str, ...]:
        """Return the addresses of the engines that take part in the next update."""
        return (self.url,)

    def each(self) -> tuple[EngineClient, ...]:
        """Return the engines that this client drives: itself, or the active members of a fleet."""
        return (self,)

    def replaced(self, connection: str) -> str:
        """Return why the sender that joined as ``connection`` (see `join`) must join again; "" if it need not.

        Also "" if the engine does not answer: the next step then raises the error.
        """
        return ""

    @property
    def verifies(self) -> bool:
        """Whether the joined engine can compare its weights with the trainer's digests."""
        return True

    @property
    def rehearsed(self) -> tuple[Info, ...]:
        """The workers' rehearsal reports (`Rehearsal.to_json`); empty before `rehearse`."""
        return ()

    @abstractmethod
    def join(self, offer: Info, on_failure: Callable[[], None] = nothing) -> None:
        """Make every worker join a transport; return once they all have.

        Args:
            offer: the fields of a `torchrl_ext.base.messages.Join`, whose ``offer`` is of `Transport.open`; the client
                adds ``rank_offset`` (1 for a single engine).
            on_failure: called as soon as one engine fails, to release others that wait for it.
        """

    def rehearse(self, how: str = "once") -> str:
        """Check, before the first update, that an update gives the same weights as a cold start.

        The engine is paused meanwhile, unless it need not rehearse, and then serves the same weights again.

        Args:
            how: ``"once"`` per start of the engine, or ``"never"``.

        Returns:
            The proof that a confirmed update gives, one of `torchrl_ext.base.reports.PROOFS`; of a fleet the weakest.

        Raises:
            EngineRefusedError: the weights differ; names the layers. The engine serves its earlier weights, or stays
                paused if it could not restore them.
        """
        return "sent"

    @abstractmethod
    def update(self, version: int, manner: Manner = Manner()) -> Update:
        """Return a new update of the engine, or of each engine that takes part now, to ``version``."""

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probabilities of ``prompts`` under the engine's current weights, computed without its caches.

        The engine must be serving (see `resume`): a paused engine may keep the call waiting until its deadline. A busy
        engine queues the request. For a fleet, ask each engine of `each`.

        Args:
            prompts: token ids, at least one per prompt. If there are no prompts, no request is sent.

        Returns:
            Per prompt the natural-log probability of each token after the first, given the tokens before it; NaN where
            the engine has no number.

        Raises:
            ConfigError: this kind of engine computes no log-probabilities.
        """
        raise no_logprobs(self.url, self.kind)

    @abstractmethod
    def load_adapter(self, name: str, path: str) -> None:
        """Serve the LoRA adapter in a directory under ``name``, in place of the one that the name stands for now.

        Args:
            name: the adapter's name in requests: ``model`` of vLLM's routes, ``lora_path`` of SGLang's.
            path: a directory as PEFT writes it (see `torchrl_ext.LoraPublisher`), under the engine's own path.

        Raises:
            ConfigError: this kind of engine serves no adapters.
            EngineRefusedError: the engine did not load it; the error says what it serves under ``name`` now.
        """

    @abstractmethod
    def unload_adapter(self, name: str) -> None:
        """Serve no adapter under ``name`` any more; SGLang loads it again for a request that names it."""

    @abstractmethod
    def pause(self) -> bool:
        """Stop generation; the client's ``pause_mode`` decides what happens to running requests.

        Returns:
            Whether the engine was serving before.
        """

    @abstractmethod
    def resume(self) -> None:
        """Let the engine generate again.

        Raises:
            EngineRefusedError: the engine sleeps, has no weights, holds a part of a version, or refuses.
        """

    @abstractmethod
    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        """Make the engine release memory for the trainer; the next update wakes it, first the weights, then the cache.

        Args:
            level: 0 only pauses; 1 keeps the weights on the host and drops keys and values; 2 drops both, and the
                engine serves again only after an update that writes every weight.
            tags: ``["kv_cache"]`` drops only keys and values; None means everything.

        Raises:
            ConfigError: this kind of engine cannot sleep, or does not support this level or these tags.
        """

    @abstractmethod
    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Wake ``weights``, ``kv_cache`` or, by default, both; a fully awake engine serves again.

        Raises:
            EngineRefusedError: the engine would serve without weights (it slept at level 2 and had no update since), or
                with a part of a version.
        """

    @abstractmethod
    def look(self) -> tuple[EngineRow, ...]:
        """Ask how each engine is now, and which version it serves; one row per engine. It changes nothing."""

    @abstractmethod
    def close(self) -> None:
        """Leave the transport and close the connection; the engine keeps running."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NullEngine(EngineClient):
    """A client without an engine, for ranks that drive none and for senders used only as a data layer.

    Args:
        on_load: called with each handoff's info, which a data layer announces to its own workers.
    """

    kind: ClassVar[str] = "none"
    url = "none"
    verifies = False

    def __init__(self, on_load: Callable[[Info], None] = lambda info: None) -> None:
        self._on_load = on_load

    def info(self) -> EngineInfo:
        return EngineInfo(url=self.url, kind=self.kind, world_size=0)

    def each(self) -> tuple[EngineClient, ...]:
        return ()

    def update(self, version: int, manner: Manner = Manner()) -> Update:
        return _NullUpdate(version, self._on_load)

    def pause(self) -> bool:
        return False

    def look(self) -> tuple[EngineRow, ...]:
        return ()

    def _ignore(self, *args: Any, **settings: Any) -> None:
        """Do nothing."""

    join = resume = sleep = wake_up = load_adapter = unload_adapter = close = _ignore


@final
class _NullUpdate(Update):
    def __init__(self, version: int, on_load: Callable[[Info], None]) -> None:
        super().__init__(version)
        self._on_load = on_load

    def load(self, info: Info, on_failure: Callable[[], None] = nothing) -> None:
        self._on_load(info)

    def commit(self) -> tuple[EngineRow, ...]:
        return ()

    rows = commit

    def _ignore(self, *args: Any, **settings: Any) -> None:
        """Do nothing."""

    stage = begin = verify = _ignore
