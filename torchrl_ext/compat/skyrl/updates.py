"""The single steps of an update over vLLM's routes, for training loops that are written around SkyRL's client."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from torchrl_ext.compat.skyrl.control import _SKYRL, EngineControl, _alike
from torchrl_ext.compat.skyrl.published import Fetched, asked, staged
from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.rpc.engines.base import is_absent
from torchrl_ext.rpc.fleet import Fleet
from torchrl_ext.types import Info
from torchrl_ext.weights.adapter import adapter_label

__all__ = ["EngineUpdates", "transport_for"]

_NCCL = "nccl"  # vLLM's own backend


def transport_for(weight_sync_backend: str, colocate_all: bool) -> str:
    """Return the name of the transport that does what SkyRL's trainer does with these two of its settings."""
    if weight_sync_backend == "delta":
        return "delta"
    return "ipc" if weight_sync_backend == "nccl" and colocate_all else "collective"


class EngineUpdates(EngineControl, ABC):
    """Takes every engine through an update, step by step, and counts the updates.

    The steps are vLLM's own routes; on SkyRL's own servers they are the methods of its workers. What is sent is the
    caller's: a message of ours, or what SkyRL's trainer sends.
    """

    _updates: ClassVar[int] = 0  # of an object: see `weight_version`
    _base: ClassVar[str | None] = None  # of an object: the checkpoint that a trainer takes deltas against
    _fetched: ClassVar[Fetched | None] = None  # of an object: what `fetch_weights` had engines stage
    _loading: ClassVar[int | None] = None  # of an object: the version that the open update loaded from there

    @property
    def weight_version(self) -> int:
        """How many updates are complete: the number of `increment_weight_version` calls."""
        return self._updates

    def increment_weight_version(self) -> None:
        """Count a complete update. The number goes along where the client is pickled."""
        self._keep(_updates=self._updates + 1)

    async def init_weight_update_communicator(self, init_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/init_weight_transfer_engine`` on every engine, each with a rank offset of its own.

        Args:
            init_info: JSON-safe mapping, or a dataclass; its ``rank_offset`` (1) is the first engine's, and servers of
                one deployment (``data_parallel_size``) share one. Or an object of SkyRL's, which has ``for_servers``
                and ``to_api_payload`` and knows the offsets itself. That of SkyRL's delta strategy
                (``base_model_path``) is for SkyRL's own servers; other engines join when they fetch.

        Raises:
            ConfigError: the engines are SGLang's; or they differ in size, and the object is SkyRL's.
            EngineError: some engine did not join; has a row per engine.
        """
        self._refuse_sglang()
        sizes = await self.world_sizes()
        if (for_servers := getattr(init_info, "for_servers", None)) is not None:
            infos = [_plain(one) for one in for_servers(_alike(sizes), len(sizes), dp_size=self.data_parallel_size)]
        else:
            info = _plain(init_info)
            offset, infos = info.get("rank_offset", 1), []
            for place, workers in enumerate(sizes.values(), start=1):
                infos.append({**info, "rank_offset": offset})
                offset += workers if place % self.data_parallel_size == 0 else 0
        if "base_model_path" in infos[0] and not await self._skyrls():
            self._keep(_base=str(infos[0]["base_model_path"]))
            return dict.fromkeys(sizes, _done("the folder is joined by fetch_weights"))
        taught = await self._taught()
        bodies = {
            url: {"init_info": {"packed": True, **info} if _is_broadcast(info) and taught[url] == _NCCL else info}
            for url, info in zip(sizes, infos, strict=True)
        }
        return await self._posted("join the transport", "/init_weight_transfer_engine", bodies)

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> dict[str, Info]:
        """Call vLLM's ``/start_weight_update`` on every engine.

        Args:
            is_checkpoint_format: whether names and shapes are a checkpoint's. Only SkyRL's own servers take others.

        Raises:
            ConfigError: not a checkpoint's, and the servers are not SkyRL's; or the engines are SGLang's.
        """
        self._refuse_sglang()
        if await self._skyrls():
            kwargs = {"is_checkpoint_format": is_checkpoint_format}
            return await self._worker_method("start the update", "skyrl_start_weight_update", kwargs)
        if not is_checkpoint_format:
            raise ConfigError(
                "vLLM has no route for weights under the names of its own layout", expected="is_checkpoint_format=True"
            )
        return await self._posted("start the update", "/start_weight_update")

    async def update_named_weights(self, update_info: Any) -> dict[str, Info]:
        """Call vLLM's ``/update_weights`` on every engine, for one piece of an update, while the trainer broadcasts.

        Args:
            update_info: JSON-safe mapping, a dataclass, or an object of SkyRL's with ``to_api_payload``. Where the
                servers are not SkyRL's own, that of SkyRL's delta strategy (``target_version``) loads what
                `fetch_weights` staged.

        Raises:
            ConfigError: `fetch_weights` staged no such version; or the engines are SGLang's.
            EngineError: some engine did not load it; has a row per engine.
        """
        self._refuse_sglang()
        info, taught = _plain(update_info), await self._taught()
        if "target_version" in info and not await self._skyrls():
            return await self._load_fetched(int(info["target_version"]))
        fewer = {name: value for name, value in info.items() if name != "packed"}  # vLLM 0.32 has it in init_info alone
        bodies = {url: {"update_info": fewer if taught[url] == _NCCL else info} for url in self._engines[1]}
        return await self._posted("load", "/update_weights", bodies)

    async def update_weights_nccl(self, update_info: Any) -> dict[str, Info]:
        """Load one piece of an update that the trainer broadcasts: see `update_named_weights`."""
        return await self._piece("update_weights_nccl", update_info)

    async def update_weights_ipc(self, update_info: Any) -> dict[str, Info]:
        """Load one piece of an update from device memory of the trainer: see `update_named_weights`.

        Handles of CUDA memory that SkyRL's trainer made are for SkyRL's own servers; for others there is
        ``WeightSender(make_transport("ipc"), client.fleet())``.

        Raises:
            ConfigError: such handles, and the servers are not SkyRL's; or the engines are SGLang's.
        """
        if "ipc_handles_pickled" in _plain(update_info) and not await self._skyrls():
            raise ConfigError(
                "these CUDA IPC handles are in a form that only SkyRL's own servers read",
                hint='use WeightSender(make_transport("ipc"), client.fleet())',
            )
        return await self._piece("update_weights_ipc", update_info)

    async def finish_weight_update(self, weight_version: int | str | None = None) -> dict[str, Info]:
        """Call vLLM's ``/finish_weight_update`` on every engine; the version becomes the label of what it serves.

        Args:
            weight_version: None stands for the version that was loaded from a folder, or else for the next number:
                `weight_version` plus 1.

        Raises:
            ConfigError: the engines are SGLang's.
            EngineError: some engine did not finish, and stays paused; has a row per engine.
        """
        self._refuse_sglang()
        if await self._skyrls():
            return await self._worker_method("finish the update", "skyrl_finish_weight_update")
        following = self.weight_version + 1 if self._loading is None else self._loading
        body = {"weight_version": str(following if weight_version is None else weight_version)}
        told = await self._posted("finish the update", "/finish_weight_update", dict.fromkeys(self._engines[1], body))
        self._keep(_loading=None)
        return told

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
            EngineError: some engine did not fetch it, or follows no folder; has a row per engine.
        """
        more = {"sync_dir": sync_dir, "uri": uri}
        body = {"target_version": target_version, **{name: one for name, one in more.items() if one is not None}}
        root = uri.rstrip("/").rpartition("/")[0] if sync_dir is None and uri is not None else sync_dir
        what = f"fetch version {target_version}"

        def fetch(fleet: Fleet) -> tuple[list[Info | None], Fetched | None]:
            told = fleet.everywhere(what, lambda engine: asked(engine, body))
            ours = [engine.url for engine, one in zip(fleet.engines, told, strict=True) if one is None]
            if not ours:
                return told, None
            return told, staged(fleet, ours, target_version, root, self._base, self._fetched)

        told, found = await self._driven(what, fetch)
        self._keep(_fetched=found)
        done = {"status": 200, "body": {"status": "ok", "result": [{"status": "ok", **body}]}}
        return self._by_url([done if one is None else one for one in told])

    async def _load_fetched(self, version: int) -> dict[str, Info]:
        """Load what `fetch_weights` staged, whole."""
        if self._fetched is None:
            raise ConfigError(f"version {version} was not fetched", hint="call fetch_weights first, with its sync_dir")
        load, seal = ({"update_info": piece} for piece in self._fetched.pieces(version))
        await self._posted("load", "/update_weights", dict.fromkeys(self._engines[1], load))
        self._keep(_loading=version)
        return await self._posted("load", "/update_weights", dict.fromkeys(self._engines[1], seal))

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, Info]:
        """Serve an adapter under a name, in place of one that had it, while engines serve.

        With our plugin the new adapter gets a label of its own, and the name is pointed at it once every engine has it.
        Do not give an `AdapterSender` the same name: each counts versions for itself.

        Args:
            lora_name: what requests ask for as their model.
            lora_path: folder of the adapter, which engines can read.

        Raises:
            EngineError: some engine did not load it; has a row per engine.
        """

        def load(fleet: Fleet) -> list[Info]:
            served = fleet.everywhere("say what adapters they have", lambda engine: _version(engine, lora_name))
            body = {"lora_name": lora_name, "lora_path": lora_path}
            if None in served:
                return fleet.everywhere(f"load adapter {lora_name!r}", lambda engine: _load_natively(engine, body))
            version, adapters = 1 + max(served), fleet.adapter(lora_name)
            info = {"path": lora_path, "version": version}
            adapters.everywhere(f"load adapter {lora_name!r}", lambda adapter: adapter.load(info))
            adapters.everywhere(f"serve adapter {lora_name!r}", lambda adapter: adapter.commit(version))
            label = adapter_label(lora_name, version)
            return [_done(f"Success: LoRA adapter '{lora_name}' added as {label}.") for _ in adapters.engines]

        return self._by_url(await self._driven(f"load adapter {lora_name!r}", load))

    async def unload_lora_adapter(self, lora_name: str) -> dict[str, Info]:
        """Take an adapter out of service: requests by its name are refused from now on.

        Raises:
            EngineError: some engine has none of this name; has a row per engine.
        """

        def unload(engine: Any) -> Info:
            if _version(engine, lora_name) is None:
                return engine.post("/v1/unload_lora_adapter", {"lora_name": lora_name})
            engine.adapter(lora_name).unload()
            return _done(f"Success: LoRA adapter '{lora_name}' removed.")

        return await self._each_engine(f"unload adapter {lora_name!r}", unload)

    async def _piece(self, method: str, update_info: Any) -> dict[str, Info]:
        if await self._skyrls():
            return await self._worker_method("load", method, {"update_info": _plain(update_info)})
        return await self.update_named_weights(update_info)

    async def _skyrls(self) -> bool:
        """Return whether the engines are SkyRL's own servers."""
        return _SKYRL in (await self._taught()).values()

    async def _each_engine(self, what: str, call: Any) -> dict[str, Info]:
        return self._by_url(await self._driven(what, lambda fleet: fleet.everywhere(what, call)))

    def _by_url(self, told: list[Info]) -> dict[str, Info]:
        return dict(zip(self._engines[1], told, strict=True))

    def _refuse_sglang(self) -> None:
        if self._engines[0] == "sglang":
            hint = "use WeightSender(transport, client.fleet())"
            raise ConfigError("SGLang's weight routes need what a transport knows", hint=hint)


def _plain(info: Any) -> dict[str, Any]:
    if (payload := getattr(info, "to_api_payload", None)) is not None:
        return dict(payload())
    return dict(info) if isinstance(info, Mapping) else asdict(info)


def _is_broadcast(info: Info) -> bool:
    return {"master_address", "master_port"} <= info.keys() and "kind" not in info


def _version(engine: Any, name: str) -> int | None:
    """Return which version of an adapter an engine serves, 0 for none yet; None where it lacks our plugin."""
    try:
        return int(engine.adapter(name).info().weight_version or 0)
    except EngineRefusedError as error:
        if is_absent(error):
            return None
        raise


def _load_natively(engine: Any, body: Info) -> Info:
    """Load an adapter by SkyRL's route, or else by vLLM's own."""
    try:
        return engine.post("/skyrl/v1/load_lora_adapter", body)
    except EngineRefusedError as error:
        if not is_absent(error):
            raise
    return engine.post("/v1/load_lora_adapter", {**body, "load_inplace": True})


def _done(text: str) -> Info:
    return {"status": 200, "body": text}
