"""Control calls and single steps of updates by the names of SkyRL's client: they go to every engine itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from torchrl_ext.compat.skyrl.published import Fetched, stage
from torchrl_ext.errors import ConfigError, DeadlineError, EngineError, EngineRefusedError
from torchrl_ext.messages import Load, Seal
from torchrl_ext.registry import engines
from torchrl_ext.rpc.connections import each
from torchrl_ext.rpc.discovery import connect
from torchrl_ext.rpc.http import HTTPSession, normalise_urls
from torchrl_ext.rpc.makes.http import session
from torchrl_ext.rpc.pool import Pool
from torchrl_ext.types import Info

__all__ = ["EngineControl", "PauseMode", "transport_for"]

_T = TypeVar("_T")
_TIMEOUT_S = 60.0  # of a call that waits for no worker
_NO_ROUTE = (404, 405, 501)
_NCCL = "nccl"  # vLLM's own backend
_SKYRL, _EXTENSION = "skyrl", "NewInferenceWorkerWrap"


def transport_for(weight_sync_backend: str, colocate_all: bool) -> str:
    """Return the name of the transport that does what SkyRL's trainer does with these two of its settings."""
    if weight_sync_backend == "delta":
        return "delta"
    return "ipc" if weight_sync_backend == "nccl" and colocate_all else "collective"


class PauseMode(Enum):
    """What a pause does to requests that run: see `EngineControl.pause`."""

    ABORT = "abort"
    KEEP = "keep"
    WAIT = "wait"


@dataclass(kw_only=True)
class EngineControl:
    """Controls engines with the methods of SkyRL's client; each method calls every engine, all at the same time.

    The steps of an update are vLLM's own routes; on SkyRL's own servers they are the methods of its workers. What is
    sent is the caller's: a message of ours, or what SkyRL's trainer sends. A call returns ``{url: {"status", "body"}}``
    unless it says otherwise. It waits for every engine, and every one of them may raise

    * EngineError: the call failed on some engine; has a row for each, with the state that it reports now;
    * ConfigError: the address of an engine is a router's, and no engine was called.

    Attributes:
        server_urls: base address of every engine; control calls are refused where a router answers.
        kind: ``"vllm"``, ``"sglang"`` or ``"embedded"``.
        adapter: name of the LoRA adapter to generate with (`AdapterSender`); None for the base weights.
        uses_lora_weight_sync: updates bring an adapter alone: a request then has to name a model, or `adapter` does,
            and a sleep keeps the base weights.
        data_parallel_size: how many of ``server_urls`` in a row are servers of one deployment.
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
    _base: str | None = field(default=None, init=False, repr=False, compare=False)  # that deltas are against
    _fetched: Fetched | None = field(default=None, init=False, repr=False, compare=False)
    _loading: int | None = field(default=None, init=False, repr=False, compare=False)  # loaded from what was fetched

    def __post_init__(self) -> None:
        self.server_urls = tuple(normalise_urls(self.server_urls))
        self._sessions = {url: session(url, self.api_key, _TIMEOUT_S) for url in self.server_urls}

    def fleet(self, **settings: Any) -> Pool:
        """Return a client for `WeightSender` that drives every engine through whole updates.

        Args:
            settings: as for `torchrl_ext.connect`.
        """
        dp_size = self.data_parallel_size
        return connect(*self.server_urls, api_key=self.api_key, data_parallel_size=dp_size, **settings)

    # pause, sleep, caches

    async def pause(self, mode: Any = "keep", clear_cache: bool = False) -> dict[str, Info]:
        """Pause every engine.

        Args:
            mode: ``keep`` freezes what runs, ``wait`` lets it end, ``abort`` ends it (this client then asks for the
                rest as soon as an engine serves again); a string, or an enum with such a value, as `PauseMode`.
            clear_cache: drop the prefix cache as well.

        Returns:
            By address; the body is what the server answered, with a ``status`` from the states of
            `torchrl_ext.types.EngineRow`. Also of `resume`, `sleep` and `wake_up`.

        Raises:
            ConfigError: no such mode.
        """
        how = str(getattr(mode, "value", mode)).lower()
        paused = await self._state_after("pause", Pool.pause, pause_mode=how)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)
        return paused

    async def resume(self) -> dict[str, Info]:
        """Let every engine generate again; one that sleeps without weights, or holds half an update, refuses."""
        return await self._state_after("resume", Pool.resume)

    resume_generation = resume

    async def pause_generation(self, clear_cache: bool = False) -> dict[str, Info]:
        """Pause every engine with mode ``keep``: see `pause`."""
        return await self.pause(PauseMode.KEEP, clear_cache)

    async def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine give its device memory back: see `torchrl_ext.rpc.client.EngineClient.sleep`.

        Args:
            level: 1 keeps weights on the host, 2 drops them. Where updates bring adapters alone it is never above 1.
            tags: None, or ``["kv_cache"]``.

        Raises:
            ConfigError: engines of this kind cannot sleep, or not so.
        """
        adapters = self.uses_lora_weight_sync or self.adapter is not None
        found = min(level, 1) if adapters else level
        return await self._state_after("sleep", lambda fleet: fleet.sleep(found, tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Info]:
        """Make every engine take its device memory again; one that is wholly awake serves again.

        Args:
            tags: ``["weights"]`` or ``["kv_cache"]``; None stands for everything.

        Raises:
            ConfigError: engines of this kind cannot sleep, or have no such tag.
        """
        return await self._state_after("wake up", lambda fleet: fleet.wake_up(tags))

    async def sleep_for_weight_sync(self, offload_kv: bool = True) -> dict[str, Info]:
        """Pause every engine with what it runs frozen, and make it give the memory of its weights back.

        Args:
            offload_kv: keep keys and values on the host. Only SkyRL's own servers do; others compute those of frozen
                requests anew after the wake.
        """
        if await self._skyrls():
            return await self._worker_method("sleep", "skyrl_sleep_for_weight_sync", offload_kv=offload_kv)
        return await self.sleep()

    async def wake_for_weight_sync(self, tags: Sequence[str]) -> dict[str, Info]:
        """Give every engine device memory again; it stays paused, until `resume_generation`.

        Args:
            tags: ``["weights"]`` before an update, ``["kv_cache"]`` after it; both where weights were kept on the host.
        """
        if await self._skyrls():
            return await self._worker_method("wake up", "skyrl_wake_for_weight_sync", tags=list(tags))

        def wake(fleet: Pool) -> None:  # each engine is paused by its own call, and waits for no other
            fleet.everywhere("wake up", lambda engine: engine.wake_up(tags, paused=True))

        return await self._state_after("wake up", wake)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> dict[str, Info]:
        """Make every engine drop its cached keys and values.

        Args:
            reset_running_requests: also of requests that run, which then compute them anew. Does not reach SGLang's
                engines: they refuse while any runs.
        """
        if self.kind == "sglang":
            return await self._posted("drop its cache", "/flush_cache")
        query = {"reset_running_requests": str(reset_running_requests).lower()}  # vLLM's route reads this
        body = {"reset_running_requests": reset_running_requests}  # and SkyRL's this
        return await self._posted("drop its cache", "/reset_prefix_cache", body, query=query)

    # questions

    async def weight_versions(self) -> dict[str, str]:
        """Ask every engine for the label of the weights that it serves; return the labels by address."""
        return await self._everywhere("tell its version", lambda engine: engine.info().weight_version)

    async def world_sizes(self) -> dict[str, int]:
        """Ask every engine how many of its workers receive weights; return the numbers by address."""
        return await self._everywhere("tell its world size", lambda engine: engine.world_size)

    async def get_world_size(self) -> tuple[int, int]:
        """Return the number of workers of all engines together, and the number that one engine reports.

        Servers of one deployment (``data_parallel_size``) report the workers of all, which count once. Engines are
        asked in the first call, and again after ``teardown``.

        Raises:
            ConfigError: engines differ in size; `world_sizes` has each.
        """
        if self._sizes is None:
            sizes = await self.world_sizes()
            self._sizes = len(sizes) // self.data_parallel_size * _alike(sizes), _alike(sizes)
        return self._sizes

    # the steps of an update

    @property
    def weight_version(self) -> int:
        """How many updates are complete: the number of `increment_weight_version` calls."""
        return self._updates

    def increment_weight_version(self) -> None:
        """Count a complete update. The number goes along where the client is pickled."""
        self._updates += 1

    async def init_weight_update_communicator(self, init_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/init_weight_transfer_engine`` on every engine, each with a rank offset of its own.

        Args:
            init_info: JSON-safe mapping, or a dataclass; its ``rank_offset`` (1) is the first engine's, and servers of
                one deployment (``data_parallel_size``) share one. Or an object of SkyRL's, which has ``for_servers``
                and ``to_api_payload`` and knows the offsets itself. That of SkyRL's delta strategy
                (``base_model_path``) is for SkyRL's own servers; other engines join when they fetch.

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
            is_checkpoint_format: whether names and shapes are a checkpoint's. Only SkyRL's own servers take others.

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
            update_info: JSON-safe mapping, a dataclass, or an object of SkyRL's with ``to_api_payload``. Where the
                servers are not SkyRL's own, that of SkyRL's delta strategy (``target_version``) loads what
                `fetch_weights` staged.

        Raises:
            ConfigError: `fetch_weights` staged no such version; or the engines are SGLang's.
        """
        info, receivers = _plain(update_info), await self._asked_receivers()
        if "target_version" in info and not await self._skyrls():
            return await self._load_fetched(int(info["target_version"]))
        fewer = {name: value for name, value in info.items() if name != "packed"}  # vLLM 0.32 has it in init_info alone
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
        """Load one piece of an update from device memory of the trainer: see `update_named_weights`.

        Handles of CUDA memory that SkyRL's trainer made are for SkyRL's own servers; for others there is
        ``WeightSender(make_transport("ipc"), client.fleet())``.

        Raises:
            ConfigError: such handles, and the servers are not SkyRL's; or the engines are SGLang's.
        """
        info = _plain(update_info)
        if await self._skyrls():
            return await self._worker_method("load", "update_weights_ipc", update_info=info)
        if "ipc_handles_pickled" in info:
            raise ConfigError(
                "these CUDA IPC handles are in a form that only SkyRL's own servers read",
                hint='use WeightSender(make_transport("ipc"), client.fleet())',
            )
        return await self.update_named_weights(info)

    async def finish_weight_update(self, weight_version: int | str | None = None) -> dict[str, Info]:
        """Call vLLM's ``/finish_weight_update`` on every engine; the version becomes the label of what it serves.

        Args:
            weight_version: None stands for the version that was loaded from a folder, or else for the next number:
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

        SkyRL's own servers have ``/fetch_weights``. Engines that run our plugin join the folder, and stage the version;
        `update_named_weights` then loads it.

        Args:
            target_version: number of the version.
            sync_dir: address of the folder that holds all versions.
            uri: address of this version. Without both, our plugin stages the version from the folder that a
                `WeightSender` with a `DeltaTransport` had it join.

        Raises:
            StoreError: there is no such version.
            ConfigError: versions lead back to a checkpoint that is not known here.
        """
        given = {"target_version": target_version, "sync_dir": sync_dir, "uri": uri}
        body = {name: value for name, value in given.items() if value is not None}
        root = uri.rstrip("/").rpartition("/")[0] if sync_dir is None and uri is not None else sync_dir
        done = {"status": 200, "body": {"status": "ok", "result": [{"status": "ok", **body}]}}
        what = f"fetch version {target_version}"

        def fetch(fleet: Pool) -> list[Info]:
            answers = fleet.everywhere(what, lambda engine: _post_if_there(engine, "/fetch_weights", body))
            if ours := [engine for engine, one in zip(fleet.engines, answers, strict=True) if one is None]:
                self._fetched = stage(Pool(ours), target_version, root, self._base, self._fetched)
            return [done if one is None else one for one in answers]

        return await self._driven(what, fetch)

    async def _load_fetched(self, version: int) -> dict[str, Info]:
        """Load the version that `fetch_weights` staged, whole."""
        fetched = self._fetched
        if fetched is None or fetched.version != version:
            staged = "no version" if fetched is None else f"version {fetched.version}"
            raise ConfigError(
                f"version {version} was not fetched: engines have staged {staged}",
                hint="call fetch_weights first, with its sync_dir, before start_weight_update",
            )
        load = Load(connection=fetched.connection, version=version, handoff={"params": fetched.params})
        await self._step("load", "/update_weights", {"update_info": load.to_json()})
        self._loading = version
        seal = Seal(connection=fetched.connection)
        return await self._step("load", "/update_weights", {"update_info": seal.to_json()})

    # adapters

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, Info]:
        """Serve an adapter under a name, in place of one that had it, by SkyRL's route, or else by vLLM's own.

        `torchrl_ext.AdapterSender` is for engines that run our plugin: it serves an adapter once every engine has it.

        Args:
            lora_name: what requests ask for as their model.
            lora_path: folder of the adapter, which engines can read.
        """
        body = {"lora_name": lora_name, "lora_path": lora_path}

        def load(engine: Any) -> Info:
            found = _post_if_there(engine, "/skyrl/v1/load_lora_adapter", body)
            return found or engine.port.post("/v1/load_lora_adapter", {**body, "load_inplace": True})

        return await self._everywhere(f"load adapter {lora_name!r}", load)

    async def unload_lora_adapter(self, lora_name: str) -> dict[str, Info]:
        """Take an adapter out of service: requests by its name are refused from now on."""
        return await self._posted(f"unload adapter {lora_name!r}", "/v1/unload_lora_adapter", {"lora_name": lora_name})

    # helpers

    async def _skyrls(self) -> bool:
        """Return whether the engines are SkyRL's own servers."""
        return _SKYRL in (await self._asked_receivers()).values()

    async def _asked_receivers(self) -> Mapping[str, str]:
        """Ask every server, once, which receiver of weights it runs; return the answers by address.

        An answer is "skyrl" for the workers of SkyRL's own servers, a weight-transfer backend of vLLM, or "" where the
        server does not say.

        Raises:
            ConfigError: an address is a router's.
        """
        if self._receivers is None:
            found = await each([asyncio.to_thread(_receiver, http) for http in self._sessions.values()])
            self._receivers = dict(zip(self._sessions, found, strict=True))
        return self._receivers

    def _refuse_sglang(self) -> None:
        if self.kind == "sglang":
            hint = "use WeightSender(transport, client.fleet())"
            raise ConfigError("SGLang's weight routes need facts that a transport knows", hint=hint)

    async def _step(self, what: str, route: str, body: Any = None, method: str = "", **kwargs: Any) -> dict[str, Info]:
        """Take a step of an update by a route, as `_posted`, or by a method of the workers of SkyRL's own servers."""
        self._refuse_sglang()
        if method and await self._skyrls():
            return await self._worker_method(what, method, **kwargs)
        return await self._posted(what, route, body)

    async def _worker_method(self, what: str, method: str, **kwargs: Any) -> dict[str, Info]:
        """Call a method of the workers of SkyRL's own servers."""
        body = {"method": method, **({"kwargs": kwargs} if kwargs else {})}
        return await self._posted(what, "/collective_rpc", body)

    async def _posted(self, what: str, route: str, body: Any = None, **how: Any) -> dict[str, Info]:
        """Call a route of each engine, with one body, or with what ``body`` returns for its address."""
        given = body if callable(body) else lambda url: body
        return await self._everywhere(what, lambda engine: engine.port.post(route, given(engine.url), **how))

    async def _everywhere(self, what: str, call: Callable[[Any], Any]) -> dict[str, Any]:
        """Return what ``call`` returns for each engine's client, by address."""
        return await self._driven(what, lambda fleet: fleet.everywhere(what, call))

    async def _state_after(self, what: str, call: Callable[[Pool], object], **settings: Any) -> dict[str, Info]:
        def called(fleet: Pool) -> list[Info]:
            call(fleet)
            answers = [getattr(getattr(engine, "port", None), "answer", {}) for engine in fleet.engines]
            rows = zip(answers, fleet.rows(), strict=True)
            return [{"status": 200, "body": {**answer, "status": row.state}} for answer, row in rows]

        return await self._driven(what, called, **settings)

    async def _driven(self, what: str, call: Callable[[Pool], Sequence[_T]], **settings: Any) -> dict[str, _T]:
        """Make a pool of the engines, and return what ``call`` returns for them, by address.

        Args:
            what: names the call, for the error.
            call: called in a thread beside this event loop; returns one result per engine.
            settings: of each engine's client.

        Raises:
            ConfigError: the address of an engine is a router's; no engine was called then.
            EngineError: the call failed on some engine; has a row per engine, with the state that it reports now.
        """
        await self._asked_receivers()
        settings |= {"api_key": self.api_key, "load_timeout_s": self.control_timeout_s}
        made = [engines.make(self.kind, url=url, **settings) for url in self._sessions]
        for engine, http in zip(made, self._sessions.values(), strict=True):
            engine.port.http = http  # which knows by now that it is no router's
        fleet = Pool(made)

        def driving() -> Sequence[_T]:
            try:
                return call(fleet)
            except (EngineError, DeadlineError) as error:
                errors = [row.error for row in fleet.rows()]
                rows = [replace(row, error=one) for row, one in zip(fleet.look(), errors, strict=True)]
                parts = {"expected": error.expected, "state": error.state, "hint": error.hint}
                raise EngineError(error.what, rows=tuple(rows), **parts) from error
            finally:
                fleet.close()

        return dict(zip(self._sessions, await asyncio.to_thread(driving), strict=True))


def _alike(sizes: Mapping[str, int]) -> int:
    """Return the size that all engines have.

    Raises:
        ConfigError: they differ.
    """
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"engines differ in world size: {dict(sizes)}", hint="call world_sizes")
    return next(iter(sizes.values()))


def _receiver(http: HTTPSession) -> str:
    """Return which receiver of weights a server runs: see `EngineControl._asked_receivers`."""
    try:
        config = http.get("/server_info", query={"config_format": "json"})["vllm_config"]
        if str(config["parallel_config"].get("worker_extension_cls")).endswith(_EXTENSION):
            return _SKYRL
        return str((config.get("weight_transfer_config") or {}).get("backend") or "")
    except (EngineRefusedError, KeyError, TypeError, AttributeError):
        return ""


def _post_if_there(engine: Any, route: str, body: Info) -> Info | None:
    """Call a route of an engine; return None where it has no such route."""
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
