"""`AdapterSender` sends LoRA adapters, a few megabytes each, to engines whose base weights stay as they are."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from torchrl_ext.errors import ConfigError
from torchrl_ext.rpc.client import EngineClient
from torchrl_ext.sync.sender import WeightSender
from torchrl_ext.transports.disk import DiskTransport
from torchrl_ext.transports.ranks import drives
from torchrl_ext.types import SyncReport
from torchrl_ext.weights.adapter import as_adapter

__all__ = ["AdapterSender"]


@final
class AdapterSender:
    """Keeps engines at the newest version of one or more LoRA adapters, by name.

    Each name is a `WeightSender` over a `DiskTransport` of its own: versions appear as a whole in
    ``root/NAME/weight_v000007/``, in PEFT's format, are loaded while the engines serve, and then take over the name.
    Each request ends with the version that it began with.

    Args:
        root: directory that the trainer and every engine reach under the same path. It stays as long as engines serve
            adapters from it: they read files again when they ran out of room for an adapter.
        engine: client of one engine or of a fleet (`torchrl_ext.connect`).
        keep_files: never remove old versions.
        dtype: cast the adapter's tensors to this dtype on the way out.
        timeout_s: deadline of every wait of the data layer, in seconds.
        rank: as in `WeightSender`. Only rank 0 talks to engines and writes files; others call `load` too.

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> lora = get_peft_model(lm, LoraConfig(r=4, target_modules="all-linear"))
        >>> adapters = tx.AdapterSender(root, tx.connect(address))
        >>> adapters.load("policy-lora", lora)  # the embedded engine serves no adapters; vLLM and SGLang do
        Traceback (most recent call last):
        torchrl_ext.errors.ConfigError: ...
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        engine: EngineClient,
        *,
        keep_files: bool = False,
        dtype: torch.dtype | None = None,
        timeout_s: float = 60.0,
        rank: int | None = None,
    ) -> None:
        self._root, self._engine, self._rank = Path(root), engine, rank
        self._transport = partial(DiskTransport, adapter=True, keep_files=keep_files, timeout_s=timeout_s)
        self._sender = partial(WeightSender, dtype=dtype, verify=False, rank=rank)
        self._senders: dict[str, WeightSender] = {}

    def load(self, name: str, model: Any, *, adapter: str | None = None) -> SyncReport:
        """Publish the adapter's weights as the next version of ``name``, and put it in service.

        Args:
            name: what requests call it: ``model`` of vLLM's routes, ``lora_path`` of SGLang's.
            model: a ``PeftModel``, a module (TorchRL wrapper, DDP) around one, or a directory that PEFT has written.
            adapter: which adapter of the module; None for the active one.

        Returns:
            What was done; ``version`` is the adapter's, and each engine's row has the version that it serves.

        Raises:
            ConfigError: no adapter that can be sent, a name that cannot be one, or engines that serve no adapters.
            UpdateError: not every engine serves the new version; the rows say which serve what.
        """
        if name not in self._senders:
            engine = self._engine.adapter(name)  # refuses a name that cannot be one
            self._senders[name] = self._sender(self._transport(self._root / name), engine)
        return self._senders[name].update_weights(as_adapter(model, adapter))

    def unload(self, name: str) -> None:
        """Take ``name`` out of service on every engine: requests by it are refused from now on.

        Running requests end with the version that they began with. Files of the last version stay in the root.

        Raises:
            EngineRefusedError: an engine serves no adapter of that name.
            EngineError: engines failed; the others have unloaded it.
        """
        sender = self._senders.pop(name, None)
        if sender is not None:
            sender.shutdown()
        if drives(self._rank):
            self._engine.adapter(name).unload()

    def version(self, name: str) -> int:
        """Return the version of ``name`` that this sender put in service last.

        Raises:
            ConfigError: it has loaded none of that name.
        """
        if name not in self._senders:
            loaded = ", ".join(self._senders)
            raise ConfigError(f"no adapter {name!r} was loaded here", expected=loaded or "a load before")
        return self._senders[name].version

    def shutdown(self) -> None:
        """Release the root for other trainers; engines keep serving what they have. May be called twice."""
        for sender in self._senders.values():
            sender.shutdown()
        self._senders.clear()
