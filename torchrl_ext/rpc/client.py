"""The contract of the control layer: an engine client tells an engine what to do and when; it never sees a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torchrl_ext.errors import ConfigError
from torchrl_ext.types import EngineInfo, EngineRow, Info, Part

__all__ = ["EngineClient", "NullEngine"]


def _nothing() -> None:
    return None


class EngineClient(ABC):
    """Drives one engine, or a fleet of them, through weight updates.

    The order of calls is ``connect``, then per update ``prefetch``, ``begin``, ``load`` (one per handoff), ``commit``.
    A call that fails leaves the engine as it is (paused from ``begin`` on) and says so.

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
        """The address, or another name that a person recognises."""

    @abstractmethod
    def info(self) -> EngineInfo:
        """Ask the engine for its kind, its model, its version and its sizes.

        Raises:
            EngineUnreachableError, EngineRefusedError: it gives no answer, or no usable one.
        """

    @property
    def world_size(self) -> int:
        """The number of workers that receive weights."""
        return self.info().world_size

    def members(self) -> tuple[str, ...]:
        """Return the addresses of the engines that take part in the next update."""
        return (self.url,)

    def each(self) -> tuple[EngineClient, ...]:
        """Return the engines that this client drives: itself, or the members of a fleet that take part now."""
        return (self,)

    def replaced(self, connection: str) -> str:
        """Return why the sender that joined as ``connection`` (see `connect`) has to join again; "" while its steps are
        taken, or where the engine does not answer, so that the next step says so."""
        return ""

    @property
    def verifies(self) -> bool:
        """Whether the engine that is connected can compare what it holds with the trainer's digests."""
        return True

    @property
    def proof(self) -> str:
        """The proof that a confirmed update gives (one of `torchrl_ext.types.PROOFS`); in a fleet, the weakest one."""
        return "sent"

    @property
    def rehearsed(self) -> tuple[Info, ...]:
        """Each worker's report on its rehearsal (`torchrl_ext.proof.rehearsal.Rehearsal.to_json`); empty before it."""
        return ()

    @abstractmethod
    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """Make every worker join the transport of ``info``, and return when they have.

        Args:
            info: from `Transport.open`; the client adds ``rank_offset`` (1 for a single engine). ``connection`` names
                the sender's connection, and ``sender`` its process: from now on workers refuse the steps of others.
            on_failure: called as soon as one engine fails, to release others that wait for it.
        """

    def rehearse(self, how: str = "once") -> None:  # noqa: B027 - what no loader of ours serves has nothing to show
        """Make the engine show, before the first update, that an update gives the same weights as a cold start.

        The engine is paused for it, unless nothing is to be shown or it was shown before; it serves the same weights
        afterwards.

        Args:
            how: ``"once"`` per start of the engine, ``"never"``, or ``"always"``.

        Raises:
            EngineRefusedError: the weights differ; names the layers. The engine serves what it served, or stays paused
                where that could not be restored.
        """

    @abstractmethod
    def prefetch(self, version: int, part: Part | None = None) -> None:
        """Have the engine prepare ``version`` as far as it can while it serves.

        Args:
            version: the version that comes.
            part: which tensors it brings, and what has the others; None for a whole one.

        Raises:
            EngineRefusedError, StaleBaseError: the engine does not hold what the part builds on, or takes no parts; it
                serves what it served.
        """

    @abstractmethod
    def begin(self, version: int) -> None:
        """Pause the engine and prepare it to load ``version``."""

    @abstractmethod
    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        """Make every worker receive one handoff, and return when they have."""

    @abstractmethod
    def commit(self, version: int) -> None:
        """Put ``version`` in service: finish, drop stale caches, resume."""

    def verify(self, digests: Mapping[str, str]) -> None:
        """Make every worker compare its weights with the trainer's digests; do nothing where there are none.

        Raises:
            EngineRefusedError, IntegrityError: the weights of a worker differ; names the tensor.
        """
        if digests:
            self._compare(digests)

    def _compare(self, digests: Mapping[str, str]) -> None:
        """Do what `verify` says, with digests."""
        raise ConfigError(f"{self.url} compares no digests", hint="give WeightSender verify=False")

    def oldest(self, version: int) -> int | None:
        """Return the oldest version that the engine may still read while ``version`` is in service; None if unknown."""
        return version

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probabilities of ``prompts`` under the weights that the engine holds, without its caches.

        The engine must serve (see `resume`): a paused one may keep the call waiting, up to its deadline. A busy one
        answers when it has room for another request. A fleet is not asked as one: see `each`.

        Args:
            prompts: token ids, at least one per prompt. Without any prompt no engine is asked, and only the errors that
                need no answer are raised.

        Returns:
            Per prompt the natural-log probability of each of its tokens after the first, given those before it; NaN
            where the engine has no number.

        Raises:
            ConfigError: this kind of engine computes none.
            EngineUnreachableError, EngineRefusedError, DeadlineError: it gives no answer, or one without them.
        """
        raise ConfigError(
            f"{self.url}: this kind of engine ({self.kind}) computes no log-probabilities",
            hint="leave verify='outputs' away; of a fleet ask the engines one by one: fleet.each()",
        )

    def adapter(self, name: str) -> EngineClient:
        """Return a client that keeps this engine at the newest version of the LoRA adapter called ``name``.

        The weights of the model stay as they are.

        Raises:
            ConfigError: this kind of engine serves no adapters.
        """
        raise ConfigError(
            f"{self.kind} engines serve no LoRA adapters",
            expected="a vLLM or an SGLang server",
            hint="send the merged weights: WeightSender does so with a PEFT model",
        )

    def unload(self) -> None:
        """Take out of service what this client loaded; only an adapter can be taken out."""
        raise ConfigError(f"{self.url} cannot serve without weights", hint="unload adapters only")

    @abstractmethod
    def pause(self) -> bool:
        """Stop the engine from generating; the client's ``pause_mode`` decides what happens to running requests.

        Returns:
            Whether it generated before.
        """

    @abstractmethod
    def resume(self) -> None:
        """Let the engine generate again."""

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> None:
        """Make the engine give memory back for the trainer; the next update wakes it, weights first, the cache last.

        Args:
            level: 0 only pauses; 1 keeps the weights on the host and drops keys and values; 2 drops both, and the
                engine serves again only after an update that wrote every weight.
            tags: ``["kv_cache"]`` drops keys and values only; None stands for everything.

        Raises:
            ConfigError: this kind of engine cannot sleep, or not so.
        """
        raise ConfigError(f"{self.kind} engines cannot be put to sleep", hint="use pause")

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Wake ``weights`` or ``kv_cache``, or everything; an engine that is wholly awake serves again.

        Raises:
            EngineRefusedError: it has no weights to serve (level 2, and no update since).
        """
        raise ConfigError(f"{self.kind} engines cannot be put to sleep", hint="use resume")

    @abstractmethod
    def rows(self) -> tuple[EngineRow, ...]:
        """Return the outcome of the last update, one row per engine."""

    def look(self) -> tuple[EngineRow, ...]:
        """Return `rows` with the state that each engine reports now, where it can be asked."""
        return self.rows()

    @abstractmethod
    def close(self) -> None:
        """Leave the transport and drop the connection; the engine itself goes on."""

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Run the body between `begin` and `commit`; if it raises, the engine stays paused, perhaps half updated."""
        self.begin(version)
        yield
        self.commit(version)


class NullEngine(EngineClient):
    """Stands for an engine where there is none: on ranks that do not drive one, and in senders used as a data layer.

    Args:
        on_load: called with each handoff's info (a data layer announces it to its workers).
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

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._on_load(info)

    def adapter(self, name: str) -> EngineClient:
        return self

    def pause(self) -> bool:
        return False

    def rows(self) -> tuple[EngineRow, ...]:
        return ()

    def _ignore(self, *args: Any, **settings: Any) -> None:
        """Do nothing: there is no engine that could."""

    connect = prefetch = begin = commit = resume = sleep = wake_up = unload = oldest = close = _ignore
