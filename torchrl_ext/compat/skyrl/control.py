"""SkyRL's control calls and update steps, under its names; each goes to every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from torchrl_ext.compat.skyrl.published import stage
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError
from torchrl_ext.messages import Finish, Load, Seal
from torchrl_ext.registry import engines
from torchrl_ext.rpc.connections import each
from torchrl_ext.rpc.discovery import connect
from torchrl_ext.rpc.http import HTTPSession, normalise_urls
from torchrl_ext.rpc.makes.http import session
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.transports.published import Joined
from torchrl_ext.types import Info

__all__ = ["EngineControl", "PauseMode", "transport_for"]

_T = TypeVar("_T")
_TIMEOUT_S = 60.0  # for calls that wait for no worker
_NO_ROUTE = (404, 405, 501)
_NCCL = "nccl"  # vLLM's own backend
_SKYRL, _EXTENSION = "skyrl", "NewInferenceWorkerWrap"


def transport_for(weight_sync_backend: str, colocate_all: bool) -> str:
    """Return the name of the transport that matches these two settings of SkyRL's trainer."""
    if weight_sync_backend == "delta":
        return "delta"
    return "ipc" if weight_sync_backend == "nccl" and colocate_all else "collective"


class PauseMode(Enum):
    """What a pause does to running requests: see `EngineControl.pause`."""

    ABORT = "abort"
    KEEP = "keep"
    WAIT = "wait"


@dataclass(kw_only=True)
class EngineControl:
    """Controls engines with the methods of SkyRL's client; each method calls all engines at the same time.

    The steps of an update use vLLM's own routes, or worker methods on SkyRL's own servers. The caller provides the
    content: one of our messages, or what SkyRL's trainer sends. Unless documented otherwise, a call returns
    ``{url: {"status", "body"}}``. It waits for every engine and may raise

    * EngineError: the call failed on an engine; has one row per engine, with its current state;
    * ConfigError: the address of an engine is a router's; no engine was called.

    Attributes:
        server_urls: base address of every engine; control calls refuse a router's address.
        kind: ``"vllm"``, ``"sglang"`` or ``"embedded"``.
        adapter: name of the LoRA adapter to generate with (`AdapterSender`); None for the base weights.
        uses_lora_weight_sync: whether updates bring only an adapter; then a request must name a model unless `adapter`
            does, and a sleep keeps the base weights.
        data_parallel_size: number of consecutive ``server_urls`` that are servers of one deployment.
        api_key: sent as a bearer token; see `HTTPSession` for several.
        control_timeout_s: deadline of a control call, in seconds.
    """

    server_urls: Sequence[str]
    kind: str = "vllm"
    adapter: str | None = None
    uses_lora_weight_sync: bool = False
    data_parallel_size: int = 1
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    control_timeout_s: float = 600.0
    _updates: int = field(default=0, init=False, repr=False, compare=False)
    _sizes: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)
    _sessions: Mapping[str, HTTPSession] = field(default_factory=dict, init=False, repr=False, compare=False)
    _receivers: Mapping[str, str] | None = field(default=None, init=False, repr=False, compare=False)
    _base: str | None = field(default=None, init=False, repr=False, compare=False)  # checkpoint that deltas build on
    _fetched: tuple[int, Joined] | None = field(default=None, init=False, repr=False, compare=False)
    _loading: int | None = field(default=None, init=False, repr=False, compare=False)  # fetched version being loaded

    def __post_init__(self) -> None:
        self.server_urls = tuple(normalise_urls(self.server_urls))
        self._sessions = {url: session(url, self.api_key, _TIMEOUT_S) for url in self.server_urls}

    def fleet(self, **settings: Any) -> Pool:
        """Return a client with which `WeightSender` runs whole updates on every engine.

        Args:
            settings: arguments of `torchrl_ext.connect`.
        """
        dp_size = self.data_parallel_size
        return connect(*self.server_urls, api_key=self.api_key, data_parallel_size=dp_size, **settings)

    # pause, sleep, caches

    async def pause(self, mode: Any = "keep", clear_cache: bool = False) -> dict[str, Info]:
        """Pause every engine.

        Args:
            mode: ``keep`` freezes running requests, ``wait`` lets them finish, ``abort`` ends them (this client then
                requests the rest once an engine serves again); a string, or an enum with such a value, as `PauseMode`.
            clear_cache: drop the prefix cache as well.

        Returns:
            By address; the body is the server's answer with a ``status`` from the states of
            `torchrl_ext.types.EngineRow`. `resume`, `sleep` and `wake_up` return the same.

        Raises:
            ConfigError: unknown mode.
        """
        how = str(getattr(mode, "value", mode)).lower()
        paused = await self._state_after("pause", Pool.pause, pause_mode=how)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)
        return paused

    async def resume(self) -> dict[str, Info]:
        """Resume generation on every engine; one that sleeps without weights, or holds half an update, refuses."""
        return await self._state_after("resume", Pool.resume)

    resume_generation = resume

    async def pause_generation(self, clear_cache: bool = False) -> dict[str, Info]:
        """Pause every engine with mode ``keep``: see `pause`."""
        return await self.pause(PauseMode.KEEP, clear_cache)

    async def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine release its device memory: see `torchrl_ext.rpc.client.EngineClient.sleep`.

        Args:
            level: 1 keeps weights on the host, 2 drops them; capped at 1 if updates bring adapters or `adapter` is set.
            tags: None, or ``["kv_cache"]``.

        Raises:
            ConfigError: engines of this kind cannot sleep, or not with this level or tag.
        """
        adapters = self.uses_lora_weight_sync or self.adapter is not None
        found = min(level, 1) if adapters else level
        return await self._state_after("sleep", lambda fleet: fleet.sleep(found, tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine restore its device memory; one that is fully awake serves again.

        Args:
            tags: ``["weights"]`` or ``["kv_cache"]``; None for everything.

        Raises:
            ConfigError: engines of this kind cannot sleep, or have no such tag.
        """
        return await self._state_after("wake up", lambda fleet: fleet.wake_up(tags))

    async def sleep_for_weight_sync(self, offload_kv: bool = True) -> dict[str, Info]:
        """Pause every engine with its running requests frozen, and make it release the memory of its weights.

        Args:
            offload_kv: keep keys and values on the host. Only SkyRL's own servers do; others recompute those of frozen
                requests after the wake.
        """
        if await self._skyrls():
            return await self._worker_method("sleep", "skyrl_sleep_for_weight_sync", offload_kv=offload_kv)
        return await self.sleep()

    async def wake_for_weight_sync(self, tags: Sequence[str]) -> dict[str, Info]:
        """Make every engine restore device memory; it stays paused until `resume_generation`.

        Args:
            tags: ``["weights"]`` before an update, ``["kv_cache"]`` after it; both if weights stayed on the host.
        """
        if await self._skyrls():
            return await self._worker_method("wake up", "skyrl_wake_for_weight_sync", tags=list(tags))

        def wake(fleet: Pool) -> None:  # each engine's own call keeps it paused, so none waits for another
            fleet.everywhere("wake up", lambda engine: engine.wake_up(tags, paused=True))

        return await self._state_after("wake up", wake)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Info]:
        """Make every engine drop its cached keys and values.

        Args:
            reset_running_requests: also drop those of running requests, which then recompute them. SGLang's engines do
                not receive this, and refuse while any request runs.
        """
        if self.kind == "sglang":
            return await self._posted("drop its cache", "/flush_cache")
        query = {"reset_running_requests": str(reset_running_requests).lower()}  # vLLM's route reads the query
        body = {"reset_running_requests": reset_running_requests}  # SkyRL's route reads the body
        return await self._posted("drop its cache", "/reset_prefix_cache", body, query=query)

    # questions

    async def weight_versions(self) -> dict[str, str]:
        """Return the label of the weights that each engine serves, by address."""
        return await self._everywhere("tell its version", lambda engine: engine.info().weight_version)

    async def world_sizes(self) -> dict[str, int]:
        """Return the number of workers of each engine that receive weights, by address."""
        return await self._everywhere("tell its world size", lambda engine: engine.world_size)

    async def get_world_size(self) -> tuple[int, int]:
        """Return the number of workers of all engines together, and the number that one engine reports.

        Each server of a deployment (``data_parallel_size``) reports the workers of all its servers, which count once.
        The answer is cached until ``teardown``.

        Raises:
            ConfigError: engines differ in size; `world_sizes` returns each size.
        """
        if self._sizes is None:
            sizes = await self.world_sizes()
            self._sizes = len(sizes) // self.data_parallel_size * _alike(sizes), _alike(sizes)
        return self._sizes

    # the steps of an update

    @property
    def weight_version(self) -> int:
        """The number of complete updates: of `increment_weight_version` calls."""
        return self._updates

    def increment_weight_version(self) -> None:
        """Count a complete update. A pickled client keeps the count."""
        self._updates += 1

    async def init_weight_update_communicator(self, init_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/init_weight_transfer_engine`` on every engine, each with its own rank offset.

        Args:
            init_info: JSON-safe mapping, or a dataclass; its ``rank_offset`` (default 1) is the first engine's, and
                servers of one deployment (``data_parallel_size``) share one. Or an object of SkyRL's with
                ``for_servers`` and ``to_api_payload``, which computes the offsets itself. The object of SkyRL's delta
                strategy (``base_model_path``) is for SkyRL's own servers; other engines join when they fetch.

        Raises:
            ConfigError: the engines are SGLang's; or they differ in size, and the object is SkyRL's.
        """
        self._refuse_sglang()
        sizes, receivers = await self.world_sizes(), await self._asked_receivers()
        if (for_servers := getattr(init_info, "for_servers", None)) is not None:
            infos = [_plain(one) for one in for_servers(_alike(sizes), len(sizes), dp_size=self.data_parallel_size)]
        else:
            info = _plain(init_info)
            offset, infos = info.get("rank_offset", 1), []
            for place, workers in enumerate(sizes.values(), start=1):
                infos.append({**info, "rank_offset": offset})
                offset += workers if place % self.data_parallel_size == 0 else 0
        if "base_model_path" in infos[0] and not await self._skyrls():
            self._base = str(infos[0]["base_model_path"])
            return {url: {"status": 200, "body": "fetch_weights joins the folder"} for url in sizes}
        bodies = {}
        for url, info in zip(sizes, infos, strict=True):
            broadcast = {"master_address", "master_port"} <= info.keys() and "kind" not in info
            packed = {"packed": True} if broadcast and receivers[url] == _NCCL else {}
            bodies[url] = {"init_info": {**packed, **info}}
        return await self._step("join the transport", "/init_weight_transfer_engine", bodies.__getitem__)

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> dict[str, Info]:
        """Call vLLM's ``/start_weight_update`` on every engine.

        Args:
            is_checkpoint_format: whether names and shapes are a checkpoint's. Only SkyRL's own servers accept others.

        Raises:
            ConfigError: not a checkpoint's, and the servers are not SkyRL's; or the engines are SGLang's.
        """
        if not is_checkpoint_format and not await self._skyrls():
            raise ConfigError(
                "vLLM has no route for weights under the names of its own layout", expected="is_checkpoint_format=True"
            )
        theirs, kwargs = "skyrl_start_weight_update", {"is_checkpoint_format": is_checkpoint_format}
        return await self._step("start the update", "/start_weight_update", method=theirs, **kwargs)

    async def update_named_weights(self, update_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/update_weights`` on every engine, for one piece of an update, while the trainer broadcasts.

        Args:
            update_info: JSON-safe mapping, a dataclass, or an object of SkyRL's with ``to_api_payload``. On servers
                other than SkyRL's, the object of SkyRL's delta strategy (``target_version``) loads what `fetch_weights`
                staged.

        Raises:
            ConfigError: `fetch_weights` staged no such version; or the engines are SGLang's.
        """
        info, receivers = _plain(update_info), await self._asked_receivers()
        if "target_version" in info and not await self._skyrls():
            return await self._load_fetched(int(info["target_version"]))
        fewer = {name: value for name, value in info.items() if name != "packed"}  # vLLM 0.32: only in init_info
        return await self._step(
            "load", "/update_weights", lambda url: {"update_info": fewer if receivers[url] == _NCCL else info}
        )

    async def update_weights_nccl(self, update_info: Any) -> dict[str, Info]:
        """Load one piece of an update that the trainer broadcasts: see `update_named_weights`."""
        info = _plain(update_info)
        if await self._skyrls():
            return await self._worker_method("load", "update_weights_nccl", update_info=info)
        return await self.update_named_weights(info)

    async def update_weights_ipc(self, update_info: Any) -> dict[str, Info]:
        """Load one piece of an update from the trainer's device memory: see `update_named_weights`.

        Only SkyRL's own servers read the CUDA memory handles of SkyRL's trainer; for others use
        ``WeightSender(make_transport("ipc"), client.fleet())``.

        Raises:
            ConfigError: such handles on other servers than SkyRL's; or the engines are SGLang's.
        """
        info = _plain(update_info)
        if await self._skyrls():
            return await self._worker_method("load", "update_weights_ipc", update_info=info)
        if "ipc_handles_pickled" in info:
            raise ConfigError(
                "only SkyRL's own servers can read these CUDA IPC handles",
                hint='use WeightSender(make_transport("ipc"), client.fleet())',
            )
        return await self.update_named_weights(info)

    async def finish_weight_update(self, weight_version: int | str | None = None) -> dict[str, Info]:
        """Call vLLM's ``/finish_weight_update`` on every engine; the version becomes the label of its weights.

        Args:
            weight_version: None for the version that was loaded from a folder, or else for the next number,
                `weight_version` plus 1.

        Raises:
            ConfigError: the engines are SGLang's.
        """
        following = self._updates + 1 if self._loading is None else self._loading
        body = {"weight_version": str(following if weight_version is None else weight_version)}
        theirs = "skyrl_finish_weight_update"
        finished = await self._step("finish the update", "/finish_weight_update", body, theirs)
        self._loading = None
        return finished

    async def fetch_weights(self, target_version: int, sync_dir: str | None = None, uri: str | None = None) -> Any:
        """Make every engine fetch a version from shared storage while it serves.

        SkyRL's own servers have ``/fetch_weights``. Engines with our plugin join the folder and stage the version;
        `update_named_weights` then loads it.

        Args:
            sync_dir: address of the folder that holds all versions.
            uri: address of this version. Without both, our plugin stages the version from the folder that a
                `WeightSender` with a `DeltaTransport` made it join.

        Raises:
            StoreError: the version does not exist.
            ConfigError: versions build on an unknown checkpoint.
        """
        given = {"target_version": target_version, "sync_dir": sync_dir, "uri": uri}
        body = {name: value for name, value in given.items() if value is not None}
        root = uri.rstrip("/").rpartition("/")[0] if sync_dir is None and uri is not None else sync_dir
        done = {"status": 200, "body": {"status": "ok", "result": [{"status": "ok", **body}]}}
        what = f"fetch version {target_version}"

        def fetch(fleet: Pool) -> list[Info]:
            answers = fleet.everywhere(what, lambda engine: _post_if_there(engine, "/fetch_weights", body))
            if ours := [engine for engine, one in zip(fleet.engines, answers, strict=True) if one is None]:
                before = None if self._fetched is None else self._fetched[1]
                joined = stage(Pool(ours), target_version, root, self._base, before)
                self._fetched = None if joined is None else (target_version, joined)
            return [done if one is None else one for one in answers]

        return await self._driven(what, fetch)

    async def _load_fetched(self, version: int) -> dict[str, Info]:
        """Load the whole version that `fetch_weights` staged."""
        staged, fetched = self._fetched or (None, None)
        if fetched is None or staged != version:
            words = "no version" if staged is None else f"version {staged}"
            raise ConfigError(
                f"version {version} was not fetched: engines have staged {words}",
                hint="call fetch_weights first, with its sync_dir, before start_weight_update",
            )
        load = Load(connection=fetched.connection, version=version, handoff={"params": fetched.params})
        await self._step("load", "/update_weights", {"update_info": load.to_json()})
        self._loading = version
        seal = Seal(connection=fetched.connection)
        finish = Finish(connection=fetched.connection, version=version, loads=1)
        sealed = await self._step("load", "/update_weights", {"update_info": seal.to_json()})
        await self._everywhere("finish the load", lambda engine: engine.port.say_each(finish))
        return sealed

    # adapters

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, Info]:
        """Serve an adapter under a name, replacing any earlier one, by SkyRL's route, or else by vLLM's own.

        For engines with our plugin, `torchrl_ext.AdapterSender` serves an adapter once every engine has it.

        Args:
            lora_name: name that requests give as their model.
            lora_path: folder of the adapter, which engines can read.
        """
        body = {"lora_name": lora_name, "lora_path": lora_path}

        def load(engine: Any) -> Info:
            found = _post_if_there(engine, "/skyrl/v1/load_lora_adapter", body)
            return found or engine.port.post("/v1/load_lora_adapter", {**body, "load_inplace": True})

        return await self._everywhere(f"load adapter {lora_name!r}", load)

    async def unload_lora_adapter(self, lora_name: str) -> dict[str, Info]:
        """Unload an adapter; engines then refuse requests that name it."""
        return await self._posted(f"unload adapter {lora_name!r}", "/v1/unload_lora_adapter", {"lora_name": lora_name})

    # helpers

    async def _skyrls(self) -> bool:
        """Return whether any of the engines is SkyRL's own server."""
        return _SKYRL in (await self._asked_receivers()).values()

    async def _asked_receivers(self) -> Mapping[str, str]:
        """Return each server's weight receiver by address, and ask only once: "skyrl" for SkyRL's own servers, a
        weight-transfer backend of vLLM, or "" if the server reports none. Raise ConfigError for a router's address."""
        if self._receivers is None:
            found = await each([asyncio.to_thread(_receiver, http) for http in self._sessions.values()])
            self._receivers = dict(zip(self._sessions, found, strict=True))
        return self._receivers

    def _refuse_sglang(self) -> None:
        if self.kind == "sglang":
            hint = "use WeightSender(transport, client.fleet())"
            raise ConfigError("SGLang's weight routes need arguments that only a transport knows", hint=hint)

    async def _step(self, what: str, route: str, body: Any = None, method: str = "", **kwargs: Any) -> dict[str, Info]:
        """Run a step of an update by a route, as `_posted`, or by a worker method of SkyRL's own servers."""
        self._refuse_sglang()
        if method and await self._skyrls():
            return await self._worker_method(what, method, **kwargs)
        return await self._posted(what, route, body)

    async def _worker_method(self, what: str, method: str, **kwargs: Any) -> dict[str, Info]:
        """Call a worker method of SkyRL's own servers."""
        body = {"method": method, **({"kwargs": kwargs} if kwargs else {})}
        return await self._posted(what, "/collective_rpc", body)

    async def _posted(self, what: str, route: str, body: Any = None, **how: Any) -> dict[str, Info]:
        """Post to a route of each engine one body, or what ``body`` returns for its address."""
        given = body if callable(body) else lambda url: body
        return await self._everywhere(what, lambda engine: engine.port.post(route, given(engine.url), **how))

    async def _everywhere(self, what: str, call: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the result of ``call`` for each engine's client, by address."""
        return await self._driven(what, lambda fleet: fleet.everywhere(what, call))

    async def _state_after(self, what: str, call: Callable[[Pool], object], **settings: Any) -> dict[str, Info]:
        def called(fleet: Pool) -> list[Info]:
            call(fleet)
            answers = [getattr(getattr(engine, "port", None), "answer", {}) for engine in fleet.engines]
            rows = zip(answers, fleet.rows(), strict=True)
            return [{"status": 200, "body": {**answer, "status": row.state}} for answer, row in rows]

        return await self._driven(what, called, **settings)

    async def _driven(self, what: str, call: Callable[[Pool], Sequence[_T]], **settings: Any) -> dict[str, _T]:
        """Run ``call`` in a thread on a pool of the engines, whose clients have ``settings``; return its results, one
        per engine, by address. Errors are those of the class; ``what`` names the call in them."""
        await self._asked_receivers()
        settings |= {"api_key": self.api_key, "load_timeout_s": self.control_timeout_s}
        made = [engines.make(self.kind, url=url, **settings) for url in self._sessions]
        for engine, http in zip(made, self._sessions.values(), strict=True):
            engine.port.http = http  # already known not to be a router's
        fleet = Pool(made)

        def driving() -> Sequence[_T]:
            try:
                return call(fleet)
            except (EngineError, DeadlineError) as error:
                errors = [row.error for row in getattr(error, "rows", ())] or [str(error)]  # a fleet of one: its own
                rows = [replace(row, error=one) for row, one in zip(fleet.look(), errors, strict=True)]
                parts = {"expected": error.expected, "state": error.state, "hint": error.hint}
                raise EngineError(error.what, rows=tuple(rows), **parts) from error
            finally:
                fleet.close()

        return dict(zip(self._sessions, await asyncio.to_thread(driving), strict=True))


def _alike(sizes: Mapping[str, int]) -> int:
    """Return the size that all engines have; raise ConfigError if they differ."""
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"engines differ in world size: {dict(sizes)}", hint="call world_sizes")
    return next(iter(sizes.values()))


def _receiver(http: HTTPSession) -> str:
    """Return the weight receiver of a server: see `EngineControl._asked_receivers`."""
    try:
        config = http.get("/server_info", query={"config_format": "json"})["vllm_config"]
        if str(config["parallel_config"].get("worker_extension_cls")).endswith(_EXTENSION):
            return _SKYRL
        return str((config.get("weight_transfer_config") or {}).get("backend") or "")
    except (EngineRefusedError, KeyError, TypeError, AttributeError):
        return ""


def _post_if_there(engine: Any, route: str, body: Info) -> Info | None:
    """Post to a route of an engine; return None if the engine lacks the route."""
    try:
        return engine.port.post(route, body)
    except EngineRefusedError as error:
        if error.status in _NO_ROUTE:
            return None
        raise


def _plain(info: Any) -> dict[str, Any]:
    if (payload := getattr(info, "to_api_payload", None)) is not None:
        return dict(payload())
    return dict(info) if isinstance(info, Mapping) else asdict(info)
