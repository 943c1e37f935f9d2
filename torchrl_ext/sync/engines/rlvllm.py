"""TorchRL's own vLLM engines (`RLvLLMEngine`) as engines of ours.

Of `AsyncVLLM`, its Ray workers and its local ones we drive the vLLM inside, whose workers take the weights themselves.
What else implements the interface takes pairs of name and tensor, and carries them to its workers by itself: then the
worker end of the transport is in this process (`RLvLLMClient`), and every transport can feed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import wait
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from torchrl_ext.errors import ConfigError, DeadlineError, EngineRefusedError, ManifestError, WeightSyncError
from torchrl_ext.landing.loader import Changes, WeightLoader
from torchrl_ext.rpc.client import EngineClient, _nothing
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.sync.engines.inprocess import InProcessEngine
from torchrl_ext.sync.engines.ray import RayEngine
from torchrl_ext.types import EngineInfo, EngineRow, Info, ParamMeta, Part, dtype_name
from torchrl_ext.waiting import in_thread
from torchrl_ext.weights.digests import tensor_digest
from torchrl_ext.weights.source import is_torchrl

__all__ = ["RLvLLMClient", "connect_torchrls"]

_TIMEOUT_S = 600.0
_LIMITS = {"timeout_s", "load_timeout_s", "start_timeout_s"}


def connect_torchrls(
    engine: Any, *, pause_mode: str | None = None, keep_cache: bool = False, **limits: float
) -> EngineClient:
    """Return the client for an `RLvLLMEngine` of TorchRL's.

    Args:
        engine: a launched `AsyncVLLM`, a `RayLLMWorker`, a `LocalLLMWrapper`, or another implementation.
        pause_mode: as for `InProcessEngine`, None for ``"keep"``; of vLLM's engines only.
        keep_cache: as for `InProcessEngine`; of vLLM's engines only.
        limits: deadlines as for `RayEngine`. Where Ray is not between, ``load_timeout_s``, else ``timeout_s``, is that
            of each call.

    Raises:
        ConfigError: an `AsyncVLLM` without replicas, or a setting that the engine does not take.
    """
    unknown = sorted(limits.keys() - _LIMITS)
    if unknown:
        raise ConfigError(
            f"TorchRL's engines take no {', '.join(unknown)}",
            expected=f"of {', '.join(sorted(_LIMITS | {'keep_cache', 'pause_mode'}))}",
        )
    timeout_s = limits.get("load_timeout_s", limits.get("timeout_s", _TIMEOUT_S))
    vllms: dict[str, Any] = {"pause_mode": pause_mode or "keep", "keep_cache": keep_cache, "timeout_s": timeout_s}
    if is_torchrl(engine, "LocalLLMWrapper"):
        return InProcessEngine(engine, url=_name(engine), **vllms)
    if is_torchrl(engine, "RayLLMWorker"):
        return RayEngine(engine.ray_actor, pick=partial(InProcessEngine, **vllms), **limits)
    if is_torchrl(engine, "AsyncVLLM"):
        if not engine.actors:
            raise ConfigError("this AsyncVLLM has no replicas", hint="make it by AsyncVLLM.launch or from_pretrained")
        pick = partial(_async_llm, **vllms)
        return Fleet([RayEngine(actor, pick=pick, **limits) for actor in engine.actors])
    if pause_mode is not None or keep_cache:
        raise ConfigError(f"{type(engine).__name__} takes no pause_mode and no keep_cache: it pauses by itself")
    return RLvLLMClient(engine, timeout_s=timeout_s)


def _async_llm(replica: Any, **settings: Any) -> InProcessEngine:
    """Return the client of the `AsyncLLM` in a replica of `AsyncVLLM`; it is called in the replica's actor."""
    return InProcessEngine(replica.engine, **settings)


def _name(engine: Any) -> str:
    return f"{type(engine).__name__}-{id(engine):x}"


class RLvLLMClient(EngineClient):
    """Drives an implementation of `torchrl.modules.llm.backends.vllm.RLvLLMEngine` by the methods of that interface.

    Its group is formed once (``init_weight_update_group``), each piece of an update goes to ``update_weights``, and
    ``reset_prefix_cache`` ends a version. The engine pauses by itself.

    Args:
        engine: the engine.
        timeout_s: deadline of each of its calls, in seconds; they have none of their own.
    """

    kind: ClassVar[str] = "ray"
    url: str = ""

    def __init__(self, engine: Any, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self.url = _name(engine)
        self._inner = InProcessEngine(_Loader(engine, self._call), url=self.url)
        self._grouped = False

    def info(self) -> EngineInfo:
        size = self._engine.get_tp_size()
        told = self._inner.info()
        return EngineInfo(url=self.url, kind=self.kind, tp_size=size, num_gpus=size, weight_version=told.weight_version)

    def connect(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._inner.connect(info)
        if not self._grouped:
            self._call("form its group", self._engine.init_weight_update_group)
            self._grouped = True

    def rehearse(self, how: str = "once") -> None:
        self._inner.rehearse(how)

    def prefetch(self, version: int, part: Part | None = None) -> None:
        self._inner.prefetch(version, part)

    def begin(self, version: int) -> None:
        self._inner.begin(version)

    def load(self, info: Info, on_failure: Callable[[], None] = _nothing) -> None:
        self._inner.load(info)

    def commit(self, version: int) -> None:
        self._call("reset its prefix cache", self._engine.reset_prefix_cache)
        self._inner.commit(version)

    def pause(self) -> bool:
        return self._inner.pause()

    def resume(self) -> None:
        self._inner.resume()

    def rows(self) -> tuple[EngineRow, ...]:
        return self._inner.rows()

    def close(self) -> None:
        self._inner.close()

    def _call(self, what: str, call: Callable[[], Any]) -> None:
        """Run ``call`` in a thread of its own, with a deadline.

        Raises:
            DeadlineError: it did not return in time.
            EngineRefusedError: it raised.
        """
        job = in_thread(call, "torchrl-ext-rlvllm")
        if not wait([job], self._timeout_s).done:
            raise DeadlineError(
                f"{self.url} did not {what} within {self._timeout_s:g} s", state="the call still runs in the engine"
            )
        try:
            job.result()
        except WeightSyncError:
            raise
        except BaseException as error:
            raise EngineRefusedError(f"{self.url} did not {what}: {type(error).__name__}: {error}") from error


class _Loader(WeightLoader):
    """Hands pairs of name and tensor to the engine; the tensors are whole, even those of a delta.

    Its digests are those of what it handed over: the interface reads nothing back.
    """

    def __init__(self, engine: Any, call: Callable[[str, Callable[[], Any]], None]) -> None:
        self._engine, self._call = engine, call
        self._digests: dict[str, str] = {}
        self._staged: list[tuple[str, Tensor]] = []
        self._vouches = True

    def vouch(self, wanted: bool) -> None:
        self._vouches, self._digests = wanted, {}

    def check(self, params: Iterable[ParamMeta]) -> None:
        known = self._engine.get_model_metadata()
        for meta in params if known else ():  # AsyncVLLM knows nothing of its model
            if meta.name not in known:
                raise ManifestError(f"the engine has no parameter {meta.name!r}", expected=f"one of its {len(known)}")
            dtype, shape = known[meta.name]
            if (dtype, tuple(shape)) != (meta.dtype, meta.shape):
                raise ManifestError(
                    f"parameter {meta} cannot land in the engine",
                    expected=f"{dtype_name(dtype)}{list(shape)}",
                    state="nothing was sent",
                )

    def load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        def noted() -> Any:
            for name, tensor in pairs:
                if self._vouches:
                    self._digests[name] = tensor_digest(tensor)
                yield name, tensor

        stream = noted()

        def update() -> None:
            self._engine.update_weights(stream)
            for _ in stream:  # an engine that stops early must not leave a collective half-way
                pass

        self._call("take weights", update)

    def stage(self, changes: Changes) -> None:
        touched: list[str] = []

        def unwanted(name: str) -> bool:
            touched.append(name)
            return False

        for _ in changes.patches(unwanted):  # none is wanted: names are enough
            pass
        self._staged = list(changes.whole(touched))

    def commit(self) -> None:
        staged, self._staged = self._staged, []
        self.load(staged)

    def digests(self) -> dict[str, str]:
        return dict(self._digests)
